# SPDX-License-Identifier: Apache-2.0
"""The decoding pools of this process, their settings by engine, and their counters.

An engine's settings are kept here under a random token that travels in its configuration, so that
engines in one process have their own; those with equal settings share one pool. Nothing here
imports the engine.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.media.limits import MediaError, MediaLimits
from mimo_plugin.media.pool import MediaPool
from mimo_plugin.media.pool_types import PoolSettings, PoolStats, default_workers
from mimo_plugin.metrics import MetricsBuffer

TOKEN_KEY = "mimo_plugin"
"""Key in an engine's ``media_io_kwargs`` under which its token lies."""


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """Settings of one engine.

    Attributes:
        pool: processes, queue and memory.
        limits: of a picture, beside the engine's own.
    """

    pool: PoolSettings = field(default_factory=PoolSettings)
    limits: MediaLimits = field(default_factory=lambda: limits_of(None))


def settings_of(config: VisionConfig, api_processes: int) -> MediaSettings:
    """What the user's settings mean on this machine.

    Args:
        config: of the feature ``vision``.
        api_processes: that serve one engine, each with a pool of its own.
    """
    return MediaSettings(
        pool=PoolSettings(
            workers=config.decode_workers or default_workers(api_processes),
            max_queued=config.decode_queue,
            queue_timeout_s=config.decode_wait_s,
            job_timeout_s=config.decode_timeout_s,
            memory_bytes=config.decode_memory_mib << 20,
        ),
        limits=limits_of(config.decode_max_expansion),
    )


def limits_of(max_expansion: float | None) -> MediaLimits:
    """What the engine limits itself, or the model's processor, is not limited a second time."""
    return MediaLimits(
        max_encoded_bytes=None,
        max_pixels=None,
        max_decoded_bytes=None,
        max_aspect_ratio=None,
        max_expansion=max_expansion,
    )


def remember(settings: MediaSettings) -> str:
    """Keep an engine's settings; the token under which :func:`recall` finds them."""
    token = uuid.uuid4().hex
    _engines[token] = settings
    return token


def recall(token: object) -> MediaSettings:
    """An engine's settings, the defaults without a token.

    Raises:
        MediaError: a token that is not from this process: a client made it up.
    """
    if token is None:
        return MediaSettings()
    found = _engines.get(token) if isinstance(token, str) else None
    if found is None:
        raise MediaError(
            f"media_io_kwargs.{TOKEN_KEY}: found {repr(token)[:80]}; allowed: what the plugin "
            "writes at start; fix: leave it out"
        )
    return found


def media_pool(settings: PoolSettings | None = None) -> MediaPool:
    """The pool with these settings; without any, that of the engine configured last.

    For jobs of up to minutes give ``timeout_s``: those that may run longer than ``job_timeout_s``
    have processes of their own.
    """
    with _lock:
        if settings is None:
            settings = (list(_engines.values()) or [MediaSettings()])[-1].pool
        if settings not in _pools:
            _pools[settings] = MediaPool(settings)
        return _pools[settings]


class PoolReport:
    """What all pools of this process did, for the metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, ...], float] = {}

    def drain(self) -> dict[str, Any] | None:
        """A payload with what was added since the last call; None where no pool ever ran."""
        with _lock:
            pools = list(_pools.values())
        if not pools:
            return None
        buffer = MetricsBuffer()
        with self._lock:
            stats = [pool.stats_by_lane() for pool in pools]
            for lane in stats[0]:
                self._lane(buffer, lane, [one[lane] for one in stats])
        return buffer.drain()

    def _lane(self, buffer: MetricsBuffer, lane: str, stats: Sequence[PoolStats]) -> None:
        for name, attribute in _GAUGES.items():
            now = sum(getattr(one, attribute) for one in stats)
            if self._seen.get((lane, name)) != now:
                self._seen[lane, name] = now
                buffer.set(name, now, lane=lane)
        for (name, *outcome), value in _COUNTERS.items():
            total = sum(value(one) for one in stats)
            key = (lane, name, *outcome)
            added = total - self._seen.get(key, 0)
            if added > 0:
                self._seen[key] = total
                labels = {"outcome": outcome[0]} if outcome else {}
                buffer.inc(name, added, lane=lane, **labels)


_GAUGES = {
    "media_workers": "workers",
    "media_queued_jobs": "queued",
    "media_running_jobs": "running",
    "media_result_bytes": "outstanding_bytes",
}
_COUNTERS: dict[tuple[str, ...], Callable[[PoolStats], float]] = {
    ("media_jobs", "done"): lambda one: one.jobs_done,
    ("media_jobs", "failed"): lambda one: one.jobs_failed - one.timeouts - one.crashes,
    ("media_jobs", "timeout"): lambda one: one.timeouts,
    ("media_jobs", "crashed"): lambda one: one.crashes,
    ("media_jobs", "refused"): lambda one: one.jobs_refused,
    ("media_workers_started",): lambda one: one.workers_started,
    ("media_wait_seconds",): lambda one: one.queue_wait_s,
    ("media_run_seconds",): lambda one: one.run_s,
}

REPORT = PoolReport()
"""The counters of this process."""

_lock = threading.Lock()
_engines: dict[str, MediaSettings] = {}
_pools: dict[PoolSettings, MediaPool] = {}


def _after_fork() -> None:
    """In a forked child: its pools start at nothing, and nobody holds the lock."""
    global _lock
    _lock = threading.Lock()
    REPORT._lock = threading.Lock()
    REPORT._seen.clear()


os.register_at_fork(after_in_child=_after_fork)
