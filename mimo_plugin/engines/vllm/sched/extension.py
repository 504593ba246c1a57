# SPDX-License-Identifier: Apache-2.0
"""The scheduler methods around which the affinity queue works."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mimo_plugin.engines.vllm.sched.queue import AffinityQueue
from mimo_plugin.engines.vllm.sched.timing import StepClock

#: steps after which a changed calibration is taken over by the queue
_RECALIBRATE_STEPS = 256


@lru_cache(maxsize=8)
def extended(base: Any) -> Any:
    """``base`` (``Scheduler``, ``AsyncScheduler`` or a user's own) with the feature's methods.

    Nothing of what the stock methods decide is changed but the order in which the waiting queue
    offers its requests and the chunk of a long prefill. The class has ``base`` as its only base, so
    that an existing scheduler can become an instance of it.
    """
    if hasattr(base, "affinity_payload"):
        return base

    class AffinityScheduler(base):  # type: ignore[misc]
        """``base`` around an affinity queue; inert until ``install``."""

        affinity: AffinityQueue | None = None
        step_clock: StepClock | None = None

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """As upstream, within a pass of the affinity queue."""
            queue, clock = self.affinity, self.step_clock
            if queue is None or clock is None:
                return super().schedule(*args, **kwargs)
            started_s = queue.clock_s()
            queue.begin_pass()
            output = None
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                queue.end_pass(output.num_scheduled_tokens if output is not None else None)
            if queue.holds_all_back:
                # vLLM takes whatever waits for want of capacity, and lifts its throttle.
                self.prefill_capacity_bound = False
            queue.processed(clock.scheduled(output, self.requests, started_s))
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """As upstream; the step's time is measured."""
            queue, clock = self.affinity, self.step_clock
            if queue is not None and clock is not None:
                clock.finished(scheduler_output)
                if clock.times is not None and clock.times.num_observed % _RECALIBRATE_STEPS == 255:
                    queue.line.cost = clock.cost = clock.calibrated()
            return super().update_from_output(scheduler_output, *args, **kwargs)

        def set_pause_state(self, pause_state: Any) -> None:
            """As upstream; time spent paused does not make requests overdue."""
            super().set_pause_state(pause_state)
            if self.affinity is not None:
                self.affinity.paused(pause_state.name != "UNPAUSED")

        def _reserve_prefill_lookahead(
            self, request: Any, num_computed_tokens: int, num_new_tokens: int
        ) -> int:
            """As upstream, after the chunk of a long prefill is cut to its lane's share."""
            queue = self.affinity
            if queue is not None and not self.need_mamba_block_aligned_split:
                num_new_tokens = queue.chunks.cut(request, num_computed_tokens, num_new_tokens)
            reserved: int = super()._reserve_prefill_lookahead(
                request, num_computed_tokens, num_new_tokens
            )
            return reserved

        def affinity_payload(self) -> dict[str, Any] | None:
            """Counters since the last call, None when there are none or the feature is off."""
            queue, clock = self.affinity, self.step_clock
            if queue is None or clock is None:
                return None
            return queue.report.drain(queue.gauges(clock))

    AffinityScheduler.__name__ = AffinityScheduler.__qualname__ = f"Affinity{base.__name__}"
    return AffinityScheduler
