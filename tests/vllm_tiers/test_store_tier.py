# SPDX-License-Identifier: Apache-2.0
"""A store below vLLM's host memory: what it says is there comes back as it was written."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from mimo_plugin.engines.vllm.tiers import store_tier
from mimo_plugin.engines.vllm.tiers.layout import RowLayout
from mimo_plugin.engines.vllm.tiers.store_tier import WAITING_PART, guarded
from mimo_plugin.errors import ConfigError
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.framing import HEADER_BYTES
from mimo_plugin.tiers.ring import RingStore
from tests.tiers.stores import Fault, MemoryStore
from tests.vllm_tiers.harness import LAYOUT, ROW_BYTES, Tiers, data_of, key, offloading_config

KEYS = [key(number, group) for number in range(4) for group in range(3)]
DATA = [data_of(k) for k in KEYS]


def pages(files) -> list[Path]:
    return sorted(Path(files["path"]).rglob("*.page"))


def test_what_host_memory_lost_comes_from_the_store(start, files):
    tiers = start(files)
    assert tiers.store(KEYS, DATA) == KEYS
    tiers.settle()
    assert tiers.tier.stats().pages_put == len(KEYS)
    tiers.forget_host()
    assert tiers.load(KEYS) == DATA
    assert tiers.load([key(9), KEYS[0]]) == [None, DATA[0]]
    assert tiers.tier.stats().pages_got == len(KEYS), "what host memory has was read again"


def test_without_a_store_there_is_host_memory(start):
    tiers = start(None)
    tiers.store(KEYS, DATA)
    tiers.keep_alive(KEYS)
    tiers.settle()
    assert tiers.load([*KEYS, key(9)]) == [*DATA, None]
    tiers.forget_host()
    assert tiers.load(KEYS) == [None] * len(KEYS)


def test_another_engine_of_the_same_kind_finds_it(start, files):
    first = start(files)
    first.store(KEYS, DATA)
    # What waits to be written is written before the end.
    first.close()
    second = start(files)
    assert second.load(KEYS) == DATA


def test_only_a_groups_own_bytes_are_stored(start, files):
    tiers = start(files)
    tiers.store(KEYS, DATA)
    tiers.settle()
    assert sorted(path.stat().st_size for path in pages(files)) == sorted(
        len(data) + HEADER_BYTES for data in DATA
    )
    # A row's other bytes stay as they are when a page is read.
    tiers.forget_host()
    tiers.memory[:] = 7
    tiers.load(KEYS)
    filled = sum(map(len, DATA))
    assert (tiers.memory == 7).sum() >= tiers.memory.size - filled
    assert filled < len(KEYS) * ROW_BYTES / 4


def test_b21_bytes_are_counted_by_group_and_found_after_a_rotation(start, files):
    """Case B21: a row for each (hash, group), of eight groups of which most fill a part of theirs.

    The store holds what the groups fill; and what host memory gave up for others comes back.
    """
    layout = RowLayout(
        row_bytes=ROW_BYTES,
        parts=tuple(((0, 500 - 60 * group),) for group in range(8)),
        kinds=("full", *["swa"] * 7),
        group_ids=tuple(range(8)),
    )
    tiers = start(files, rows=32, layout=layout)
    hashes = [bytes([number]) * 32 for number in range(12)]
    rounds = [[make_offload_key(name, group) for group in range(8)] for name in hashes]
    data = {
        k: random.Random(k).randbytes(layout.group_bytes(group))
        for keys in rounds
        for group, k in enumerate(keys)
    }
    for keys in rounds:
        assert tiers.store(keys, [data[k] for k in keys]) == keys
        tiers.settle()
    stats = tiers.tier.stats()
    one = sum(layout.group_bytes(group) for group in range(8))
    assert stats.bytes_held == len(rounds) * (one + 8 * HEADER_BYTES)
    assert one < 8 * ROW_BYTES / 10
    # Three times as much as host memory has rows for went through it.
    assert tiers.load(rounds[0]) == [data[k] for k in rounds[0]]
    assert tiers.tier.stats().pages_got == 8


FACTS = {
    "model": {"model": replace(offloading_config().model, name="org/other")},
    "dtype": {"model": replace(offloading_config().model, dtype="fp8_e4m3")},
    "hash": {"cache": replace(offloading_config().cache, tokens_per_hash=8)},
    "chunk": {"cache": replace(offloading_config().cache, blocks_per_chunk=2)},
    "layers": {
        "groups": tuple(
            replace(group, layer_names=("other",)) for group in offloading_config().groups
        )
    },
    "block": {
        "groups": tuple(replace(group, tokens_per_block=32) for group in offloading_config().groups)
    },
    "ranks": {"parallel": replace(offloading_config().parallel, tp_size=2, world_size=2)},
    "stages": {"parallel": replace(offloading_config().parallel, pp_size=2)},
    "layout": {"kv_cache_layout": "BLHNC"},
    "replicated": {"replicated_layout": True},
}


@pytest.mark.parametrize("name", FACTS)
def test_pages_of_other_facts_are_not_found(start, files, name):
    first = start(files)
    first.store(KEYS, DATA)
    first.settle()
    other = start(files, config=offloading_config(**FACTS[name]))
    assert other.load(KEYS) == [None] * len(KEYS)
    assert not set(other.tier.texts(KEYS)) & set(first.tier.texts(KEYS))


def test_what_else_keeps_pages_apart(start, files, monkeypatch):
    tiers = [
        start(files),
        start({**files, "name": "other"}),
        start(files, facts={"revision": "abc"}),
    ]
    monkeypatch.setattr(store_tier, "installed_vllm", lambda: type("V", (), {"label": "vllm 9"}))
    tiers.append(start(files))
    monkeypatch.undo()
    tiers.append(start(files))
    tiers[-1].manager.set_layout(LAYOUT, {"quantization": "fp8"})
    tiers.append(start(files))
    moved = replace(LAYOUT, parts=(((0, 600),), *LAYOUT.parts[1:]))
    tiers[-1].manager.set_layout(moved)
    texts = {text for one in tiers for text in one.tier.texts(KEYS)}
    assert len(texts) == len(tiers) * len(KEYS)


def test_an_engine_at_another_address_shares(start, files):
    """Neither a replica's number nor the engine's id is part of a page's meaning."""
    first = start(files)
    config = offloading_config(
        engine_id="other",
        parallel=replace(offloading_config().parallel, data_parallel_index=1),
    )
    assert start(files, config=config).tier.texts(KEYS) == first.tier.texts(KEYS)


