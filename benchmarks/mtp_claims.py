# SPDX-License-Identifier: Apache-2.0
"""Claims and tables of the MTP benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.mtp_engine import Result
from benchmarks.mtp_reference import Acceptance, Round, acceptance, gain_interval, gain_pct

#: engine configuration -> mode of the torch reference that drafts the same way
SAME_RULE = {"ours": "exact", "stock": "layer0", "chained": "chained"}


@dataclass
class Found:
    """Everything that was measured.

    Attributes:
        prompts: number of prompts.
        first_outputs: end of the first bin of outputs.
        outputs: tokens of each request.
        passes: by configuration and pass.
        load: runs of one batch, in the order of their turns.
        torch_outputs: tokens by plain torch.
        torch_rounds: rounds by plain torch, by mode.
    """

    prompts: int
    first_outputs: int
    outputs: int
    passes: dict[str, dict[str, Result]] = field(default_factory=dict)
    load: list[tuple[str, Result]] = field(default_factory=list)
    torch_outputs: list[list[int]] = field(default_factory=list)
    torch_rounds: dict[str, list[Round]] = field(default_factory=dict)

    def rounds(self, name: str, pass_name: str = "cold") -> list[Round]:
        """Rounds of one pass."""
        return self.passes[name][pass_name].rounds


def same_outputs(result: Result, expected: Sequence[Sequence[int]]) -> float:
    """Share of requests whose tokens are those expected, as far as both go."""
    pairs = list(zip(result.outputs, expected, strict=True))
    return sum(ours == list(other[: len(ours)]) for ours, other in pairs) / len(pairs)


def load_outputs(found: Found) -> dict[str, float]:
    """By engine of the load part, the plugin's only: share of requests with the right tokens."""
    plain = [result.outputs for name, result in found.load if name == "load_none"]
    return {
        name: same_outputs(result, plain[0])
        for name, result in found.load
        if name not in ("load_none", "load_stock_schedule")
    }


def gap(one: Acceptance, other: Acceptance) -> float:
    """Largest difference of conditional acceptance at any position."""
    pairs = zip(one.conditional, other.conditional, strict=True)
    return max(abs(a - b) for a, b in pairs)


def claims(found: Found, how: str) -> list[dict[str, Any]]:
    """The claims of the acceptance part; empty when it was not run."""
    if "ours" not in found.passes:
        return []
    plain = found.passes["none"]["cold"].outputs
    same = {
        f"{name}/{pass_name}": same_outputs(result, plain)
        for name, passes in found.passes.items()
        if name.startswith("ours")
        for pass_name, result in passes.items()
    }
    same |= load_outputs(found)
    common = {"seeds": [], "prompts": found.prompts, "how": how}
    out: list[dict[str, Any]] = [
        {
            "id": "outputs_identical",
            "value": sum(same.values()) / len(same),
            "stock": same_outputs(found.passes["stock"]["cold"], plain),
            "bound": 1.0,
            "unit": "share of prompts whose tokens are those without speculation, all "
            "configurations of the plugin",
            "worst": min(same.values()),
            "by_configuration": same,
            **common,
        }
    ]
    ours, stock = found.rounds("ours"), found.rounds("stock")
    torch = found.torch_rounds
    for end in (found.first_outputs, found.outputs):
        low, high = gain_interval(ours, stock, end, found.prompts)
        out.append(
            {
                "id": f"accept_len_{end}_gain_pct",
                "value": round(gain_pct(ours, stock, end), 2),
                "stock": 0.0,
                "bound": round(gain_pct(torch["exact"], torch["layer0"], end), 2),
                "unit": f"percent more tokens a round than stock, first {end} outputs; the bound "
                "is what plain torch says of the same two rules",
                "interval_90": [round(low, 2), round(high, 2)],
                "accept_len": round(acceptance(ours, 0, end).length_tokens, 4),
                "stock_accept_len": round(acceptance(stock, 0, end).length_tokens, 4),
                **common,
            }
        )
    gaps = {
        name: max(
            gap(acceptance(found.rounds(name), 0, end), acceptance(torch[mode], 0, end))
            for end in (found.first_outputs, found.outputs)
        )
        for name, mode in SAME_RULE.items()
        if name in found.passes and mode in torch
    }
    out.append(
        {
            "id": "reference_gap_max",
            "value": round(gaps["ours"], 4),
            "stock": round(gaps["stock"], 4),
            "bound": 0.0,
            "unit": "largest difference of acceptance at a draft position (given that the earlier "
            "ones were accepted) between engine and plain torch",
            "by_configuration": {name: round(value, 4) for name, value in gaps.items()},
            "same_outputs_as_torch": same_outputs(
                found.passes["none"]["cold"], found.torch_outputs
            ),
            **common,
        }
    )
    pairs = {
        name: [acceptance(found.rounds(name, which)).length_tokens for which in ("cold", "cached")]
        for name in ("ours", "ours_kv")
        if name in found.passes
    }
    differences = {name: 100 * abs(b / a - 1) for name, (a, b) in pairs.items()}
    out.append(
        {
            "id": "cold_vs_cached_gap_pct",
            "value": round(max(differences.values()), 3),
            "stock": None,
            "bound": 0.0,
            "unit": f"percent between acceptance lengths, first {found.outputs} outputs, cold and "
            "with the prompt cached",
            "by_configuration": {name: round(value, 3) for name, value in differences.items()},
            "cached_tokens": min(found.passes["ours"]["cached"].cached_tokens),
            **common,
        }
    )
    return out


