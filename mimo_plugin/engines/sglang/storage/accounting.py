# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of the store: hits, misses by reason, bytes by kind, pages.

Look-ups and transfers run on SGLang's storage threads; the scheduler asks the backend for
statistics once a step, and that writes to Prometheus what was counted, once a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.metrics import METRICS, MetricsBuffer
from mimo_plugin.tiers.store import StoreStats

logger = logging.getLogger("sglang.mimo_plugin")

PERIOD_S = 1.0

#: metrics that this adapter writes
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


def make_sink(model_name: str) -> PrometheusSink:
    """The Prometheus collectors of this process."""
    specs = tuple(spec for spec in METRICS if spec.name in NAMES)
    return PrometheusSink(model_name, [0], logger, specs=specs)


class TierAccounting:
    """Counts; thread-safe.

    Args:
        make: makes the sink when metrics are on, which the first :meth:`flush` shows; None: not on
            this rank, whose counts would be those of another again.
        clock_s: monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[[], PrometheusSink] | None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._clock_s = clock_s
        self._sink: PrometheusSink | None = None
        self._lock = threading.Lock()
        self._buffer = MetricsBuffer()
        self._pages = dict.fromkeys(_PAGES, 0)
        self._failed_calls = 0
        self._due_s = clock_s()

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

    def flush(self, stats: Callable[[], StoreStats]) -> None:
        """Write what was counted, at most once in ``PERIOD_S``.

        Args:
            stats: of the store.
        """
        now = self._clock_s()
        if self._make is None or now < self._due_s:
            return
        self._due_s = now + PERIOD_S
        if self._sink is None:
            self._sink = self._make()
        found = stats()
        with self._lock:
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
            payload = self._buffer.drain()
        if payload is not None:
            self._sink.apply(payload, 0)
