# SPDX-License-Identifier: Apache-2.0
"""Lanes: the classes of prefills, the caps, and the share of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.lanes import Lane, full_lane, lane_of, long_room_tokens

LANES = (Lane(65_536, 2), Lane(262_144, 1))


@pytest.mark.parametrize(
    ("tokens", "lane"),
    [(0, 0), (65_536, 0), (65_537, 1), (262_144, 1), (262_145, 2), (10**6, 2)],
)
def test_classes_of_the_report(tokens, lane):
    assert lane_of(LANES, tokens) == lane
    assert lane_of((), tokens) == 0


@pytest.mark.parametrize("values", [(0, 1), (-1, 1), (1, 0), (1, -2)])
def test_a_lane_needs_positive_numbers(values):
    with pytest.raises(ValueError, match="over_tokens >= 1 and max_prefills >= 1"):
        Lane(*values)


def test_what_is_over_the_second_limit_counts_in_the_first_lane():
    assert full_lane(LANES, 70_000, [300_000, 70_000]) == LANES[0]
    assert full_lane(LANES, 70_000, [300_000, 60_000]) is None
    assert full_lane(LANES, 300_000, [300_000]) == LANES[1]
    assert full_lane(LANES, 300_000, [70_000]) is None
    assert full_lane(LANES, 300_000, [70_000, 70_000]) == LANES[0]


def test_short_prefills_are_never_held():
    assert full_lane(LANES, 65_536, [10**6] * 50) is None
    assert full_lane((), 10**6, [10**6] * 50) is None


@given(
    lanes=st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 5)),
        max_size=4,
        unique_by=lambda lane: lane[0],
    ).map(
        lambda rows: tuple(
            Lane(over, most)
            for over, most in zip(
                sorted(r[0] for r in rows), sorted((r[1] for r in rows), reverse=True), strict=True
            )
        )
    ),
    tokens=st.integers(0, 150),
    active=st.lists(st.integers(0, 150), max_size=8),
)
def test_full_lane_against_counting(lanes, tokens, active):
    over = [lane for lane in lanes if tokens > lane.over_tokens]
    assert lane_of(lanes, tokens) == len(over)
    full = [
        lane
        for lane in over
        if len([a for a in active if a > lane.over_tokens]) >= lane.max_prefills
    ]
    assert full_lane(lanes, tokens, iter(active)) == (full[0] if full else None)
    if full_lane(lanes, tokens, active) is None:
        # Starting it keeps every cap.
        for lane in lanes:
            before = sum(a > lane.over_tokens for a in active)
            after = before + (tokens > lane.over_tokens)
            assert after <= max(before, lane.max_prefills)


def test_the_whole_step_when_nothing_shorter_is_there():
    kwargs = {"share": 0.5, "shorter_tokens": 0}
    assert long_room_tokens(8192, decode_tokens=0, **kwargs) == 8192
    assert long_room_tokens(8192, decode_tokens=200, **kwargs) == 7992


def test_shorter_work_gets_what_it_needs_up_to_its_share():
    kwargs = {"share": 0.5, "decode_tokens": 0}
    assert long_room_tokens(8192, shorter_tokens=100, **kwargs) == 8092
    assert long_room_tokens(8192, shorter_tokens=100_000, **kwargs) == 4096
    assert long_room_tokens(8192, share=0.5, decode_tokens=8000, shorter_tokens=8192) == 0


@given(
    budget=st.integers(1, 10_000),
    share=st.floats(0.01, 0.99),
    decodes=st.integers(0, 20_000),
    shorter=st.integers(0, 20_000),
)
def test_long_prefills_leave_room(budget, share, decodes, shorter):
    room = long_room_tokens(budget, share=share, decode_tokens=decodes, shorter_tokens=shorter)
    assert 0 <= room <= max(0, budget - decodes)
    left = budget - decodes - room
    if room:
        assert left == min(shorter, budget - int(share * budget))
