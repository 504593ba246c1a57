# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a sparse sliding-window event lie in its range.

Such an event lists the kept blocks in order, without their places. Some of them have names: a
full-attention block ends where they end, so its hash was told before. The others lie where no name
is known, between those that have one; and engines keep *windows*: ``need`` blocks in a row that end
on an aligned boundary (``SlidingWindowManager.reachable_block_mask`` of vLLM), with one block more
where a draft model looks ahead. A block whose place these rules leave open has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How the windows of a group lie.

    Attributes:
        before: blocks of a window before the first one that ends with a full-attention block.
        ahead: blocks of it after the last such block: 1 where a draft model looks ahead.
        step: blocks of this group in one full-attention block.
    """

    before: int
    ahead: int
    step: int

    @classmethod
    def of(cls, need_blocks: int, ahead: int, step: int) -> WindowRule:
        """The rule for windows of ``need_blocks`` that end on multiples of ``step`` blocks."""
        return cls((step - 1 - -need_blocks % step) % step, ahead, step)


def places(
    known: Sequence[int | None], free: Sequence[bool], rule: WindowRule
) -> list[int | None] | None:
    """Places of the listed blocks.

    Args:
        known: by list index, the place of a block whose hash has a name.
        free: by place, whether no name is known there.
        rule: of the group.

    Returns:
        By list index, the place, or None where it stays open; None for the whole list when the
        known places contradict each other.
    """
    anchors = [place for place in known if place is not None]
    if any(b <= a for a, b in zip(anchors, anchors[1:], strict=False)):
        return None
    found = list(known)
    first = 0
    while first < len(known):
        if known[first] is not None:
            first += 1
            continue
        last = first
        while last < len(known) and known[last] is None:
            last += 1
        low = known[first - 1] if first else None
        high = known[last] if last < len(known) else None
        gap = _gap(last - first, low, high, free, rule)
        if gap is not None:
            found[first:last] = gap
        first = last
    return found


def _gap(
    count: int, low: int | None, high: int | None, free: Sequence[bool], rule: WindowRule
) -> list[int] | None:
    """Places of ``count`` blocks without names between two that have one."""
    start = 0 if low is None else low + 1
    stop = len(free) if high is None else high
    open_places = [place for place in range(start, stop) if free[place]]
    if count == len(open_places):
        return open_places
    if count > len(open_places):
        return None
    right = 0  # of them, how many come right behind the block before the gap
    if high is None:
        # The last window may begin here and be cut off by the range's end.
        left = count
        if rule.ahead:
            if low is None or count < rule.ahead:
                return None
            right, left = rule.ahead, count - rule.ahead
        if left > rule.before:
            return None
    elif low is None:
        # The first window may have lost its beginning, which left the model's window.
        left = count
        if rule.ahead and count == rule.before + rule.ahead:
            # The range begins with what looks ahead of the window before it.
            if not rule.before:
                return None
            right, left = rule.ahead, rule.before
        if left >= rule.step:
            return None
    else:
        right, left = rule.ahead, rule.before
        if count != right + left:
            return None
    chosen = [*range(start, start + right), *range(stop - left, stop)]
    if len(set(chosen)) != count or not all(
        start <= place < stop and free[place] for place in chosen
    ):
        return None
    return chosen
