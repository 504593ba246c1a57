# SPDX-License-Identifier: Apache-2.0
"""Going on after a load from another engine: exact rows, whole windows, no needless work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.handover import LoadedGroup, resume_at, unknown_rows


def loaded_tokens(group, end):
    """Tokens of a group that are there: its blocks from ``first_block`` on."""
    return set(range(group.first_block * group.block_size_tokens, end))


@st.composite
def loads(draw):
    """(end, k, groups, local) as a connector leaves them: windows reach at least to the end."""
    k = draw(st.integers(0, 4))
    end = draw(st.integers(1, 400))
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        block = draw(st.sampled_from((1, 2, 16, 32)))
        window = draw(st.integers(1, 128))
        last_needed = max(0, end - window + 1)  # what the token at ``end`` attends to
        groups.append(LoadedGroup(block, draw(st.integers(0, last_needed // block)), window))
    groups.append(LoadedGroup(16))
    return end, k, groups, draw(st.integers(0, end))


def test_an_engine_that_ends_guesses_the_last_rows():
    assert list(unknown_rows(10, 0)) == [9]
    assert list(unknown_rows(10, 2)) == [7, 8, 9]
    assert list(unknown_rows(2, 5)) == [0, 1]
    assert list(unknown_rows(0, 1)) == []


@given(st.integers(0, 200), st.integers(0, 6))
def test_unknown_rows_are_those_whose_token_is_past_the_end(end, layer):
    assert list(unknown_rows(end, layer)) == [p for p in range(end) if p + 1 + layer >= end]


@given(loads())
def test_all_that_a_recomputed_token_attends_to_is_there(load):
    end, k, groups, local = load
    start = resume_at(end, k, groups, local_tokens=local)
    for group in groups:
        there = loaded_tokens(group, end)
        for token in range(start, end):
            first = 0 if group.window_tokens is None else max(0, token - group.window_tokens + 1)
            assert set(range(first, start)) <= there


@given(loads())
def test_no_row_is_left_that_could_be_recomputed(load):
    end, k, groups, local = load
    start = resume_at(end, k, groups, local_tokens=local)
    assert local <= start <= end
    left = [p for i in range(k) for p in unknown_rows(end, i) if p < start]
    blocked = max([local, *(group.first_resumable for group in groups)])
    if left:
        assert start == min(blocked, end)
        assert start > end - k
    else:
        assert start == max(0, min(end, max(end - k, blocked)))


@given(loads())
def test_the_more_layers_the_earlier(load):
    end, k, groups, local = load
    starts = [resume_at(end, n, groups, local_tokens=local) for n in range(k + 1)]
    assert starts == sorted(starts, reverse=True)
    assert starts[0] == end


def test_a_window_whose_first_block_was_not_sent_stops_the_way_back():
    full = LoadedGroup(64)
    assert resume_at(222, 3, [full, LoadedGroup(32, 4, 64)]) == 219
    # blocks 5 and 6 hold tokens 160 … 223: token 223 is the first whose window is whole
    assert resume_at(226, 3, [full, LoadedGroup(32, 5, 64)]) == 223
    assert resume_at(225, 3, [full, LoadedGroup(32, 5, 64)]) == 223
    assert resume_at(2, 3, [full]) == 0
    assert resume_at(100, 3, [full], local_tokens=98) == 98


@pytest.mark.parametrize("values", [(0, 0), (-1, 0), (16, -1)])
def test_a_group_needs_a_block_size(values):
    with pytest.raises(ValueError, match="block_size_tokens must be > 0"):
        LoadedGroup(*values)


def test_numbers_must_be_right():
    with pytest.raises(ValueError, match="window_tokens must be > 0 or None, got 0"):
        LoadedGroup(16, 0, 0)
    with pytest.raises(ValueError, match="must hold all blocks"):
        resume_at(10, 1, [LoadedGroup(16, 1)])
    with pytest.raises(ValueError, match="got -1, 3 and 0"):
        resume_at(-1, 3, [])
    with pytest.raises(ValueError, match="end_tokens and layer must be >= 0"):
        unknown_rows(-1, 0)
