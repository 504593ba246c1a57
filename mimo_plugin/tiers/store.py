# SPDX-License-Identifier: Apache-2.0
"""What a store of KV pages offers to the engines' adapters.

A page is what one rank holds of one block: some runs of memory (keys and values of each layer),
which the store reads and writes in place, one behind the other. A store never fails a request: what
it can't give is a miss, what it can't keep is dropped, and both are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Parts = Sequence[memoryview]
"""A page: runs of bytes in the engine's memory; writable where a page is read into them."""


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Counters of a store since it was opened, and what it holds.

    Attributes:
        bytes_held: of all pages, as far as is known; None where the store does not tell.
        pages_put: written; pages that were there already are touched and not counted.
        pages_got: read whole.
        pages_missed: asked for and not there.
        pages_damaged: there, but not what was written, so removed.
        pages_touched: kept alive.
        pages_dropped: not written, because the store was full or failed, or not kept alive because
            it failed.
        pages_evicted: removed to make room.
        calls_failed: to stores that did not answer, or answered with an error.
        stores_down: stores that are left alone now because calls to them failed.
    """

    bytes_held: int | None
    pages_put: int
    pages_got: int
    pages_missed: int
    pages_damaged: int
    pages_touched: int
    pages_dropped: int
    pages_evicted: int
    calls_failed: int = 0
    stores_down: int = 0


class PageStore(Protocol):
    """A store; its methods may be called from several threads."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there. Does not keep them alive."""
        ...

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages into memory; False where memory holds nothing that can be used."""
        ...

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages; a page that is there already is kept alive instead."""
        ...

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Keep pages alive as if they had just been read; which of them are there."""
        ...

    def stats(self) -> StoreStats:
        """Counters so far; never waits for the store itself."""
        ...

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...
