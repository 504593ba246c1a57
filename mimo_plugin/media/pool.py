# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that decode pictures and clips; results arrive in shared memory.

A picture takes tens of milliseconds, a video may take minutes. So there are two lanes
(:mod:`~mimo_plugin.media.pool_lane`), each with processes, queue and memory of its own: however
many videos are decoded, a picture finds a process, and the other way round. Where both want the
same core, the processes of the long lane give way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mimo_plugin.media.pool_lane import Lane
from mimo_plugin.media.pool_types import (
    JobFailed,
    JobResult,
    PoolBusy,
    PoolClosed,
    PoolSettings,
    PoolStats,
)
from mimo_plugin.media.process import Job

__all__ = ["JobFailed", "JobResult", "MediaPool", "PoolBusy", "PoolClosed", "PoolSettings"]

LONG_NICENESS = 5
"""How much processes of the long lane yield to others, as for ``nice``."""


class MediaPool:
    """Runs functions of the form ``function(data, allocate, **options) -> JSON-able result``.

    ``data`` is the bytes given (or a memoryview of them), ``allocate(shape)`` gives a writable
    uint8 array in shared memory. The function must be importable by name, and should raise
    :class:`~mimo_plugin.media.limits.MediaError` for bad input. Threads may share a pool.
    """

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        long = replace(self.settings, preload=())
        self._lanes = {"short": Lane(self.settings), "long": Lane(long, niceness=LONG_NICENESS)}

    def run_sync(
        self,
        function: Callable[..., Any],
        data: bytes | bytearray | memoryview = b"",
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> JobResult:
        """Run a job and wait for it.

        Args:
            function: found again by its module and name in the worker.
            data: handed over in shared memory when long.
            timeout_s: longest run; the settings' ``job_timeout_s`` when None. A job that is
                allowed more goes to the long lane.
            options: keyword arguments of the function; pickled.

        Raises:
            MediaError: the function refused the input, ran too long or took its process down.
            JobFailed: the function raised anything else.
            PoolBusy: no place, or no memory for the result, in time.
            PoolClosed: the pool is closed.
        """
        job, lane = self._job(function, data, timeout_s, options)
        return lane.run_sync(job)

    async def run(
        self,
        function: Callable[..., Any],
        data: bytes | bytearray | memoryview = b"",
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> JobResult:
        """:meth:`run_sync` for an event loop. A cancelled job that waits is dropped."""
        job, lane = self._job(function, data, timeout_s, options)
        return await lane.run(job)

    def stats(self) -> PoolStats:
        """Depths and counters as of now, of both lanes together."""
        both = [vars(stats) for stats in self.stats_by_lane().values()]
        return PoolStats(**{name: sum(one[name] for one in both) for name in both[0]})

    def stats_by_lane(self) -> dict[str, PoolStats]:
        """The same of each lane, ``short`` and ``long``."""
        return {name: lane.stats() for name, lane in self._lanes.items()}

    def close(self, grace_s: float = 1.0) -> None:
        """End the pool: waiting jobs fail, running ones get ``grace_s`` seconds to end.

        Results that were handed out stay usable. A second call does nothing.
        """
        for lane in self._lanes.values():
            lane.close(grace_s)

    def _job(
        self,
        function: Callable[..., Any],
        data: bytes | bytearray | memoryview,
        timeout_s: float | None,
        options: dict[str, Any],
    ) -> tuple[Job, Lane]:
        limit_s = self.settings.job_timeout_s if timeout_s is None else timeout_s
        job = Job.of(function, data, limit_s, options)
        return job, self._lanes["long" if limit_s > self.settings.job_timeout_s else "short"]
