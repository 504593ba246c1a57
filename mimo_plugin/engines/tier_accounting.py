# SPDX-License-Identifier: Apache-2.0
"""What is counted of the store below host memory, on either engine."""

from __future__ import annotations

import threading

from mimo_plugin.metrics import MetricsBuffer
from mimo_plugin.tiers.store import StoreStats

#: metrics of the store
NAMES = frozenset(
    {
        "tier_hit_tokens",
        "tier_missed_tokens",
        "tier_bytes",
        "tier_pages",
        "tier_failed_calls",
        "tier_held_bytes",
        "tier_stores_down",
    }
)

_PAGES = {
    "written": "pages_put",
    "read": "pages_got",
    "touched": "pages_touched",
    "missed": "pages_missed",
    "damaged": "pages_damaged",
    "dropped": "pages_dropped",
    "evicted": "pages_evicted",
}


class TierCounts:
    """Counts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = MetricsBuffer()
        self._pages = dict.fromkeys(_PAGES, 0)
        self._failed_calls = 0

    def looked_up(self, asked_tokens: int, full_tokens: int, hit_tokens: int) -> None:
        """A prefix of ``asked_tokens`` was looked up.

        Args:
            asked_tokens: what was asked for.
            full_tokens: of it, before the first page without full-attention KV, <= asked_tokens.
            hit_tokens: of that, what can be restored, <= full_tokens.
        """
        with self._lock:
            self._buffer.inc("tier_hit_tokens", hit_tokens)
            for reason, tokens in (
                ("absent", asked_tokens - full_tokens),
                ("no_window", full_tokens - hit_tokens),
            ):
                if tokens:
                    self._buffer.inc("tier_missed_tokens", tokens, reason=reason)

    def cut(self, tokens: int) -> None:
        """Of a hit, host memory had no room for ``tokens``."""
        if tokens > 0:
            with self._lock:
                self._buffer.inc("tier_missed_tokens", tokens, reason="host_capacity")

    def moved(self, direction: str, kind: str, count_bytes: int) -> None:
        """Pages were read or written."""
        if count_bytes:
            with self._lock:
                self._buffer.inc("tier_bytes", count_bytes, direction=direction, kind=kind)

    def _take(self, found: StoreStats) -> None:
        """Count what the store has counted since the last time; the caller holds the lock."""
        for what, name in _PAGES.items():
            before, count = self._pages[what], getattr(found, name)
            if count > before:
                self._buffer.inc("tier_pages", count - before, what=what)
                self._pages[what] = count
        if found.calls_failed > self._failed_calls:
            self._buffer.inc("tier_failed_calls", found.calls_failed - self._failed_calls)
            self._failed_calls = found.calls_failed
        self._buffer.set("tier_stores_down", found.stores_down)
        if found.bytes_held is not None:
            self._buffer.set("tier_held_bytes", found.bytes_held)
