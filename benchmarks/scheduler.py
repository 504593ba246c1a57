# SPDX-License-Identifier: Apache-2.0
"""What the order of the waiting queue is worth, and what it costs.

* engine: a real engine with a tiny MiMo, in virtual time (scheduled tokens): a burst of 80 requests
  over 6 shared prefixes in a small pool, and an open loop of 120. Every request must get the tokens
  that stock gives it.
* trace: a prefill node on the Mooncake conversation trace, vLLM's scheduler without a model.
* cost: CPU time added to a step while 256 requests of 64 thousand tokens wait.

Policies: stock vLLM (``fcfs``), SGLang's rules ``lpm`` and ``hrrn`` on vLLM's queue, the plugin.

Run: ``python -m benchmarks.scheduler [--quick] [--json PATH] [--seeds N] [--traces DIR]``
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import sched_engine, sched_trace
from benchmarks.sched_claims import claims
from benchmarks.sched_plot import plot

PARTS = ("engine", "trace", "cost")
POLICIES = ("fcfs", "lpm", "hrrn", "plugin")
TRACE_NAME = "mooncake_conversation_trace.jsonl"
#: offered load of the claims, and the other loads that are shown
CLAIM_LOAD, LOADS = 1.1, (0.9, 1.0, 1.1, 1.2)
#: where the parts of the trace start that the claims are checked on
TRACE_STARTS = (0, 4500, 9000)
#: seeds of the model-free twin of the engine's workloads
TWIN_SEEDS = 10
WORKERS = min(2, os.cpu_count() or 1)


def run_engine(
    seeds: list[int], policies: tuple[str, ...], *, real: bool = True
) -> list[sched_engine.Run]:
    """All policies on burst and open loop; raises when a request gets other tokens than stock's."""
    backend = sched_engine.RealEngine() if real else sched_engine.ModelFree()
    gaps = sched_engine.open_gaps(seeds)
    runs: list[sched_engine.Run] = []
    # Policy by policy: stock runs before anything of the plugin has touched the scheduler.
    for policy in policies:
        for workload in ("burst", "open"):
            for seed in seeds:
                run = sched_engine.run(backend, workload, policy, seed, gap_tokens=gaps[seed])
                runs.append(run)
    if real:
        check_tokens(runs)
    return runs


def check_tokens(runs: list[sched_engine.Run]) -> None:
    """Raise RuntimeError where a policy changed what a request was answered."""
    stock = {(r.workload, r.seed): r.outputs for r in runs if r.policy == "fcfs"}
    for run in runs:
        expected = stock[run.workload, run.seed]
        wrong = [
            i
            for i, pair in enumerate(zip(run.outputs, expected, strict=True))
            if pair[0] != pair[1]
        ]
        if wrong:
            raise RuntimeError(
                f"{run.policy} changed the tokens of {len(wrong)} of {len(expected)} requests "
                f"({run.workload}, seed {run.seed}; the first is {wrong[0]}: "
                f"{run.outputs[wrong[0]]} instead of {expected[wrong[0]]})"
            )


def trace_jobs(path: Path, requests: int, quick: bool) -> list[Any]:
    """Simulations of the trace part, as :func:`benchmarks.sched_trace.run` takes them."""
    wide = sched_trace.Node()
    runs = [(0, load, wide) for load in ((CLAIM_LOAD,) if quick else LOADS)]
    if not quick:
        runs += [(start, CLAIM_LOAD, wide) for start in TRACE_STARTS[1:]]
        runs += [(0, CLAIM_LOAD, sched_trace.Node(hybrid=True))]
    policies = ("fcfs", "plugin") if quick else POLICIES
    return [(str(path), start, requests, policies, node, load) for start, load, node in runs]


def engine_table(runs: list[sched_engine.Run]) -> Iterator[str]:
    """Lines on burst and open loop; every seed of the real engine, the twin in the mean."""
    stock = {(r.backend, r.workload, r.seed): r for r in runs if r.policy == "fcfs"}
    yield (
        f"{'':34}{'computed':>10}{'ratio':>7}   TTFT in k tokens of virtual time: "
        "mean, p50, p90, p99, max (mean, p90, max ratio)"
    )
    for run in runs:
        if run.backend != "engine":
            continue
        base = stock[run.backend, run.workload, run.seed]
        mine, stocks = run.stats(), base.stats()
        ratios = ", ".join(f"{mine[k] / stocks[k]:.2f}" for k in ("mean", "p90", "max"))
        yield (
            f"{run.workload:7} seed {run.seed}  {run.policy:18}{run.computed_tokens:>10,}"
            f"{run.computed_tokens / base.computed_tokens:>7.3f}   "
            + " ".join(f"{mine[k]:6.1f}" for k in ("mean", "p50", "p90", "p99", "max"))
            + f"  ({ratios})"
        )
    for workload in ("burst", "open"):
        for policy in POLICIES[1:]:
            pairs = [
                (r, stock[r.backend, workload, r.seed])
                for r in runs
                if (r.backend, r.workload, r.policy) == ("model-free", workload, policy)
            ]
            if not pairs:
                continue
            computed = [r.computed_tokens / base.computed_tokens for r, base in pairs]
            parts = [f"computed {sum(computed) / len(pairs):.3f} (worst {max(computed):.3f})"]
            for key in ("mean", "p90", "max"):
                values = [r.stats()[key] / base.stats()[key] for r, base in pairs]
                parts.append(f"{key} {sum(values) / len(pairs):.3f} (worst {max(values):.3f})")
            yield f"{workload:7} {len(pairs)} seeds, model-free, {policy:8} " + ", ".join(parts)


