# SPDX-License-Identifier: Apache-2.0
"""What a step costs, in equivalent tokens and in seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from mimo_plugin.core.cost import PrefillCost, StepTimes

#: scheduled tokens from which on a request counts as prefilling; decodes with drafts stay below
_PREFILL_TOKENS = 32


class StepClock:
    """Follows the steps of a scheduler and measures how fast they are.

    With async scheduling the next step is scheduled while one runs; a step then starts when the
    step before it has ended.

    Args:
        cost: the model's prefill cost.
        clock_s: monotonic seconds.
        calibrate: whether to learn from measured times.
    """

    def __init__(self, cost: PrefillCost, clock_s: Callable[[], float], calibrate: bool) -> None:
        self.cost = cost
        self._clock_s = clock_s
        # Without full attention there is no ratio to learn.
        learns = calibrate and math.isfinite(cost.parity_tokens)
        self.times = StepTimes(cost.parity_tokens) if learns else None
        self._in_flight: deque[tuple[Any, float, int, float, bool]] = deque()
        self._last_end_s = 0.0

    def scheduled(self, output: Any, requests: dict[str, Any], started_s: float) -> float:
        """Note a step; its cost in equivalent tokens.

        Args:
            output: the ``SchedulerOutput``; computed tokens of its requests are advanced already.
            requests: the scheduler's requests by id.
            started_s: when scheduling it began.
        """
        tokens: int = output.total_num_scheduled_tokens
        if not tokens:
            return 0.0
        attention, prefill = 0.0, 0
        for request_id, count in output.num_scheduled_tokens.items():
            if count >= _PREFILL_TOKENS:
                before = requests[request_id].num_computed_tokens - count
                attention += count * (before + count / 2)
                prefill += count
        if self.times is not None:
            # Steps of decodes are bound by memory and say nothing about prefill.
            telling = 2 * prefill > tokens
            self._in_flight.append((output, started_s, tokens, attention, telling))
            while len(self._in_flight) > 64:
                self._in_flight.popleft()
        return tokens + attention / self.cost.parity_tokens

    def finished(self, output: Any) -> None:
        """The output of a step has arrived."""
        if self.times is None or not output.total_num_scheduled_tokens:
            return
        while self._in_flight and self._in_flight[0][0] is not output:
            self._in_flight.popleft()
        if not self._in_flight:
            return
        _, started_s, tokens, attention, telling = self._in_flight.popleft()
        now = self._clock_s()
        if telling:
            self.times.observe(tokens, attention, now - max(started_s, self._last_end_s))
        self._last_end_s = now

    def calibrated(self) -> PrefillCost:
        """The prefill cost as measured so far."""
        if self.times is None:
            return self.cost
        return PrefillCost(self.times.parity_tokens)
