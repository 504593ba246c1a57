# SPDX-License-Identifier: Apache-2.0
"""Where keys belong: everybody agrees, shares are even, and little moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.ring import (
    EQUAL_POINTS,
    LEAST_POINTS,
    POINTS_PER_GIB,
    HashRing,
    points_for,
)

ROOT = Path(__file__).resolve().parents[2]
KEYS = [f"space/{number:x}" for number in range(4000)]
NAMES = st.lists(st.text(max_size=12), min_size=1, max_size=16, unique=True)


def equal(names):
    return HashRing(dict.fromkeys(names, EQUAL_POINTS))


@settings(deadline=None, max_examples=60)
@given(NAMES)
def test_equal_stores_hold_equal_parts(names):
    shares = equal(names).shares()
    assert sum(shares.values()) == pytest.approx(1)
    for share in shares.values():
        assert 0.8 <= share * len(names) <= 1.2


@settings(deadline=None, max_examples=30)
@given(NAMES)
def test_shares_are_those_of_real_keys(names):
    ring = equal(names)
    found = ring.split(KEYS)
    for name, share in ring.shares().items():
        # Six standard deviations of a draw of so many keys.
        spread = 6 * (share * (1 - share) * len(KEYS)) ** 0.5
        assert abs(len(found.get(name, [])) - share * len(KEYS)) <= spread + 1


@settings(deadline=None, max_examples=60)
@given(NAMES, st.text(max_size=12))
def test_one_that_joins_takes_its_share_and_moves_nothing_else(names, new):
    names = [name for name in names if name != new]
    if not names:
        return
    before, after = equal(names), equal([*names, new])
    moved = [key for key in KEYS if before.store_of(key) != after.store_of(key)]
    assert all(after.store_of(key) == new for key in moved)
    # The share is 1 of n + 1, with the bound of the balance, and chance in the keys.
    share = 1 / (len(names) + 1)
    assert len(moved) <= 1.2 * share * len(KEYS) + 6 * (share * len(KEYS)) ** 0.5


@settings(deadline=None, max_examples=60)
@given(NAMES, st.data())
def test_one_that_leaves_moves_its_own_only(names, data):
    if len(names) < 2:
        return
    gone = data.draw(st.sampled_from(names))
    before, after = equal(names), equal([name for name in names if name != gone])
    for key in KEYS:
        if before.store_of(key) != gone:
            assert after.store_of(key) == before.store_of(key)


@settings(deadline=None, max_examples=30)
@given(NAMES, st.randoms())
def test_the_order_of_the_stores_does_not_matter(names, chance):
    points = {name: chance.randrange(1, 300) for name in names}
    shuffled = list(points.items())
    chance.shuffle(shuffled)
    one, other = HashRing(points), HashRing(dict(shuffled))
    assert [one.store_of(key) for key in KEYS[:200]] == [other.store_of(key) for key in KEYS[:200]]


def test_another_process_finds_the_same():
    code = (
        "import sys; from mimo_plugin.core.ring import HashRing\n"
        "ring = HashRing(dict.fromkeys(sys.argv[1:4], 64))\n"
        "print(' '.join(ring.store_of(f'space/{n:x}') for n in range(50)))\n"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", code, *names],
            **{"capture_output": True, "text": True, "check": True, "cwd": ROOT},
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout.split()
        for names, seed in ((["/a", "/b", "/c"], "1"), (["/c", "/a", "/b"], "2"))
    ]
    ring = HashRing(dict.fromkeys(("/b", "/c", "/a"), 64))
    assert done[0] == done[1] == [ring.store_of(key) for key in KEYS[:50]]
    assert set(done[0]) == {"/a", "/b", "/c"}


def test_where_keys_belong_never_changes():
    """Stores outlive versions of this package: these were found when the rule was written."""
    ring = HashRing({"/a": 64, "/b": 64, "/c": 128})
    assert [ring.store_of(key)[1] for key in KEYS[:8]] == list("aacaaccb")


def test_points_go_by_the_capacity():
    gib = 1 << 30
    assert points_for(1) == points_for(gib) == LEAST_POINTS
    assert points_for(500 * gib) == 500 * POINTS_PER_GIB
    shares = HashRing({"a": points_for(500 * gib), "b": points_for(1500 * gib)}).shares()
    assert shares["b"] == pytest.approx(0.75, abs=0.05)


def test_more_points_leave_those_there_are():
    few, more = HashRing({"a": 64, "b": 64}), HashRing({"a": 64, "b": 96})
    moved = [key for key in KEYS if few.store_of(key) != more.store_of(key)]
    assert moved and all(more.store_of(key) == "b" for key in moved)


def test_indices_by_store_are_whole_and_in_order():
    ring = equal(["a", "b", "c"])
    found = ring.split(KEYS)
    assert sorted(index for at in found.values() for index in at) == list(range(len(KEYS)))
    for name, at in found.items():
        assert at == sorted(at) and all(ring.store_of(KEYS[index]) == name for index in at)


def test_any_text_is_a_key_and_a_name():
    ring = equal(["", "\udc80", "/data/é"])
    assert {ring.store_of(key) for key in ("", "\ud800", "x" * 5000)} <= {"", "\udc80", "/data/é"}


@given(st.lists(st.text(max_size=8), max_size=40), st.integers(0, 2))
def test_while_a_store_is_away_its_keys_alone_move(keys, gone):
    names = ["a", "b", "c"]
    ring = HashRing(dict.fromkeys(names, 64))
    left = HashRing({name: 64 for name in names if name != names[gone]})
    for key in keys:
        assert ring.store_of(key, {names[gone]}) == left.store_of(key)
        if ring.store_of(key) != names[gone]:
            assert ring.store_of(key, {names[gone]}) == ring.store_of(key)
    split = ring.split(keys, {names[gone]})
    assert names[gone] not in split
    assert sorted(index for at in split.values() for index in at) == list(range(len(keys)))
