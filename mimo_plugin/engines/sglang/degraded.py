# SPDX-License-Identifier: Apache-2.0
"""``mimo:degraded``: the plugin was asked for, and the engine runs without it."""

from __future__ import annotations

import logging

from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.metrics import METRICS

logger = logging.getLogger("sglang.mimo_plugin")

NAME = "degraded"


def say_degraded() -> None:
    """Set the metric in this process, a scheduler's; one rank of a group speaks for all."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    if not get_observability().enable_metrics or get_parallel().attn_tp_rank != 0:
        return
    specs = tuple(spec for spec in METRICS if spec.name == NAME)
    sink = PrometheusSink(str(get_serving().served_model_name), [0], logger, specs=specs)
    sink.set(NAME, 1, [], 0)
