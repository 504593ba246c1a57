# SPDX-License-Identifier: Apache-2.0
"""Longest hits of one prompt on many workers at once.

Full attention alone takes a bisection for each length that differs between workers. A window of n
blocks holds exactly one of every n-th blocks of the prompt, so only these are looked up until one
is found: a long prompt without any window costs a look-up for every n-th of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


Reached: TypeAlias = Callable[[int], int]
"""Workers whose full attention has so many tokens, a multiple of the alignment."""


def reached(prompt: Prompt, chains: Sequence[Chains], workers: int) -> Reached:
    """Look-up of full attention; the groups of a draft model have their look-ahead too."""
    hashes, hash_tokens, known = prompt.hashes, prompt.hash_tokens, len(prompt.hashes)
    if len(chains) == 1 and not chains[0].geometry.lookahead_blocks:
        get = chains[0].links.get

        def one(tokens: int) -> int:
            link = get(hashes[tokens // hash_tokens - 1])
            return link.reach & workers if link is not None else 0

        return one

    def several(tokens: int) -> int:
        mask = workers
        for chain in chains:
            size = chain.geometry.block_size_tokens
            needed = (tokens // size + chain.geometry.lookahead_blocks) * size
            end = needed // hash_tokens
            mask &= chain.reach(hashes[end - 1]) if end <= known else 0
        return mask

    return several


def full_steps(prompt: Prompt, full: Reached, workers: int) -> list[Reach]:
    """Lengths at which full attention of some worker ends, and who has them; longest first."""
    aligned = prompt.aligned_tokens
    found: list[Reach] = []
    # Lengths between two that were seen, with the workers of the shorter and of the longer one.
    todo = [(1, prompt.limit_tokens // aligned, workers, 0)]
    while todo:
        low, high, shorter, longer = todo.pop()
        if low > high or shorter == longer:
            continue
        middle = (low + high) // 2
        mask = full(middle * aligned)
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


def longest_full(prompt: Prompt, full: Reached) -> int:
    """Tokens that full attention of any worker has."""
    low, high = 0, prompt.limit_tokens // prompt.aligned_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if full(middle * prompt.aligned_tokens):
            low = middle
        else:
            high = middle - 1
    return low * prompt.aligned_tokens


def safe_steps(
    prompt: Prompt, full: Reached, windows: Sequence[Windows], workers: int
) -> list[Reach]:
    """Longest hits that have their windows, with the workers whose longest hit it is.

    Args:
        full: from :func:`reached`.
        windows: sliding-window groups, joined by geometry.
        workers: bits of all that are asked for.
    """
    # The one that reaches furthest takes the fewest probes.
    needed = sorted(
        (joined for joined in windows if joined.geometry.window_blocks),
        key=lambda joined: joined.geometry.window_blocks * joined.geometry.block_size_tokens,
        reverse=True,
    )
    if not needed:
        steps, seen = [], 0
        for tokens, mask in full_steps(prompt, full, workers):
            steps.append((tokens, mask & ~seen))
            seen |= mask
        return steps
    longest = longest_full(prompt, full)
    if not longest:
        return []
    search = _Search(prompt, full, needed[0], needed[1:], longest)
    search.run()
    return search.found


class _Search:
    """Looks for windows from the longest length down, until every worker has its answer."""

    def __init__(
        self,
        prompt: Prompt,
        full: Reached,
        windows: Windows,
        others: Sequence[Windows],
        longest_tokens: int,
    ) -> None:
        self.found: list[Reach] = []
        self._prompt, self._full, self._others = prompt, full, others
        self._missing = full(prompt.aligned_tokens)
        geometry = windows.geometry
        self._get = windows.masks.get
        self._size = geometry.block_size_tokens
        self._width = geometry.window_blocks
        self._ahead = geometry.lookahead_blocks
        self._blocks = longest_tokens // self._size
        self._hash_blocks = self._size // prompt.hash_tokens
        self._known_blocks = len(prompt.hashes) // self._hash_blocks

    def run(self) -> None:
        """Fill ``found``."""
        hashes, get, width, full = self._prompt.hashes, self._get, self._width, self._full
        stride = width * self._hash_blocks
        aligned_blocks = self._prompt.aligned_tokens // self._size
        # A window that ends after ``width`` blocks or more holds the last block of one stretch of
        # ``width`` blocks; stretch i ends with block ``(i + 1) * width - 1``.
        last = self._blocks // width
        while last > 0:
            first = max(0, last - _PROBES)
            # The shortest length that these probes are for.
            shortest = -(-(first + 1) * width // aligned_blocks) * aligned_blocks
            if shortest > self._blocks or full(shortest * self._size) & self._missing:
                probes = hashes[(first + 1) * stride - 1 : last * stride : stride]
                masks = list(map(get, probes))
                if any(masks):
                    for stretch in range(last - 1, first - 1, -1):
                        mask = masks[stretch - first]
                        if mask and mask & self._missing:
                            self._around((stretch + 1) * width - 1, mask)
                            if not self._missing:
                                return
            last = first
        # A window that the prompt's start cuts off holds all blocks from 0 on, "and so" -1.
        self._around(-1, self._missing)

    def _around(self, pivot: int, mask: int) -> None:
        """Lengths whose window holds block ``pivot``, which the workers of ``mask`` have."""
        size, width, ahead = self._size, self._width, self._ahead
        aligned_blocks = self._prompt.aligned_tokens // size
        shortest = max(1, -(-(pivot + 1) // aligned_blocks)) * aligned_blocks
        longest = min(pivot + width if pivot >= 0 else width - 1, self._blocks)
        longest -= longest % aligned_blocks
        if longest < shortest:
            return
        mask &= self._missing & self._full(shortest * size)
        if not mask:
            return
        # Workers that have the pivot and the n blocks behind it, and all n blocks up to it.
        right = self._run(pivot + 1, longest + ahead - pivot - 1, 1, mask)
        left = self._run(pivot - 1, width - 1, -1, mask) if pivot >= 0 else [mask] * width
        for end in range(longest, shortest - 1, -aligned_blocks):
            behind, before = end + ahead - pivot - 1, pivot - end + width
            if pivot < 0:
                before = 0
            if behind >= len(right) or before >= len(left):
                continue
            found = right[behind] & left[before] & self._missing
            if not found:
                continue
            found &= self._full(end * size)
            for joined in self._others:
                found = _confirmed(self._prompt, joined, end * size, found)
            if found:
                self.found.append((end * size, found))
                self._missing &= ~found
                if not self._missing & mask:
                    return

    def _run(self, start: int, count: int, step: int, mask: int) -> list[int]:
        """Workers that have the first n of the blocks from ``start`` on, for n = 0, 1, …

        The list ends where there are none left.
        """
        hashes, get, hash_blocks = self._prompt.hashes, self._get, self._hash_blocks
        if step > 0:
            count = min(count, self._known_blocks - start)
        run = [mask]
        for block in range(start, start + step * count, step):
            mask &= get(hashes[(block + 1) * hash_blocks - 1], 0)
            if not mask:
                break
            run.append(mask)
        return run


def _confirmed(prompt: Prompt, joined: Windows, tokens: int, mask: int) -> int:
    """Those of the workers that have all blocks of the window before ``tokens``."""
    hash_blocks = joined.geometry.block_size_tokens // prompt.hash_tokens
    for block in blocks_for_hit(joined.geometry, tokens):
        at = (block + 1) * hash_blocks - 1
        if not mask or at >= len(prompt.hashes):
            return 0
        mask &= joined.masks.get(prompt.hashes[at], 0)
    return mask
