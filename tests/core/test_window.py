# SPDX-License-Identifier: Apache-2.0
"""Blocks that a hit needs, against the definition in tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.window import (
    GroupGeometry,
    blocks_for_hit,
    is_valid_hit,
    last_safe_boundary,
    longest_valid_hit,
)

GROUPS = st.builds(
    GroupGeometry,
    block_size_tokens=st.sampled_from([1, 2, 4, 8]),
    window_tokens=st.none() | st.integers(1, 40),
    lookahead_blocks=st.integers(0, 1),
)
#: alignments must be a multiple of each block size above
ALIGNMENT = 8


@given(GROUPS, st.integers(0, 30))
def test_blocks_are_those_of_the_tokens(group: GroupGeometry, blocks: int) -> None:
    size = group.block_size_tokens
    hit = blocks * size
    first = 0 if group.window_tokens is None else max(0, hit - (group.window_tokens - 1))
    wanted = {token // size for token in range(first, hit)}
    if hit:
        wanted |= {blocks + i for i in range(group.lookahead_blocks)}
    assert set(blocks_for_hit(group, hit)) == wanted


def test_a_hit_inside_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        blocks_for_hit(GroupGeometry(16, 128), 24)


@pytest.mark.parametrize("kwargs", [{"block_size_tokens": 0}, {"block_size_tokens": -4}])
def test_impossible_geometry_is_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="block_size_tokens"):
        GroupGeometry(**kwargs)
    with pytest.raises(ValueError, match="window_tokens"):
        GroupGeometry(16, 0)
    with pytest.raises(ValueError, match="lookahead_blocks"):
        GroupGeometry(16, None, -1)


@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(0, 200))
def test_last_safe_boundary_is_the_largest(groups: list[GroupGeometry], cacheable: int) -> None:
    def fits(hit: int) -> bool:
        return all(hit + g.lookahead_blocks * g.block_size_tokens <= cacheable for g in groups)

    best = max((h for h in range(0, cacheable + 1, ALIGNMENT) if fits(h)), default=0)
    assert last_safe_boundary(groups, ALIGNMENT, cacheable) == best


@given(st.lists(GROUPS, min_size=1, max_size=3), st.integers(0, 90), st.data())
def test_longest_valid_hit(groups: list[GroupGeometry], limit: int, data: st.DataObject) -> None:
    missing = data.draw(
        st.sets(st.tuples(st.integers(0, len(groups) - 1), st.integers(0, 90)), max_size=6)
    )

    def resident(group: int, block: int) -> bool:
        return (group, block) not in missing

    hit = longest_valid_hit(groups, ALIGNMENT, limit, resident)
    assert 0 <= hit <= limit
    assert hit % ALIGNMENT == 0
    for index, group in enumerate(groups):
        size = group.block_size_tokens
        first = 0 if group.window_tokens is None else max(0, hit - group.window_tokens + 1)
        assert not any((index, t // size) in missing for t in range(first, hit))
    for longer in range(hit + ALIGNMENT, limit + 1, ALIGNMENT):
        assert not is_valid_hit(groups, longer, resident)


@given(GROUPS, st.integers(1, 20))
def test_more_residency_never_hurts(group: GroupGeometry, blocks: int) -> None:
    hit = blocks * group.block_size_tokens
    needed = set(blocks_for_hit(group, hit))
    assert is_valid_hit([group], hit, lambda _, b: b in needed)
    for gone in needed:
        assert not is_valid_hit([group], hit, lambda _, b, gone=gone: b in needed - {gone})
