# SPDX-License-Identifier: Apache-2.0
"""Which blocks a hit needs, and so which blocks a writer must keep.

A hit of ``h`` tokens is valid iff every full-attention block of ``[0, h)`` is resident and every
sliding-window block over ``[h - (W - 1), h)`` is resident; a group that carries a draft model's
KV (EAGLE / MTP) needs one look-ahead block more, because its last block is recomputed.
The writer (what to keep), the reader (what a hit needs) and the tests all call
:func:`blocks_for_hit`, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """What one KV cache group needs for a hit.

    Args:
        block_size_tokens: tokens in one block of this group, > 0.
        window_tokens: sliding window W (the query's own token included, as the engines count it),
            or ``None`` for full attention.
        lookahead_blocks: blocks needed past the hit; 1 for a draft (EAGLE / MTP) group, else 0.
    """

    block_size_tokens: int
    window_tokens: int | None = None
    lookahead_blocks: int = 0

    def __post_init__(self) -> None:
        if self.block_size_tokens <= 0:
            raise ValueError(f"block_size_tokens must be > 0, got {self.block_size_tokens}")
        if self.window_tokens is not None and self.window_tokens <= 0:
            raise ValueError(f"window_tokens must be > 0 or None, got {self.window_tokens}")
        if self.lookahead_blocks < 0:
            raise ValueError(f"lookahead_blocks must be >= 0, got {self.lookahead_blocks}")

    @property
    def is_full(self) -> bool:
        """True for a full-attention group."""
        return self.window_tokens is None

    @property
    def window_blocks(self) -> int:
        """Blocks that the last W-1 tokens span when the hit ends on a block edge."""
        if self.window_tokens is None:
            raise ValueError("a full-attention group has no window")
        return -(-(self.window_tokens - 1) // self.block_size_tokens)


def blocks_for_hit(group: GroupGeometry, hit_tokens: int) -> range:
    """Block indices of ``group`` that must be resident for a hit of ``hit_tokens``.

    ``hit_tokens`` must lie on a block edge of the group. The range is empty for ``hit_tokens`` = 0.
    """
    if hit_tokens % group.block_size_tokens:
        raise ValueError(
            f"hit_tokens={hit_tokens} is not a multiple of the group's block size "
            f"{group.block_size_tokens}"
        )
    if hit_tokens == 0:
        return range(0)
    end = hit_tokens // group.block_size_tokens
    first = 0 if group.is_full else max(0, end - group.window_blocks)
    return range(first, end + group.lookahead_blocks)


def draft_swa_groups(groups: Sequence[GroupGeometry]) -> tuple[int, ...]:
    """Indices of the SWA groups of a draft model: those that look ahead while others don't.

    Where every group looks ahead (a draft model without groups of its own) there are none.
    """
    ahead = tuple(i for i, g in enumerate(groups) if not g.is_full and g.lookahead_blocks)
    return ahead if any(not g.lookahead_blocks for g in groups if not g.is_full) else ()


def last_safe_boundary(
    groups: Sequence[GroupGeometry], alignment_tokens: int, cacheable_tokens: int
) -> int:
    """Largest aligned boundary whose look-ahead blocks all end within ``cacheable_tokens``."""
    lookahead = max((g.lookahead_blocks * g.block_size_tokens for g in groups), default=0)
    return max(0, (cacheable_tokens - lookahead) // alignment_tokens * alignment_tokens)


def is_valid_hit(
    groups: Sequence[GroupGeometry],
    hit_tokens: int,
    resident: Callable[[int, int], bool],
) -> bool:
    """The promise itself: ``resident(group index, block index)`` holds for all that a hit needs."""
    return all(
        resident(index, block)
        for index, group in enumerate(groups)
        for block in blocks_for_hit(group, hit_tokens)
    )


def longest_valid_hit(
    groups: Sequence[GroupGeometry],
    alignment_tokens: int,
    max_hit_tokens: int,
    resident: Callable[[int, int], bool],
) -> int:
    """Longest aligned valid hit, by trying every boundary. The oracle of the property tests."""
    for hit in range(max_hit_tokens // alignment_tokens * alignment_tokens, 0, -alignment_tokens):
        if is_valid_hit(groups, hit, resident):
            return hit
    return 0
