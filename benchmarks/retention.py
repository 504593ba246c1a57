# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens each retention policy reuses, and what the KV cache manager costs.

Model-free: vLLM's ``Scheduler`` and ``KVCacheManager`` at the geometry of MiMo-V2.5-Pro (10 full
and 60 sliding-window layers), driven by seeded workloads. Policies: stock with retention 0 (vLLM's
default), 1024 and dense; the plugin; and the bound, a cache whose sliding-window KV costs nothing.

Run: ``python -m benchmarks.retention [--quick] [--json PATH] [--seeds N] [--traces DIR]``
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.workloads import LONG, MIX, Mix

MIXES: dict[str, Mix] = {"mix": MIX, "long": LONG}
#: (workload, pool blocks) of the full run; claims name them
RUNS = (("mix", 12_000), ("mix", 5_000), ("long", 12_000))
POLICIES = ("stock0", "stock1024", "dense", "plugin", "bound")
COST_LENGTHS = (65_536, 262_144, 1_048_576)
#: blocks of the pool that a trace is replayed on
TRACE_BLOCKS = 20_000


@dataclass(frozen=True)
class Result:
    """One policy on one workload and seed."""

    workload: str
    blocks: int
    policy: str
    seed: int
    requests: int
    hit_pct: float
    full_hit_pct: float


def simulator(policy: str, blocks: int) -> Any:
    """A simulator with the policy's retention."""
    from benchmarks.sim import PLUGIN, Geometry, Simulator

    if policy == "plugin":
        return Simulator(blocks, plugin=PLUGIN)
    if policy == "bound":
        return Simulator(blocks, geometry=Geometry(swa_groups=0))
    interval = {"stock0": 0, "stock1024": 1024, "dense": None}[policy]
    return Simulator(blocks, retention_interval=interval)


def run_one(job: tuple[str, int, str, int]) -> Result:
    """Simulate one (workload, blocks, policy, seed)."""
    from benchmarks.workloads import sessions

    workload, blocks, policy, seed = job
    totals = simulator(policy, blocks).drive(sessions(MIXES[workload], seed), seed=seed)
    full_pct = 100.0 * totals.full_hit_tokens / max(1, totals.prompt_tokens)
    return Result(workload, blocks, policy, seed, totals.requests, totals.hit_pct, full_pct)


def run_trace(job: tuple[str, str, int]) -> Result:
    """Replay the head of a trace, requests in order, a few at a time."""
    from benchmarks.workloads import read_trace, trace_prompt

    path, policy, requests = job
    sim = simulator(policy, TRACE_BLOCKS)
    running: set[str] = set()
    for request in read_trace(Path(path), requests):
        while len(running) >= 4:
            running -= sim.step()
        running.add(sim.submit(trace_prompt(request), max(1, request.output_tokens)))
    while running:
        running -= sim.step()
    totals = sim.totals()
    full_pct = 100.0 * totals.full_hit_tokens / max(1, totals.prompt_tokens)
    return Result(
        Path(path).stem, TRACE_BLOCKS, policy, 0, totals.requests, totals.hit_pct, full_pct
    )


def means(results: list[Result]) -> dict[tuple[str, int, str], float]:
    """Mean hit in percent per (workload, blocks, policy)."""
    out: dict[tuple[str, int, str], float] = {}
    key = lambda r: (r.workload, r.blocks, r.policy)  # noqa: E731
    for group, rows in groupby(sorted(results, key=key), key=key):
        values = [row.hit_pct for row in rows]
        out[group] = sum(values) / len(values)
    return out


def seed_gains(results: list[Result]) -> list[float]:
    """Plugin minus the better of stock 0 and 1024, in points, for every workload and seed."""
    hit = {(r.workload, r.blocks, r.seed, r.policy): r.hit_pct for r in results}
    gains = []
    for workload, blocks, seed, policy in hit:
        if policy == "plugin":
            stock = [
                hit[workload, blocks, seed, name]
                for name in ("stock0", "stock1024")
                if (workload, blocks, seed, name) in hit
            ]
            gains.append(hit[workload, blocks, seed, "plugin"] - max(stock))
    return gains


