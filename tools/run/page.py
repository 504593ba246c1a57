# SPDX-License-Identifier: Apache-2.0
"""The HTML report: one self-contained file with a verdict, tables, plots and a sample chat."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tools.run.compare import METRIC_PREFIX, Outcome, by_label, percentile

STOCK_COLOUR, PLUGIN_COLOUR, BOUND_COLOUR = "#8c8c8c", "#e8590c", "#2b8a3e"

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.7rem;margin-bottom:.2rem} h2{font-size:1.2rem;margin-top:2rem}
.verdict{display:flex;gap:1rem;flex-wrap:wrap;margin:1rem 0}
.card{flex:1 1 10rem;border:1px solid #ddd;border-radius:.6rem;padding:.7rem 1rem}
.card b{display:block;font-size:1.6rem} .good b{color:#2b8a3e} .bad b{color:#c92a2a}
table{border-collapse:collapse;width:100%}
th,td{padding:.3rem .6rem;border-bottom:1px solid #e5e5e5}
td+td,th+th{text-align:right;font-variant-numeric:tabular-nums} th{text-align:left;color:#555}
.facts td{text-align:left} img{width:100%}
pre{white-space:pre-wrap;background:#f6f6f6;padding:.8rem;border-radius:.4rem}
.note{color:#555}
"""


