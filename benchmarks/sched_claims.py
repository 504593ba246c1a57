# SPDX-License-Identifier: Apache-2.0
"""Claims of the scheduler benchmark, in the project's format."""

from __future__ import annotations

from typing import Any

from benchmarks.sched_engine import Run
from benchmarks.sched_trace import TraceRun

#: claim id -> (workload, figure, what it is)
ENGINE_CLAIMS = {
    "burst_prefill_ratio": ("burst", "computed", "prefill tokens computed"),
    "open_ttft_mean_ratio": ("open", "mean", "mean TTFT"),
    "open_ttft_p90_ratio": ("open", "p90", "p90 of TTFT"),
    "open_ttft_max_ratio": ("open", "max", "longest TTFT"),
    "open_prefill_ratio": ("open", "computed", "prefill tokens computed"),
}
TRACE_CLAIMS = {
    "long_p90_ratio": ("long_p90", "p90 TTFT of the tenth of requests with most uncached tokens"),
    "short_p99_ratio": ("short_p99", "p99 TTFT of the other nine tenths"),
}


def claims(
    engine_runs: list[Run],
    trace_runs: list[TraceRun],
    cost_rows: list[dict[str, Any]],
    how: str,
    load: float,
) -> list[dict[str, Any]]:
    """One entry per claim whose part was run."""
    out = engine_claims(engine_runs, how) + trace_claims(trace_runs, how, load)
    if cost_rows:
        worst = max(cost_rows, key=lambda row: row["added_mean_ms"])
        out.append(
            {
                "id": "step_cpu_ms_256x64k",
                "value": round(worst["added_mean_ms"], 3),
                "stock": 0.0,
                "bound": 0.0,
                "unit": f"ms of CPU added per step, mean, {worst['waiting_requests']} waiting",
                "seeds": [],
                "worst": round(worst["added_p99_ms"], 3),
                "stock_step_ms": round(worst["stock_ms"], 3),
                "how": how,
            }
        )
    return out


def engine_claims(runs: list[Run], how: str) -> list[dict[str, Any]]:
    """Mean over seeds of plugin/stock on the real engine; the other rules' means beside it."""
    real = {(r.workload, r.policy, r.seed): r for r in runs if r.backend == "engine"}
    seeds = sorted({seed for _, policy, seed in real if policy == "plugin"})
    if not seeds:
        return []
    policies = sorted({policy for _, policy, _ in real} - {"fcfs"})
    out = []
    for claim_id, (workload, figure, text) in ENGINE_CLAIMS.items():

        def value(policy: str, seed: int, workload: str = workload, figure: str = figure) -> float:
            run = real[workload, policy, seed]
            return float(run.computed_tokens if figure == "computed" else run.stats()[figure])

        ratios = {p: [value(p, s) / value("fcfs", s) for s in seeds] for p in policies}
        mine = ratios["plugin"]
        out.append(
            {
                "id": claim_id,
                "value": round(sum(mine) / len(mine), 3),
                "stock": 1.0,
                "bound": None,
                "unit": f"{text}, plugin/stock, mean over seeds",
                "seeds": seeds,
                "per_seed": [round(ratio, 3) for ratio in mine],
                "worst": round(max(mine), 3),
                "stock_per_seed": [round(value("fcfs", seed), 2) for seed in seeds],
                "others": {
                    p: round(sum(r) / len(r), 3) for p, r in ratios.items() if p != "plugin"
                },
                "how": how,
            }
        )
    return out


def trace_claims(runs: list[TraceRun], how: str, load: float) -> list[dict[str, Any]]:
    """Plugin/stock at ``load``, mean over the parts of the trace; parts and loads beside it."""
    stats = {(r.policy, r.first, r.load, r.hybrid): r.stats() for r in runs}
    if ("plugin", 0, load, False) not in stats:
        return []
    starts = sorted({r.first for r in runs if r.load == load and not r.hybrid})
    loads = sorted({r.load for r in runs if r.first == 0 and not r.hybrid})
    policies = sorted({r.policy for r in runs} - {"fcfs"})
    out = []
    for claim_id, (figure, text) in TRACE_CLAIMS.items():

        def ratio(
            policy: str, first: int, at: float, hybrid: bool = False, figure: str = figure
        ) -> float:
            base = stats["fcfs", first, at, hybrid][figure]
            return round(stats[policy, first, at, hybrid][figure] / base, 3)

        by_start = [ratio("plugin", start, load) for start in starts]
        entry = {
            "id": claim_id,
            "value": round(sum(by_start) / len(by_start), 3),
            "stock": 1.0,
            "bound": None,
            "unit": f"{text}, plugin/stock, conversation trace at load {load}, mean over parts",
            "seeds": starts,
            "per_seed": by_start,
            "worst": max(by_start),
            "by_load": {str(at): ratio("plugin", 0, at) for at in loads},
            "stock_s": round(stats["fcfs", 0, load, False][figure], 2),
            "others": {
                p: round(sum(ratio(p, start, load) for start in starts) / len(starts), 3)
                for p in policies
                if p != "plugin"
            },
            "how": how,
        }
        if ("plugin", 0, load, True) in stats:
            entry["hybrid"] = ratio("plugin", 0, load, True)
        out.append(entry)
    return out