@pytest.mark.parametrize("damage", ["flip", "cut", "longer"])
def test_damage_at_any_byte_is_a_miss_and_mended(start, files, damage):
    """The load fails, the request computes, and what it stores is found again."""
    some, good = [key(0, 2), key(1, 1)], [data_of(key(0, 2)), data_of(key(1, 1))]
    tiers = start(files)
    tiers.store(some, good)
    tiers.settle()
    (path,) = (p for p in pages(files) if p.stat().st_size == HEADER_BYTES + len(good[0]))
    whole = path.read_bytes()
    for at in range(len(whole)):
        bad = bytearray(whole)
        if damage == "flip":
            bad[at] ^= 0xFF
        path.write_bytes(bad[:at] if damage == "cut" else bad if damage == "flip" else bad + b"x")
        tiers.forget_host()
        assert tiers.load(some) == [None, good[1]], at
        # Nothing is asked for twice: the failed one is gone, the other one is in host memory.
        assert not path.exists()
        tiers.store(some[:1], good[:1])
        tiers.settle()
        assert path.read_bytes() == whole
    stats = tiers.tier.stats()
    # Of a load that failed in part, the rest is kept.
    assert stats.pages_damaged == stats.pages_got == len(whole)


def test_one_folder_is_guarded_as_several_are(start, files):
    """Room is made beside the calls: making it takes longer than a call may."""
    tiers = start(files)
    (breaker,) = tiers.tier.store.stores.values()
    assert isinstance(breaker, Breaker) and breaker._store._guarded


def test_settings_are_checked(files):
    with pytest.raises(ConfigError, match=r"mimo\.tiers\.capacity_gib"):
        Tiers({**files, "capacity_gib": None})
    with pytest.raises(ConfigError, match=r"mimo\.tiers\.pth"):
        Tiers({**files, "pth": "x"})


# --- stores that are slow or fail ----------------------------------------------------------------