def draw(stock: Outcome, plugin: Outcome, figures: Mapping[str, Any]) -> bytes:
    """Draw the plots as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.2), constrained_layout=True)
    _draw_kinds(axes[0][0], figures)
    _draw_growth(axes[0][1], stock, plugin, figures)
    _draw_ttft(axes[1][0], stock, plugin)
    _draw_counters(axes[1][1], plugin, figures)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _draw_kinds(axis: Any, figures: Mapping[str, Any]) -> None:
    kinds = list(figures["kinds"])
    series = (
        ("stock", STOCK_COLOUR, "stock"),
        ("plugin", PLUGIN_COLOUR, "plugin"),
        ("unlimited", BOUND_COLOUR, "unlimited cache"),
    )
    for i, (name, colour, label) in enumerate(series):
        values = [figures["kinds"][kind][f"{name}_recomputed_tokens"] for kind in kinds]
        places = [place + 0.29 * (i - 1) for place in range(len(kinds))]
        bars = axis.bar(places, values, width=0.27, color=colour, label=label)
        axis.bar_label(bars, labels=[f"{v / 1000:.1f}K" for v in values], fontsize=7)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_ylabel("tokens")
    axis.set_title("Prompt tokens computed again, by kind of request")
    axis.legend(frameon=False)


def _draw_growth(axis: Any, stock: Outcome, plugin: Outcome, figures: Mapping[str, Any]) -> None:
    for run, colour in ((stock, STOCK_COLOUR), (plugin, PLUGIN_COLOUR)):
        sums = list(accumulate(record.recomputed_tokens for record in run.records))
        axis.plot(range(1, len(sums) + 1), sums, color=colour, label=run.name)
    axis.axhline(
        figures["unlimited_recomputed_tokens"],
        color=BOUND_COLOUR,
        linestyle="--",
        label="unlimited cache, whole run",
    )
    axis.set_xlabel("requests")
    axis.set_ylabel("tokens")
    axis.set_ylim(bottom=0)
    axis.set_title("Prompt tokens computed again, summed up")
    axis.legend(frameon=False)


def _draw_ttft(axis: Any, stock: Outcome, plugin: Outcome) -> None:
    from matplotlib import ticker

    for run, colour in ((stock, STOCK_COLOUR), (plugin, PLUGIN_COLOUR)):
        times = [record.ttft_s for record in run.records]
        points = [percentile(times, percent) * 1000 for percent in range(101)]
        axis.plot(points, range(101), color=colour, label=run.name)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel("time to first token, ms")
    axis.set_ylabel("% of requests")
    axis.set_title("Time to first token")
    axis.legend(frameon=False)


def _draw_counters(axis: Any, plugin: Outcome, figures: Mapping[str, Any]) -> None:
    cached = {
        f"cached blocks, {kind}/{cls}": value
        for kind in ("full", "swa")
        for cls, value in sorted(_classes(plugin, kind).items())
        if value
    }
    trimmed = {f"trimmed tokens, {k}": float(v) for k, v in figures["trimmed_tokens"].items()}
    rows = {**trimmed, **cached}
    axis.set_title("What the plugin counted")
    if not rows:
        axis.text(0.5, 0.5, "no plugin metrics in this run", ha="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    names = list(rows)[::-1]
    bars = axis.barh(names, [rows[name] for name in names], color=PLUGIN_COLOUR)
    axis.bar_label(bars, labels=[f" {rows[name]:,.0f}" for name in names], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xscale("symlog")
    axis.margins(x=0.15)


def _classes(plugin: Outcome, kind: str) -> dict[str, float]:
    samples = {
        METRIC_PREFIX + "cached_blocks": [
            (labels, value)
            for labels, value in plugin.metrics.get(METRIC_PREFIX + "cached_blocks", ())
            if labels.get("kind") == kind
        ]
    }
    return by_label(samples, METRIC_PREFIX + "cached_blocks", "cls")


def html_table(rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """Rows of cells, the first of them the heads; ``kind`` is a class of the style sheet."""
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    ]
    return f"<table class={kind}><tr>{cells}</tr>{''.join(lines)}</table>"


def image(picture: bytes, text: str) -> str:
    """An ``<img>`` that holds its PNG."""
    encoded = base64.b64encode(picture).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{encoded}">'


def card(value: str, text: str, good: bool | None = None) -> str:
    """A figure of the verdict; green or red where ``good`` says so."""
    kind = "" if good is None else (" good" if good else " bad")
    return f'<div class="card{kind}"><b>{html.escape(value)}</b>{html.escape(text)}</div>'


def write_page(
    path: Path,
    figures: Mapping[str, Any],
    rows: Sequence[Sequence[str]],
    picture: bytes,
    facts: Mapping[str, str],
    sample: str,
    drafts: str = "",
) -> None:
    """Write the report to ``path``.

    ``facts`` are the run's settings, ``sample`` a chat's text, ``drafts`` the HTML of that section.
    """
    total = figures["runs"]["stock"]["requests"]
    same = figures["identical_requests"]
    kinds = [
        [
            "kind of request",
            "requests",
            "prompt tokens",
            "stock recomputed",
            "plugin",
            "unlimited cache",
            "ratio",
        ]
    ]
    for kind, row in figures["kinds"].items():
        before, after = row["stock_recomputed_tokens"], row["plugin_recomputed_tokens"]
        share = f"{after / before:.3f}" if before else "–"
        counts = (row["requests"], row["prompt_tokens"], before, after)
        numbers = [f"{count:,}" for count in (*counts, row["unlimited_recomputed_tokens"])]
        kinds.append([kind, *numbers, share])
    cards = [
        card(f"{same} of {total}", "answers identical, token for token", same == total),
        card(
            f"{figures['recomputed_ratio']:.2f}×",
            f"prompt tokens computed again (unlimited cache: {figures['bound_ratio']:.2f}×)",
            figures["recomputed_ratio"] < 1,
        ),
        card(f"{figures['ttft_p50_ratio']:.2f}×", "time to first token, p50"),
        card(f"{figures['ttft_p90_ratio']:.2f}×", "time to first token, p90"),
    ]
    settings = html_table([["setting", "value"], *map(list, facts.items())], "facts")
    difference = figures["first_difference"]
    note = f'<p class="note">First difference: {html.escape(difference)}.</p>' if difference else ""
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>mimo-plugin: stock and plugin compared</title><style>{STYLE}</style></head><body>"
        "<h1>Stock vLLM and mimo-plugin, the same workload</h1>"
        '<p class="note">Both servers ran one after the other on this machine and were asked the '
        "same requests in the same order. Ratios are plugin/stock; lower is better.</p>"
        f'<div class="verdict">{"".join(cards)}</div>{note}'
        f"{image(picture, 'plots')}"
        f"<h2>Figures</h2>{html_table(rows)}"
        f"<h2>By kind of request</h2>{html_table(kinds)}"
        f"{drafts}"
        f"<h2>How it was run</h2>{settings}"
        "<h2>One conversation</h2>"
        '<p class="note">Part of a chat as the server with the plugin saw it.</p>'
        f"<pre>{html.escape(sample)}</pre></body></html>\n",
        encoding="utf-8",
    )