def acceptance_table(found: Found) -> Iterator[str]:
    """One line for each pass of an engine and each mode of plain torch."""
    ends = (found.first_outputs, found.outputs)
    yield (
        f"{'':26}{f'length, {ends[0]} out':>15}{f'{ends[1]} out':>9}   "
        f"{f'by position, {ends[1]} outputs':24}{'same tokens':>12}{'cached':>8}"
    )
    plain = found.passes["none"]["cold"].outputs if "none" in found.passes else None
    for name, passes in found.passes.items():
        for pass_name, result in passes.items():
            yield _line(
                f"{name}, {pass_name}",
                result.rounds,
                ends,
                None if plain is None else same_outputs(result, plain),
                min(result.cached_tokens),
            )
    for mode, rounds in found.torch_rounds.items():
        yield _line(f"plain torch, {mode}", rounds, ends, None, None)


def _line(
    name: str, rounds: list[Round], ends: tuple[int, int], same: float | None, cached: int | None
) -> str:
    if rounds:
        first, whole = (acceptance(rounds, 0, end) for end in ends)
        positions = " ".join(f"{value:.3f}" for value in whole.conditional)
        numbers = f"{first.length_tokens:15.3f}{whole.length_tokens:9.3f}   {positions:24}"
    else:
        numbers = f"{'-':>15}{'-':>9}   {'':24}"
    tokens = "" if same is None else f"{same:.4f}"
    return f"{name:26}{numbers}{tokens:>12}{'' if cached is None else cached:>8}"


def load_table(found: Found) -> Iterator[str]:
    """One line for each run of one batch, and CPU time against no speculation."""
    yield (
        f"{'':20}{'CPU s':>8}{'wall s':>8}{'ratio':>8}   tokens a step and request, "
        "emitted per verified token, acceptance length by outputs 0-127, 128 and later"
    )
    plain = [r.cpu_s for name, r in found.load if name == "load_none"]
    base = sum(plain) / max(1, len(plain))
    for name, result in found.load:
        steps, per_verified = emitted(result)
        bins = [
            f"{acceptance(part).length_tokens:.3f}" if part else "-"
            for part in (
                [r for r in result.rounds if r[1] < 128],
                [r for r in result.rounds if r[1] >= 128],
            )
        ]
        ratio = f"{base / result.cpu_s:8.3f}" if plain else f"{'-':>8}"
        yield (
            f"{name:20}{result.cpu_s:8.1f}{result.seconds:8.1f}{ratio}   "
            f"{steps:.3f}, {per_verified:.3f}, {', '.join(bins)}"
        )


def emitted(result: Result) -> tuple[float, float]:
    """Tokens that a decoding request gains in a step, and that it gains for each verified token.

    A step verifies one token of a request and its drafts. What the last round of a request gains
    past its end does not count.
    """
    ends = [len(tokens) for tokens in result.outputs]
    kept = sum(min(1 + accepted, ends[i] - known) for i, known, _, accepted in result.rounds)
    decoded = sum(ends) - len(ends)  # the first output comes from the prompt
    steps = decoded - kept + len(result.rounds)
    verified = steps + sum(drafted for _, _, drafted, _ in result.rounds)
    return decoded / max(1, steps), decoded / max(1, verified)