def costs(lengths: tuple[int, ...], repeats: int) -> list[dict[str, float]]:
    """CPU seconds of one request's life in the manager, stock and plugin, per length."""
    from benchmarks.kv_cost import best_of

    rows = []
    for length in lengths:
        stock, plugin = (best_of(length, repeats, plugin=on) for on in (False, True))
        rows.append(
            {
                "length_tokens": length,
                "stock_s": stock.total_s,
                "plugin_s": plugin.total_s,
                "ratio": plugin.total_s / stock.total_s,
                **{f"stock_{k}": v for k, v in asdict(stock).items()},
                **{f"plugin_{k}": v for k, v in asdict(plugin).items()},
            }
        )
    return rows


def claims(
    results: list[Result], cost_rows: list[dict[str, float]], waiting: dict[str, float], how: str
) -> list[dict[str, Any]]:
    """The claims of this benchmark, in the project's format."""
    mean = means(results)
    out: list[dict[str, Any]] = []
    for workload, blocks in RUNS:
        if (workload, blocks, "plugin") not in mean:
            continue
        seeds = sorted({r.seed for r in results if (r.workload, r.blocks) == (workload, blocks)})
        out.append(
            {
                "id": f"{workload}{blocks}_hit_pct",
                "value": round(mean[workload, blocks, "plugin"], 2),
                "stock": round(mean[workload, blocks, "stock0"], 2),
                "bound": round(mean[workload, blocks, "bound"], 2),
                "unit": "percent of prompt tokens",
                "seeds": seeds,
                "how": how,
            }
        )
    seeds = sorted({r.seed for r in results})
    out.append(
        {
            "id": "worst_seed_gain_points",
            "value": round(min(seed_gains(results)), 2),
            "stock": 0.0,
            "bound": None,
            "unit": "points against the better of stock 0 and 1024",
            "seeds": seeds,
            "how": how,
        }
    )
    worst = max(cost_rows, key=lambda row: row["ratio"])
    out.append(
        {
            "id": "kv_cpu_ratio",
            "value": round(worst["ratio"], 3),
            "stock": 1.0,
            "bound": None,
            "unit": f"CPU time plugin/stock, worst length ({worst['length_tokens']} tokens)",
            "seeds": [],
            "how": how,
        }
    )
    out.append(
        {
            "id": "waiting_1m_ms_per_step",
            "value": round(waiting["plugin_ms"], 3),
            "stock": round(waiting["stock_ms"], 3),
            "bound": 0.0,
            "unit": f"ms added per step by a waiting request of {waiting['length_tokens']} tokens",
            "seeds": [],
            "how": how,
        }
    )
    return out


def waiting_cost(length_tokens: int) -> dict[str, float]:
    """Milliseconds that a waiting request of this length adds to a scheduler step."""
    from benchmarks.kv_cost import waiting_step_s

    out: dict[str, float] = {"length_tokens": length_tokens}
    for name, plugin in (("stock", False), ("plugin", True)):
        base_s, waiting_s = waiting_step_s(length_tokens, plugin=plugin)
        out[f"{name}_ms"] = 1e3 * (waiting_s - base_s)
    return out


def table(results: list[Result]) -> Iterator[str]:
    """Text table of means and ranges over seeds."""
    mean = means(results)
    yield f"{'workload':28} {'pool':>6}  " + "".join(f"{p:>20}" for p in POLICIES)
    for workload, blocks in dict.fromkeys((r.workload, r.blocks) for r in results):
        cells = []
        for policy in POLICIES:
            values = [
                r.hit_pct
                for r in results
                if (r.workload, r.blocks, r.policy) == (workload, blocks, policy)
            ]
            if not values:
                cells.append(f"{'-':>20}")
                continue
            spread = f"({min(values):.1f}..{max(values):.1f})" if len(values) > 1 else ""
            cells.append(f"{mean[workload, blocks, policy]:.1f} {spread}".rjust(20))
        yield f"{workload:28} {blocks:>6}  " + "".join(cells)


