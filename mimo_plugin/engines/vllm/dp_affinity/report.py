# SPDX-License-Identifier: Apache-2.0
"""Counters of the balancer, which runs in the API process; its stat logger drains them."""

from __future__ import annotations

from typing import Any

from mimo_plugin.metrics import MetricsBuffer


class AffinityReport:
    """Where requests went since the last ``drain``. Of one event loop, like the balancer."""

    def __init__(self) -> None:
        self._buffer = MetricsBuffer()

    def sent(self, rank: int, outcome: str) -> None:
        """A request goes to ``rank``; ``outcome`` is one of ``metrics.AFFINITY_OUTCOMES``."""
        self._buffer.inc("dp_affinity_requests", outcome=outcome, rank=str(rank))

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, None when nothing happened."""
        return self._buffer.drain()


REPORT = AffinityReport()
"""The counters of this process."""