def trace_table(runs: list[sched_trace.TraceRun]) -> Iterator[str]:
    """Lines on the trace: seconds, and ratios against stock."""
    stock = {(r.first, r.load, r.hybrid): r.stats() for r in runs if r.policy == "fcfs"}
    yield (
        f"{'part, load, groups':30}{'policy':8}{'hit':>6} {'mean':>7} {'p90':>7} {'max':>7} | "
        f"{'long p90':>8} {'short p99':>9} | ratios: mean, max, long p90, short p99"
    )
    for run in runs:
        stats, base = run.stats(), stock[run.first, run.load, run.hybrid]
        ratios = [stats[k] / base[k] for k in ("mean", "max", "long_p90", "short_p99")]
        name = (
            f"{run.first}..{run.first + run.requests}, {run.load:.2f}, "
            f"{'hybrid' if run.hybrid else 'full'}"
        )
        yield (
            f"{name:30}{run.policy:8}{stats['hit']:6.3f} {stats['mean']:7.2f} {stats['p90']:7.2f} "
            f"{stats['max']:7.2f} | {stats['long_p90']:8.2f} {stats['short_p99']:9.2f} | "
            + " ".join(f"{ratio:6.3f}" for ratio in ratios)
        )


def cost_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines on CPU time."""
    for row in rows:
        yield (
            f"{row['waiting_requests']} waiting of {row['length_tokens']:,} tokens, "
            f"{row['groups']} prefixes, SWA retention {row['retention_interval']}: "
            f"stock {row['stock_ms']:.2f} ms a step; added "
            f"mean {row['added_mean_ms']:.3f}, p50 {row['added_p50_ms']:.3f}, "
            f"p99 {row['added_p99_ms']:.3f}, max {row['added_max_ms']:.3f} ms; "
            f"add_request {row['plugin_add_request_ms']:.3f} "
            f"(stock {row['stock_add_request_ms']:.3f}) ms"
        )


def engine_environment() -> None:
    """This process and its children: the engine in-process, offline, quiet."""
    from tools.server import engine_environment as environment

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}))


def main(argv: list[str] | None = None) -> int:
    """Run, print the tables, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/scheduler.json"))
    parser.add_argument("--quick", action="store_true", help="one seed, stock and plugin only")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0..N-1 of the engine part")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE_NAME}")
    parser.add_argument("--trace-requests", type=int, default=3000, help="length of each part")
    parser.add_argument("--only", choices=PARTS, action="append", help="leave the others out")
    arguments = parser.parse_args(argv)
    engine_environment()
    quick, parts = arguments.quick, arguments.only or list(PARTS)
    trace_path = None
    if "trace" in parts and arguments.traces is not None:
        trace_path = arguments.traces / TRACE_NAME
        if not trace_path.is_file():
            parser.error(f"--traces {arguments.traces}: there is no {TRACE_NAME} in it")

    started = time.monotonic()
    seeds = list(range(1 if quick else arguments.seeds))
    engine_policies = ("fcfs", "plugin") if quick else POLICIES
    engine_runs: list[sched_engine.Run] = []
    trace_runs: list[sched_trace.TraceRun] = []
    # Fresh processes: vLLM keeps one configuration per process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        futures = []
        if "engine" in parts:
            futures.append(pool.submit(run_engine, seeds, engine_policies))
            twin = list(range(2 if quick else TWIN_SEEDS))
            futures.append(pool.submit(run_engine, twin, POLICIES, real=False))
        jobs = [] if trace_path is None else trace_jobs(trace_path, arguments.trace_requests, quick)
        trace_futures = [pool.submit(sched_trace.run, job) for job in jobs]
        for future in futures:
            engine_runs += future.result()
        for trace_future in trace_futures:
            trace_runs += trace_future.result()
    cost_rows: list[dict[str, Any]] = []
    if "cost" in parts:
        # After the pool has ended, so that nothing of ours runs beside what is timed.
        from benchmarks.sched_cost import DRIVES, step_cpu

        size = {"steps": 140, "warm_up": 60, "repeats": 1} if quick else {}
        for groups, interval in DRIVES[:1] if quick else DRIVES:
            cost_rows.append(step_cpu(groups, interval, **size))

    how = "python -m benchmarks.scheduler" + (" --quick" if quick else "")
    if trace_path is not None:
        how += " --traces DIR"
    listed = claims(engine_runs, trace_runs, cost_rows, how, CLAIM_LOAD)
    if engine_runs:
        print("Real engine, virtual time; every request got stock's tokens")
        print("\n".join(engine_table(engine_runs)))
    if trace_runs:
        print("\nConversation trace, prefill node, seconds of virtual time")
        print("\n".join(trace_table(trace_runs)))
    elif "trace" in parts:
        print("\nConversation trace: left out, and with it its claims (--traces DIR runs it)")
    if cost_rows:
        print("\nCPU time")
        print("\n".join(cost_table(cost_rows)))
    print()
    for claim in listed:
        worst = f", worst {claim['worst']}" if claim.get("worst") is not None else ""
        print(f"  {claim['id']:24} {claim['value']}  (stock {claim['stock']}{worst})")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "claims": listed,
        "engine": [run.document() for run in engine_runs],
        "trace": [run.document() for run in trace_runs],
        "cost": cost_rows,
        "seconds": round(time.monotonic() - started, 1),
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if engine_runs or trace_runs:
        plot(engine_runs, trace_runs, CLAIM_LOAD, arguments.json.with_suffix(".png"))
    print(f"wrote {arguments.json} in {document['seconds']} s")
    return 0


if __name__ == "__main__":
    # Prefix groups and hashes are the same in every worker.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
