# SPDX-License-Identifier: Apache-2.0
"""The workers: which there are, which are well, what they serve.

Each has a task that asks it every ``interval_s``. A worker that refuses a connection is down at
once, one that is slow to answer after some tries; it is back as soon as it answers well. Whoever
sends requests tells of failures too, which brings the next look forward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimo_plugin.core.targets import Target
from mimo_plugin.router.probe import Facts, Probe, ProbeError
from mimo_plugin.router.settings import WorkerSpec

log = logging.getLogger(__name__)

_SLOW_TRIES = 3  # looks in a row without an answer before a worker that was well is down
_MODELS_EVERY = 5  # looks; adapters come and go
_STARTUP_INTERVAL_S = 0.5  # at most, between looks at a worker that is down


@dataclass(slots=True, eq=False)
class Worker:
    """One worker.

    Attributes:
        spec: as it was named.
        facts: what it said; None before it was ever well.
        up: it answers.
        drained: it gets nothing new.
        error: why it is not up, in one line.
    """

    spec: WorkerSpec
    facts: Facts | None = None
    up: bool = False
    drained: bool = False
    error: str = "not asked yet"
    failures: int = 0
    targets: dict[str, Target] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address and name."""
        return self.spec.url

    @property
    def state(self) -> str:
        """``ready``, ``draining`` or ``down``."""
        return "down" if not self.up else "draining" if self.drained else "ready"

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Cards of its models."""
        return self.facts.models if self.facts is not None else {}

    def failed(self, error: str, *, down: bool) -> None:
        """A request failed; ``down``: it does not even take connections."""
        if down and self.up:
            log.warning("worker %s is down: %s", self.url, error)
            self.up, self.error = False, error
        self.wake.set()


class Workers:
    """All of them.

    Args:
        probe: asks them.
        interval_s: between two looks at one that is well.
        changed: called after anything about a worker has changed; it must not raise.
        removed: called with a worker that is no more.
    """

    def __init__(
        self,
        probe: Probe,
        interval_s: float,
        changed: Callable[[Worker], None],
        removed: Callable[[Worker], None],
    ) -> None:
        self.by_url: dict[str, Worker] = {}
        self.by_target: dict[str, Worker] = {}
        self._probe, self._interval_s = probe, interval_s
        self._changed, self._removed = changed, removed

    def add(self, spec: WorkerSpec) -> Worker:
        """A new worker, or a known one with other settings."""
        if spec.url in self.by_url:
            if self.by_url[spec.url].spec == spec:
                return self.by_url[spec.url]
            self.remove(spec.url)
        worker = self.by_url[spec.url] = Worker(spec)
        worker.task = asyncio.create_task(self._watch(worker), name=f"watch {spec.url}")
        return worker

    def remove(self, url: str) -> bool:
        """Forget a worker; what it is answering goes on. False: there is none."""
        worker = self.by_url.pop(url, None)
        if worker is None:
            return False
        if worker.task is not None:
            worker.task.cancel()
        for name in worker.targets:
            self.by_target.pop(name, None)
        worker.up = False
        self._removed(worker)
        return True

    def drain(self, url: str, drained: bool) -> bool:
        """It gets nothing new, or is in again. False: there is none."""
        worker = self.by_url.get(url)
        if worker is None:
            return False
        worker.drained = drained
        self._changed(worker)
        return True

    async def close(self) -> None:
        """Look no more."""
        tasks = [worker.task for worker in self.by_url.values() if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every worker was asked once, or the time is up."""
        waiting = [w for w in self.by_url.values() if w.error == "not asked yet"]
        deadline = asyncio.get_running_loop().time() + timeout_s
        while waiting and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
            waiting = [w for w in waiting if not w.up and w.error == "not asked yet"]

    # Who can take a request

    def ready(self) -> Iterable[Worker]:
        """Workers that take requests."""
        return (worker for worker in self.by_url.values() if worker.up and not worker.drained)

    def unfit(self, model: str | None) -> set[str]:
        """Targets that can't take a request for the model; None: any model will do."""
        return {
            name
            for name, worker in self.by_target.items()
            if not worker.up or worker.drained or (model is not None and model not in worker.models)
        }

    def serves(self, model: str) -> bool:
        """Whether any worker, well or not, has the model."""
        return any(model in worker.models for worker in self.by_url.values())

    def is_adapter(self, model: str) -> bool:
        """Whether a worker has it as a LoRA adapter."""
        return any(w.facts is not None and model in w.facts.adapters for w in self.by_url.values())

    # Looking

    async def _watch(self, worker: Worker) -> None:
        looks = 0
        while True:
            try:
                await self._look(worker, with_models=looks % _MODELS_EVERY == 0)
                looks += 1
            except ProbeError as error:
                worker.failures += 1
                looks = 0
                if not worker.up or not error.slow:
                    self._down(worker, str(error))
                elif worker.failures >= _SLOW_TRIES:
                    self._down(worker, f"{worker.failures} looks without an answer: {error}")
            except Exception:  # a worker can answer anything; the watch must go on
                log.exception("looking at worker %s failed", worker.url)
                self._down(worker, "its answers could not be read")
            worker.wake.clear()
            pause_s = self._interval_s
            if not worker.up:
                pause_s = min(pause_s, _STARTUP_INTERVAL_S)
            try:
                await asyncio.wait_for(worker.wake.wait(), pause_s)
                await asyncio.sleep(min(pause_s, 0.1))  # many failures are one reason to look
            except asyncio.TimeoutError:
                pass

    async def _look(self, worker: Worker, *, with_models: bool) -> None:
        await self._probe.healthy(worker.url)
        was_up, before = worker.up, worker.facts
        if worker.facts is None or not worker.up or with_models:
            worker.facts = await self._probe.facts(worker.spec)
        worker.failures = 0
        worker.up, worker.error = True, ""
        if not was_up or worker.facts != before:
            self._meet(worker)
        if not was_up:
            log.info(
                "worker %s is up: %s %s, %s", worker.url, *_words(worker.facts), worker.spec.role
            )

    def _down(self, worker: Worker, error: str) -> None:
        if worker.up or worker.error == "not asked yet":
            log.warning("worker %s is down: %s", worker.url, error)
        changed = worker.up
        worker.up, worker.error = False, error
        if changed:
            self._changed(worker)

    def _meet(self, worker: Worker) -> None:
        assert worker.facts is not None
        found = {
            target.name: target
            for rank in worker.facts.ranks
            for target in (Target(worker.url, rank, worker.spec.role),)
        }
        for name in worker.targets.keys() - found.keys():
            self.by_target.pop(name, None)
        worker.targets = found
        for name in found:
            self.by_target[name] = worker
        self._changed(worker)


def _words(facts: Facts) -> tuple[str, str]:
    return facts.engine, facts.version or "of unknown version"
