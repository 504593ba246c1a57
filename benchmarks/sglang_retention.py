# SPDX-License-Identifier: Apache-2.0
"""How much of what SGLang has computed before it computes again, stock and plugin.

Model-free: SGLang's radix cache with its tree core in Rust, its pools and allocators, driven by the
seeded workloads of ``benchmarks/retention.py`` at three sizes of the pools. The bound is a cache
whose pool for sliding windows is as large as the other one, with a checkpoint at nearly every page.
Beside that: prefixes of a cached prompt, and a hot prefix in L3 under cold traffic.

Run: ``.venv-sglang/bin/python -m benchmarks.sglang_retention [--quick] [--json PATH] [--seeds N]``
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.sglang_cases import CASES, case_hits
from benchmarks.sglang_churn import STEPS, churn
from benchmarks.sglang_claims import POLICIES, Result, claims, ratios, table
from benchmarks.sglang_pools import Pools, Store
from benchmarks.sglang_store import Kept, keep_hot, room_bytes
from benchmarks.workloads import MIX, sessions

#: pools of the full run, tokens of full attention and of sliding windows
POOLS = ((150_000, 19_200), (150_000, 8_000), (64_000, 8_000))
#: the section kv of the plugin; the workloads' messages begin with token 1
PLUGIN: dict[str, Any] = {"message_start_token_ids": [1]}
#: and with checkpoints a page apart as far as windows reach
BOUND: dict[str, Any] = {**PLUGIN, "ladder_min_tokens": 16, "ladder_growth": 0.01}
SETTINGS: dict[str, dict[str, Any] | None] = {"stock": None, "plugin": PLUGIN, "bound": BOUND}


def run_one(job: tuple[int, int, str, int]) -> Result:
    """Simulate one (full pool, sliding-window pool, policy, seed)."""
    from benchmarks.sglang_sim import SglangSimulator, play

    full_tokens, swa_tokens, policy, seed = job
    pools = Pools(full_tokens=full_tokens, swa_tokens=swa_tokens)
    if policy == "bound":
        pools = replace(pools, swa_tokens=full_tokens)
    totals = play(SglangSimulator(pools, SETTINGS[policy]), sessions(MIX, seed), seed=seed)
    return Result(
        full_tokens=full_tokens,
        swa_tokens=swa_tokens,
        policy=policy,
        seed=seed,
        requests=totals.requests,
        prompt_tokens=totals.prompt_tokens,
        recomputed_tokens=totals.recomputed_tokens,
        retractions=totals.retractions,
    )


def run_cases(policy: str) -> dict[str, list[int]]:
    """Hits of all cases."""
    return {name: case_hits(name, SETTINGS[policy]) for name in CASES}


def run_store(seeds: range) -> list[Kept]:
    """The hot prefix of each seed, stock and plugin, in stores of the same size."""
    kept = []
    with tempfile.TemporaryDirectory() as name:
        room = room_bytes(PLUGIN, Path(name) / "size")
        for seed in seeds:
            for policy in ("stock", "plugin"):
                store = Store(Path(name) / f"{policy}{seed}", room)
                kept.append(keep_hot(policy, SETTINGS[policy], seed, store))
    return kept


def plot(results: list[Result], path: Path) -> None:
    """Bars of recomputed tokens per pool and policy; every seed is a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pools = list(dict.fromkeys(r.pool for r in results))
    colours = dict(zip(POLICIES, ("#9aa5b1", "#d9480f", "#2f9e44"), strict=True))
    figure, axes = pyplot.subplots(1, len(pools), figsize=(3.4 * len(pools), 3.8), squeeze=False)
    for axis, pool in zip(axes[0], pools, strict=True):
        for x, policy in enumerate(POLICIES):
            values = [r.recomputed_pct for r in results if (r.pool, r.policy) == (pool, policy)]
            height = sum(values) / len(values)
            axis.bar(x, height, color=colours[policy])
            axis.plot([x] * len(values), values, "k.", markersize=4)
            axis.text(x, height, f"{height:.1f}", ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(POLICIES)), POLICIES)
        axis.set_title(f"{pool[0]:,} full, {pool[1]:,} sliding-window", fontsize=10)
        axis.set_ylabel("prompt tokens computed again, %")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_retention")
    parser.add_argument("--json", type=Path, default=Path("out/bench/sglang_retention.json"))
    parser.add_argument("--quick", action="store_true", help="one seed of one pool")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0..N-1 (default 5)")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)

    pools = POOLS[1:2] if arguments.quick else POOLS
    seeds = range(1 if arguments.quick else arguments.seeds)
    jobs = [(*pool, policy, seed) for pool in pools for policy in POLICIES for seed in seeds]
    results: list[Result] = []
    with ProcessPoolExecutor(arguments.workers) as executor:
        kept_jobs = executor.submit(run_store, seeds)
        case_jobs = {policy: executor.submit(run_cases, policy) for policy in ("stock", "plugin")}
        churn_job = None if arguments.quick else executor.submit(churn, 0, STEPS, PLUGIN)
        for done, result in enumerate(executor.map(run_one, jobs), 1):
            results.append(result)
            print(f"\r{done}/{len(jobs)} simulations", end="", file=sys.stderr, flush=True)
        kept = kept_jobs.result()
        hits = {policy: job.result() for policy, job in case_jobs.items()}
        walked = churn_job.result() if churn_job is not None else None
    print(file=sys.stderr)

    how = "python -m benchmarks.sglang_retention" + (" --quick" if arguments.quick else "")
    listed = claims(results, hits, kept, how)
    print("Prompt tokens computed again, percent: mean over seeds (range)")
    print("\n".join(table(results)))
    for name in CASES:
        print(f"{name}: stock {hits['stock'][name]}, plugin {hits['plugin'][name]}")
    if walked is not None:
        print(f"random walk: {walked.steps:,} steps, no slot lost; {walked}")
    for claim in listed:
        print(f"  {claim['id']:22} {claim['value']}  (stock {claim['stock']})")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "claims": listed,
        "results": [asdict(r) for r in results],
        "ratios": {f"{full}/{swa}": found for (full, swa), found in ratios(results).items()},
        "store": [asdict(k) for k in kept],
        "walk": asdict(walked) if walked is not None else None,
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(results, arguments.json.with_suffix(".png"))
    print(f"wrote {arguments.json} and {arguments.json.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
