# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the comparison: identity of answers, recomputed tokens, TTFT ratios, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.run.replay import Record
from tools.run.workload import KINDS

METRIC_PREFIX = "mimo:"
Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


class RunError(Exception):
    """The comparison cannot be trusted; the message says why and what to do."""


@dataclass(frozen=True)
class Outcome:
    """One server's run over the workload."""

    name: str
    records: list[Record]
    start_up_s: float
    wall_s: float
    metrics: Samples = field(repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(record.prompt_tokens for record in self.records)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the cache."""
        return sum(record.cached_tokens for record in self.records)

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens computed again."""
        return self.prompt_tokens - self.cached_tokens

    def ttft_s(self, percent: float) -> float:
        """Percentile of the time to first token."""
        return percentile([record.ttft_s for record in self.records], percent)


@dataclass(frozen=True)
class Identity:
    """How far the answers of two runs are the same, token for token."""

    requests: int
    identical_requests: int
    tokens: int
    identical_tokens: int
    first_difference: str | None

    @property
    def fraction(self) -> float:
        """Share of answer tokens that agree up to the first difference of their answer."""
        return self.identical_tokens / self.tokens if self.tokens else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation; ``percent`` from 0 to 100."""
    ordered = sorted(values)
    if not ordered:
        raise RunError("no request was measured")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(value: float, base: float) -> float:
    """``value / base``; 1 when both are zero, infinity when only the base is."""
    if base == 0:
        return 1.0 if value == 0 else float("inf")
    return value / base


def compare_answers(stock: Sequence[Record], plugin: Sequence[Record]) -> Identity:
    """Compare request by request. A request whose prompt differs counts as wholly different."""
    by_turn = {(record.session, record.turn): record for record in plugin}
    if len(stock) != len(plugin) or len(by_turn) != len(plugin):
        raise RunError(f"{len(stock)} requests on stock, {len(plugin)} with the plugin")
    same_requests = same_tokens = 0
    first: str | None = None
    for one in stock:
        other = by_turn[(one.session, one.turn)]
        common = 0
        if one.prompt_hash == other.prompt_hash:
            while (
                common < min(len(one.answer), len(other.answer))
                and one.answer[common] == other.answer[common]
            ):
                common += 1
        same_tokens += common
        if common == len(one.answer) == len(other.answer):
            same_requests += 1
        elif first is None:
            first = f"session {one.session}, turn {one.turn} ({one.kind}), answer token {common}"
    total = sum(len(record.answer) for record in stock)
    return Identity(len(stock), same_requests, total, same_tokens, first)


def unlimited_cached_tokens(records: Sequence[Record], block_tokens: int) -> list[int]:
    """Cached tokens of each request with an unlimited cache: the longest prefix left earlier.

    Whole blocks of ``block_tokens``, and never the last prompt token, which is always computed.
    Requests count in their order of submission.
    """
    known: set[int] = set()
    cached = []
    for record in records:
        chain = 0
        hits = 0
        missed = False
        tokens = [*record.prompt, *record.answer]
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            chain = hash((chain, tuple(tokens[start : start + block_tokens])))
            if not missed and start + block_tokens < record.prompt_tokens and chain in known:
                hits = start + block_tokens
            else:
                missed = True
            known.add(chain)
        cached.append(hits)
    return cached


def require_plugin_metrics(samples: Samples) -> None:
    """Raise RunError unless the server exported the plugin's metrics."""
    if not any(name.startswith(METRIC_PREFIX) for name in samples):
        raise RunError(
            f"the plugin's server exports no metric that starts with {METRIC_PREFIX!r}: the plugin "
            "was not active; check `mimo doctor` and the log of the server"
        )


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Values of a metric summed per value of ``label``."""
    totals: dict[str, float] = {}
    for labels, value in samples.get(name, ()):
        key = labels.get(label, "")
        totals[key] = totals.get(key, 0.0) + value
    return totals


def trimmed_by_reason(outcome: Outcome) -> dict[str, int]:
    """Tokens cut from full-attention hits, by reason, as the plugin counted them."""
    totals = by_label(outcome.metrics, METRIC_PREFIX + "trimmed_tokens_total", "reason")
    return {reason: int(value) for reason, value in sorted(totals.items())}


def summary(stock: Outcome, plugin: Outcome, block_tokens: int) -> dict[str, Any]:
    """All figures of the report, JSON-able."""
    identity = compare_answers(stock.records, plugin.records)
    ideal = [
        record.prompt_tokens - cached
        for record, cached in zip(
            stock.records, unlimited_cached_tokens(stock.records, block_tokens), strict=True
        )
    ]
    bound = sum(ideal)
    kinds = {}
    for kind in KINDS:
        rows = [[r for r in run.records if r.kind == kind] for run in (stock, plugin)]
        if rows[0]:
            kinds[kind] = {
                "requests": len(rows[0]),
                "prompt_tokens": sum(r.prompt_tokens for r in rows[0]),
                "stock_recomputed_tokens": sum(r.recomputed_tokens for r in rows[0]),
                "plugin_recomputed_tokens": sum(r.recomputed_tokens for r in rows[1]),
                "unlimited_recomputed_tokens": sum(
                    tokens
                    for record, tokens in zip(stock.records, ideal, strict=True)
                    if record.kind == kind
                ),
            }
    runs = {
        run.name: {
            "requests": len(run.records),
            "prompt_tokens": run.prompt_tokens,
            "cached_tokens": run.cached_tokens,
            "recomputed_tokens": run.recomputed_tokens,
            "cached_pct": 100 * ratio(run.cached_tokens, run.prompt_tokens),
            "ttft_p50_s": run.ttft_s(50),
            "ttft_p90_s": run.ttft_s(90),
            "start_up_s": run.start_up_s,
            "wall_s": run.wall_s,
        }
        for run in (stock, plugin)
    }
    return {
        "runs": runs,
        "kinds": kinds,
        "unlimited_recomputed_tokens": bound,
        "identical_requests": identity.identical_requests,
        "identical_fraction": identity.fraction,
        "first_difference": identity.first_difference,
        "recomputed_ratio": ratio(plugin.recomputed_tokens, stock.recomputed_tokens),
        "bound_ratio": ratio(bound, stock.recomputed_tokens),
        "ttft_p50_ratio": ratio(plugin.ttft_s(50), stock.ttft_s(50)),
        "ttft_p90_ratio": ratio(plugin.ttft_s(90), stock.ttft_s(90)),
        "trimmed_tokens": trimmed_by_reason(plugin),
    }


def claim(
    name: str, value: float, bound: float | None, unit: str, seeds: list[int], how: str
) -> dict[str, Any]:
    """One entry of the claims format."""
    return {
        "id": name,
        "value": round(value, 6),
        "stock": 1.0,
        "bound": None if bound is None else round(bound, 6),
        "unit": unit,
        "seeds": seeds,
        "how": how,
    }


def claims(figures: Mapping[str, Any], seed: int, how: str) -> list[dict[str, Any]]:
    """The run's entries of the claims format (see the benchmarks' documentation)."""
    values: tuple[tuple[str, float, float | None, str], ...] = (
        ("tokens_identical", figures["identical_fraction"], 1.0, "fraction"),
        ("recomputed_ratio", figures["recomputed_ratio"], figures["bound_ratio"], "plugin/stock"),
        ("ttft_p50_ratio", figures["ttft_p50_ratio"], None, "plugin/stock"),
        ("ttft_p90_ratio", figures["ttft_p90_ratio"], None, "plugin/stock"),
    )
    return [claim(*value, seeds=[seed], how=how) for value in values]


def table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the comparison table: what, stock, plugin, plugin/stock."""
    stock, plugin = (figures["runs"][name] for name in ("stock", "plugin"))

    def row(title: str, key: str, form: str = "{:,}", with_ratio: bool = True) -> list[str]:
        values = [form.format(run[key]) for run in (stock, plugin)]
        last = f"{ratio(plugin[key], stock[key]):.3f}" if with_ratio else ""
        return [title, *values, last]

    rows = [
        ["", "stock", "plugin", "plugin/stock"],
        row("requests", "requests", with_ratio=False),
        row("prompt tokens", "prompt_tokens", with_ratio=False),
        row("cached tokens", "cached_tokens"),
        row("cached, % of prompt", "cached_pct", "{:.1f}", with_ratio=False),
        row("recomputed tokens", "recomputed_tokens"),
        row("TTFT p50, s", "ttft_p50_s", "{:.4f}"),
        row("TTFT p90, s", "ttft_p90_s", "{:.4f}"),
        row("whole run, s", "wall_s", "{:.1f}"),
    ]
    bound = figures["unlimited_recomputed_tokens"]
    rows.append(["unlimited cache recomputes", f"{bound:,}", "", f"{figures['bound_ratio']:.3f}"])
    trimmed = figures["trimmed_tokens"] or {"nothing": 0}
    rows += [[f"trimmed: {reason}", "", f"{tokens:,}", ""] for reason, tokens in trimmed.items()]
    identical, total = figures["identical_requests"], stock["requests"]
    rows.append(["identical answers", "", f"{identical} of {total}", ""])
    return rows


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align a table for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
