# SPDX-License-Identifier: Apache-2.0
"""What goes into the pool and what comes out of it: settings, results, counters, errors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mimo_plugin.errors import MimoError

MAX_WORKERS = 8
"""Most workers for pictures where nobody names a number."""


class JobFailed(MimoError):
    """The job's function raised an error that does not blame the input."""


class PoolBusy(MimoError):
    """No place in the queue, or no memory for the result, within the time allowed."""


class PoolClosed(MimoError):
    """The pool was closed before the job ended."""


def default_workers(processes: int = 1) -> int:
    """Workers of each of some processes: its share of the cores, from 1 to ``MAX_WORKERS``."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // processes))


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How large each lane of the pool is and how long it waits.

    Attributes:
        workers: processes at most.
        max_queued: jobs that wait for a worker; further callers wait for a place.
        queue_timeout_s: longest wait for such a place, and for memory.
        job_timeout_s: longest run of a job, if the caller names no other.
        memory_bytes: shared memory of all results of a lane that are still in use.
        worker_memory_bytes: private memory of one worker; None for no limit.
        preload: modules a worker imports before its first job.
    """

    workers: int = field(default_factory=default_workers)
    max_queued: int = 64
    queue_timeout_s: float = 30.0
    job_timeout_s: float = 30.0
    memory_bytes: int = 4 << 30
    worker_memory_bytes: int | None = 8 << 30
    preload: tuple[str, ...] = ("mimo_plugin.media.images",)

    def __post_init__(self) -> None:
        positive = ("workers", "max_queued", "queue_timeout_s", "job_timeout_s", "memory_bytes")
        for name in (*positive, "worker_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"media pool: {name}: found {value}; allowed: above 0")


class JobResult(NamedTuple):
    """What a job gave back.

    Attributes:
        meta: what the function returned.
        arrays: uint8, in the order in which the function asked for them, in shared memory that
            is freed with the last reference to it.
    """

    meta: Any
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class PoolStats:
    """A look at a lane or a pool: gauges first, then counters since its start."""

    workers: int
    queued: int
    running: int
    outstanding_bytes: int
    jobs_done: int
    jobs_refused: int
    jobs_failed: int
    timeouts: int
    crashes: int
    workers_started: int
    queue_wait_s: float
    run_s: float
