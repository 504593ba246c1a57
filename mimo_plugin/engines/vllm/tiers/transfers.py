# SPDX-License-Identifier: Apache-2.0
"""Pages between host memory and a store, on a bounded number of threads.

A job is cut into batches, which go one by one: reads before writes, and writes on half of the
threads at most, so that a read never waits for more than the batches that are under way. What waits
can be given up at any time; what is under way is waited for, because it uses host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mimo_plugin.errors import one_line

logger = logging.getLogger("vllm.mimo_plugin")

Payload = TypeVar("Payload")

SLOW_S = 10.0
"""A store gives up sooner; waiting for longer is said in the log."""


@dataclass(eq=False)
class Job(Generic[Payload]):
    """Pages that are read, or written, together.

    Attributes:
        payload: the caller's.
        pages: how many there are.
        read: from the store, or written to it.
        done: which of them went well, when the job is finished.
        busy_s: time that threads worked on it.
    """

    payload: Payload
    pages: int
    read: bool
    done: list[bool] = field(init=False)
    busy_s: float = 0.0
    left: int = 0

    def __post_init__(self) -> None:
        self.done = [False] * self.pages


_Batch = tuple["Job[Payload]", int, int]


class Transfers(Generic[Payload]):
    """See the module.

    Args:
        move: moves the pages of a job from a first to a last index (exclusive), and says which
            went well. Called on the threads; ends in bounded time.
        threads: how many, >= 2.
    """

    def __init__(self, move: Callable[[Job[Payload], int, int], list[bool]], threads: int) -> None:
        assert threads >= 2
        self._move = move
        self._reads: deque[_Batch[Payload]] = deque()
        self._writes: deque[_Batch[Payload]] = deque()
        self._finished: deque[Job[Payload]] = deque()
        self._most_writing = threads // 2
        self._reading = self._writing = 0
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"mimo-tier-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job[Payload], bounds: Iterable[tuple[int, int]]) -> None:
        """Begin a job, soon.

        Args:
            job: not submitted before.
            bounds: first and last index (exclusive) of each batch; pages in none of them fail.
        """
        batches = [(job, start, end) for start, end in bounds]
        job.left = len(batches)
        with self._changed:
            if not batches or self._closed:
                self._finished.append(job)
                return
            (self._reads if job.read else self._writes).extend(batches)
            self._changed.notify_all()

    def finished(self) -> list[Job[Payload]]:
        """Jobs that have ended since the last call."""
        with self._changed:
            found = list(self._finished)
            self._finished.clear()
        return found

    def drain(self, patience_s: float = 0.0) -> None:
        """Until no thread uses host memory; what waits fails, after so many seconds of patience."""
        end_s = time.monotonic() + patience_s
        with self._changed:
            while self._busy() and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            for job, _, _ in (*self._reads, *self._writes):
                self._ended(job)
            self._reads.clear()
            self._writes.clear()
            while self._reading + self._writing:
                if not self._changed.wait(SLOW_S):
                    logger.warning("mimo tiers: waiting for a store that uses host memory")

    def close(self, patience_s: float = 0.0) -> None:
        """End the threads, as :meth:`drain`; what is submitted from now on fails."""
        self.drain(patience_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _busy(self) -> int:
        return len(self._reads) + len(self._writes) + self._reading + self._writing

    def _ended(self, job: Job[Payload]) -> None:
        job.left -= 1
        if not job.left:
            self._finished.append(job)

    def _next(self) -> _Batch[Payload] | None:
        if self._reads:
            self._reading += 1
            return self._reads.popleft()
        if self._writes and self._writing < self._most_writing:
            self._writing += 1
            return self._writes.popleft()
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while (batch := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            job, start, end = batch
            started_s = time.monotonic()
            try:
                done = self._move(job, start, end)
            except Exception as error:  # a store that fails must end neither thread nor engine
                logger.warning("mimo tiers: a transfer failed: %s", one_line(repr(error)))
                done = []
            with self._changed:
                job.done[start : start + len(done)] = done
                job.busy_s += time.monotonic() - started_s
                if job.read:
                    self._reading -= 1
                else:
                    self._writing -= 1
                self._ended(job)
                self._changed.notify_all()
