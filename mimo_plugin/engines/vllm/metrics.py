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
from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.engines.vllm import register
from mimo_plugin.engines.vllm.dp_affinity.report import REPORT as AFFINITY_REPORT
from mimo_plugin.engines.vllm.media_pool import REPORT as MEDIA_REPORT
from mimo_plugin.engines.vllm.video.report import REPORT as VIDEO_REPORT
from mimo_plugin.engines.vllm.vision.report import REPORT as VISION_REPORT

STATS_KEY = "mimo"
"""Key of the payload in ``SchedulerStats.kv_connector_stats``."""

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


@lru_cache(maxsize=1)
def _logger_class() -> type:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class MimoStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        """Takes our payload out of the scheduler's statistics; first of the loggers."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.sink = PrometheusSink(
                str(vllm_config.model_config.served_model_name),
                engine_indexes,
                logging.getLogger(register.LOGGER_NAME),
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
            if payload is not None:
                self.sink.apply(payload, engine_idx)
            self._take(engine_idx, VISION_REPORT, VIDEO_REPORT)
            self.log()

        def log(self) -> None:
            """What belongs to the process goes to its first engine; also when none works."""
            self._take(
                self.first_engine, MEDIA_REPORT, VISION_REPORT, VIDEO_REPORT, AFFINITY_REPORT
            )

        def _take(self, engine_idx: int, *reports: Any) -> None:
            for report in reports:
                found = report.drain()
                if found is not None:
                    self.sink.apply(found, engine_idx)

        def log_engine_initialized(self) -> None:
            pass

    return MimoStatLogger
