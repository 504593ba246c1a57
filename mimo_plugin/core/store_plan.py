# SPDX-License-Identifier: Apache-2.0
"""Which windows of one request's KV are worth storing below the device.

Full attention is stored whole. Of a sliding-window group only the blocks are that a hit at a kept
point needs (:func:`blocks_for_hit`, as for the look-up); where points are kept is the retention
rule of :mod:`mimo_plugin.core.retention`. All points but the last are known before their blocks are
computed; the end of a turn is known when it has come, so the newest window waits for it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

from mimo_plugin.core.retention import TAIL, TURN_END, RetentionRule
from mimo_plugin.core.window import GroupGeometry, last_safe_boundary


class StorePlan:
    """The kept points of one request.

    Args:
        groups: geometry of each group.
        rule: where points are kept; its alignment is a multiple of every block size.
    """

    __slots__ = ("_groups", "_planned_tokens", "_points", "_rule")

    def __init__(self, groups: Sequence[GroupGeometry], rule: RetentionRule) -> None:
        self._groups = groups
        self._rule = rule
        self._points: list[int] = []
        self._planned_tokens = 0

    @property
    def points(self) -> Sequence[int]:
        """Kept positions in tokens, ascending."""
        return self._points

    @property
    def planned_tokens(self) -> int:
        """Position up to which points are decided."""
        return self._planned_tokens

    def extend(
        self,
        upto_tokens: int,
        num_prompt_tokens: int,
        junctions: Iterable[int] = (),
        message_starts: Iterable[int] = (),
    ) -> None:
        """Decide the points up to ``upto_tokens``; those decided before stay.

        Args:
            upto_tokens: any position, also one whose KV is not computed yet.
            num_prompt_tokens: length of the prompt.
            junctions: where the request was seen to part from another.
            message_starts: of chat messages in what is decided now.
        """
        upto = self._rule.align(upto_tokens)
        plan = self._rule.plan(
            self._planned_tokens, upto, num_prompt_tokens, junctions, message_starts
        )
        for tokens, _ in plan:
            self._add(tokens)
        self._planned_tokens = max(self._planned_tokens, upto)

    def finish(self, stored_tokens: int) -> None:
        """The request has ended; ``stored_tokens`` of its KV can be stored."""
        end = last_safe_boundary(self._groups, self._rule.alignment_tokens, stored_tokens)
        if TURN_END in self._rule.classes and end > 0:
            self._add(end)
        before = end - self._rule.alignment_tokens
        if TAIL in self._rule.classes and before > 0:
            self._add(before)

    def wanted(self, group: int, block: int) -> bool:
        """Whether a hit at one of the points needs this block."""
        geometry = self._groups[group]
        if geometry.is_full:
            return True
        size = geometry.block_size_tokens
        # The hits that need the block end after it less the look-ahead, and a window later at most.
        nearest = bisect_right(self._points, (block - geometry.lookahead_blocks) * size)
        last = (block + geometry.window_blocks) * size
        return nearest < len(self._points) and self._points[nearest] <= last

    def _add(self, tokens: int) -> None:
        index = bisect_right(self._points, tokens)
        if not index or self._points[index - 1] != tokens:
            insort(self._points, tokens)


def waiting_blocks(group: GroupGeometry, rule: RetentionRule) -> int:
    """Newest blocks of a group that a point may need which is known only at the end.

    The end lies up to one alignment unit and the look-ahead before what is computed, and the point
    before it (``tail``) one unit more.
    """
    if group.is_full or not {TURN_END, TAIL} & rule.classes:
        return 0
    size = group.block_size_tokens
    behind = rule.lookahead_tokens + rule.alignment_tokens - size
    if TAIL in rule.classes:
        behind += rule.alignment_tokens
    return group.window_blocks + -(-behind // size)
