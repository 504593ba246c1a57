# SPDX-License-Identifier: Apache-2.0
"""Picture of the scheduler benchmark: distributions of TTFT by length class and policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sched_engine import Run
from benchmarks.sched_trace import TraceRun

COLOURS = {"fcfs": "#868e96", "lpm": "#4dabf7", "hrrn": "#9775fa", "plugin": "#d9480f"}


def plot(
    engine_runs: Sequence[Run], trace_runs: Sequence[TraceRun], load: float, path: Path
) -> None:
    """Write the PNG: the trace's long and short class, then the open loop."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, str, dict[str, list[float]]]] = []
    shown = [r for r in trace_runs if (r.first, r.load, r.hybrid) == (0, load, False)]
    if shown:
        for long, name in ((True, "long: top tenth by uncached tokens"), (False, "the others")):
            panels.append(
                (
                    f"trace, load {load}, {name}",
                    "TTFT, s",
                    {run.policy: run.of_class(long) for run in shown},
                )
            )
    real = [r for r in engine_runs if (r.workload, r.backend) == ("open", "engine")]
    if real:
        values: dict[str, list[float]] = {}
        for run in real:
            values.setdefault(run.policy, []).extend(t / 1000 for t in run.ttft)
        seeds = len({run.seed for run in real})
        panels.append((f"open loop, real engine, {seeds} seed(s)", "TTFT, thousand tokens", values))
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False)
    for axis, (title, label, by_policy) in zip(axes[0], panels, strict=True):
        _distribution(axis, by_policy)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.set_ylabel("share of requests")
    axes[0][0].legend(fontsize=9, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _distribution(axis: Any, by_policy: dict[str, list[float]]) -> None:
    for policy, values in by_policy.items():
        ordered = sorted(values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        width = 2.2 if policy == "plugin" else 1.4
        axis.step(ordered, shares, where="post", label=policy, color=COLOURS[policy], lw=width)
    axis.set_ylim(0, 1.01)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
