# SPDX-License-Identifier: Apache-2.0
"""A cheap look-up for scoring: how long would a request's hit be?

The engine's own look-up touches every block of the prefix. To rank waiting requests a few dozen
probes do, because a cache that evicts the ends of prefixes first holds full-attention blocks from
the start without gaps. Where that does not hold the answer can be too long; it only orders a queue,
what a request really gets is looked up by the engine when the request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mimo_plugin.core.window import GroupGeometry, blocks_for_hit

Resident = Callable[[int, int], bool]
"""``(group index, block index)`` -> is that block cached?"""


def probe_full(
    groups: Sequence[GroupGeometry],
    alignment_tokens: int,
    max_hit_tokens: int,
    resident: Resident,
    *,
    guess_tokens: int = 0,
) -> int:
    """The hit that full attention alone would give, aligned, in tokens.

    Args:
        groups: all KV cache groups.
        alignment_tokens: a multiple of every block size.
        max_hit_tokens: longest hit allowed.
        resident: whether a block is cached.
        guess_tokens: where the prefix may end; only saves probes.
    """
    high = max(0, max_hit_tokens) // alignment_tokens
    full = [(i, g) for i, g in enumerate(groups) if g.is_full]
    if not full:
        return high * alignment_tokens

    def reaches(units: int) -> bool:
        tokens = units * alignment_tokens
        return all(resident(i, blocks_for_hit(g, tokens)[-1]) for i, g in full)

    low, guess = 0, min(guess_tokens // alignment_tokens, high)
    if guess and reaches(guess):
        # Most often nothing changed, or the prefix grew by a few blocks.
        low, step = guess, 1
        while low + step <= high and reaches(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step - 1)
    elif guess:
        high = guess - 1
    while low < high:
        middle = (low + high + 1) // 2
        if reaches(middle):
            low = middle
        else:
            high = middle - 1
    return low * alignment_tokens


def probe_windows(
    groups: Sequence[GroupGeometry],
    alignment_tokens: int,
    full_tokens: int,
    resident: Resident,
    *,
    before: tuple[int, int] = (0, 0),
) -> int:
    """Longest aligned hit up to ``full_tokens`` (of :func:`probe_full`) with its windows cached.

    ``before`` is the hit and full-attention prefix of last time. It saves probes; a window that was
    cached since then at or below that prefix is not seen.
    """
    swa = [(i, g) for i, g in enumerate(groups) if not g.is_full]
    hit, settled = full_tokens, 0
    while hit and swa and settled < len(swa):
        if before[0] < hit <= before[1]:
            hit = before[0]  # no hit ended between the two
            continue
        settled = 0
        for i, group in swa:
            lower = _below_gap(i, group, hit, alignment_tokens, resident)
            if lower == hit:
                settled += 1
            else:
                hit = lower
                break
    return hit


def _below_gap(
    index: int,
    group: GroupGeometry,
    hit_tokens: int,
    alignment_tokens: int,
    resident: Resident,
) -> int:
    """``hit_tokens`` when its window is resident, else the longest hit that avoids the gap found.

    The window is probed from its left end: a missing block rules out every hit whose window holds
    it, so the leftmost gap gives the longest jump.
    """
    size = group.block_size_tokens
    for block in blocks_for_hit(group, hit_tokens):
        if not resident(index, block):
            end = (block - group.lookahead_blocks) * size
            return max(0, min(end, hit_tokens - 1) // alignment_tokens * alignment_tokens)
    return hit_tokens
