# SPDX-License-Identifier: Apache-2.0
"""What a follower can take over from a leader."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.leaders import awaited_tokens, common_blocks


def chain(tokens: list[int]) -> list[int]:
    """Chained hashes: each covers everything before it."""
    out, value = [], 0
    for token in tokens:
        value = hash((value, token))
        out.append(value)
    return out


_TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(shared=_TOKENS, a=_TOKENS, b=_TOKENS)
def test_common_blocks_equals_counting(shared, a, b):
    left, right = chain(shared + a), chain(shared + b)
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_blocks(left, right) == count == common_blocks(right, left)
    assert count >= len(shared)


def test_common_blocks_of_nothing():
    assert common_blocks([], []) == common_blocks([1], []) == common_blocks([], [1]) == 0
    assert common_blocks([1], [1]) == 1
    assert common_blocks([1], [2]) == 0


def test_common_blocks_compares_few():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    blocks = Counted(range(65_536))
    assert common_blocks(blocks, list(range(65_536))) == 65_536
    assert Counted.reads <= 18


def aligned(unit: int):
    """Every multiple of ``unit`` can be resumed from."""

    def last_stop(after: int, upto: int) -> int:
        stop = upto // unit * unit
        return stop if stop > after else 0

    return last_stop


def test_a_follower_waits_for_the_last_stop_of_what_is_shared():
    assert awaited_tokens(0, 1000, 0, aligned(16)) == 992
    assert awaited_tokens(512, 1000, 600, aligned(16)) == 992


def test_no_wait_for_what_is_past_or_out_of_reach():
    assert awaited_tokens(992, 1000, 0, aligned(16)) == 0, "the follower has it"
    assert awaited_tokens(0, 1000, 992, aligned(16)) == 0, "the leader has passed it"
    assert awaited_tokens(0, 15, 0, aligned(16)) == 0, "nothing that can be resumed from"
    assert awaited_tokens(64, 64, 0, aligned(16)) == 0
    assert awaited_tokens(0, 0, 0, aligned(16)) == 0


@given(
    hit=st.integers(0, 60),
    limit=st.integers(0, 60),
    leader=st.integers(0, 60),
    stops=st.sets(st.integers(1, 60), max_size=8),
)
def test_awaited_is_a_stop_ahead_of_both(hit, limit, leader, stops):
    def last_stop(after: int, upto: int) -> int:
        return max((s for s in stops if after < s <= upto), default=0)

    tokens = awaited_tokens(hit, limit, leader, last_stop)
    ahead = [s for s in stops if max(hit, leader) < s <= limit]
    assert tokens == max(ahead, default=0)
