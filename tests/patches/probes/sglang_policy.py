# SPDX-License-Identifier: Apache-2.0
"""Register schedule policies and let SGLang's scheduler make and use them."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from array import array
from types import SimpleNamespace
from typing import Any

BUILT_IN = ("fcfs", "lof", "lpm", "hrrn", "dfs-weight", "shortest-prefill-first")
WAITING = 200
"""Requests; SGLang turns cache-aware policies off above 128."""


def accepted(name: str) -> bool:
    """Whether the command line takes the name."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = parser.parse_args(["--model-path=dummy", f"--schedule-policy={name}"])
        except SystemExit:
            return False
    return bool(found.schedule_policy == name)


def make(name: str, cache: Any) -> Any:
    """The policy object that a scheduler makes for itself."""
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = SimpleNamespace(
        schedule_policy=name,
        tree_cache=cache,
        enable_hierarchical_cache=False,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
    )
    Scheduler.init_schedule_policy(scheduler)
    return scheduler.policy


def queue(count: int) -> list[Any]:
    """Requests of random lengths that share prefixes of a few."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    rng = random.Random(3)
    return [
        Req(
            rid=f"{number:03}",
            origin_input_text="",
            origin_input_ids=array("q", [number % 4] * 64 + [rng.randrange(99)] * number),
            sampling_params=SamplingParams(max_new_tokens=rng.randrange(1, 50)),
        )
        for number in rng.sample(range(count), count)
    ]


def order(policy: Any, count: int) -> list[str]:
    """The waiting queue after the policy has sorted it."""
    waiting = queue(count)
    policy.calc_priority(waiting)
    return [req.rid for req in waiting]


def registered(cache: Any) -> dict[str, Any]:
    """What becomes of policies from outside SGLang's tree."""
    from sglang.srt.managers import schedule_policy

    if not hasattr(schedule_policy, "register_schedule_policy"):
        return {"registry": False, "accepted": accepted("by-length")}

    class ByLength(schedule_policy.RegisteredSchedulePolicy):
        cache_aware = False

        def sort(self, waiting_queue: list[Any], running_batch: Any, processed: int) -> None:
            waiting_queue.sort(key=lambda req: len(req.origin_input_ids))

    class ByLengthAlways(ByLength):
        scales = True

    class ByHit(schedule_policy.RegisteredSchedulePolicy):
        scales = True

        def sort(self, waiting_queue: list[Any], running_batch: Any, processed: int) -> None:
            waiting_queue.sort(key=lambda req: -req.num_matched_prefix_tokens)

    before = accepted("by-length")
    register = schedule_policy.register_schedule_policy
    for name, cls in (
        ("by-length", ByLength),
        ("by-length-always", ByLengthAlways),
        ("by-hit", ByHit),
    ):
        register(name, cls)
    refused = []
    for name in ("by-length", "lpm", " "):
        try:
            register(name, ByLength)
        except ValueError:
            refused.append(name)
    by_hit = make("by-hit", cache)
    waiting = queue(WAITING)
    by_hit.calc_priority(waiting)
    hits = [req.num_matched_prefix_tokens for req in waiting]
    return {
        "registry": True,
        "accepted": [before, accepted("by-length"), accepted("no-such-policy")],
        "refused": refused,
        "short": order(make("by-length", cache), 100),
        "fallback": order(make("by-length", cache), WAITING),
        "scales": order(make("by-length-always", cache), WAITING),
        "hits": hits,
        "knows_hits": by_hit.waiting_queue_prefix_matched(waiting),
    }


def measure() -> dict[str, Any]:
    """Orders of SGLang's own policies, and what a registered one does."""
    from benchmarks.sglang_sim import Pools, SglangSimulator

    simulator = SglangSimulator(Pools(), None)
    for prefix in range(2):  # requests of two of the four prefixes have a hit
        simulator.submit(0, [prefix] * 64 + [5000 + prefix] * 200, [1])
        while simulator.waiting or simulator.running or simulator.chunked:
            simulator.step()
    cache = simulator.cache
    own = {name: order(make(name, cache), count) for name in BUILT_IN for count in (100,)}
    arrival = [req.rid for req in queue(WAITING)]
    return {"own": own, "arrival": arrival, **registered(cache)}
