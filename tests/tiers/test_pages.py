# SPDX-License-Identifier: Apache-2.0
"""Where a stored prefix may end, and the memory of its pages."""

from __future__ import annotations

import ctypes
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.engines.sglang.storage.pages import (
    ALL,
    TRAILING,
    common_ends,
    leading,
    legal_ends,
    parts_of,
)
from mimo_plugin.tiers.keys import key_space

FOUND = st.lists(st.booleans(), max_size=24)


@given(FOUND, st.integers(1, 6))
def test_legal_ends_are_those_of_the_definition(found, trailing):
    """SGLang's rule (``HiCacheFile.batch_exists_v2``): the pages of a window are all there."""
    windows = [
        end
        for end in range(1, len(found) + 1)
        if all(found[i] for i in range(max(0, end - trailing), end))
    ]
    assert legal_ends(found, TRAILING, trailing) == windows
    prefixes = [end for end in range(1, len(found) + 1) if all(found[:end])]
    assert legal_ends(found, ALL) == prefixes
    assert leading(found) == len(prefixes)


@pytest.mark.parametrize(
    ("swa", "other", "hit"),
    [([3], [3], 3), ([3], [2], 0), ([1, 3], [1, 2], 1)],
)
def test_the_longest_common_end_point_is_the_hit(swa, other, hit):
    """B19: three pages; the windows of two pools end at different lengths."""
    ends = common_ends([[1, 2, 3], swa, other])
    assert (ends[-1] if ends else 0) == hit


def test_a_partial_window_is_a_miss_a_thousand_times():
    """B64: one of two pages of the window is stored."""
    for _ in range(1000):
        assert legal_ends([True, False, True], TRAILING, 2) == [1]
        assert common_ends([[1, 2, 3], legal_ends([False, False, True], TRAILING, 2)]) == []


def test_spaces_differ_with_every_fact():
    facts = {"model": "a", "dtype": "bf16", "tp_rank": 0}
    spaces = {key_space(facts)}
    for name in facts:
        spaces.add(key_space({**facts, name: "other"}))
    spaces.add(key_space({**facts, "pool": "swa"}))
    assert len(spaces) == 5 and key_space(dict(reversed(facts.items()))) in spaces


def test_pages_are_the_memory_itself():
    memory = array("B", range(60))
    start = memory.buffer_info()[0]
    pages = parts_of([start, start + 30, start + 10, start + 40], [10, 5, 10, 5], 2)
    assert [[bytes(run) for run in page] for page in pages] == [
        [bytes(range(10)), bytes(range(30, 35))],
        [bytes(range(10, 20)), bytes(range(40, 45))],
    ]
    pages[1][0][0] = 99
    assert memory[10] == 99 and ctypes.c_ubyte.from_address(start + 10).value == 99
    assert parts_of([], [], 0) == []


def test_runs_that_are_no_whole_pages_are_our_own_fault():
    with pytest.raises(AssertionError, match="whole pages"):
        parts_of([1, 2, 3], [1, 1, 1], 2)
