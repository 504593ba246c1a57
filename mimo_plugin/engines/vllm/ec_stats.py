# SPDX-License-Identifier: Apache-2.0
"""Counters of the shared embedding cache, on the way that vLLM has for EC connectors.

The worker's go to the scheduler with its report of what it loaded; the scheduler's connector adds
its own and hands all of them to vLLM, which carries them to the API process.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from mimo_plugin.media.shared import SharedCache
from mimo_plugin.media.shared_types import CacheCounts
from mimo_plugin.metrics import METRICS, MetricsBuffer, merge_payloads

_SPECS = tuple(spec for spec in METRICS if spec.name.startswith("encoder_cache_"))

_COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "stored": ("encoder_cache_stores", {"outcome": "stored"}),
    "refused": ("encoder_cache_stores", {"outcome": "refused"}),
    "evictions": ("encoder_cache_evictions", {}),
    "recovered": ("encoder_cache_recovered", {}),
    "bytes_read": ("encoder_cache_bytes", {"direction": "read"}),
    "bytes_written": ("encoder_cache_bytes", {"direction": "written"}),
}
"""What a worker counts, by the name of ``CacheCounts``, and the metric it goes to."""


LOOK_EVERY_S = 1.0
"""How often the scheduler looks how full the cache is."""


class WorkerCounts:
    """What a worker's cache counted since the last ``drain``."""

    def __init__(self, counts: CacheCounts) -> None:
        self._counts = counts
        self._seen = CacheCounts()

    def drain(self) -> dict[str, int]:
        """Names of ``CacheCounts`` that grew, and by how much."""
        now, before = asdict(self._counts), asdict(self._seen)
        self._seen = CacheCounts(**now)
        return {name: now[name] - before[name] for name in _COUNTERS if now[name] > before[name]}


def added(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """The sum of two drains."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in first.keys() | second.keys()}


class SchedulerReport:
    """Look-ups of the scheduler, and what its workers report."""

    def __init__(self, cache: SharedCache) -> None:
        self._cache = cache
        self._buffer = MetricsBuffer()
        self._next_look_s = 0.0

    def looked_up(self, outcome: str) -> None:
        """An item that a request needs was looked for: ``hit``, ``miss`` or ``mismatch``."""
        self._buffer.inc("encoder_cache_lookups", outcome=outcome)

    def worked(self, counts: dict[str, int]) -> None:
        """A worker has reported."""
        for name, value in counts.items():
            metric, labels = _COUNTERS[name]
            self._buffer.inc(metric, value, **labels)

    def drain(self) -> EncoderCacheStats | None:
        """Everything since the last call, None when nothing happened."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:  # others fill the cache too
            self._next_look_s = now_s + LOOK_EVERY_S
            self._buffer.set("encoder_cache_used_bytes", self._cache.used_bytes())
            self._buffer.set("encoder_cache_entries", self._cache.entries())
        payload = self._buffer.drain()
        return None if payload is None else EncoderCacheStats(payload)


class EncoderCacheStats(ECConnectorStats):  # type: ignore[misc]
    """A payload of ``MetricsBuffer`` under way."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> EncoderCacheStats:
        """Both, one after the other."""
        self.data = merge_payloads(self.data or None, other.data or None) or {}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums for vLLM's log line, the last value of gauges."""
        found: dict[str, int | float] = {}
        for name, labels, value in self.data.get("inc", ()):
            key = "_".join((name.removeprefix("encoder_cache_"), *labels))
            found[key] = found.get(key, 0) + value
        for name, _, value in self.data.get("set", ()):
            found[name.removeprefix("encoder_cache_")] = value
        return found

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class EncoderCacheProm(ECConnectorPromMetrics):  # type: ignore[misc]
    """The metrics in the API process, with or without the plugin's section."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        from mimo_plugin.engines.prometheus import PrometheusSink

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        model_name = str(next(iter(per_engine_labelvalues.values()))[0])
        self._sink = PrometheusSink(model_name, list(per_engine_labelvalues), specs=_SPECS)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine's cache did."""
        self._sink.apply(transfer_stats_data, engine_idx)
