# SPDX-License-Identifier: Apache-2.0
"""What routing by true residency is worth with real engines, and what it costs.

Real ``vllm serve`` processes with a tiny MiMo on the CPU, each with a small KV pool, answer one
replay (agents with shared system prompts, chats that grow, forks; Poisson arrivals) through
round-robin, through each policy of vllm-router and sglang-router from PyPI, and through
``mimo router``. Caches are emptied before each run. What was computed and hit is read from the
workers, so no router is asked how well it did.

Then the CPU time of ``mimo router`` alone: prompts of 8 KB, which it tokenises, routes and relays,
while it follows the workers' events. These workers compute nothing (``router_standin``).

Run: ``python -m benchmarks.router_real [--quick] [--json PATH] [--seeds N] [--policy NAME …]``
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import router_peers
from benchmarks.router_peers import SGLANG_POLICIES, VLLM_POLICIES, RouterServer, running
from benchmarks.router_replay import QUICK, Answer, Session, Sizes, Turn, plan, replay, words
from benchmarks.router_workers import BLOCK_TOKENS, Counters, TinyWorker, tiny_workers
from tools import tiny_mimo
from tools.server import ServerError

OURS = "mimo router"
ROUND_ROBIN = "vllm-router round_robin"
PEERS = (
    *(f"vllm-router {policy}" for policy in VLLM_POLICIES),
    *(f"sglang-router {policy}" for policy in SGLANG_POLICIES),
)
QUICK_PEERS = (ROUND_ROBIN, "vllm-router consistent_hash", "vllm-router kv_aware")
WARM_S = 30.0
IDLE_SHARE = 0.05  # of a core
PROMPT_BYTES = 8192


@dataclass(frozen=True)
class Run:
    """One replay through one router. Lists are by worker."""

    policy: str
    seed: int
    answers: list[Answer]
    workers: list[Counters]
    cpu_s: float
    seconds: float

    @property
    def hit_tokens(self) -> float:
        """Of all prompts."""
        return sum(worker.hit_tokens for worker in self.workers)

    @property
    def load_ratio(self) -> dict[str, float]:
        """Of the worker that has most, over the mean."""
        tokens = [worker.computed_tokens for worker in self.workers]
        requests = [worker.requests for worker in self.workers]
        return {
            name: max(values) * len(values) / max(1.0, sum(values))
            for name, values in (("tokens", tokens), ("requests", requests))
        }

    @property
    def errors(self) -> list[str]:
        """What failed."""
        return [answer.error for answer in self.answers if answer.error is not None]

    def stats(self) -> dict[str, float]:
        """The figures that are shown: tokens, seconds, and router's CPU time per request in ms."""
        ordered = sorted(a.ttft_s for a in self.answers if a.ttft_s is not None) or [float("nan")]
        at = {q: ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99)}
        prompt_tokens = sum(worker.prompt_tokens for worker in self.workers)
        return {
            "prompt_tokens": prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "computed_tokens": prompt_tokens - self.hit_tokens,
            "hit": self.hit_tokens / max(1.0, prompt_tokens),
            "ttft_mean_s": sum(ordered) / len(ordered),
            "ttft_p50_s": at[0.5],
            "ttft_p90_s": at[0.9],
            "ttft_p99_s": at[0.99],
            "load_tokens": self.load_ratio["tokens"],
            "load_requests": self.load_ratio["requests"],
            "cpu_ms": self.cpu_s * 1e3 / max(1, len(self.answers)),
        }


def command_of(policy: str, workers: Sequence[TinyWorker], model: str) -> list[str]:
    """What starts a router."""
    told = [worker.as_worker for worker in workers]
    if policy == OURS:
        command = [sys.executable, "-m", "mimo_plugin.cli", "router", "--model", model]
        for worker in told:
            command += ["--worker", f"{worker.url},events={worker.events},replay={worker.replay}"]
        return command
    name, _, rest = policy.partition(" ")
    programs = router_peers.install()
    if name == "vllm-router":
        return router_peers.vllm_router(programs, rest, told, model, BLOCK_TOKENS)
    return router_peers.sglang_router(programs, rest, told)


def warm(router: RouterServer) -> None:
    """Wait until requests pass; raises ServerError."""
    end_s = time.monotonic() + WARM_S
    body = {"messages": [{"role": "user", "content": "bo"}], "max_tokens": 1}
    passed = 0
    while passed < 3:
        try:
            router.post("/v1/chat/completions", body, timeout_s=10.0)
            passed += 1
        except (OSError, ServerError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.3)


def settle(router: RouterServer) -> None:
    """Wait until it has read what the workers told before it came, and is idle."""
    end_s, last_s = time.monotonic() + WARM_S, router.cpu_s()
    while True:
        time.sleep(1.0)
        last_s, before_s = router.cpu_s(), last_s
        if last_s - before_s < IDLE_SHARE:
            return
        if time.monotonic() > end_s:
            raise ServerError(f"{router.name}: still busy after {WARM_S:.0f} s")


