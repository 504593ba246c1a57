# SPDX-License-Identifier: Apache-2.0
"""Results of the retention benchmark on SGLang, and its claims in the project's format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.sglang_store import Kept

POLICIES = ("stock", "plugin", "bound")


@dataclass(frozen=True)
class Result:
    """One policy on one seed of the workload; pools and counts in tokens."""

    full_tokens: int
    swa_tokens: int
    policy: str
    seed: int
    requests: int
    prompt_tokens: int
    recomputed_tokens: int
    retractions: int

    @property
    def pool(self) -> tuple[int, int]:
        """Sizes of the two pools."""
        return self.full_tokens, self.swa_tokens

    @property
    def recomputed_pct(self) -> float:
        """Of all prompt tokens, those that had been computed before and were again."""
        return 100.0 * self.recomputed_tokens / self.prompt_tokens


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def ratios(results: list[Result], policy: str = "plugin") -> dict[tuple[int, int], list[float]]:
    """Recomputed tokens of ``policy`` / stock per pool, seed by seed."""
    found = {(r.pool, r.seed, r.policy): r.recomputed_tokens for r in results}
    out: dict[tuple[int, int], list[float]] = {}
    for pool, seed, name in found:
        if name == policy:
            ratio = found[pool, seed, policy] / found[pool, seed, "stock"]
            out.setdefault(pool, []).append(ratio)
    return out


def claims(
    results: list[Result], hits: dict[str, dict[str, list[int]]], kept: list[Kept], how: str
) -> list[dict[str, Any]]:
    """The claims of this benchmark.

    Args:
        results: of the workload.
        hits: policy -> case -> hit tokens of each request.
        kept: hot prefixes in L3.
        how: the command.
    """
    stock, plugin = hits["stock"], hits["plugin"]
    out = []
    for claim_id, case, bound, unit in (
        ("shared_300_hit", "shared_300", 288, "tokens hit; prompt of 360, first 300 cached"),
        ("shared_600_hit", "shared_600", 592, "tokens hit; prompt of 660, first 600 cached"),
        ("batch4_hit_total", "batch4", 1600, "tokens hit; 4 requests at once, first 400 cached"),
    ):
        entry = _claim(claim_id, sum(plugin[case]), sum(stock[case]), bound, unit, [1], how)
        if len(plugin[case]) > 1:
            entry |= {"per_request": plugin[case], "stock_per_request": stock[case]}
        out.append(entry)
    return [*out, *_pressure(results, how), _keep_alive(kept, how)]


def _pressure(results: list[Result], how: str) -> Iterator[dict[str, Any]]:
    by_pool, bounds = ratios(results), ratios(results, "bound")
    seeds = sorted({r.seed for r in results})
    every = [ratio for found in by_pool.values() for ratio in found]
    text = "prompt tokens computed again, plugin/stock"
    bound = round(mean([ratio for found in bounds.values() for ratio in found]), 3)
    entry = _claim(
        "recomputed_ratio", round(mean(every), 3), 1.0, bound, f"{text}, mean", seeds, how
    )
    yield entry | {
        "per_pool": {_name(pool): round(mean(found), 3) for pool, found in by_pool.items()},
        "bound_per_pool": {_name(pool): round(mean(found), 3) for pool, found in bounds.items()},
    }
    entry = _claim(
        "worst_seed_ratio", round(max(every), 3), 1.0, None, f"{text}, worst seed", seeds, how
    )
    yield entry | {
        "worst_per_pool": {_name(pool): round(max(found), 3) for pool, found in by_pool.items()}
    }


def _keep_alive(kept: list[Kept], how: str) -> dict[str, Any]:
    parts = {
        policy: [k.fraction for k in kept if k.policy == policy] for policy in ("stock", "plugin")
    }
    entry = _claim(
        "l3_keepalive_fraction",
        round(mean(parts["plugin"]), 3),
        round(mean(parts["stock"]), 3),
        1.0,
        "part of a hot prompt hit in L3 after cold traffic and a restart, mean",
        sorted({k.seed for k in kept}),
        how,
    )
    return entry | {"worst": round(min(parts["plugin"]), 3)}


def _claim(
    claim_id: str,
    value: float,
    stock: float,
    bound: float | None,
    unit: str,
    seeds: list[int],
    how: str,
) -> dict[str, Any]:
    return {
        "id": claim_id,
        "value": value,
        "stock": stock,
        "bound": bound,
        "unit": unit,
        "seeds": seeds,
        "how": how,
    }


def _name(pool: tuple[int, int]) -> str:
    return f"{pool[0]}/{pool[1]}"


def table(results: list[Result]) -> Iterator[str]:
    """Text table of means and ranges over seeds, with the ratios."""
    by_pool = ratios(results)
    yield f"{'pools, tokens':>18}" + "".join(f"{p:>22}" for p in POLICIES) + "   plugin/stock"
    for pool in dict.fromkeys(r.pool for r in results):
        cells = []
        for policy in POLICIES:
            values = [r.recomputed_pct for r in results if (r.pool, r.policy) == (pool, policy)]
            cells.append(f"{mean(values):.2f} ({min(values):.2f}..{max(values):.2f})".rjust(22))
        found = by_pool[pool]
        tail = f"   {mean(found):.2f} ({min(found):.2f}..{max(found):.2f})"
        yield f"{_name(pool):>18}" + "".join(cells) + tail