class Slow(MemoryStore):
    """Its calls of one name wait until they are let go."""

    def __init__(self, name):
        super().__init__()
        self.slow, self.go, self.waiting = name, threading.Event(), threading.Semaphore(0)

    def _call(self, name, keys):
        super()._call(name, keys)
        if name == self.slow:
            self.waiting.release()
            assert self.go.wait(60)

    def wait_for(self, calls=1):
        for _ in range(calls):
            assert self.waiting.acquire(timeout=60)


@pytest.fixture
def over(start, files, monkeypatch):
    """Starts tiers over a store in memory that is not guarded."""

    made = []

    def make(store, **kwargs):
        made.append(store)
        monkeypatch.setattr(
            store_tier, "open_store", lambda config, where: RingStore({"it": store})
        )
        return start(files, **kwargs)

    yield make
    for store in made:
        if isinstance(store, Slow):
            store.go.set()


def many(count, group=0, first=100):
    keys = [key(number, group) for number in range(first, first + count)]
    return keys, [data_of(k) for k in keys]


def test_what_waits_to_be_written_is_bounded(over):
    store = Slow("put")
    tiers = over(store, rows=40)
    most = int(40 * WAITING_PART)
    for step in range(4):
        tiers.store(*many(4, first=4 * step))
    for _ in range(2):
        tiers.step()
    pinned = 40 - tiers.primary._num_evictable_cache_chunks - tiers.primary._get_num_free_chunks()
    assert most <= pinned <= most + 4
    # Host memory still takes what comes.
    assert len(tiers.store(*many(24, first=500))) == 24
    store.go.set()
    tiers.settle()
    assert store.put_pages == most
    assert tiers.counts()["tier_pages", "dropped"] == 16 - most + 24
    # The head of what came together was kept.
    kept = [key(number) for number in range(most)]
    assert set(tiers.tier.texts(kept)) == set(store.pages)
    # And there is room again.
    tiers.store(*many(4, first=900))
    tiers.settle()
    assert store.put_pages == most + 4


def test_a_read_does_not_wait_for_writes(over):
    store = Slow("put")
    tiers = over(store)
    some, data = many(1)
    store.pages = dict(zip(tiers.tier.texts(some), data, strict=True))
    for step in range(12):
        tiers.store(*many(1, first=4 * step))
    store.wait_for(2)
    assert tiers.load(some) == data
    assert sum(name == "put" for name, _ in store.calls) <= 2
    store.go.set()


@pytest.mark.parametrize(("name", "value"), [("BATCH_PAGES", 5), ("BATCH_BYTES", 700)])
def test_what_goes_to_the_store_at_a_time_is_bounded(over, monkeypatch, name, value):
    """A page that is larger goes alone."""
    monkeypatch.setattr(store_tier, name, value)
    store = MemoryStore()
    tiers = over(store)
    tiers.store(KEYS, DATA)
    tiers.settle()
    tiers.forget_host()
    assert tiers.load(KEYS) == DATA
    sizes = {text: len(data) for text, data in zip(tiers.tier.texts(KEYS), DATA, strict=True)}
    for call in ("put", "get"):
        batches = [keys for done, keys in store.calls if done == call]
        assert sorted(sum(batches, [])) == sorted(sizes)
        if name == "BATCH_PAGES":
            assert sorted(map(len, batches)) == [2, 5, 5]
        else:
            assert max(sum(map(sizes.get, keys)) for keys in batches) <= value
            assert len(batches) == 8


@pytest.mark.parametrize("error", [ConnectionError, ValueError])
@pytest.mark.parametrize("call", ["exists", "get", "put", "touch"])
def test_errors_of_a_store_are_misses(over, call, error):
    store = MemoryStore()
    tiers = over(store)
    tiers.store(KEYS[:3], DATA[:3])
    tiers.settle()

    def fail(*args):
        raise error("it fails")

    setattr(store, call, fail)
    tiers.now_s += 100
    tiers.keep_alive(KEYS[:3])
    tiers.store(KEYS[3:], DATA[3:])
    tiers.settle()
    tiers.forget_host()
    found = tiers.load(KEYS)
    for k, got, good in zip(KEYS, found, DATA, strict=True):
        assert got in (None, good), k
    if call in ("exists", "get"):
        assert found == [None] * len(KEYS)
    if call == "put":
        assert found == [*DATA[:3], *[None] * 9]


