# SPDX-License-Identifier: Apache-2.0
"""A prefill node on a recorded request trace: vLLM's scheduler without a model, on a virtual clock.

Each request asks for one token. A step takes a fixed time, plus for each of its tokens the time of
all that is linear in the model and of the full attention over what lies before the token. Requests
come when the trace says, with time stretched so that stock vLLM is offered the load asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.sched_engine import quantile, ttft_stats
from benchmarks.workloads import (
    TraceRequest,
    block_id_prompt,
    read_trace,
    unlimited_cache_uncached_tokens,
)

#: attended keys at which full attention costs as much as all the rest (MiMo-V2-Flash)
PARITY_TOKENS = 81_000.0
#: prefill speed of the node without full attention, and what a step costs beside its tokens
TOKENS_PER_S = 40_000.0
STEP_S = 0.01
POOL_TOKENS = 2_560_000
MAX_BATCHED_TOKENS, MAX_REQUESTS = 8192, 64
MAX_MODEL_LEN = 1 << 18
#: share of requests, by uncached tokens, that are called long
LONG_SHARE = 0.1


@dataclass(frozen=True)
class Node:
    """What the trace runs on.

    Attributes:
        hybrid: KV groups and block sizes of MiMo-V2 (10 full and 60 SWA layers); otherwise full
            attention only, in blocks of the trace's size, which is what hits are counted in.
        pool_tokens: tokens of full-attention KV that the pool would hold if it held nothing else.
    """

    hybrid: bool = False
    pool_tokens: int = POOL_TOKENS
    tokens_per_s: float = TOKENS_PER_S
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    max_requests: int = MAX_REQUESTS

    def simulator(self) -> Any:
        """An empty node."""
        from benchmarks.sim import Geometry, Simulator

        if self.hybrid:
            # As in real pools, the SWA groups take their blocks out of the same pool.
            geometry = Geometry(full_block_tokens=512, swa_block_tokens=256)
        else:
            geometry = Geometry(swa_groups=0, full_block_tokens=512)
        return Simulator(
            self.pool_tokens // geometry.full_block_tokens,
            geometry=geometry,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_requests=self.max_requests,
            watch_lookups=False,
        )


@dataclass
class TraceRun:
    """One policy on one piece of a trace. Times in seconds, by request in order of arrival."""

    policy: str
    first: int
    requests: int
    load: float
    stretch: float
    hybrid: bool
    prompt_tokens: int
    computed_tokens: int
    preemptions: int
    busy_s: float
    makespan_s: float
    ttft_s: list[float] = field(repr=False)
    wait_s: list[float] = field(repr=False)
    computed: list[int] = field(repr=False)
    long: list[bool] = field(repr=False)

    def of_class(self, long: bool) -> list[float]:
        """TTFT in seconds of the long, or of the other requests."""
        return [t for t, is_long in zip(self.ttft_s, self.long, strict=True) if is_long == long]

    def document(self) -> dict[str, Any]:
        """What goes into the JSON file: a summary, not every request."""
        lists = ("ttft_s", "wait_s", "computed", "long")
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in lists}
        return out | {"stats": {name: round(value, 3) for name, value in self.stats().items()}}

    def stats(self) -> dict[str, float]:
        """What the table shows."""
        long, short = self.of_class(True), self.of_class(False)
        return {
            "hit": 1 - self.computed_tokens / self.prompt_tokens,
            "wait_mean": sum(self.wait_s) / len(self.wait_s),
            **ttft_stats(self.ttft_s),
            "long_p50": quantile(long, 0.5),
            "long_p90": quantile(long, 0.9),
            "short_p50": quantile(short, 0.5),
            "short_p99": quantile(short, 0.99),
        }


@lru_cache(maxsize=2)
def trace_part(path: Path, first: int, count: int) -> tuple[list[TraceRequest], list[bool]]:
    """Requests of a trace, and which of them are long: in the top decile of tokens to compute.

    To compute is what a cache without limit would leave, so the classes don't depend on a policy.
    """
    requests = list(read_trace(path, first + count))[first:]
    uncached = unlimited_cache_uncached_tokens(requests)
    limit = quantile(uncached, 1 - LONG_SHARE)
    return requests, [tokens >= limit for tokens in uncached]


def step_s(node: Node, chunks: Sequence[tuple[int, int]]) -> float:
    """Seconds of a step with ``(context tokens, new tokens)`` chunks."""
    tokens = sum(new + new * (before + new / 2) / PARITY_TOKENS for before, new in chunks)
    return STEP_S + tokens / node.tokens_per_s


def replay(
    requests: Sequence[TraceRequest],
    long: Sequence[bool],
    policy: str,
    node: Node,
    *,
    stretch: float,
    first: int = 0,
    load: float = 0.0,
    changes: dict[str, Any] | None = None,
) -> TraceRun:
    """Serve the requests under one policy, from an empty cache."""
    from benchmarks.sched_policies import Seam, use

    simulator = node.simulator()
    scheduler = simulator.scheduler
    seam = Seam(scheduler)
    now = busy = 0.0
    use(policy, seam, parity_tokens=PARITY_TOKENS, clock_s=lambda: now, changes=changes)
    start_ms = requests[0].timestamp_ms
    arrivals = [(r.timestamp_ms - start_ms) / 1000 * stretch for r in requests]
    count = len(requests)
    ttft, wait, computed = [0.0] * count, [0.0] * count, [0] * count
    submitted = 0
    while submitted < count or scheduler.requests:
        if submitted < count and not scheduler.requests:
            now = max(now, arrivals[submitted])
        while submitted < count and arrivals[submitted] <= now:
            simulator.submit(block_id_prompt(requests[submitted]), 1)
            submitted += 1
        scheduled = scheduler.schedule()
        if not scheduled.num_scheduled_tokens:
            raise RuntimeError(f"{policy}: nothing was scheduled, {len(scheduler.requests)} wait")
        for new in scheduled.scheduled_new_reqs:
            index = int(new.req_id)
            wait[index] = now - arrivals[index]
            computed[index] = requests[index].input_tokens - new.num_computed_tokens
        chunks = []
        for request_id, new_tokens in scheduled.num_scheduled_tokens.items():
            # The scheduler has moved the request on already.
            after = scheduler.requests[request_id].num_computed_tokens
            chunks.append((after - new_tokens, new_tokens))
        seconds = step_s(node, chunks)
        now += seconds
        busy += seconds
        for request_id in simulator.update(scheduled):
            ttft[int(request_id)] = now - arrivals[int(request_id)]
    return TraceRun(
        policy,
        first,
        count,
        load,
        stretch,
        node.hybrid,
        sum(r.input_tokens for r in requests),
        sum(computed),
        seam.preemptions,
        busy,
        now,
        ttft,
        wait,
        computed,
        list(long),
    )


def stretch_for_load(
    requests: Sequence[TraceRequest], long: Sequence[bool], node: Node, load: float
) -> float:
    """Factor on the trace's times at which stock's work is ``load`` times the time of arrivals.

    Stock serves in order of arrival, so what it computes hardly depends on when requests come.
    """
    busy = replay(requests, long, "fcfs", node, stretch=0.0).busy_s
    arrivals_s = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    return busy / load / arrivals_s


def run(job: tuple[str, int, int, tuple[str, ...], Node, float]) -> list[TraceRun]:
    """Simulations of (trace, first request, requests, policies, node, load), one per policy."""
    path, first, count, policies, node, load = job
    requests, long = trace_part(Path(path), first, count)
    stretch = stretch_for_load(requests, long, node, load)
    return [
        replay(requests, long, policy, node, stretch=stretch, first=first, load=load)
        for policy in policies
    ]
