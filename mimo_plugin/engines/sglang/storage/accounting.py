# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of the store: hits, misses by reason, bytes by kind, pages.

Look-ups and transfers run on SGLang's storage threads; the scheduler asks the backend for
statistics once a step, and that writes to Prometheus what was counted, once a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.engines.tier_accounting import NAMES, TierCounts
from mimo_plugin.metrics import METRICS
from mimo_plugin.tiers.store import StoreStats

logger = logging.getLogger("sglang.mimo_plugin")

PERIOD_S = 1.0


def make_sink(model_name: str) -> PrometheusSink:
    """The Prometheus collectors of this process."""
    specs = tuple(spec for spec in METRICS if spec.name in NAMES)
    return PrometheusSink(model_name, [0], logger, specs=specs)


class TierAccounting(TierCounts):
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
        super().__init__()
        self._make = make
        self._clock_s = clock_s
        self._sink: PrometheusSink | None = None
        self._due_s = clock_s()

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
            self._take(found)
            payload = self._buffer.drain()
        if payload is not None:
            self._sink.apply(payload, 0)