def plot(results: list[Result], path: Path) -> None:
    """Bars of hit rates per workload and policy; every seed is a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = list(dict.fromkeys((r.workload, r.blocks) for r in results))
    colours = dict(
        zip(POLICIES, ("#9aa5b1", "#c3cad3", "#dfe3e8", "#d9480f", "#2f9e44"), strict=True)
    )
    figure, axes = pyplot.subplots(1, len(runs), figsize=(3.6 * len(runs), 3.8), squeeze=False)
    for axis, (workload, blocks) in zip(axes[0], runs, strict=True):
        for x, policy in enumerate(POLICIES):
            values = [
                r.hit_pct
                for r in results
                if (r.workload, r.blocks, r.policy) == (workload, blocks, policy)
            ]
            if not values:
                continue
            height = sum(values) / len(values)
            axis.bar(x, height, color=colours[policy])
            axis.plot([x] * len(values), values, "k.", markersize=4)
            axis.text(x, height + 1, f"{height:.1f}", ha="center", fontsize=9)
        axis.set_xticks(range(len(POLICIES)), POLICIES, rotation=30)
        axis.set_title(f"{workload}, {blocks} blocks", fontsize=10)
        axis.set_ylim(0, 105)
        axis.set_ylabel("prompt tokens reused, %")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/retention.json"))
    parser.add_argument("--quick", action="store_true", help="one seed of one workload")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0..N-1 (default 5)")
    parser.add_argument("--traces", type=Path, help="folder with Mooncake-style *.jsonl traces")
    parser.add_argument("--trace-requests", type=int, default=400, help="head of each trace")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)

    runs = (("mix", 5_000),) if arguments.quick else RUNS
    seeds = range(1 if arguments.quick else arguments.seeds)
    skip = {"dense"} if arguments.quick else set()
    jobs = [
        (workload, blocks, policy, seed)
        for workload, blocks in runs
        for policy in POLICIES
        if policy not in skip
        for seed in seeds
    ]
    results: list[Result] = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for done, result in enumerate(pool.map(run_one, jobs), 1):
            results.append(result)
            print(f"\r{done}/{len(jobs)} simulations", end="", file=sys.stderr, flush=True)
        trace_results: list[Result] = []
        if arguments.traces is not None:
            paths = sorted(arguments.traces.glob("*.jsonl"))
            count = arguments.trace_requests
            trace_jobs = [(str(p), policy, count) for p in paths for policy in POLICIES]
            trace_results = list(pool.map(run_trace, trace_jobs))
    print(file=sys.stderr)

    lengths = COST_LENGTHS[:1] if arguments.quick else COST_LENGTHS
    # After the pool has ended, so that nothing of ours runs beside what is timed.
    cost_rows = costs(lengths, 1 if arguments.quick else 3)
    waiting = waiting_cost(lengths[-1])
    how = "python -m benchmarks.retention" + (" --quick" if arguments.quick else "")
    listed = claims(results, cost_rows, waiting, how)

    print("Prompt tokens reused, percent: mean over seeds (range)")
    print("\n".join(table(results + trace_results)))
    print("\nCPU time of the KV cache manager, one request's life")
    for row in cost_rows:
        print(
            f"  {row['length_tokens']:>9,} tokens: stock {1e3 * row['stock_s']:8.1f} ms, "
            f"plugin {1e3 * row['plugin_s']:8.1f} ms, ratio {row['ratio']:.3f}"
        )
    print(
        f"A waiting request of {waiting['length_tokens']:,} tokens adds per step: "
        f"stock {waiting['stock_ms']:.2f} ms, plugin {waiting['plugin_ms']:.3f} ms"
    )
    for claim in listed:
        print(f"  {claim['id']:26} {claim['value']}  (stock {claim['stock']})")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "claims": listed,
        "results": [asdict(r) for r in results + trace_results],
        "costs": cost_rows,
        "waiting": waiting,
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(results + trace_results, arguments.json.with_suffix(".png"))
    print(f"wrote {arguments.json} and {arguments.json.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Output tokens and system prompts hash equally in every worker.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
