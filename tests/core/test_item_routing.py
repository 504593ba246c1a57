# SPDX-License-Identifier: Apache-2.0
"""Items and encoders: who gets what, how evenly, and what a change moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.item_routing import SPREAD, assign, item_key, preference, route

ENCODERS = [f"http://encoder-{i}:30000" for i in range(8)]


def keys(count: int, seed: int = 0) -> list[bytes]:
    """Keys of different items."""
    return [item_key(f"{seed}/{i}".encode()) for i in range(count)]


def home(key: bytes, encoders: list[str]) -> str:
    """The encoder of an item that comes alone."""
    return encoders[assign([key], encoders)[0]]


def test_the_same_item_has_the_same_encoder_in_any_order_of_names() -> None:
    for key in keys(200):
        assert home(key, ENCODERS) == home(key, ENCODERS[::-1]) == home(key, sorted(ENCODERS))


def test_an_encoder_that_leaves_moves_only_its_own_items() -> None:
    for gone in ENCODERS:
        left = [name for name in ENCODERS if name != gone]
        for key in keys(300, seed=1):
            before = home(key, ENCODERS)
            assert before == gone or home(key, left) == before


def test_an_encoder_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    moved = 0
    for key in keys(2000, seed=2):
        before, after = home(key, ENCODERS[:-1]), home(key, ENCODERS)
        assert after in (before, ENCODERS[-1])
        moved += after != before
    assert 2000 / 8 * 0.75 < moved < 2000 / 8 * 1.25


@pytest.mark.parametrize("count", [2, 3, 8])
def test_items_spread_evenly(count: int) -> None:
    total = 6000
    held = Counter(home(key, ENCODERS[:count]) for key in keys(total, seed=3))
    assert len(held) == count
    assert max(held.values()) < 1.15 * total / count
    assert min(held.values()) > 0.85 * total / count


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 1000))
def test_a_request_never_overloads_one_encoder(items: int, count: int, seed: int) -> None:
    chosen = assign(keys(items, seed), ENCODERS[:count])
    assert len(chosen) == items
    assert max(Counter(chosen).values()) <= -(-SPREAD * items // count)


@given(st.lists(st.sampled_from(keys(6)), min_size=1, max_size=30), st.integers(1, 8))
def test_an_item_that_is_there_again_follows_the_first(wanted: list[bytes], count: int) -> None:
    """However full its encoder is: what is encoded already is no work."""
    chosen = assign(wanted, ENCODERS[:count])
    assert chosen == [chosen[wanted.index(key)] for key in wanted]
    different = list(dict.fromkeys(wanted))
    assert assign(different, ENCODERS[:count]) == [chosen[wanted.index(key)] for key in different]


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 1000))
def test_with_room_every_item_is_at_home(items: int, count: int, seed: int) -> None:
    wanted = keys(items, seed)
    chosen = assign(wanted, ENCODERS[:count], spread=count)
    assert [ENCODERS[i] for i in chosen] == [home(key, ENCODERS[:count]) for key in wanted]


def test_a_chat_that_grows_keeps_its_encoders() -> None:
    """With a shuffle, as in SGLang, an item comes back to its encoder one time in eight."""
    kept = total = 0
    for seed in range(40):
        chat = keys(12, seed)
        turns = [assign(chat[:length], ENCODERS) for length in range(1, 13)]
        for earlier, later in zip(turns, turns[1:], strict=False):
            kept += sum(a == b for a, b in zip(earlier, later, strict=False))
            total += len(earlier)
    assert kept / total > 0.85


def test_kinds_keep_their_order_and_each_item_is_a_part() -> None:
    items = [("image", b"a"), ("video", b"v"), ("image", b"b")]
    routes = route(items, ENCODERS)
    assert routes.counts == {"image": [1, 1, 0], "video": [0, 0, 1]}
    alone = [home(key, ENCODERS) for key in (b"a", b"b", b"v")]
    assert list(routes.encoders) == alone
    assert route([], ENCODERS) == ((), {})


def test_keys_of_long_items_see_all_of_them() -> None:
    long = bytes(range(256)) * 40_000
    assert item_key(long) == item_key(bytes(long))
    assert item_key(long) != item_key(long + b"\0")
    assert item_key(long) != item_key(b"\1" + long[1:])
    assert item_key(long) != item_key(long[:-1] + b"\1")
    half = bytearray(long)
    half[len(half) // 2 : len(half) // 2 + 300_000] = bytes(300_000)
    assert item_key(long) != item_key(bytes(half))
    assert item_key(b"") != item_key(b"\0")


def test_preference_lists_every_encoder_once() -> None:
    for key in keys(20):
        assert sorted(preference(key, ENCODERS)) == list(range(8))


@pytest.mark.parametrize(("encoders", "spread"), [([], 2.0), (ENCODERS, 0.5)])
def test_impossible(encoders: list[str], spread: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        assign([b"k"], encoders, spread)
