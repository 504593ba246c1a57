# SPDX-License-Identifier: Apache-2.0
"""Cutting computed KV into windows: nothing is given back twice, every end can be resumed at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.retention import LADDER, NONE, PROMPT_END, TURN_END
from mimo_plugin.core.segments import Segment, cut, window_start
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit

GROUP = GroupGeometry(16, 129)


def run(ends: list[int], cached: int = 0, released: int = 0) -> list[tuple[int, int, int]]:
    segments = cut([(end, LADDER) for end in ends], GROUP, cached, released)
    return [(s.release_from, s.start, s.end) for s in segments]


def test_windows_that_touch_give_nothing_back() -> None:
    assert run([128, 256, 320]) == [(0, 0, 128), (128, 128, 256), (256, 256, 320)]


def test_what_lies_between_two_windows_is_given_back() -> None:
    assert run([128, 512]) == [(0, 0, 128), (128, 384, 512)]


def test_a_window_may_begin_in_what_the_cache_owns() -> None:
    assert run([576], cached=512) == [(512, 512, 576)]


def test_a_checkpoint_whose_window_is_gone_is_left_out() -> None:
    # A long output: its window slid from the prompt's end at 512 up to 900 and further.
    assert run([640, 1024, 1040], cached=512, released=896) == [
        (896, 896, 1024),
        (1024, 1024, 1040),
    ]


def test_the_last_end_is_always_handed_over() -> None:
    assert run([1024], cached=512, released=960) == [(960, 960, 1024)]
    assert run([1024], cached=512, released=1024) == [(1024, 1024, 1024)]


def test_classes_stay_with_their_ends() -> None:
    segments = cut([(16, PROMPT_END), (64, TURN_END), (80, NONE)], GROUP, 0, 0)
    assert segments == [
        Segment(0, 0, 16, PROMPT_END),
        Segment(16, 16, 64, TURN_END),
        Segment(64, 64, 80, NONE),
    ]


@st.composite
def stretches(draw: st.DrawFn) -> tuple[list[int], GroupGeometry, int, int]:
    page = draw(st.sampled_from([1, 4, 16]))
    group = GroupGeometry(page, draw(st.integers(2, 90)))
    cached = page * draw(st.integers(0, 20))
    steps = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    ends, at = [], cached
    for step in steps:
        at += page * step
        ends.append(at)
    released = page * draw(st.integers(0, ends[-1] // page))
    return ends, group, cached, released


@given(stretches())
def test_against_the_definition(case: tuple[list[int], GroupGeometry, int, int]) -> None:
    ends, group, cached, released = case
    segments = cut([(end, LADDER) for end in ends], group, cached, released)
    gone = max(cached, released)
    # Position by position: live in the request's own KV, kept by the tree, or given back.
    state = {p: "own" for p in range(gone, ends[-1])}
    for segment in segments:
        assert segment.release_from <= segment.start
        for p in range(segment.release_from, segment.start):
            assert state.pop(p) == "own"
        for p in range(segment.start, segment.end):
            assert state[p] == "own"
            state[p] = "kept"
    assert set(state.values()) <= {"kept"}, "neither kept nor given back"
    assert segments[-1].end == ends[-1]
    assert [s.end for s in segments] == sorted({s.end for s in segments})
    kept = {p for p in state}
    for end in ends[:-1]:
        first = blocks_for_hit(group, end).start * group.block_size_tokens
        assert first == window_start(group, end)
        own = set(range(max(first, cached), end))
        possible = not own & set(range(cached, gone))
        assert (end in {s.end for s in segments}) == possible
        if possible:
            assert own <= kept
    # The running request goes on: it needs the last window, as far as it had it.
    last = set(range(max(window_start(group, ends[-1]), gone), ends[-1]))
    assert last <= kept
