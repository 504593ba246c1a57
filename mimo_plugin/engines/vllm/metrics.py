# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's payload to ``/metrics``.

The scheduler puts ``MetricsBuffer.drain()`` under the key ``mimo`` into
``SchedulerStats.kv_connector_stats``, beside a real connector's keys. In the API process a stat
logger takes it out again before vLLM's own loggers see it, and applies it to Prometheus, together
with what the API process itself has counted of images and videos.
"""

from __future__ import annotations

import functools
import logging
from functools import lru_cache
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.engines.vllm import register
from mimo_plugin.engines.vllm.media_pool import REPORT as MEDIA_REPORT
from mimo_plugin.engines.vllm.video.report import REPORT as VIDEO_REPORT
from mimo_plugin.engines.vllm.vision.report import REPORT as VISION_REPORT
from mimo_plugin.metrics import METRICS, PAYLOAD_VERSION, PREFIX, MetricSpec

STATS_KEY = "mimo"
"""Key of the payload in ``SchedulerStats.kv_connector_stats``."""

logger = logging.getLogger(register.LOGGER_NAME)

_BASE_LABELS = ("model_name", "engine")
_MARK = "mimo_plugin_wrapper"


def install() -> None:
    """Give engines that run with the plugin its stat logger; a second call changes nothing.

    The wrapper looks at each engine's configuration, so that a stock engine created later in the
    same process keeps exactly vLLM's loggers.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    stock = StatLoggerManager.__init__
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, *args, **kwargs)
        if _concerns(vllm_config):
            self.stat_loggers.insert(0, _logger_class()(vllm_config, self.engine_indexes))

    setattr(__init__, _MARK, True)
    StatLoggerManager.__init__ = __init__


def _concerns(vllm_config: Any) -> bool:
    return (
        register.degraded_reason(vllm_config) is not None
        or register.config_from(vllm_config) is not None
    )


def take_payload(scheduler_stats: Any) -> dict[str, Any] | None:
    """Remove and return our payload; a real connector's entries stay."""
    stats = getattr(scheduler_stats, "kv_connector_stats", None)
    if not isinstance(stats, dict) or STATS_KEY not in stats:
        return None
    payload = stats.pop(STATS_KEY)
    if not stats:
        scheduler_stats.kv_connector_stats = None
    return payload if isinstance(payload, dict) else None


class PrometheusSink:
    """The Prometheus collectors of all engines of one model in this process."""

    def __init__(
        self,
        model_name: str,
        engine_indexes: list[int],
        specs: tuple[MetricSpec, ...] = METRICS,
    ) -> None:
        self._model_name = model_name
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
            logger.warning(
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


@lru_cache(maxsize=1)
def _logger_class() -> type:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class MimoStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        """Takes our payload out of the scheduler's statistics; first of the loggers."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.sink = PrometheusSink(
                str(vllm_config.model_config.served_model_name), engine_indexes
            )
            self.first_engine = engine_indexes[0]
            config = register.config_from(vllm_config)
            for engine_idx in engine_indexes:
                self.sink.set("degraded", 0 if config else 1, [], engine_idx)
                if config:
                    labels = [__version__, config.engine_label, ",".join(config.features)]
                    self.sink.set("info", 1, labels, engine_idx)

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            payload = take_payload(scheduler_stats)
            for found in (payload, VISION_REPORT.drain(), VIDEO_REPORT.drain()):
                if found is not None:
                    self.sink.apply(found, engine_idx)
            self.log()

        def log(self) -> None:
            """What belongs to the process goes to its first engine; also when none works."""
            found = MEDIA_REPORT.drain()
            if found is not None:
                self.sink.apply(found, self.first_engine)

        def log_engine_initialized(self) -> None:
            pass

    return MimoStatLogger
