# SPDX-License-Identifier: Apache-2.0
"""Cutting a stretch of freshly computed KV into what checkpoints need and what they don't.

For engines that hand KV to the cache in contiguous pieces: each piece ends at a checkpoint, keeps
the sliding-window KV of that checkpoint's window, and gives back what lies before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_plugin.core.window import GroupGeometry, blocks_for_hit


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece, in token positions.

    Attributes:
        release_from: sliding-window KV of ``[release_from, start)`` is given back now.
        start: sliding-window KV of ``[start, end)`` is kept.
        end: where the piece ends.
        cls: checkpoint class at ``end``; ``none`` where only the running request needs it.
    """

    release_from: int
    start: int
    end: int
    cls: str


def window_start(group: GroupGeometry, tokens: int) -> int:
    """First token position that a hit of ``tokens`` needs in ``group``."""
    return blocks_for_hit(group, tokens).start * group.block_size_tokens


def cut(
    ends: Sequence[tuple[int, str]],
    group: GroupGeometry,
    cached_tokens: int,
    released_tokens: int,
) -> list[Segment]:
    """Segments that cover everything from ``cached_tokens`` to the last end.

    Below ``cached_tokens`` the cache holds at least one window. A checkpoint whose window reaches
    into what was given back before is left out; the last end always gets a segment.

    Args:
        ends: positions to end at with their classes, ascending, block-aligned, all above
            ``cached_tokens``; the last one is where the computed KV ends.
        group: geometry of the sliding-window layers.
        cached_tokens: position up to which the cache owns the KV already.
        released_tokens: sliding-window KV of ``[cached_tokens, released_tokens)`` is gone.
    """
    gone = max(cached_tokens, released_tokens)
    at = gone
    segments: list[Segment] = []
    for index, (end, cls) in enumerate(ends):
        first = window_start(group, end)
        if index < len(ends) - 1 and gone > max(first, cached_tokens):
            continue
        start = min(max(first, at), max(end, at))
        segments.append(Segment(at, start, end, cls))
        at = max(at, end)
    return segments
