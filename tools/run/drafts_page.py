# SPDX-License-Identifier: Apache-2.0
"""The section "Drafts" of the HTML report."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from typing import Any

from tools.run import drafts
from tools.run.page import PLUGIN_COLOUR, STOCK_COLOUR, card, html_table, image

TITLE = "<h2>Drafts</h2>"


def draw(section: Mapping[str, Any]) -> bytes:
    """Acceptance by position in the draft as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(12, 3.2), constrained_layout=True)
    for shift, name, colour in ((-0.2, "stock", STOCK_COLOUR), (0.2, "plugin", PLUGIN_COLOUR)):
        values = [100 * value for value in section["runs"][name]["conditional"]]
        bars = axis.bar(
            [place + shift for place in range(len(values))],
            values,
            width=0.38,
            color=colour,
            label=name,
        )
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    axis.set_xticks(range(section["layers"]), [f"draft {i + 1}" for i in range(section["layers"])])
    axis.set_ylim(0, 108)
    axis.set_ylabel("%")
    axis.set_title("Accepted, given that all drafts before it were", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def build(section: Mapping[str, Any]) -> str:
    """The section's HTML: figures, or one line that says why there are none."""
    good, line = drafts.verdict(section)
    sentence = f"{line[0].upper()}{line[1:]}."
    if "runs" not in section:
        return f'{TITLE}<p class="note">{html.escape(sentence)}</p>'
    same, prompts = section["identical_requests"], section["prompts"]
    lengths = [section["runs"][name]["accept_len"] for name in ("stock", "plugin")]
    cards = [
        card(f"{same} of {prompts}", "draft answers identical, token for token", same == prompts),
        card(f"{lengths[1]:.2f}", f"tokens a round (stock: {lengths[0]:.2f})"),
    ]
    counted = ", ".join(f"{name} {value:,}" for name, value in section["plugin_counters"].items())
    note = (
        f"Speculative decoding with {section['layers']} drafted tokens a round, "
        f"{section['answer_tokens']} greedy tokens for each of {prompts} prompts from source files "
        f"of Python's standard library. Model: {section['model']}. Stock vLLM drafts every token "
        "with the first MTP layer, the plugin each with the layer that was trained for it. "
        f"Counted by the plugin itself: {counted}. On so few prompts the ratio moves by several "
        "percent; make bench BENCH=mtp measures it."
    )
    return (
        f'{TITLE}<p class="note">{html.escape(note)}</p><div class="verdict">{"".join(cards)}</div>'
        f"{'' if good else _bad(sentence)}{image(draw(section), 'acceptance by draft position')}"
        f"{html_table(drafts.table(section))}"
    )


def _bad(sentence: str) -> str:
    return f'<p class="note">{html.escape(sentence)}</p>'
