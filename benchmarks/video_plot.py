# SPDX-License-Identifier: Apache-2.0
"""Picture of the video benchmark: CPU time by GOP, time by workers, memory against its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"full": "#868e96", "stock": "#4dabf7", "plugin": "#d9480f"}
NAMES = {"full": "full decode", "stock": "stock loader", "plugin": "plugin"}


def plot(found: dict[str, Any], path: Path) -> None:
    """Write the PNG with a panel for each part that was run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = {"cost": _cost, "workers": _workers, "memory": _memory}
    shown = [part for part in draw if found[part]]
    if not shown:
        return
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.4 * len(shown), 3.6), squeeze=False)
    for axis, part in zip(axes[0], shown, strict=True):
        draw[part](axis, found[part])
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cost(axis: Any, rows: list[dict[str, Any]]) -> None:
    ways = [name for name in NAMES if name in rows[0]["cpu_s"]]
    for number, name in enumerate(ways):
        places = [group + 0.27 * number for group in range(len(rows))]
        heights = [row["cpu_s"][name] for row in rows]
        axis.bar(places, heights, 0.25, label=NAMES[name], color=COLOURS[name])
    middle = 0.27 * (len(ways) - 1) / 2
    axis.set_xticks([n + middle for n in range(len(rows))], [f"GOP {row['gop']}" for row in rows])
    axis.set_title("CPU time of 1 frame a second", fontsize=10)
    axis.set_ylabel("CPU seconds")
    axis.legend(fontsize=8, frameon=False)


def _workers(axis: Any, row: dict[str, Any]) -> None:
    axis.bar(
        ["1 worker", "2 workers"], [min(row["one_s"]), min(row["two_s"])], 0.5, color="#d9480f"
    )
    axis.set_title(f"{row['best']}x with two workers, load {row['load']}", fontsize=10)
    axis.set_ylabel("seconds, best")


def _memory(axis: Any, rows: list[dict[str, Any]]) -> None:
    bars = [
        (f"{side}, {row['workers']}", row["measured_bytes"][side], row["bound_bytes"][side])
        for side in ("worker", "server")
        for row in rows
    ]
    for number, (_, measured, bound) in enumerate(bars):
        axis.bar(number - 0.15, measured / 1e6, 0.28, color="#d9480f")
        axis.bar(number + 0.15, bound / 1e6, 0.28, color="#868e96")
    axis.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    length = rows[0]["seconds_of_video"]
    axis.set_title(f"{length:.0f} s of 720p: measured, bound", fontsize=10)
    axis.set_ylabel("MB")
