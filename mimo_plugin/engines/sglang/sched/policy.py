# SPDX-License-Identifier: Apache-2.0
"""``--schedule-policy mimo-affinity``: SGLang's policy class with the affinity order in it.

SGLang has no registry of policies: the class that the scheduler makes its policy from is replaced
by a subclass, in the scheduler's process and only where the feature is on. Two methods of the
prefill batch are wrapped there, for the rules of ``batch.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sglang.srt.managers.scheduler as scheduler_module
from sglang.srt.managers.schedule_policy import (
    AddReqResult,
    CacheAgnosticPolicy,
    PrefillAdder,
    SchedulePolicy,
)
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.runtime_context import get_observability, get_parallel, get_schedule

from mimo_plugin.config import MimoConfig
from mimo_plugin.core.affinity import FCFS, OVERDUE, PREEMPTED, AffinityRule, Cost
from mimo_plugin.core.lanes import Lane
from mimo_plugin.engines.queue_report import QueueReport
from mimo_plugin.engines.sglang import register
from mimo_plugin.engines.sglang.metrics import make_feature_sink
from mimo_plugin.engines.sglang.sched.batch import (
    RecentBatches,
    awaited_leader,
    chunk_limit_tokens,
    shorter_tokens,
)
from mimo_plugin.engines.sglang.sched.order import AffinityOrder, Clock
from mimo_plugin.engines.wrapping import wrap_once

logger = logging.getLogger(register.LOGGER_NAME)

MAX_WAIT_CHUNKS = 256
"""Where several ranks must agree, a request is overdue after so many chunks of prefill tokens."""

SKIPS_PER_PASS = 32
"""Requests of a pass that may be left out of the batch while those behind them are tried."""

METRIC_NAMES = frozenset(
    {"scheduler_admissions", "scheduler_deferrals", "queue_wait_s", "metrics_dropped"}
)


class _Settings:
    """What the feature was switched on with in this process."""

    def __init__(self, config: MimoConfig, cost: Cost) -> None:
        self.whole = config
        self.config = config.scheduler
        self.cost = cost
        # With the plugin's retention a request leaves KV behind at every page of a short prefix.
        self.dense = "kv" in config.features
        self.lanes = tuple(
            Lane(lane.over_tokens, lane.max_prefills) for lane in config.scheduler.lanes
        )


_settings: _Settings | None = None
_active: AffinityPolicy | None = None


class AffinityPolicy(SchedulePolicy):  # type: ignore[misc]
    """Upstream's policies, and ours under its name.

    Args:
        policy: the name; the others are upstream's arguments.
    """

    def __init__(
        self,
        policy: str,
        tree_cache: Any,
        enable_hierarchical_cache: bool,
        enable_priority_scheduling: bool,
        schedule_low_priority_values_first: bool,
    ) -> None:
        global _active
        ours = policy == register.POLICY
        super().__init__(
            CacheAgnosticPolicy.FCFS.value if ours else policy,
            tree_cache,
            enable_hierarchical_cache,
            enable_priority_scheduling,
            schedule_low_priority_values_first,
        )
        self.affinity: AffinityOrder | None = None
        if ours:
            assert _settings is not None, "the name is known only where the feature is on"
            self.affinity = _make_order(_settings, self)
            config = _settings.config
            self._lanes = _settings.lanes if config.mode != FCFS else ()
            self._share = config.lane_share
            self._dense = _settings.dense
            self._dedupes = config.dedupe and config.mode != FCFS
            self._skips_left = 0
            self._recent = RecentBatches()
            self._report = QueueReport(
                self._lanes,
                logger,
                lambda request: str(request.rid),
                by_priority=self.enable_priority_scheduling,
            )
            self._sink = make_feature_sink(
                _settings.whole, METRIC_NAMES, enabled=get_observability().enable_metrics
            )
            _active = self
            register.log_active(register.SCHEDULER_ROLE, _settings.whole)

    def calc_priority(
        self, waiting_queue: list[Any], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        """Sort the waiting queue in place; called before each prefill batch."""
        if self.affinity is None:
            super().calc_priority(waiting_queue, running_batch, processed_tokens)
            return
        self._skips_left = SKIPS_PER_PASS
        self.affinity.sort(waiting_queue, processed_tokens)

    def waiting_queue_prefix_matched(self, waiting_queue: list[Any]) -> bool:
        """Whether requests know what they hit; ours have been looked up."""
        return self.affinity is not None or super().waiting_queue_prefix_matched(waiting_queue)

    def shortest_prefill_chunk_limit(
        self, chunked_req: Any, waiting_queue: list[Any], budget: int, page_size: int
    ) -> int | None:
        """The most tokens of this batch for the prefill that is under way, None for no limit."""
        if self.affinity is None:
            limit: int | None = super().shortest_prefill_chunk_limit(
                chunked_req, waiting_queue, budget, page_size
            )
            return limit
        self._recent.note((chunked_req,))
        left = len(chunked_req.full_untruncated_fill_ids) - chunked_req.prefix_len
        return chunk_limit_tokens(
            left,
            shorter_tokens(waiting_queue, self._lanes, page_size, budget),
            budget,
            page_size,
            lanes=self._lanes,
            share=self._share,
        )

    # -- the batch -----------------------------------------------------------------------------

    def leave_out(self, request: Any, adder: Any) -> bool:
        """Whether a request lets this batch go without it; those behind it are tried."""
        assert self.affinity is not None
        self._recent.note(adder.can_run_list)
        entry = self.affinity.entry_of(request)
        if not self._dedupes or self._skips_left == 0 or entry is None:
            return False
        if entry.group in (PREEMPTED, OVERDUE):
            return False
        leaders = self._recent.pending()
        leader = awaited_leader(request, leaders, adder.page_size, dense=self._dense)
        if leader is None:
            return False
        self._skips_left -= 1
        self._report.followed(entry, *leader)
        return True

    def pass_over(self, request: Any) -> bool:
        """Whether a request that found the place of the long prefill taken may be passed."""
        assert self.affinity is not None
        if self._skips_left == 0:
            return False
        self._skips_left -= 1
        entry = self.affinity.entry_of(request)
        if entry is not None:
            self._report.held(entry)
        return True

    def started(self, request: Any) -> None:
        """A request has joined the batch. Counters are written at once: when nothing waits any
        more, the queue isn't sorted again."""
        assert self.affinity is not None
        found = self.affinity.started(request)
        if found is not None:
            entry, waited_s = found
            line = self.affinity.line
            self._report.admitted(entry, line.oldest(), waited_s, len(line))
        payload = self._report.drain({})
        if self._sink is not None and payload is not None:
            self._sink.apply(payload, 0)