def test_a_store_that_hangs_costs_no_more_than_time(start, files, monkeypatch):
    """Even in the middle of a read, host memory is given back; a late answer does not touch it."""
    fault = Fault()
    store = MemoryStore(before=fault)
    limits = BreakerLimits(timeout_s=0.2)
    monkeypatch.setattr(
        store_tier, "open_store", lambda config, where: Breaker(store, "it", limits=limits)
    )
    tiers = start(files)
    tiers.store(KEYS, DATA)
    tiers.settle()
    tiers.forget_host()
    context = tiers.request()
    while [tiers.manager.lookup(k, context) for k in KEYS] != [LookupResult.HIT_PENDING] * 12:
        tiers.step()
    fault.hangs = True
    tiers.step()  # the reads begin
    fault.wait_for(1)
    tiers.manager.reset_cache()
    assert not tiers.manager.has_pending_work()
    tiers.memory[:] = 9
    fault.let_go()
    tiers.finish(context)
    for _ in range(3):  # a breaker that has opened stays so for long
        assert all(got in (None, good) for got, good in zip(tiers.load(KEYS), DATA, strict=True))
    assert store.closed is not None


def test_reset_gives_up_what_waits_and_keeps_what_is_written(over):
    store = Slow("put")
    tiers = over(store, rows=160)
    for step in range(10):
        tiers.store(*many(4, first=4 * step))
    store.wait_for(2)
    threading.Timer(0.05, store.go.set).start()
    tiers.manager.reset_cache()
    assert not tiers.manager._jobs and tiers.tier.room_rows == 40
    assert 0 < store.put_pages < 40
    found = tiers.load([key(number) for number in range(40)])
    assert sum(got is not None for got in found) == store.put_pages
    assert all(got in (None, data_of(key(number))) for number, got in enumerate(found))


def test_what_was_not_there_is_found_when_another_has_written_it(over):
    """A request that was told of a miss, and runs on, does not hide the page from the others."""
    tiers = over(MemoryStore())
    context = tiers.request()
    assert tiers.look_up(KEYS, context) == [False] * 12
    tiers.store(KEYS, DATA)
    tiers.settle()
    tiers.forget_host()
    assert tiers.load(KEYS) == DATA
    # And what is lost behind a hit is a miss for all, as soon as a load has failed.
    tiers.tier.store.stores["it"].pages.clear()
    tiers.forget_host()
    assert tiers.load(KEYS) == [None] * 12
    assert tiers.look_up(KEYS, context) == [False] * 12
    tiers.finish(context)


def test_a_look_up_under_way_brings_its_own_answer(over):
    store = Slow("exists")
    tiers = over(store)
    context = ReqContext(req_id="x")
    look_ups = tiers.tier._look_ups
    assert tiers.tier.lookup(KEYS[0], context) is LookupResult.RETRY
    look_ups.mark(KEYS[:2], True)
    tiers.step()
    store.wait_for()
    look_ups.mark(KEYS[:2], True)
    assert tiers.tier.lookup(KEYS[0], context) is LookupResult.RETRY
    store.go.set()
    assert tiers.look_up(KEYS[:1], context) == [False]
    look_ups.mark(KEYS[:1], True)
    assert tiers.tier.lookup(KEYS[0], context) is LookupResult.HIT


def test_stores_are_guarded():
    plain = MemoryStore()
    assert isinstance(guarded(plain), Breaker)
    ring = RingStore({"a": plain})
    assert guarded(ring) is ring
    breaker = Breaker(plain, "it")
    assert guarded(breaker) is breaker


def test_a_tier_without_layout_is_not_asked(start, files):
    tiers = start(files)
    tiers.tier._layout, tiers.tier._space = None, ""
    with pytest.raises(AssertionError, match="set_layout"):
        tiers.tier.texts(KEYS)
    tiers.tier.set_layout(LAYOUT)
    with pytest.raises(AssertionError, match="another size"):
        tiers.tier.set_layout(replace(LAYOUT, row_bytes=2 * ROW_BYTES))


def test_the_end_leaves_nothing_in_shared_memory(files):
    tiers = Tiers(files)
    path = tiers.region.mmap_path
    tiers.store(KEYS, DATA)
    tiers.settle()
    assert os.path.exists(path)
    tiers.close()
    assert not os.path.exists(path) and tiers.region.mmap_obj is None
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith(("mimo-tier-", "mimo-touch"))]