def one_run(
    policy: str, seed: int, sessions: list[Session], workers: Sequence[TinyWorker], logs: Path
) -> Run:
    """Empty the caches, start the router, replay."""
    model = workers[0].model
    for worker in workers:
        worker.forget()
    log = logs / f"{policy.replace(' ', '-')}-{seed}.log"
    with running(command_of(policy, workers, model), model, log, policy) as router:
        warm(router)
        settle(router)
        before, cpu_s = [worker.counters() for worker in workers], router.cpu_s()
        started_s = time.monotonic()
        answers = replay(router.base_url, model, sessions)
        seconds = time.monotonic() - started_s
        done = [w.counters().since(b) for w, b in zip(workers, before, strict=True)]
        return Run(policy, seed, answers, done, router.cpu_s() - cpu_s, seconds)


def cpu_ms(model: str, folder: Path, logs: Path, requests: int) -> dict[str, float]:
    """CPU time of ``mimo router`` per request of 8 KB, before workers that compute nothing.

    ``ms``: turns of chats, whose beginnings it has seen; ``unrelated_ms``: prompts of which no two
    have anything in common. Both with the events that follow.
    """
    rnd = random.Random(0)
    systems = [words(rnd, 1250) for _ in range(4)]
    chats = [
        Session(
            f"chat{number}",
            number * 0.15,
            systems[number % 4],
            tuple(Turn(0.3, words(rnd, 150), 8) for _ in range(4)),
        )
        for number in range(requests // 4)
    ]
    single = [
        Session(f"cpu{number}", number * 0.05, "", (Turn(0.0, words(rnd, PROMPT_BYTES // 5), 8),))
        for number in range(requests)
    ]
    found: dict[str, float] = {"requests": requests}
    with ExitStack() as started:
        command = [sys.executable, "-m", "mimo_plugin.cli", "router", "--model", model]
        command += ["--hash-block-tokens", str(BLOCK_TOKENS)]
        for number in range(2):
            events = f"ipc://{folder / f'standin{number}'}"
            standin = [sys.executable, "-m", "benchmarks.router_standin", model, events]
            name = f"standin{number}"
            worker = started.enter_context(running(standin, model, logs / f"{name}.log", name))
            command += ["--worker", f"{worker.base_url},events={events}"]
        router = started.enter_context(running(command, model, logs / "cpu.log", OURS))
        warm(router)
        settle(router)
        for key, sessions in (("ms", chats), ("unrelated_ms", single)):
            cpu_s = router.cpu_s()
            answers = replay(router.base_url, model, sessions)
            found[key] = (router.cpu_s() - cpu_s) * 1e3 / len(answers)
            failed = [answer.error for answer in answers if answer.error]
            if failed:
                raise ServerError(f"{OURS}: {len(failed)} requests failed: {failed[0]}")
            tokens = sum(answer.prompt_tokens for answer in answers)
            found[key.replace("ms", "prompt_tokens")] = tokens / len(answers)
    return found


def claims(runs: list[Run], cpu: dict[str, float], how: str) -> list[dict[str, Any]]:
    """Ratios of ours and others, by seed and their mean; only what was run."""
    seeds = sorted({run.seed for run in runs})
    by = {(run.policy, run.seed): run for run in runs}
    others = sorted({run.policy for run in runs} - {OURS})
    unit_hit = "hit tokens, ours over"

    def entry(
        name: str, per_seed: list[float], stock: float | None, bound: float, unit: str
    ) -> Any:
        return {
            "id": name,
            "value": round(sum(per_seed) / len(per_seed), 3),
            "stock": stock,
            "bound": bound,
            "unit": unit,
            "seeds": seeds,
            "per_seed": [round(value, 3) for value in per_seed],
            "how": how,
        }

    def hits(policy: str) -> list[float]:
        return [by[policy, seed].hit_tokens for seed in seeds]

    ours, out = hits(OURS), []
    if ROUND_ROBIN in others:
        ratios = [mine / max(1.0, its) for mine, its in zip(ours, hits(ROUND_ROBIN), strict=True)]
        out.append(entry("hit_vs_round_robin", ratios, 1.0, 1.25, f"{unit_hit} round-robin's"))
    peers = [policy for policy in others if policy != ROUND_ROBIN]
    if peers:
        best = max(peers, key=lambda policy: sum(hits(policy)))
        ratios = [mine / max(hits(p)[i] for p in peers) for i, mine in enumerate(ours)]
        claim = entry("hit_vs_best_peer", ratios, 1.0, 1.0, f"{unit_hit} the best of each seed")
        shares = {policy: round(sum(ours) / max(1.0, sum(hits(policy))), 3) for policy in peers}
        out.append(claim | {"best": best, "others": shares})
    loads = [by[OURS, seed].load_ratio for seed in seeds]
    text = "prompt tokens computed by the busiest worker, or requests, over the mean of all workers"
    claim = entry("max_over_mean_load", [max(load.values()) for load in loads], None, 1.25, text)
    out.append(claim | {"tokens": [round(load["tokens"], 3) for load in loads]})
    text = "ms of CPU of one router process per chat turn of 8 KB: tokens, decision, relay, events"
    out.append(entry("router_cpu_ms_per_request", [cpu["ms"]], None, 3.0, text) | cpu)
    out[-1]["replay_ms"] = [round(by[OURS, seed].stats()["cpu_ms"], 2) for seed in seeds]
    return out


def plot(runs: list[Run], path: Path) -> None:
    """Hit and TTFT of each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = sorted({run.policy for run in runs}, key=lambda policy: (policy != OURS, policy))
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 0.6 + 0.34 * len(policies)), sharey=True)
    shown = {
        "hit": ("prompt tokens hit, share", 1.0),
        "ttft_p90_s": ("TTFT p90, ms", 1e3),
        "load_tokens": ("computed tokens, busiest over mean", 1.0),
    }
    for axis, (key, (title, scale)) in zip(axes, shown.items(), strict=True):
        for row, policy in enumerate(reversed(policies)):
            values = [run.stats()[key] * scale for run in runs if run.policy == policy]
            colour = "tab:blue" if policy == OURS else "tab:gray"
            axis.barh(row, sum(values) / len(values), color=colour, alpha=0.75)
            axis.plot(values, [row] * len(values), "k.", ms=4)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(policies)), list(reversed(policies)), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show(run: Run) -> None:
    """One line."""
    stats = run.stats()
    print(
        f"{run.policy:32} seed {run.seed}  hit {stats['hit']:.3f}"
        f"  computed {stats['computed_tokens']:7.0f} of {stats['prompt_tokens']:7.0f}"
        f"  TTFT p50/p90/p99 {stats['ttft_p50_s'] * 1e3:4.0f}/{stats['ttft_p90_s'] * 1e3:4.0f}"
        f"/{stats['ttft_p99_s'] * 1e3:4.0f} ms"
        f"  max/mean tokens {stats['load_tokens']:.2f} requests {stats['load_requests']:.2f}"
        f"  CPU {stats['cpu_ms']:.2f} ms"
        + (f"  FAILED {len(run.errors)}: {run.errors[0]}" if run.errors else ""),
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_real", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/router_real.json"))
    parser.add_argument("--quick", action="store_true", help="two workers, few sessions and peers")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, help="3, or 2 with --quick")
    parser.add_argument("--blocks", type=int, default=300, help="of each worker's KV pool")
    parser.add_argument("--policy", action="append", choices=(OURS, *PEERS), help="only these")
    arguments = parser.parse_args(argv)
    started_s = time.monotonic()
    count = arguments.workers or (2 if arguments.quick else 3)
    if count < 2 or arguments.seeds < 1:
        parser.error("--workers: allowed: 2 or more; --seeds: 1 or more")
    seeds = range(1 if arguments.quick else arguments.seeds)
    policies = arguments.policy or [*(QUICK_PEERS if arguments.quick else PEERS), OURS]
    if any(policy != OURS for policy in policies):
        router_peers.install()
    logs = arguments.json.parent / "router_real.logs"
    logs.mkdir(parents=True, exist_ok=True)
    how = "python -m benchmarks.router_real" + (" --quick" if arguments.quick else "")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="mimo-rr-") as folder:
        model = tiny_mimo.make(Path(folder) / "model", tiny_mimo.TinyMiMo())
        with tiny_workers(model, count, logs=logs, blocks=arguments.blocks) as workers:
            print(f"{count} workers after {time.monotonic() - started_s:.0f} s", flush=True)
            for seed in seeds:
                sessions = plan(seed, QUICK if arguments.quick else Sizes())
                # Nobody is always the first or the last.
                for policy in policies[seed:] + policies[:seed]:
                    runs.append(one_run(policy, seed, sessions, workers, logs))
                    show(runs[-1])
        # The workers are gone: on shared cores they would slow down what is measured.
        cpu: dict[str, float] = {}
        if OURS in policies:
            cpu = cpu_ms(str(model), Path(folder), logs, 60 if arguments.quick else 200)
    listed = claims(runs, cpu, how) if OURS in policies else []
    for claim in listed:
        print(f"  {claim['id']:28} {claim['value']}  (bound {claim['bound']}) {claim['per_seed']}")
    document = {
        "claims": listed,
        "workers": count,
        "blocks": arguments.blocks,
        "runs": [
            {
                "policy": run.policy,
                "seed": run.seed,
                "requests": len(run.answers),
                "seconds": round(run.seconds, 1),
                "errors": run.errors,
                "by_worker": [asdict(worker) for worker in run.workers],
                **run.stats(),
            }
            for run in runs
        ],
        "seconds": round(time.monotonic() - started_s, 1),
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(runs, arguments.json.with_suffix(".png"))
    failed = sum(len(run.errors) for run in runs)
    print(f"wrote {arguments.json} in {document['seconds']} s; {failed} requests failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
