# SPDX-License-Identifier: Apache-2.0
"""``mimo:degraded``: the plugin was asked for, and the engine runs without it."""

from __future__ import annotations

NAME = "degraded"


def say_degraded() -> None:
    """Set the metric in this process, a scheduler's; one rank of a group speaks for all."""
    from sglang.srt.runtime_context import get_observability

    from mimo_plugin.engines.sglang.metrics import make_sink

    sink = make_sink({NAME}, enabled=get_observability().enable_metrics)
    if sink is not None:
        sink.set(NAME, 1, [], 0)
