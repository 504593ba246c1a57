# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a waiting queue: counters, and a debug line per decision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mimo_plugin.core.affinity import OVERDUE, PREEMPTED, Waiting
from mimo_plugin.core.lanes import Lane, lane_of
from mimo_plugin.metrics import MetricsBuffer


class QueueReport:
    """Counts decisions; every admission has exactly one reason.

    Args:
        lanes: of the rule, ascending.
        log: where debug lines go.
        id_of: name of an engine's request.
        by_priority: the engine runs with priority scheduling.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        log: logging.Logger,
        id_of: Callable[[Any], str],
        *,
        by_priority: bool = False,
    ) -> None:
        self.lanes = tuple(lanes)
        self.by_priority = by_priority
        self._log = log
        self._id_of = id_of
        self.buffer = MetricsBuffer()
        self._gauges: dict[str, float] = {}

    def lane_name(self, uncached_tokens: int) -> str:
        """Label of a lane: the uncached tokens that its requests have more than."""
        index = lane_of(self.lanes, uncached_tokens)
        return str(self.lanes[index - 1].over_tokens) if index else "0"

    def admitted(
        self, entry: Waiting, oldest: Waiting | None, waited_s: float, num_waiting: int
    ) -> None:
        """``entry`` started; ``oldest`` is the request that has waited longest of the others."""
        reason = self._reason(entry, oldest)
        lane = self.lane_name(entry.uncached_tokens)
        self.buffer.inc("scheduler_admissions", reason=reason)
        self.buffer.observe("queue_wait_s", max(0.0, waited_s), lane=lane)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug(
                "mimo scheduler: start %s (%s): waited %.3f s, hit %d of %d tokens, lane %s, "
                "%d still wait",
                self._id_of(entry.item),
                reason,
                waited_s,
                entry.hit_tokens,
                entry.num_tokens,
                lane,
                num_waiting,
            )

    def _reason(self, entry: Waiting, oldest: Waiting | None) -> str:
        if entry.group == PREEMPTED:
            return "preempted"
        if entry.group == OVERDUE:
            return "max_wait"
        if oldest is None or entry.order < oldest.order:
            return "arrival"
        urgent = self.by_priority and oldest.priority != entry.priority
        return "priority" if urgent else "affinity"

    def held(self, entry: Waiting) -> None:
        """``entry`` was passed over because its lane is full."""
        self._deferred(entry, "lane", "its lane is full")

    def followed(self, entry: Waiting, leader_id: str, tokens: int) -> None:
        """``entry`` waits for a leader to compute its first ``tokens`` tokens."""
        self._deferred(entry, "duplicate", f"{leader_id} computes its first {tokens} tokens")

    def _deferred(self, entry: Waiting, reason: str, detail: str) -> None:
        if reason in entry.deferred_for:
            return
        entry.deferred_for += (reason,)
        self.buffer.inc("scheduler_deferrals", reason=reason)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug(
                "mimo scheduler: defer %s (%s): %s; hit %d of %d tokens",
                self._id_of(entry.item),
                reason,
                detail,
                entry.hit_tokens,
                entry.num_tokens,
            )

    def guarded(self, entry: Waiting) -> None:
        """Others were held back for an overdue request that does not fit yet."""
        self.buffer.inc("scheduler_guard_steps")
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug(
                "mimo scheduler: overdue %s does not fit yet, the others wait for it",
                self._id_of(entry.item),
            )

    def drain(self, gauges: dict[str, float]) -> dict[str, Any] | None:
        """Everything since the last call, and the gauges that have changed."""
        for name, value in gauges.items():
            if self._gauges.get(name) != value:
                self._gauges[name] = value
                self.buffer.set(name, value)
        return self.buffer.drain()
