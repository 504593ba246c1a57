# SPDX-License-Identifier: Apache-2.0
"""Orders of the waiting queue that the scheduler benchmark compares, all over the same seam.

``fcfs`` is stock vLLM with nothing of ours installed. ``lpm`` and ``hrrn`` are the rules of
SGLang's ``--schedule-policy`` (0.5.23) on vLLM's queue: both look at every waiting request before
each step, fall back to arrival order when more than 128 wait, and put a request behind the others
when it hits next to nothing and shares its start with one that was looked at before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import RequestStatus

from mimo_plugin.core.cost import PrefillCost

#: SGLang's limits: waiting requests above which it stops sorting; tokens that count as a hit
MOST_SORTED = 128
SHORT_HIT_TOKENS = 32

POLICIES = ("fcfs", "lpm", "hrrn", "plugin")


class Seam:
    """Counts the tokens that a scheduler schedules, and lets a rule arrange its queue first."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.scheduled_tokens = 0
        self.preemptions = 0
        #: tokens found in the cache at first admission, by request id
        self.cached_tokens: dict[str, int] = {}
        self.before: Callable[[], None] | None = None
        self.after: Callable[[Any], None] | None = None
        scheduler.schedule = self._schedule

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            self.before()
        # By way of the class: installing the plugin changes it.
        output = type(self.scheduler).schedule(self.scheduler, *args, **kwargs)
        self.scheduled_tokens += output.total_num_scheduled_tokens
        self.preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.cached_tokens.setdefault(new.req_id, new.num_computed_tokens)
        if self.after is not None:
            self.after(output)
        return output

    def reset(self) -> None:
        """Start counting anew."""
        self.scheduled_tokens = self.preemptions = 0
        self.cached_tokens = {}
        self.before = self.after = None


class SglangRule:
    """Arranges ``scheduler.waiting`` before each step as SGLang would.

    Args:
        seam: the scheduler's seam.
        ratio: False for ``lpm`` (longest hit first), True for ``hrrn`` (highest ratio of tokens
            processed while waiting to uncached tokens first; what is cached whole before all).
    """

    def __init__(self, seam: Seam, *, ratio: bool) -> None:
        self.seam = seam
        self.ratio = ratio
        self._arrived_tokens: dict[str, int] = {}
        seam.before = self.arrange

    def arrange(self) -> None:
        """Sort the queue; preempted requests stay in front, as vLLM wants them."""
        scheduler = self.seam.scheduler
        queue = scheduler.waiting
        now = self.seam.scheduled_tokens
        for request in queue:
            self._arrived_tokens.setdefault(request.request_id, now)
        full = len(scheduler.running) >= scheduler.max_num_running_reqs
        if full or not 1 < len(queue) <= MOST_SORTED:
            return
        waiting = list(queue)
        front = [r for r in waiting if r.status == RequestStatus.PREEMPTED]
        scored = []
        first_blocks: set[Any] = set()
        for request in waiting:
            if request.status == RequestStatus.PREEMPTED:
                continue
            hit = self._hit_tokens(request)
            behind = False
            if hit <= SHORT_HIT_TOKENS and request.block_hashes:
                # Shared starts shorter than a block don't show here, but they can't be reused.
                behind = request.block_hashes[0] in first_blocks
                first_blocks.add(request.block_hashes[0])
            scored.append((behind, self._score(request, hit, now), request))
        scored.sort(key=lambda entry: entry[:2])
        queue.clear()
        queue.extend(front)
        queue.extend(request for _, _, request in scored)

    def _score(self, request: Any, hit: int, now: int) -> float:
        if not self.ratio:
            return -hit
        uncached = request.num_tokens - hit
        waited = now - self._arrived_tokens[request.request_id]
        return float("-inf") if uncached <= 0 else -waited / uncached

    def _hit_tokens(self, request: Any) -> int:
        coordinator = self.seam.scheduler.kv_cache_manager.coordinator
        return int(
            coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
        )


def install_plugin(
    scheduler: Any, parity_tokens: float, clock_s: Callable[[], float], changes: dict[str, Any]
) -> None:
    """The plugin's queue with default settings, but for ``changes``."""
    from mimo_plugin.engines.vllm.sched.install import install
    from mimo_plugin.engines.vllm.sched.settings import SchedSettings

    settings = replace(SchedSettings(cost=PrefillCost(parity_tokens)), **changes)
    install(scheduler, settings, clock_s=clock_s)


def use(
    policy: str,
    seam: Seam,
    *,
    parity_tokens: float,
    clock_s: Callable[[], float],
    changes: dict[str, Any] | None = None,
) -> None:
    """Let ``policy`` order the queue of an idle scheduler, whatever did so before.

    Args:
        policy: one of :data:`POLICIES`.
        seam: the scheduler's seam; its counts are reset.
        parity_tokens: see ``core.cost.PrefillCost``.
        clock_s: virtual seconds.
        changes: settings of the plugin that are not the defaults.
    """
    scheduler = seam.scheduler
    seam.reset()
    if getattr(scheduler, "affinity", None) is not None:
        from mimo_plugin.engines.vllm.sched.install import remove

        remove(scheduler)
    scheduler.waiting = create_request_queue(scheduler.policy)
    if policy in ("lpm", "hrrn"):
        SglangRule(seam, ratio=policy == "hrrn")
    elif policy == "plugin":
        install_plugin(scheduler, parity_tokens, clock_s, changes or {})
    elif policy != "fcfs":
        raise ValueError(f"policy {policy!r}; known: {', '.join(POLICIES)}")
