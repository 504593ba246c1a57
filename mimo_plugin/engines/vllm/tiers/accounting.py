# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of host memory and the store: hits, misses by reason, bytes, pages.

Counted in the scheduler's process; what :meth:`TierAccounting.drain` hands out goes to the API
process with the scheduler's statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from mimo_plugin.engines.tier_accounting import TierCounts
from mimo_plugin.tiers.store import StoreStats

PERIOD_S = 1.0
"""Stores are asked for their counts at most so often."""


class TierAccounting(TierCounts):
    """Counts; thread-safe.

    Args:
        stores: the stores' own counts.
        clock_s: monotonic seconds.
    """

    def __init__(
        self,
        stores: Sequence[Callable[[], StoreStats]] = (),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._stores = tuple(stores)
        self._clock_s = clock_s
        self._due_s = clock_s()

    def found_in_host(self, tokens: int) -> None:
        """Tokens were found in host memory with all that a hit needs; not in ``looked_up`` too."""
        if tokens:
            with self._lock:
                self._buffer.inc("tier_host_hit_tokens", tokens)

    def host_moved(self, direction: str, kind: str, count_bytes: int) -> None:
        """KV was read from host memory to the device, or written to it."""
        if count_bytes:
            with self._lock:
                self._buffer.inc("tier_host_bytes", count_bytes, direction=direction, kind=kind)

    def adopted(self, kind: str, count_bytes: int) -> None:
        """KV of a hit from lower tiers was not read, because the device had it."""
        if count_bytes:
            with self._lock:
                self._buffer.inc("tier_adopted_bytes", count_bytes, kind=kind)

    def pages(self, what: str, count: int) -> None:
        """Pages were ``repaired`` or ``dropped`` before the store saw them."""
        if count:
            with self._lock:
                self._buffer.inc("tier_pages", count, what=what)

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, in the payload format of ``metrics.py``."""
        found: StoreStats | None = None
        now = self._clock_s()
        if self._stores and now >= self._due_s:
            self._due_s = now + PERIOD_S
            found = _sum([stats() for stats in self._stores])
        with self._lock:
            if found is not None:
                self._take(found)
            return self._buffer.drain()


def _sum(found: Sequence[StoreStats]) -> StoreStats:
    """Of several stores together; the bytes are not known where one does not tell."""
    values: dict[str, Any] = {}
    for item in fields(StoreStats):
        counts = [getattr(stats, item.name) for stats in found]
        values[item.name] = None if None in counts else sum(counts)
    return StoreStats(**values)
