# SPDX-License-Identifier: Apache-2.0
"""The scheduler's waiting queue in affinity order.

vLLM peeks at the queue, and then either pops the request because it runs, or pops it to skip it for
this step (LoRA slots, a connector that is not ready) and prepends it again at the end of the step,
or stops because there is no room. So ``peek_request`` names the request that should start next, and
the queue looks empty (in ``bool``, which only the scheduling pass asks) when none of those that
wait should start in this step. Between a peek and the pop that follows nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from math import inf
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from mimo_plugin.core.affinity import NORMAL, OVERDUE, PREEMPTED, AffinityLine, Waiting
from mimo_plugin.core.lanes import full_lane, lane_of
from mimo_plugin.engines.queue_report import QueueReport
from mimo_plugin.engines.vllm.sched.chunks import LongChunks
from mimo_plugin.engines.vllm.sched.followers import Followers
from mimo_plugin.engines.vllm.sched.hits import HitIndex
from mimo_plugin.engines.vllm.sched.protection import Protection
from mimo_plugin.engines.vllm.sched.settings import SchedSettings, logger
from mimo_plugin.engines.vllm.sched.timing import StepClock

#: every so many passes one request is looked up whose hit may have grown unseen
PASSES_PER_RECHECK = 16
#: requests that a pass may park behind leaders before it ends; bounds the work of a step
PARKS_PER_PASS = 64
#: blocks of waiting requests' hits that a pass moves to the young end of the cache
PROTECTED_BLOCKS_PER_PASS = 512


class AffinityQueue(RequestQueue):  # type: ignore[misc]
    """``scheduler.waiting`` in the order of :class:`AffinityLine`.

    Args:
        scheduler: the scheduler it belongs to.
        settings: the feature's settings.
        clock_s: monotonic seconds; benchmarks pass a virtual clock.
    """

    def __init__(
        self,
        scheduler: Any,
        settings: SchedSettings,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.clock_s = clock_s
        #: equivalent tokens processed so far; what requests age by
        self.clock_tokens = 0.0
        self.by_priority = scheduler.policy.value == "priority"
        self.line = AffinityLine(settings.rule(by_priority=self.by_priority), settings.cost)
        self.hits = HitIndex(scheduler.kv_cache_manager)
        if settings.reorders:
            self.hits.attach()
        self.followers = Followers(self.line, self.hits)
        self.protection = Protection(self.hits)
        self.chunks = LongChunks(scheduler, settings, self.line, self.hits)
        self.report = QueueReport(
            settings.lanes,
            logger,
            lambda request: str(request.request_id),
            by_priority=self.by_priority,
        )
        self._entries: dict[str, Waiting] = {}
        self._blocked: dict[str, Waiting] = {}
        self._skipped: dict[str, Waiting] = {}
        self._arrivals = count()
        self._preemptions = count(-1, -1)
        #: an overdue request that the engine skipped although it has an adapter (LoRA)
        self._adapter_guard: Waiting | None = None
        self._passes = 0
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self._in_pass = False
        #: the last pass asked for a request while there was room, and none was to start
        self.holds_all_back = False
        self._reset_pass()

    def _reset_pass(self) -> None:
        self._offer: Waiting | None = None
        self._offer_known = False
        self._popped: Waiting | None = None
        self._active: list[Any] | None = None
        self._parks_left = PARKS_PER_PASS
        #: prefills of more tokens than this find their lane full in this pass
        self._full_over_tokens: float = inf
        self._scans_left = self.settings.scan_requests

    # -- the engine's interface --------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Take in a request that has arrived, or one that was blocked elsewhere."""
        self._enter(request, next(self._arrivals))

    def prepend_request(self, request: Any) -> None:
        """Take back a request: preempted, or skipped in this pass."""
        known = self._skipped.pop(request.request_id, None)
        if known is not None:
            # Its hit is known and still watched; looking again is for when something happened.
            self._place(known, known.hit_tokens)
            known.skipped_pass = self._passes
            if known.group == OVERDUE and request.lora_request is not None:
                self._adapter_guard = known
            if known.stale:
                self.hits.call_dirty(known)
        elif request.status == RequestStatus.PREEMPTED:
            self._enter(request, next(self._preemptions), preempted=True)
        else:
            self._enter(request, next(self._preemptions))

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back the requests skipped in this pass."""
        self._settle()
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        """The request to start next; outside a scheduling pass the first of the line."""
        if self._in_pass:
            offer = self._next_offer()
            if offer is None:
                raise IndexError("no waiting request may start in this step")
            return offer.item
        for entry in self.line:
            return entry.item
        for entry in self._blocked.values():
            return entry.item
        raise IndexError("peek from an empty queue")

    def pop_request(self) -> Any:
        """Hand out the request that ``peek_request`` names."""
        request = self.peek_request()
        entry = self._entries[request.request_id]
        self._leave(entry, keep_watch=self._in_pass)
        if self._in_pass:
            self._popped = entry
            self._skipped[request.request_id] = entry
            self._offer, self._offer_known = None, False
        return request

    def remove_request(self, request: Any) -> None:
        """Drop a request. Raises ValueError when it is not here, as the stock queue does."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.item is not request:
            raise ValueError(f"request {request.request_id} is not waiting")
        self._leave(entry)
        self._offer, self._offer_known = None, False

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Drop those of ``requests`` that wait here."""
        for request in requests:
            entry = self._entries.get(request.request_id)
            if entry is not None and entry.item is request:
                self._leave(entry)
        self._offer, self._offer_known = None, False

    def __bool__(self) -> bool:
        """In a scheduling pass: may a request start? Otherwise: does any wait?"""
        if self._in_pass:
            return self._next_offer() is not None
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        """All waiting requests: the line in order, then what can't start now."""
        for entry in self.line:
            yield entry.item
        for entry in list(self._blocked.values()):
            yield entry.item

    # -- the scheduling pass -----------------------------------------------------------------

    def begin_pass(self) -> None:
        """The scheduler starts to schedule a step."""
        self._reset_pass()
        self._in_pass = True
        self._passes += 1
        self.chunks.begin_pass(self._passes)
        if self._entries and self.settings.reorders:
            # Now, not when the queue is asked: a long prefill that takes the whole step must see
            # who has become ready or overdue.
            self._refresh()

    def end_pass(self, scheduled_tokens: Mapping[str, int] | None = None) -> None:
        """The scheduler has scheduled a step.

        Args:
            scheduled_tokens: tokens of each request in the step, by which its computed tokens have
                been advanced already; None when scheduling failed.
        """
        self._settle(scheduled_tokens or {})
        offer = self._offer
        self.holds_all_back = self._offer_known and offer is None
        if offer is not None:
            self.chunks.nothing_fits()
        if offer is not None and offer.group == OVERDUE and len(self._entries) > 1:
            # It was asked for and not taken: nothing else may use the room it waits for.
            self.report.guarded(offer)
        self._in_pass = False
        self._offer, self._offer_known = None, False
        for entry in self._skipped.values():
            self._forget(entry)
        self._skipped.clear()
        self.hits.new_batch()

    def processed(self, equivalent_tokens: float) -> None:
        """The engine processes a step worth this much; waiting requests age by it."""
        self.clock_tokens += equivalent_tokens

    def paused(self, is_paused: bool) -> None:
        """While the engine takes no requests, waiting is not held against the schedule."""
        now = self.clock_s()
        if is_paused and self._paused_since is None:
            self._paused_since = now
        elif not is_paused and self._paused_since is not None:
            self._paused_s += now - self._paused_since
            self._paused_since = None

    def now_s(self) -> float:
        """Seconds, pauses left out."""
        running = self.clock_s() if self._paused_since is None else self._paused_since
        return running - self._paused_s

    def gauges(self, clock: StepClock) -> dict[str, float]:
        """What an operator may want to see of the queue as it is now."""
        out: dict[str, float] = {
            "waiting_uncached_tokens": self.line.uncached_tokens,
            "scheduler_parked_requests": self.line.num_parked,
        }
        if clock.times is not None:
            out["attention_parity_tokens"] = clock.times.parity_tokens
            if clock.times.tokens_per_s is not None:
                out["prefill_tokens_per_s"] = clock.times.tokens_per_s
        return out

    # -- entering and leaving ----------------------------------------------------------------

    def _enter(self, request: Any, order: int, *, preempted: bool = False) -> None:
        entry = Waiting(
            item=request,
            order=order,
            arrived_s=self.now_s(),
            arrived_tokens=self.clock_tokens,
            num_tokens=request.num_tokens,
            priority=request.priority,
            stock_key=(request.arrival_time, request.request_id) if self.by_priority else (),
            group=PREEMPTED if preempted else NORMAL,
        )
        self._place(entry)

    def _place(self, entry: Waiting, hit_tokens: int | None = None) -> None:
        request = entry.item
        twin = self._entries.get(request.request_id)
        if twin is not None:
            # A session that was preempted and then ended its turn on a late output comes twice.
            self._leave(twin)
        self._entries[request.request_id] = entry
        entry.stale = False
        # In the engine's own order a blocked request keeps its place and is asked in its turn.
        if self.settings.reorders and self.scheduler._is_blocked_waiting_status(request.status):
            self._blocked[request.request_id] = entry
        elif hit_tokens is None:
            self._queue_up(entry)
        else:
            entry.num_tokens = request.num_tokens
            self.line.add(entry, hit_tokens)
        self._offer, self._offer_known = None, False

    def _queue_up(self, entry: Waiting) -> None:
        hit = self._look_up(entry)
        self.line.add(entry, hit)
        if hit and self.settings.protect_hits and self.settings.reorders and not entry.safe:
            self.protection.ask(entry, hit)

    def _look_up(self, entry: Waiting, *, anew: bool = False) -> int:
        if not self.settings.reorders:
            return 0
        self.hits.attach()
        request = entry.item
        entry.num_tokens = request.num_tokens
        remote = request.kv_transfer_params
        if remote and remote.get("do_remote_prefill") and not request.num_preemptions:
            # Another instance computed the prompt: next to nothing is left to do, or to lose.
            entry.safe = True
            return int(request.num_tokens)
        entry.safe = False
        return self.hits.look_up(entry, anew=anew)

    def _leave(self, entry: Waiting, *, keep_watch: bool = False) -> None:
        request_id = entry.item.request_id
        self._entries.pop(request_id, None)
        self._blocked.pop(request_id, None)
        self.followers.release(entry)
        self.line.remove(entry)
        if not keep_watch:
            self._forget(entry)

    def _forget(self, entry: Waiting) -> None:
        """``entry`` will not come back."""
        self.hits.forget(entry)
        if entry is self._adapter_guard:
            self._adapter_guard = None

    def _settle(self, scheduled_tokens: Mapping[str, int] | None = None) -> None:
        """Find out what became of the request that was popped last."""
        entry, self._popped = self._popped, None
        if entry is None:
            return
        request = entry.item
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            self._skipped.pop(request.request_id, None)
            self._forget(entry)
            self.hits.new_batch()
            self._active = None
            self.chunks.something_fits()
            # What it got in the end (and in mode fcfs nobody has looked before).
            step_tokens = (scheduled_tokens or {}).get(request.request_id, 0)
            hit = request.num_computed_tokens - step_tokens
            self.line.cost_of(entry, request.num_tokens, hit)
            waited_s = self.now_s() - entry.arrived_s
            self.report.admitted(entry, self.line.oldest(), waited_s, len(self._entries))

    # -- what to offer -----------------------------------------------------------------------

    def _next_offer(self) -> Waiting | None:
        if not self._offer_known:
            self._settle()
            if self.settings.reorders:
                self._rescore_dirty()
            self._offer, self._offer_known = self._choose(), True
        return self._offer

    def _refresh(self) -> None:
        """Bring the line up to date, as far as the budget of a pass goes."""
        for request_id, entry in list(self._blocked.items()):
            if self.scheduler._handle_blocked_waiting_request(entry.item):
                del self._blocked[request_id]
                self._queue_up(entry)
        was_reset = self.hits.attach()
        self.protection.work(PROTECTED_BLOCKS_PER_PASS)
        if len(self.followers):
            self._release_followers(everyone=was_reset)
        for entry in self.line.advance(self.now_s(), self.clock_tokens):
            self.followers.release(entry)
        if self._passes % PASSES_PER_RECHECK == 0:
            unsure = self.hits.take_unsure()
            if unsure is not None:
                self._rescore(unsure, anew=True)
        self._rescore_dirty()

    def _rescore_dirty(self) -> None:
        for entry in self.hits.take_dirty(self._scans_left):
            self._rescore(entry)

    def _rescore(self, entry: Waiting, *, anew: bool = False) -> None:
        if not entry.queued:
            entry.stale = True  # popped; it may come back at the end of the pass
            return
        self.followers.release(entry)
        if self._scans_left <= 0:
            self.hits.call_dirty(entry)
            return
        self._scans_left -= 1
        self.line.rescore(entry, self._look_up(entry, anew=anew))

    def _release_followers(self, *, everyone: bool) -> None:
        at_work = {r.request_id: r.num_computed_tokens for r in self._running_prefills()}
        followers = self.followers
        for entry in followers.everyone() if everyone else followers.passed(at_work):
            self._rescore(entry)

    def _choose(self) -> Waiting | None:
        """The first of the line that may start now."""
        if not self.settings.reorders:
            return next(self.line.ready(), None)
        checked: Waiting | None = None
        while True:
            entry = next(filter(self._has_adapter_slot, self._ready()), None)
            if entry is None or entry.group != NORMAL:
                return entry
            if not self._parks_left:
                return None
            if entry is not checked and self._scans_left > 0:
                # The score may be out of date in favour of the request; then look again.
                checked = entry
                self._scans_left -= 1
                hit = self._look_up(entry)
                exact = None if entry.safe else self.hits.exact(entry)
                hit = hit if exact is None else exact
                if hit != entry.hit_tokens:
                    self.line.rescore(entry, hit)
                    continue
            if self._may_start(entry):
                return entry

    def _ready(self) -> Iterator[Waiting]:
        """The line without the lanes that were found full in this pass.

        Lanes nest and the line starts with the most urgent requests, so what keeps one request
        from starting keeps every longer one behind it from starting.
        """
        return self.line.ready(self._full_over_tokens)

    def _has_adapter_slot(self, entry: Waiting) -> bool:
        """False while ``entry`` would use an adapter slot that an overdue request waits for."""
        guard = self._adapter_guard
        if guard is None or entry is guard or entry.item.lora_request is None:
            return True
        mine, wanted = entry.item.lora_request, guard.item.lora_request
        return bool(mine.lora_int_id == wanted.lora_int_id)

    def _running_prefills(self) -> list[Any]:
        """Prefills that compute, as opposed to those whose KV is being loaded."""
        return [
            request
            for request in self.scheduler._inflight_prefills
            if request.status == RequestStatus.RUNNING
        ]

    def _active_prefills(self, entry: Waiting) -> list[Any]:
        """Running prefills; under priority scheduling those that are no less urgent."""
        if self._active is None:
            # It comes from a set; who follows whom must not depend on addresses.
            self._active = sorted(self._running_prefills(), key=_arrival)
        if self.by_priority:
            return [request for request in self._active if request.priority <= entry.priority]
        return self._active

    def _may_start(self, entry: Waiting) -> bool:
        """Hold ``entry`` back if its lane is full or a leader is at work for it."""
        lanes, active = self.settings.lanes, self._active_prefills(entry)
        if lane_of(lanes, entry.uncached_tokens):
            left = [r.num_tokens - r.num_computed_tokens for r in active]
            lane = full_lane(lanes, entry.uncached_tokens, left)
            if lane is not None:
                self._full_over_tokens = lane.over_tokens
                self.report.held(entry)
                return False
        if self.settings.dedupe:
            for leader in active:
                tokens = self.followers.awaited(entry, leader)
                if tokens:
                    self.followers.park(entry, leader, tokens)
                    self._parks_left -= 1
                    self.report.followed(entry, leader.request_id, tokens)
                    return False
        return True


def _arrival(request: Any) -> tuple[float, str]:
    return request.arrival_time, request.request_id
