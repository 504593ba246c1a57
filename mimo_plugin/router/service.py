# SPDX-License-Identifier: Apache-2.0
"""What the router knows and decides, without HTTP: from a request's body to a target, and back
from what became of it to what is known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.load import Speed
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Decision, Request
from mimo_plugin.errors import ConfigError
from mimo_plugin.router.knowledge import Knowledge
from mimo_plugin.router.metrics import Metrics
from mimo_plugin.router.model import ModelFacts
from mimo_plugin.router.probe import Probe
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.record import Record, Records
from mimo_plugin.router.settings import Settings, WorkerSpec, settings_text, worker_of
from mimo_plugin.router.speed import Speeds
from mimo_plugin.router.state import (
    Done,
    FirstToken,
    RouterListener,
    Sent,
    WorkerChanged,
    open_state,
)
from mimo_plugin.router.tokens import Tokens
from mimo_plugin.router.workers import Worker, Workers

log = logging.getLogger(__name__)

_REMEMBERED_BLOCKS = 1_000_000  # of the last prompts of sessions


@dataclass(slots=True, eq=False)
class Routing:
    """A request on its way.

    Attributes:
        request: as decisions take it.
        record: what people see of it.
        came_s: by the clock that decisions are made by.
        alone: its target had nothing before it.
        first_token: it came, or should have.
    """

    request: Request
    record: Record
    came_s: float
    alone: bool = False
    first_token: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Count:
    """Totals of one target."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Service:
    """One router.

    Args:
        settings: all options.
        model: what the model's files say.
        session: to workers.
        metrics: counts.
        random: chance in ties.
    """

    def __init__(
        self,
        settings: Settings,
        model: ModelFacts,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        random: Random | None = None,
    ) -> None:
        self.settings, self.model, self.metrics = settings, model, metrics
        self.state = open_state(settings.state, self.now_s)
        self.knowledge = Knowledge(settings.hash_block_tokens, model.window_tokens, self.state)
        start = Speed(PrefillCost(model.parity_tokens))
        if settings.tokens_per_s is not None:
            start = Speed(start.cost, settings.tokens_per_s)
        self.speeds = Speeds(start, fixed=settings.tokens_per_s is not None)
        self.router = Router(
            self._lookup,
            self.knowledge.reservations,
            start,
            random or Random(),
            prefixes=self._prefixes if model.window_tokens is not None else None,
            queue_weight=settings.queue_weight,
        )
        self.records = Records()
        self.counts: dict[str, Count] = {}
        self._last: OrderedDict[str, tuple[Sequence[Hash], int]] = OrderedDict()
        self._last_blocks = 0
        probe = Probe(session, settings.worker_key)
        self.workers = Workers(
            probe, settings.health_interval_s, self._worker_changed, self._worker_removed
        )
        self.tokens = Tokens(settings, session, self.workers)

    def now_s(self) -> float:
        """The clock of all decisions."""
        return time.monotonic()

    async def start(self) -> None:
        """Look for the workers, and read their events from now on.

        Raises:
            MimoError: the shared state can't be reached.
        """
        for spec in self.settings.workers:
            self.workers.add(spec)
        given = {spec.url: settings_text(spec) for spec in self.settings.workers}
        listener = RouterListener(self.router, self._worker_changed_elsewhere, self.now_s)
        await self.state.start(listener, given)
        self.knowledge.start()
        await self.workers.first_look(2 * self.settings.connect_timeout_s)

    async def close(self) -> None:
        """End all tasks."""
        await self.workers.close()
        await self.tokens.close()
        await self.state.close()
        await self.knowledge.close()

    # Workers

    def add_worker(self, spec: WorkerSpec) -> Worker:
        """A worker is there from now on, for all routers."""
        worker = self.workers.add(spec)
        self.state.publish(WorkerChanged(spec.url, settings_text(spec), added=True))
        return worker

    def remove_worker(self, url: str) -> bool:
        """It is no more, for all routers. False: there is none."""
        if not self.workers.remove(url):
            return False
        self.state.publish(WorkerChanged(url, removed=True))
        return True

    def drain_worker(self, url: str, drained: bool) -> bool:
        """It gets nothing new, or is in again, for all routers. False: there is none."""
        if not self.workers.drain(url, drained):
            return False
        self.state.publish(WorkerChanged(url, drained=drained))
        return True

    def _worker_changed_elsewhere(self, change: WorkerChanged) -> None:
        if change.removed:
            self.workers.remove(change.url)
            return
        if change.added or change.url not in self.workers.by_url:
            try:
                self.workers.add(worker_of({**change.settings, "url": change.url}, "state"))
            except ConfigError as error:  # of another version, say
                log.error("a worker that another router has added: %s", error)
                return
        self.workers.drain(change.url, change.drained)

    def _worker_changed(self, worker: Worker) -> None:
        facts = worker.facts
        if facts is None:
            return
        for name, target in worker.targets.items():
            self.counts.setdefault(name, Count())
            self.router.set_target(target, self.speeds.of(name))
            self.knowledge.set_target(name, facts, facts.sources.get(target.rank))
        for name in [n for n, t in self.router.targets.items() if t.worker == worker.url]:
            if name not in worker.targets:
                self._target_removed(name)
        self.router.drain(worker.url, worker.drained)
        self.tokens.worker_changed(worker)

    def _worker_removed(self, worker: Worker) -> None:
        self.tokens.worker_removed(worker)
        for name in worker.targets:
            self._target_removed(name)

    def _target_removed(self, name: str) -> None:
        self.router.remove_target(name)
        self.knowledge.drop(name)
        self.speeds.forget(name)
        self.counts.pop(name, None)

    def _lookup(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        if not hashes:
            return {}
        self.knowledge.align()
        return self.knowledge.lookups.lookup(hashes, max_hit_tokens)

    def _prefixes(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        return self.knowledge.lookups.prefixes(hashes, max_hit_tokens) if hashes else {}

    # One request

    def begin(
        self, key: str, request_id: str, path: str, model: str | None, prompt: Prompt
    ) -> Routing:
        """What is known of a request before it is decided.

        Args:
            key: unique among requests in flight.
            request_id: the client's own, which need not be.
        """
        hashes = self.knowledge.hashes(prompt)
        kept = prompt.kept_tokens if self._keeps_windows() else ()
        request = Request(
            key, hashes, prompt.prompt_tokens, prompt.session, prompt.media_keys, kept
        )
        now_s = self.now_s()
        record = Record(time.time(), request_id, path, model, prompt.session, prompt.prompt_tokens)
        self.records.add(record)
        self.metrics.prompt_tokens.inc(prompt.prompt_tokens)
        return Routing(request, record, now_s)

    def choose(
        self, routing: Routing, model: str | None, role: str, exclude: Iterable[str]
    ) -> Decision:
        """Where it goes.

        Raises:
            NoTargetError: nobody can take it.
        """
        start = time.thread_time()
        unfit = self.workers.unfit(model).union(exclude)
        decision = self.router.choose(routing.request, self.now_s(), role=role, exclude=unfit)
        self.metrics.decision_s.observe(time.thread_time() - start)
        self.metrics.decisions.labels(decision.reason).inc()
        return decision

    def sent(self, routing: Routing, decision: Decision) -> None:
        """It goes there."""
        target, record = decision.target, routing.record
        load = self.router.loads[target]
        routing.alone = not load.prefills and not load.decodes
        now_s = self.now_s()
        self.router.sent(routing.request, decision, now_s)
        self.knowledge.lookups.sent(routing.request, target, now_s)
        self.state.publish(Sent.of(routing.request, decision))
        record.decision = decision
        count = self.counts[target]
        count.requests += 1
        count.prompt_tokens += record.prompt_tokens
        count.hit_tokens += decision.chosen.hit_tokens

    def expect_first_token(self, routing: Routing) -> None:
        """The answer is not streamed: its first token counts as come when it should."""
        decision = routing.record.decision
        if decision is None:
            return
        chosen = decision.chosen
        expected_s = chosen.wait_s + chosen.prefill_s + chosen.media_s
        routing.timer = asyncio.get_running_loop().call_later(
            expected_s, self._first_token, routing, None
        )

    def first_token(self, routing: Routing) -> None:
        """The first byte of a streamed answer came."""
        if routing.record.ttft_s is None:
            routing.record.ttft_s = elapsed_s = self.now_s() - routing.came_s
            self.metrics.ttft.observe(elapsed_s)
        self._first_token(routing, None)

    def prefilled(self, routing: Routing, decoder: Decision) -> None:
        """A prefill worker is done; the request goes on to another one."""
        routing.alone = False  # its first token says nothing of the prefill any more
        if decoder.target in self.counts:
            self.counts[decoder.target].requests += 1
        self._first_token(routing, decoder.target)

    def _first_token(self, routing: Routing, decode_on: str | None) -> None:
        if not routing.first_token:
            routing.first_token = True
            now_s = self.now_s()
            self.router.first_token(routing.request, now_s, decode_on)
            self.knowledge.lookups.first_token(routing.request, now_s)
            request = routing.request
            self.state.publish(FirstToken(request.id, request.prompt_tokens, decode_on))

    def done(
        self,
        routing: Routing,
        *,
        status: int,
        failed: bool = False,
        blame: str | None = None,
        cached_tokens: int | None = None,
        reported_prompt_tokens: int | None = None,
    ) -> None:
        """One try of it is over.

        Args:
            status: what the client got, or would get.
            failed: its prompt may not have been computed.
            blame: the target whose fault that is.
            cached_tokens, reported_prompt_tokens: what the worker said of its prompt.
        """
        if routing.timer is not None:
            routing.timer.cancel()
            routing.timer = None
        now_s = self.now_s()
        if not failed:  # an answer that was not streamed may be faster than was expected
            self._first_token(routing, None)
        self.router.done(routing.request, now_s, failed=failed)
        self.knowledge.lookups.done(
            routing.request, now_s, cached_tokens=None if failed else cached_tokens
        )
        self.state.publish(Done(routing.request.id, failed))
        routing.first_token = False
        routing.record.status = status
        if blame in self.counts:
            self.counts[blame].errors += 1
        if not failed and routing.record.decision is not None:
            target = routing.record.decision.target
            self._learn(routing, target, cached_tokens, reported_prompt_tokens)

    def _learn(
        self, routing: Routing, target: str, cached: int | None, reported: int | None
    ) -> None:
        request, record = routing.request, routing.record
        if cached is not None:
            record.actual_hit_tokens = cached
            self.metrics.predicted.inc(record.predicted_hit_tokens)
            self.metrics.actual.inc(cached)
            self.metrics.compared_prompts.inc(reported or record.prompt_tokens)
        if request.session is not None:
            self._remember(request)
        if record.ttft_s is not None and routing.alone and record.decision is not None:
            hit = cached if cached is not None else record.predicted_hit_tokens
            tokens = reported or record.prompt_tokens
            if self.speeds.observe(target, min(hit, tokens), tokens, record.ttft_s):
                for name, known in self.router.targets.items():
                    self.router.set_target(known, self.speeds.of(name))

    def _remember(self, request: Request) -> None:
        assert request.session is not None
        old = self._last.pop(request.session, None)
        self._last_blocks -= len(old[0]) if old is not None else 0
        self._last[request.session] = request.hashes, request.prompt_tokens
        self._last_blocks += len(request.hashes)
        while self._last_blocks > _REMEMBERED_BLOCKS and len(self._last) > 1:
            _, (hashes, _) = self._last.popitem(last=False)
            self._last_blocks -= len(hashes)

    def _keeps_windows(self) -> bool:
        return any(
            worker.facts is not None and worker.facts.keeps_windows
            for worker in self.workers.ready()
        )

    # What people ask

    def resident(self, hashes: Sequence[Hash], prompt_tokens: int) -> dict[str, Any]:
        """What of a prompt is where."""
        limit = max(0, prompt_tokens - 1)
        hits = self._lookup(hashes, limit)
        full = self._prefixes(hashes, limit)
        return {
            "prompt_tokens": prompt_tokens,
            "targets": {
                name: {
                    "hit_tokens": hits.get(name, 0),
                    "full_tokens": max(full.get(name, 0), hits.get(name, 0)),
                }
                for name in self.router.targets
            },
        }

    def last_prompt(self, session: str) -> tuple[Sequence[Hash], int] | None:
        """The last prompt of a session: its hashes and its length."""
        return self._last.get(session)

    def models(self) -> list[Mapping[str, Any]]:
        """Cards of all models that ready workers serve."""
        cards: dict[str, Mapping[str, Any]] = {}
        for worker in self.workers.ready():
            for name, card in worker.models.items():
                cards.setdefault(name, card)
        return list(cards.values())
