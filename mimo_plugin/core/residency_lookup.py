# SPDX-License-Identifier: Apache-2.0
"""Longest hits of one prompt on many workers at once.

Full attention takes a bisection for each length that differs between workers. A window of n blocks
holds exactly one of every n-th blocks of the prompt, so only these are looked up until one is
found: a long prompt without any window costs a look-up for every n-th of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.residency_groups import Chains, Windows
from mimo_plugin.core.window import blocks_for_hit

Reach: TypeAlias = tuple[int, int]
"""A length in tokens, and the bits of the workers that have it."""

_PROBES = 512  # at once; after each lot it is seen whether anybody still waits for an answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is looked up.

    Attributes:
        hashes: of its blocks of ``hash_tokens`` tokens.
        aligned_tokens: hits are multiples of it.
        max_hit_tokens: longest hit allowed.
    """

    hashes: Sequence[Hash]
    hash_tokens: int
    aligned_tokens: int
    max_hit_tokens: int

    @property
    def limit_tokens(self) -> int:
        """Longest length in question."""
        tokens = min(self.max_hit_tokens, len(self.hashes) * self.hash_tokens)
        return max(0, tokens // self.aligned_tokens * self.aligned_tokens)


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def full_steps(prompt: Prompt, chains: Sequence[Chains], workers: int) -> list[Reach]:
    """Lengths at which full attention of some worker ends, and who has them; longest first."""
    hashes, aligned, known = prompt.hashes, prompt.aligned_tokens, len(prompt.hashes)

    def reach(units: int) -> int:
        mask, tokens = workers, units * aligned
        for chain in chains:
            size = chain.geometry.block_size_tokens
            needed = (tokens // size + chain.geometry.lookahead_blocks) * size
            end = needed // prompt.hash_tokens
            mask &= chain.reach(hashes[end - 1]) if end <= known else 0
        return mask

    found: list[Reach] = []
    # Lengths between two that were seen, with the workers of the shorter and of the longer one.
    todo = [(1, prompt.limit_tokens // aligned, workers, 0)]
    while todo:
        low, high, shorter, longer = todo.pop()
        if low > high or shorter == longer:
            continue
        middle = (low + high) // 2
        mask = reach(middle)
        if mask:
            found.append((middle * aligned, mask))
        todo.append((low, middle - 1, shorter, mask))
        todo.append((middle + 1, high, mask, longer))
    found.sort(reverse=True)
    steps: list[Reach] = []
    for tokens, mask in found:
        if not steps or mask != steps[-1][1]:
            steps.append((tokens, mask))
    return steps


def safe_steps(
    prompt: Prompt, windows: Sequence[Windows], steps: Sequence[Reach]
) -> Iterator[Reach]:
    """Longest hits that have their windows, with the workers whose longest hit it is.

    Args:
        windows: sliding-window groups, joined by geometry.
        steps: what full attention has, from :func:`full_steps`.
    """
    if not steps:
        return
    # The one that reaches furthest takes the fewest probes.
    needed = sorted(
        (joined for joined in windows if joined.geometry.window_blocks),
        key=lambda joined: joined.geometry.window_blocks * joined.geometry.block_size_tokens,
        reverse=True,
    )
    search = _Search(prompt, steps)
    for tokens, mask in search.windows_of(needed[0]) if needed else steps:
        mask &= search.missing
        for joined in needed[1:]:
            mask = _confirmed(prompt, joined, tokens, mask)
        if mask:
            search.missing &= ~mask
            yield tokens, mask
        if not search.missing:
            return


def _confirmed(prompt: Prompt, joined: Windows, tokens: int, mask: int) -> int:
    """Those of the workers that have all blocks of the window before ``tokens``."""
    hash_blocks = joined.geometry.block_size_tokens // prompt.hash_tokens
    for block in blocks_for_hit(joined.geometry, tokens):
        at = (block + 1) * hash_blocks - 1
        if not mask or at >= len(prompt.hashes):
            return 0
        mask &= joined.masks.get(prompt.hashes[at], 0)
    return mask


class _Search:
    """Looks for windows from the longest length down.

    Attributes:
        missing: workers whose longest hit is not known yet.
    """

    def __init__(self, prompt: Prompt, steps: Sequence[Reach]) -> None:
        self.missing = steps[-1][1]
        self._prompt = prompt
        self._steps = steps

    def _full(self, tokens: int) -> int:
        """Workers in question whose full attention has ``tokens``."""
        reach = 0
        # Few lengths differ, and mostly the first ones are meant.
        for length, mask in self._steps:
            if length < tokens:
                break
            reach = mask
        return reach & self.missing

    def windows_of(self, joined: Windows) -> Iterator[Reach]:
        """Lengths with a window of one geometry, longest first, and the workers that have both."""
        size, width = joined.geometry.block_size_tokens, joined.geometry.window_blocks
        hash_blocks = size // self._prompt.hash_tokens
        hashes, get = self._prompt.hashes, joined.masks.get
        stride = width * hash_blocks
        blocks = self._steps[0][0] // size  # of the longest prefix
        # Every window that ends at ``width`` blocks or later holds the last block of one stretch
        # of ``width`` blocks; stretch i ends with block ``(i + 1) * width - 1``.
        last = blocks // width
        while last > 0:
            first = max(0, last - _PROBES)
            if self._full((first + 1) * width * size):
                found = map(get, hashes[(first + 1) * stride - 1 : last * stride : stride])
                masks = [mask or 0 for mask in found]
                for stretch in range(last - 1, first - 1, -1):
                    if masks[stretch - first] & self.missing:
                        pivot = (stretch + 1) * width - 1
                        yield from self._around(joined, pivot, masks[stretch - first], blocks)
            last = first
        yield from self._around(joined, -1, -1, blocks)

    def _around(self, joined: Windows, pivot: int, mask: int, blocks: int) -> Iterator[Reach]:
        """Lengths whose window holds block ``pivot``, which ``mask`` has; -1 is before the first.

        A window that the prompt's start cuts off holds all blocks from 0 on, so it "holds" -1.
        """
        geometry = joined.geometry
        size, width, ahead = (
            geometry.block_size_tokens,
            geometry.window_blocks,
            geometry.lookahead_blocks,
        )
        shortest = max(1, pivot + 1)  # in blocks
        mask &= self._full(shortest * size)
        if not mask:
            return
        # Workers that have the pivot and the n blocks behind it, and all n blocks up to it.
        longest = min(pivot + width if pivot >= 0 else width - 1, blocks)
        right = self._run(joined, pivot + 1, longest + ahead - pivot - 1, 1, mask)
        left = self._run(joined, pivot - 1, width - 1, -1, mask) if pivot >= 0 else []
        for end in range(longest, shortest - 1, -1):
            tokens = end * size
            behind = end + ahead - pivot - 1
            if tokens % self._prompt.aligned_tokens or behind >= len(right):
                continue
            before = pivot - max(0, end - width) if pivot >= 0 else 0
            if before >= len(left) and pivot >= 0:
                continue
            found = right[behind] & (left[before] if pivot >= 0 else -1)
            found &= self._full(tokens)
            if found:
                yield tokens, found

    def _run(self, joined: Windows, start: int, count: int, step: int, mask: int) -> list[int]:
        """Workers that have the first n of the blocks from ``start`` on, for n = 0, 1, …

        The list ends where there are none left.
        """
        hash_blocks = joined.geometry.block_size_tokens // self._prompt.hash_tokens
        hashes, get, known = self._prompt.hashes, joined.masks.get, len(self._prompt.hashes)
        run = [mask]
        for block in range(start, start + step * count, step):
            at = (block + 1) * hash_blocks - 1
            mask &= get(hashes[at], 0) if at < known else 0
            if not mask:
                break
            run.append(mask)
        return run
