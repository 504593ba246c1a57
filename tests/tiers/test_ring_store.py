# SPDX-License-Identifier: Apache-2.0
"""Several stores as one: each page in its own, answers in order, stores at the same time."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.tiers.ring import RingStore
from mimo_plugin.tiers.store import StoreStats
from tests.tiers.stores import PAGE_BYTES, MemoryStore, empty, page

KEYS = [f"{number}" for number in range(60)]
PAGES = [page(number) for number in range(60)]


def ring(count=3, **points):
    stores = {f"/{number}": MemoryStore() for number in range(count)}
    return RingStore(stores, points or None), stores


def test_each_page_lies_in_its_own_store_and_comes_back_in_order():
    target, stores = ring()
    assert target.put(KEYS, PAGES) == [True] * 60
    assert sum(len(store.pages) for store in stores.values()) == 60
    for name, store in stores.items():
        assert 5 < len(store.pages) < 40
        assert all(target.ring.store_of(key) == name for key in store.pages)
    found = [empty() for _ in KEYS]
    assert target.get(KEYS, found) == [True] * 60
    assert found == PAGES


@given(st.lists(st.integers(0, 90), unique=True))
def test_answers_are_in_the_order_of_the_keys(numbers):
    target, _ = ring()
    target.put(KEYS, PAGES)
    keys = [f"{number}" for number in numbers]
    there = [number < 60 for number in numbers]
    found = [empty() for _ in keys]
    assert target.exists(keys) == target.touch(keys) == target.get(keys, found) == there
    for number, well, parts in zip(numbers, there, found, strict=True):
        assert parts == (page(number) if well else empty())


def test_each_store_is_asked_once_for_a_batch_and_only_where_it_has_a_part():
    target, stores = ring()
    assert str(target) == "/0, /1, /2"
    target.exists(KEYS)
    assert all(len(store.calls) == 1 for store in stores.values())
    (key,) = KEYS[:1]
    target.exists([key])
    assert sum(len(store.calls) for store in stores.values()) == 4
    assert target.exists([]) == []


def test_stores_work_at_the_same_time():
    target, stores = ring()
    together = threading.Barrier(3)
    for store in stores.values():
        store.before = lambda: together.wait(60)
    assert target.put(KEYS, PAGES) == [True] * 60


def test_it_returns_when_all_have_answered_even_where_one_raises():
    """A store that is still at it would write into memory that the caller uses again."""
    target, stores = ring()
    first = target.ring.store_of(KEYS[0])
    raised, ended = threading.Event(), []

    def fails():
        raised.set()
        raise KeyError("bug")

    def slow():
        assert raised.wait(60)
        ended.append(1)

    for name, store in stores.items():
        store.before = fails if name == first else slow
    with pytest.raises(KeyError):
        target.get(KEYS, [empty() for _ in KEYS])
    assert len(ended) == 2


def test_sums_of_the_counters():
    target, stores = ring()
    target.put(KEYS, PAGES)
    target.get([*KEYS, "x"], [empty() for _ in range(61)])
    stats = target.stats()
    assert (stats.pages_put, stats.pages_got, stats.pages_missed) == (60, 60, 1)
    assert stats.bytes_held == 60 * PAGE_BYTES
    silent = StoreStats(**{**vars(stats), "bytes_held": None, "calls_failed": 2, "stores_down": 1})
    stores["/1"].stats = lambda: silent
    mixed = target.stats()
    assert (mixed.bytes_held, mixed.calls_failed, mixed.stores_down) == (None, 2, 1)


def test_points_decide_the_parts():
    stores = {"/0": MemoryStore(), "/1": MemoryStore()}
    target = RingStore(stores, {"/0": 64, "/1": 640})
    target.put(KEYS, PAGES)
    assert len(stores["/1"].pages) > 3 * len(stores["/0"].pages)


def test_closing_closes_all_and_calls_still_end():
    target, stores = ring()
    target.put(KEYS, PAGES)
    target.close()
    target.close()
    assert all(store.closed.is_set() for store in stores.values())
    assert target.exists(KEYS) == [True] * 60


class Resting(MemoryStore):
    """A store that can be left alone."""

    resting = False


def test_what_is_written_while_a_store_rests_goes_to_the_next_one():
    stores = {f"/{number}": Resting() for number in range(3)}
    target = RingStore(stores)
    target.put(KEYS, PAGES)
    lost = [key for key in KEYS if target.ring.store_of(key) == "/1"]
    stores["/1"].resting = True
    calls = len(stores["/1"].calls)
    there = [key not in lost for key in KEYS]
    assert target.exists(KEYS) == target.touch(KEYS) == there
    target.put(KEYS, PAGES)
    assert all(target.exists(KEYS))
    assert len(stores["/1"].calls) == calls
    stores["/1"].resting = False
    assert all(target.exists(KEYS))
    assert len(stores["/1"].calls) == calls + 1


def test_where_all_stores_rest_each_answers_for_itself():
    stores = {f"/{number}": Resting() for number in range(3)}
    target = RingStore(stores)
    for store in stores.values():
        store.resting = True
    assert target.exists(KEYS) == [False] * 60
    assert all(store.calls for store in stores.values())
