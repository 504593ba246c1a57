# SPDX-License-Identifier: Apache-2.0
"""Picture of the MTP benchmark: acceptance by configuration, draft position and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.mtp_claims import Found
from benchmarks.mtp_reference import acceptance

COLOURS = {
    "ours": "#d9480f",
    "stock": "#868e96",
    "chained": "#4dabf7",
    "first_layer_prompt": "#9775fa",
    "no_prompt": "#69b34c",
}
OTHER = "#f4a27a"
NAMES = {
    "ours": "plugin",
    "ours_kv": "plugin, kv",
    "ours_chunked": "plugin, chunks",
    "stock_window": "vLLM's window",
    "first_layer_prompt": "prompt in layer 0",
    "no_prompt": "no prompt",
}
BIN_OUTPUTS = 5


def plot(found: Found, path: Path) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name, passes in found.passes.items() if passes["cold"].rounds]
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 3.9))
    _lengths(axes[0], found, shown)
    _positions(axes[1], found, [n for n in ("ours", "stock") if n in shown])
    _bins(axes[2], found, [n for n in COLOURS if n in shown])
    for axis in axes:
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lengths(axis: Any, found: Found, names: list[str]) -> None:
    rows = sorted(names, key=lambda n: acceptance(found.rounds(n)).length_tokens)
    for row, name in enumerate(rows):
        length = acceptance(found.rounds(name)).length_tokens
        axis.barh(row, length, color=COLOURS.get(name, OTHER))
        axis.text(length, row, f" {length:.3f}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [NAMES.get(name, name) for name in rows], fontsize=8)
    axis.set_xlim(left=1)
    axis.set_title(f"tokens a round, first {found.outputs} outputs", fontsize=10)


def _positions(axis: Any, found: Found, names: list[str]) -> None:
    sides = [(NAMES.get(n, n), found.rounds(n), COLOURS[n], "o-") for n in names]
    for mode, colour in (("exact", COLOURS["ours"]), ("layer0", COLOURS["stock"])):
        if mode in found.torch_rounds:
            sides.append((f"plain torch, {mode}", found.torch_rounds[mode], colour, "x:"))
    for label, rounds, colour, style in sides:
        values = acceptance(rounds).conditional
        axis.plot(range(len(values)), values, style, color=colour, label=label)
    axis.set_xticks(range(3))
    axis.set_xlabel("draft position")
    axis.set_title("accepted, given that the earlier ones were", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def _bins(axis: Any, found: Found, names: list[str]) -> None:
    starts = range(1, found.outputs, BIN_OUTPUTS)
    for name in names:
        rounds = found.rounds(name)
        values = [acceptance(rounds, s, s + BIN_OUTPUTS).length_tokens for s in starts]
        label = NAMES.get(name, name)
        axis.plot(range(len(values)), values, "o-", color=COLOURS[name], label=label)
    axis.set_xticks(range(len(starts)), [f"{s}-{s + BIN_OUTPUTS - 1}" for s in starts])
    axis.set_xlabel("outputs before the round")
    axis.set_title("tokens a round", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