def _make_order(settings: _Settings, policy: SchedulePolicy) -> AffinityOrder:
    config = settings.config
    alone = get_parallel().tp_size == 1 and get_parallel().pp_size == 1
    chunk = max(get_schedule().chunked_prefill_size or 0, 1024)
    clock = (
        Clock.seconds(config.max_wait_s) if alone else Clock.tokens(float(MAX_WAIT_CHUNKS * chunk))
    )
    rule = replace(
        AffinityRule.of(config, settings.lanes, by_priority=policy.enable_priority_scheduling),
        max_wait_s=clock.max_wait,
    )
    tree = policy.tree_cache

    def look_up(request: Any) -> int:
        match_kv_cache(request, tree)
        return int(request.num_matched_prefix_tokens)

    logger.info(
        "mimo scheduler: mode %s, longest wait %g %s", rule.mode, clock.max_wait, clock.unit
    )
    return AffinityOrder(
        rule,
        settings.cost,
        look_up,
        clock,
        look_ups_per_pass=config.scan_requests,
        priority_sign=policy.priority_sign,
    )


def install(config: MimoConfig, cost: Cost) -> None:
    """Make the policy known in this process; before the scheduler is built.

    Args:
        config: the plugin's configuration.
        cost: prefill cost of the model.
    """
    global _settings
    _settings = _Settings(config, cost)
    scheduler_module.SchedulePolicy = AffinityPolicy
    wrap_once(PrefillAdder, "add_one_req", _around(_add_one_req))
    wrap_once(PrefillAdder, "_select_prefill_admission", _around(_select_prefill_admission))


def _around(ours: Callable[..., Any]) -> Callable[[Any], Any]:
    """From SGLang's function to ours, which gets SGLang's as its first argument."""

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        return call

    return make


class _PlaceTaken(Exception):
    """A request would have to be computed in chunks while another one is."""


def _add_one_req(
    original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    policy = _active
    if policy is None:
        return original(adder, req, *args, **kwargs)
    if policy.leave_out(req, adder):
        return AddReqResult.CONTINUE
    try:
        found = original(adder, req, *args, **kwargs)
    except _PlaceTaken:
        return AddReqResult.CONTINUE if policy.pass_over(req) else AddReqResult.OTHER
    if adder.can_run_list and adder.can_run_list[-1] is req:
        policy.started(req)
    return found


def _select_prefill_admission(
    original: Callable[..., Any], adder: Any, req: Any, **kwargs: Any
) -> Any:
    """Upstream tracks one prefill in chunks; a batch in which that one left room would start
    another."""
    found = original(adder, req, **kwargs)
    if (
        _active is not None
        and kwargs.get("has_chunked_req")
        and getattr(found, "is_chunked", False)
    ):
        raise _PlaceTaken
    return found
