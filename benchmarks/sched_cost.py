# SPDX-License-Identifier: Apache-2.0
"""CPU time that the scheduler feature adds to a step while many long requests wait.

Model-free, at the geometry of MiMo-V2.5-Pro. The plugin runs first and its admissions are noted;
then stock vLLM runs through the same admissions, so that both schedule, allocate and evict the same
in every step and what differs is the feature. Times are CPU seconds of the scheduling thread in
``schedule()`` and ``update_from_output()``, where the pool's events come from, and of
``add_request()`` apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

WAITING, LENGTH_TOKENS = 256, 65_536
SHARED_TOKENS = 49_152
OUTPUT_TOKENS = 64
RUNNING = 12
MAX_BATCHED_TOKENS = 8192
#: requests of this length whose full-attention KV fits the pool
POOL_REQUESTS = 20
#: (prefixes that requests share, SWA retention): few that stay warm; and more than the pool holds,
#: whose full-attention KV often outlives the SWA KV that a hit needs
DRIVES = ((8, 8192), (24, 0))
PARITY_TOKENS = 81_000.0
STEP_S = 0.4


@dataclass
class Steps:
    """CPU seconds by step, and of each ``add_request`` call; who was admitted in each step."""

    step_s: list[float] = field(default_factory=list)
    add_s: list[float] = field(default_factory=list)
    admitted: list[list[str]] = field(default_factory=list)
    hit_tokens: int = 0


@lru_cache(maxsize=2048)
def _hashes(name: str, count: int) -> list[bytes]:
    return [blake2b(f"{name}.{i}".encode(), digest_size=32).digest() for i in range(count)]


class _Drive:
    """A scheduler with ``waiting`` requests of ``length_tokens``; each one admitted is replaced."""

    def __init__(
        self,
        waiting: int,
        length_tokens: int,
        *,
        groups: int,
        retention_interval: int,
        plugin: bool,
    ) -> None:
        from benchmarks.sched_policies import Seam, use
        from benchmarks.sim import Geometry, Simulator

        self.geometry = Geometry()
        self.waiting = waiting
        self.groups = groups
        self.length_tokens = length_tokens
        self.shared_tokens = length_tokens * SHARED_TOKENS // LENGTH_TOKENS
        per_request = length_tokens // self.geometry.full_block_tokens
        swa = self.geometry.swa_groups * (MAX_BATCHED_TOKENS // self.geometry.swa_block_tokens)
        self.simulator = Simulator(
            POOL_REQUESTS * per_request + 2 * swa,
            geometry=self.geometry,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=2 * length_tokens,
            max_requests=RUNNING,
            retention_interval=retention_interval,
            watch_lookups=False,
        )
        self.scheduler = self.simulator.scheduler
        self.seam = Seam(self.scheduler)
        self.now_s = 0.0
        self.steps = Steps()
        self._submitted = 0
        # With its output a request stays within the length, so that no lane touches its chunks.
        self._prompt = list(range(length_tokens - OUTPUT_TOKENS))
        use(
            "plugin" if plugin else "fcfs",
            self.seam,
            parity_tokens=PARITY_TOKENS,
            clock_s=lambda: self.now_s,
            changes={"max_wait_s": 1e9},
        )

    def _hasher(self, index: int) -> Any:
        """Block hashes without hashing: shared within a group up to a point, then the request's."""
        tokens = self.geometry.hash_block_tokens
        shared = self.shared_tokens // tokens
        most = self.length_tokens // tokens
        # Groups don't come in turn, or every arrival would find the same number of equals waiting.
        group = index * index // 3 % self.groups

        def hashes(request: Any) -> list[bytes]:
            all_hashes = _hashes(f"g{group}", shared) + _hashes(f"r{index}", most - shared)
            return all_hashes[len(request.block_hashes) : request.num_tokens // tokens]

        return hashes

    def fill(self) -> None:
        """Submit until enough wait."""
        while len(self.scheduler.waiting) < self.waiting:
            hasher = self._hasher(self._submitted)
            self._submitted += 1
            add = self.scheduler.add_request

            def timed(request: Any, add: Any = add) -> None:
                started = time.thread_time()
                add(request)
                self.steps.add_s.append(time.thread_time() - started)

            self.scheduler.add_request = timed
            try:
                self.simulator.submit(self._prompt, OUTPUT_TOKENS, block_hasher=hasher)
            finally:
                del self.scheduler.add_request

    def step(self, admit: list[str] | None) -> None:
        """One timed step; stock is made to admit exactly ``admit``."""
        scheduler = self.scheduler
        if admit is not None:
            queue = scheduler.waiting
            first = [scheduler.requests[request_id] for request_id in admit]
            queue.remove_requests(first)
            queue.extendleft(reversed(first))
            scheduler.max_num_active_reqs = len(scheduler.running) + len(first)
        started = time.thread_time()
        scheduled = scheduler.schedule()
        spent = time.thread_time() - started
        self.now_s += STEP_S
        new = [r.req_id for r in scheduled.scheduled_new_reqs]
        self.steps.hit_tokens += sum(r.num_computed_tokens for r in scheduled.scheduled_new_reqs)
        self.steps.admitted.append(new + list(scheduled.scheduled_cached_reqs.resumed_req_ids))
        update = scheduler.update_from_output

        def timed(*args: Any) -> Any:
            nonlocal spent
            started = time.thread_time()
            result = update(*args)
            spent += time.thread_time() - started
            return result

        scheduler.update_from_output = timed
        try:
            self.simulator.update(scheduled)
        finally:
            del scheduler.update_from_output
        self.steps.step_s.append(spent)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drive(
    steps: int,
    waiting: int,
    length_tokens: int,
    groups: int,
    retention_interval: int,
    *,
    admissions: list[list[str]] | None = None,
) -> Steps:
    """``steps`` steps of the plugin, or of stock as long as it follows the given admissions."""
    run = _Drive(
        waiting,
        length_tokens,
        groups=groups,
        retention_interval=retention_interval,
        plugin=admissions is None,
    )
    with _no_collection():
        for index in range(steps):
            run.fill()
            run.step(None if admissions is None else admissions[index])
            if admissions is not None and run.steps.admitted[-1] != admissions[index]:
                # From here on they would do different work (after a preemption, for example).
                run.steps.step_s.pop()
                break
    return run.steps


def step_cpu(
    groups: int,
    retention_interval: int,
    *,
    steps: int = 320,
    warm_up: int = 80,
    repeats: int = 2,
    waiting: int = WAITING,
    length_tokens: int = LENGTH_TOKENS,
) -> dict[str, Any]:
    """Milliseconds of CPU time per step, stock and plugin, and what the plugin adds.

    Of ``repeats`` pairs of runs the one with the least added: other load only ever adds time.
    """
    size = (steps, waiting, length_tokens, groups, retention_interval)
    rows = []
    for _ in range(repeats):
        plugin = drive(*size)
        stock = drive(*size, admissions=plugin.admitted)
        rows.append(_row(plugin, stock, warm_up, waiting, length_tokens))
    best = min(rows, key=lambda row: row["added_mean_ms"])
    return {
        "waiting_requests": waiting,
        "length_tokens": length_tokens,
        "groups": groups,
        "retention_interval": retention_interval,
        **best,
        "added_mean_ms_repeats": [row["added_mean_ms"] for row in rows],
    }


def _row(
    plugin: Steps, stock: Steps, warm_up: int, waiting: int, length_tokens: int
) -> dict[str, Any]:
    compared = len(stock.step_s)
    if compared < 2 * warm_up:
        raise RuntimeError(f"stock followed the plugin's admissions for {compared} steps only")
    pairs = list(zip(plugin.step_s[:compared], stock.step_s, strict=True))[warm_up:]
    added = [1e3 * (with_it - without) for with_it, without in pairs]
    admissions = [len(ids) for ids in plugin.admitted[warm_up:compared]]
    admitting = [ms for ms, count in zip(added, admissions, strict=True) if count]
    looked_up = length_tokens * sum(map(len, plugin.admitted))
    ordered = sorted(added)
    return {
        "steps": len(added),
        "steps_with_admissions": len(admitting),
        "admissions": sum(admissions),
        "hit_share": plugin.hit_tokens / max(1, looked_up),
        "stock_ms": _mean_ms(stock.step_s[warm_up:]),
        "plugin_ms": _mean_ms(plugin.step_s[warm_up:compared]),
        "added_mean_ms": sum(added) / len(added),
        "added_p50_ms": ordered[len(ordered) // 2],
        "added_p99_ms": ordered[int(len(ordered) * 0.99)],
        "added_max_ms": ordered[-1],
        "added_mean_ms_admitting": sum(admitting) / max(1, len(admitting)),
        # Those that fill the queue at the start find an empty cache.
        "stock_add_request_ms": _mean_ms(stock.add_s[waiting:]),
        "plugin_add_request_ms": _mean_ms(plugin.add_s[waiting:]),
    }


def _mean_ms(seconds: list[float]) -> float:
    return 1e3 * sum(seconds) / max(1, len(seconds))
