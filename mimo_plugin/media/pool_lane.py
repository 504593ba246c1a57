# SPDX-License-Identifier: Apache-2.0
"""One lane of the pool: a queue of jobs, and the slots that work it off.

Why not an executor of the standard library: there, one crash breaks the whole pool, a job has no
time-out, and results are pickled. Here a crash or a hang costs its own job only: the process is
ended and another takes its place.

Each slot is one thread of the server and one process (:mod:`~mimo_plugin.media.process`). The
thread only waits on a socket, so neither the event loop nor the interpreter lock is held while a
worker decodes. Slots start with the first job that needs them. A lane that was inherited through
``fork`` starts afresh in the child.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from mimo_plugin.media.limits import DecoderCrashed, DecodeTimeout
from mimo_plugin.media.pool_types import (
    JobResult,
    PoolBusy,
    PoolClosed,
    PoolSettings,
    PoolStats,
)
from mimo_plugin.media.process import Busy, Gone, Job, TimedOut, Worker, WorkerOptions
from mimo_plugin.media.segments import Budget


@dataclass
class _Counts:
    jobs_done: int = 0
    jobs_refused: int = 0
    jobs_failed: int = 0
    timeouts: int = 0
    crashes: int = 0
    workers_started: int = 0
    queue_wait_s: float = 0.0
    run_s: float = 0.0


@dataclass(eq=False)
class _Ticket:
    job: Job
    future: Future[JobResult] = field(default_factory=Future)
    placed: Future[None] = field(default_factory=Future)
    queued_at_s: float = field(default_factory=time.monotonic)


class Lane:
    """Runs jobs, ``settings.workers`` at once; see :class:`~mimo_plugin.media.pool.MediaPool`."""

    def __init__(self, settings: PoolSettings, niceness: int = 0) -> None:
        self.settings = settings
        self._niceness = niceness
        self._fresh()
        _lanes.add(self)

    def _fresh(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Ticket] = deque()
        self._waiting: deque[_Ticket] = deque()  # their callers wait for a place in the queue
        self._workers: set[Worker] = set()
        self._slots: list[threading.Thread] = []
        self._idle = 0
        self._running = 0
        self._closed = False
        self._counts = _Counts()
        self._budget = Budget(self.settings.memory_bytes)

    def run_sync(self, job: Job) -> JobResult:
        """Run a job and wait for it."""
        ticket = self._enqueue(job)
        try:
            ticket.placed.result(self.settings.queue_timeout_s)
        except (FutureTimeout, TimeoutError):  # two classes in Python 3.10
            self._give_up(ticket)
        return ticket.future.result()

    async def run(self, job: Job) -> JobResult:
        """:meth:`run_sync` for an event loop. A cancelled job that waits is dropped."""
        ticket = self._enqueue(job)
        try:
            if not ticket.placed.done():
                waited = asyncio.shield(asyncio.wrap_future(ticket.placed))
                try:
                    await asyncio.wait_for(waited, self.settings.queue_timeout_s)
                except (asyncio.TimeoutError, TimeoutError):
                    self._give_up(ticket)
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise

    def stats(self) -> PoolStats:
        """Depths and counters as of now."""
        with self._lock:
            counts, queued = dict(vars(self._counts)), len(self._queue)
            return PoolStats(
                workers=len(self._workers),
                queued=queued,
                running=self._running,
                outstanding_bytes=self._budget.outstanding_bytes(),
                **counts,
            )

    def close(self, grace_s: float) -> None:
        """End the lane: waiting jobs fail, running ones get ``grace_s`` seconds to end."""
        with self._lock:
            self._closed = True
            dropped = [*self._queue, *self._waiting]
            self._queue.clear()
            self._waiting.clear()
            self._work.notify_all()
            slots = list(self._slots)
        for ticket in dropped:
            _settle(ticket.placed)
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_exception(PoolClosed("media pool: closed; job not started"))
        deadline_s = time.monotonic() + grace_s
        for slot in slots:
            if slot is not threading.current_thread():
                slot.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            left = list(self._workers)
        for worker in left:
            worker.kill()
        for slot in slots:
            if slot is not threading.current_thread():
                slot.join(grace_s + 1.0)

    # -- queue ---------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> _Ticket:
        """Queue a job; without a place its ``placed`` is not done yet."""
        ticket = _Ticket(job)
        with self._lock:
            if self._closed:
                raise PoolClosed("media pool: closed; no more jobs are taken")
            self._waiting.append(ticket)
            self._admit()
        return ticket

    def _admit(self) -> None:
        """Move waiting jobs into free places, and see that enough slots run. Under the lock."""
        while self._waiting and len(self._queue) < self.settings.max_queued:
            ticket = self._waiting.popleft()
            self._queue.append(ticket)
            _settle(ticket.placed)
            self._work.notify()
        if self._idle < len(self._queue) and len(self._slots) < self.settings.workers:
            slot = threading.Thread(
                target=self._serve, name=f"mimo-media-{len(self._slots)}", daemon=True
            )
            self._slots.append(slot)
            slot.start()

    def _withdraw(self, ticket: _Ticket) -> bool:
        """Take back a job that no worker has; whether it had no place yet."""
        ticket.future.cancel()
        with self._lock:
            waiting = ticket in self._waiting
            for jobs in (self._waiting, self._queue):
                with contextlib.suppress(ValueError):
                    jobs.remove(ticket)
            self._admit()
        return waiting

    def _give_up(self, ticket: _Ticket) -> None:
        with self._lock:
            if ticket not in self._waiting:  # it got its place in the last moment
                return
            self._waiting.remove(ticket)
            self._counts.jobs_refused += 1
        raise PoolBusy(
            f"media pool: found no place in the queue of {self.settings.max_queued} jobs for "
            f"{self.settings.queue_timeout_s:g} s; allowed: one within that time; "
            "fix: retry later, or raise workers"
        )

    # -- slots ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        worker: Worker | None = None
        try:
            while (ticket := self._next()) is not None:
                worker = self._process_of_slot(ticket, worker)
                if worker is not None:
                    worker = self._run(ticket, worker)
                del ticket  # an idle slot must not keep the last result alive
                with self._lock:
                    self._running -= 1
        finally:
            self._end(worker)

    def _next(self) -> _Ticket | None:
        with self._lock:
            while True:
                while not self._queue:
                    if self._closed:
                        return None
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                ticket = self._queue.popleft()
                self._admit()
                if ticket.future.set_running_or_notify_cancel():
                    self._running += 1
                    self._counts.queue_wait_s += time.monotonic() - ticket.queued_at_s
                    return ticket

    def _process_of_slot(self, ticket: _Ticket, worker: Worker | None) -> Worker | None:
        """The slot's process, a new one when it has ended; None after an error is reported."""
        if worker is not None and worker.alive():
            return worker
        self._end(worker)
        options = WorkerOptions(
            preload=self.settings.preload,
            memory_bytes=self.settings.worker_memory_bytes,
            niceness=self._niceness,
        )
        try:
            worker = Worker(options)
        except Exception as problem:
            self._fail(ticket, problem)
            return None
        with self._lock:
            self._workers.add(worker)
            self._counts.workers_started += 1
            if self._closed:
                worker.kill()
        return worker

    def _run(self, ticket: _Ticket, worker: Worker) -> Worker | None:
        """Do the job and settle its future; None when the process had to be given up."""
        started_s = time.monotonic()
        job = ticket.job
        try:
            meta, arrays = worker.run(
                job,
                lambda length: self._budget.acquire(length, self.settings.queue_timeout_s),
                self._budget.release_with,
            )
        except TimedOut:
            self._end(worker, kill=True)
            text = f"media: found decoding that takes longer; allowed: {job.timeout_s:g} s"
            self._fail(ticket, DecodeTimeout(text), "timeouts")
            return None
        except Gone as how:
            self._end(worker, kill=True)
            text = f"media: found input on which the decoder ended ({how}); allowed: a whole file"
            if self._closed:
                self._fail(ticket, PoolClosed("media pool: closed while the job ran"))
            else:
                self._fail(ticket, DecoderCrashed(text), "crashes")
            return None
        except Busy:
            text = (
                f"media pool: found no shared memory free for {self.settings.queue_timeout_s:g} s; "
                f"allowed: {self._budget.limit_bytes} bytes in use; "
                "fix: retry later, or raise memory_bytes"
            )
            self._fail(ticket, PoolBusy(text))
        except Exception as problem:
            self._fail(ticket, problem)
        else:
            with self._lock:
                self._counts.jobs_done += 1
                self._counts.run_s += time.monotonic() - started_s
            ticket.future.set_result(JobResult(meta, arrays))
        return worker

    def _fail(self, ticket: _Ticket, problem: Exception, counter: str | None = None) -> None:
        with self._lock:
            self._counts.jobs_failed += 1
            if counter is not None:
                setattr(self._counts, counter, getattr(self._counts, counter) + 1)
        ticket.future.set_exception(problem)

    def _end(self, worker: Worker | None, *, kill: bool = False) -> None:
        if worker is None:
            return
        with self._lock:
            self._workers.discard(worker)
        if kill:
            worker.kill()
        worker.close()

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's workers alone and start afresh."""
        for worker in self._workers:
            worker.forget()
        self._fresh()


def _settle(future: Future[None]) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(None)


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _close_all() -> None:
    for lane in list(_lanes):
        lane.close(grace_s=0.0)


def _fork_all() -> None:
    for lane in list(_lanes):
        lane._after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_fork_all)
