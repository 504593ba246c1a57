# SPDX-License-Identifier: Apache-2.0
"""Where a stored prefix may end, and the memory of a page. No engine is imported."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mimo_plugin.tiers.store import Parts

TRAILING, ALL = "trailing_pages", "all_pages"
"""SGLang's names of what a pool needs of a prefix: its last pages, or all of them."""


def leading(found: Sequence[bool]) -> int:
    """How many pages there are before the first that is missing."""
    for count, there in enumerate(found):
        if not there:
            return count
    return len(found)


def legal_ends(found: Sequence[bool], policy: str, trailing: int = 1) -> list[int]:
    """Lengths, in pages, of the prefixes that a pool can restore, ascending.

    Args:
        found: which pages of the pool are stored.
        policy: ``TRAILING`` or ``ALL``.
        trailing: pages that a window takes, for ``TRAILING``; a shorter prefix needs all it has.

    A window's pages may have holes between them: only lengths that end a whole window count.
    """
    if policy == ALL:
        return list(range(1, leading(found) + 1))
    ends, run = [], 0
    for length, there in enumerate(found, start=1):
        run = run + 1 if there else 0
        if run >= min(trailing, length):
            ends.append(length)
    return ends


def common_ends(pools: Sequence[Sequence[int]]) -> list[int]:
    """Lengths that every pool can restore, ascending; the last is the hit."""
    if not pools:
        return []
    common = set(pools[0]).intersection(*map(set, pools[1:]))
    return sorted(common)


def longest_end(ends: Sequence[int], at_most: int) -> int:
    """The longest of ``ends`` that is not above ``at_most``; 0 when none is."""
    return max((end for end in ends if end <= at_most), default=0)


def parts_of(addresses: Sequence[int], sizes_bytes: Sequence[int], pages: int) -> list[Parts]:
    """Memory of pages, each as the runs of bytes that hold it.

    Args:
        addresses: of the runs, page by page; the memory must outlive what is returned.
        sizes_bytes: of the runs.
        pages: how many pages there are.
    """
    runs = len(addresses) // pages if pages else 0
    assert runs * pages == len(addresses) == len(sizes_bytes), "runs are not whole pages"
    views = [
        memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        for address, size in zip(addresses, sizes_bytes, strict=True)
    ]
    return [views[i : i + runs] for i in range(0, len(views), runs)] if runs else []
