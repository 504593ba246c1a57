# SPDX-License-Identifier: Apache-2.0
"""Lanes: how many long prefills run at once, and how much of a step they may take.

A lane holds the prefills with more than ``over_tokens`` uncached tokens left. Lanes nest: what is
over 256K is over 64K as well and counts in both. Requests outside every lane are never held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """At most ``max_prefills`` concurrent prefills with more than ``over_tokens`` tokens left."""

    over_tokens: int
    max_prefills: int

    def __post_init__(self) -> None:
        if self.over_tokens < 1 or self.max_prefills < 1:
            raise ValueError(f"lane needs over_tokens >= 1 and max_prefills >= 1, got {self}")


def lane_of(lanes: Sequence[Lane], uncached_tokens: float) -> int:
    """Number of lanes (ascending by ``over_tokens``) that a prefill is in; 0 is the short class."""
    count = 0
    for lane in lanes:
        if uncached_tokens <= lane.over_tokens:
            break
        count += 1
    return count


def full_lane(
    lanes: Sequence[Lane], uncached_tokens: int, active_tokens: Iterable[int]
) -> Lane | None:
    """The first lane that keeps a prefill from starting, None when it may start.

    Args:
        lanes: ascending by ``over_tokens``.
        uncached_tokens: what the prefill would compute.
        active_tokens: uncached tokens left of each prefill that runs now.
    """
    mine = lanes[: lane_of(lanes, uncached_tokens)]
    if not mine:
        return None
    active = list(active_tokens)
    for lane in mine:
        if sum(left > lane.over_tokens for left in active) >= lane.max_prefills:
            return lane
    return None


def long_room_tokens(
    budget_tokens: int, *, share: float, decode_tokens: int, shorter_tokens: int
) -> int:
    """Tokens of a step for all long prefills together.

    The engine fills a step in the order in which requests were admitted, so without a limit a
    prefill of a million tokens takes every step whole: requests admitted later wait for its end,
    whatever their length.

    Args:
        budget_tokens: tokens of a step.
        share: part of the step that long prefills always get, decodes aside.
        decode_tokens: tokens that decoding requests need in the step.
        shorter_tokens: tokens that shorter prefills could compute in the step, running ones and
            those that wait and could start.
    """
    others = min(shorter_tokens, budget_tokens - int(share * budget_tokens))
    return max(0, budget_tokens - decode_tokens - others)
