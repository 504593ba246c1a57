# SPDX-License-Identifier: Apache-2.0
"""From the payload of a ``MetricsBuffer`` to Prometheus; for any engine."""

from __future__ import annotations

import logging
from typing import Any

from mimo_plugin.metrics import METRICS, PAYLOAD_VERSION, PREFIX, MetricSpec

_LOGGER = logging.getLogger(__name__)

_BASE_LABELS = ("model_name", "engine")


class PrometheusSink:
    """The Prometheus collectors of all engines of one model in this process."""

    def __init__(
        self,
        model_name: str,
        engine_indexes: list[int],
        logger: logging.Logger = _LOGGER,
        *,
        specs: tuple[MetricSpec, ...] = METRICS,
    ) -> None:
        self._model_name = model_name
        self._logger = logger
        self._collectors = {spec.name: _collector(spec) for spec in specs}
        # Series without labels of their own exist from the start, at 0.
        for spec in specs:
            if not spec.labels and spec.kind != "gauge":
                for engine_idx in engine_indexes:
                    self._series(spec.name, [], engine_idx)
        self._warned = False

    def _series(self, name: str, labels: list[str], engine_idx: int) -> Any:
        return self._collectors[name].labels(self._model_name, str(engine_idx), *labels)

    def set(self, name: str, value: float, labels: list[str], engine_idx: int) -> None:
        """Set a gauge of one engine."""
        self._series(name, labels, engine_idx).set(value)

    def apply(self, payload: dict[str, Any], engine_idx: int) -> None:
        """Add one drained payload; unknown names (another version's) are skipped, said once."""
        if payload.get("v") != PAYLOAD_VERSION:
            self._warn(f"payload version {payload.get('v')}")
            return
        for name, labels, value in payload.get("inc", ()):
            if self._known(name):
                self._series(name, labels, engine_idx).inc(value)
        for name, labels, value in payload.get("set", ()):
            if self._known(name):
                self._series(name, labels, engine_idx).set(value)
        for name, labels, values in payload.get("obs", ()):
            if self._known(name):
                series = self._series(name, labels, engine_idx)
                for value in values:
                    series.observe(value)

    def _known(self, name: str) -> bool:
        if name in self._collectors:
            return True
        self._warn(f"metric {name!r}")
        return False

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._logger.warning(
                "mimo-plugin: skipped %s; is another version in the engine's process?", what
            )


def _collector(spec: MetricSpec) -> Any:
    """The collector of a metric, the existing one when this process already has it."""
    import prometheus_client

    name = PREFIX + spec.name
    existing = getattr(prometheus_client.REGISTRY, "_names_to_collectors", {}).get(name)
    if existing is not None:
        return existing
    labels = [*_BASE_LABELS, *spec.labels]
    if spec.kind == "counter":
        return prometheus_client.Counter(name, spec.help, labels)
    if spec.kind == "gauge":
        mode = "livesum" if spec.per_process else "mostrecent"
        return prometheus_client.Gauge(name, spec.help, labels, multiprocess_mode=mode)
    return prometheus_client.Histogram(name, spec.help, labels, buckets=spec.buckets)
