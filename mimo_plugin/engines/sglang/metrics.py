# SPDX-License-Identifier: Apache-2.0
"""Prometheus in the scheduler's process: SGLang collects what all its processes write through
``PROMETHEUS_MULTIPROC_DIR``."""

from __future__ import annotations

import logging
from collections.abc import Set

from sglang.srt.runtime_context import get_parallel, get_serving

from mimo_plugin.config import MimoConfig
from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.engines.sglang import register
from mimo_plugin.metrics import METRICS

logger = logging.getLogger(register.LOGGER_NAME)


def make_sink(names: Set[str], *, enabled: bool) -> PrometheusSink | None:
    """The collectors of this process for the metrics ``names``.

    Args:
        names: metrics without prefix.
        enabled: SGLang was started with ``--enable-metrics``.

    Returns:
        None where nobody asked, and in all ranks of an attention group but the first: they decide
        alike, so one speaks for all.
    """
    if not enabled or get_parallel().attn_tp_rank != 0:
        return None
    specs = tuple(spec for spec in METRICS if spec.name in names)
    return PrometheusSink(str(get_serving().served_model_name), [0], logger, specs=specs)


def make_feature_sink(
    config: MimoConfig, names: Set[str], *, enabled: bool
) -> PrometheusSink | None:
    """The same for a feature that is on; ``info`` is set with what the engine was started with."""
    sink = make_sink(names | {"info"}, enabled=enabled)
    if sink is not None:
        info = [config.plugin_version, config.engine_label, ",".join(config.features)]
        sink.set("info", 1, info, 0)
    return sink
