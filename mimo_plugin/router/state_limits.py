# SPDX-License-Identifier: Apache-2.0
"""What a shared state may cost, and the time that all who share it agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class StateLimits:
    """What the state may cost.

    Attributes:
        timeout_s: longest time for the server to accept or to answer.
        heartbeat_s: between signs of life.
        lease_s: silence after which a process counts as dead, and its requests no more.
        flush_s: least time between two batches.
        patience_s: how long news wait for more, but for requests that were sent.
        retry_s: longest time between attempts to connect.
        queue_changes: waiting for the server; beyond it others learn from what is in flight.
        queue_bytes: the same in bytes.
        stream_batches: kept for others.
        stream_s: the same in time.
        open_requests: in flight in one process.
        sessions: remembered.
        session_ttl_s: how long.
        snapshot_bytes: of one target, compressed; larger ones are not kept.
        snapshot_ttl_s: how long.
        snapshot_lease_s: how long nobody else writes a target's snapshot after one did.
    """

    timeout_s: float = 2.0
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    flush_s: float = 0.004
    patience_s: float = 0.02
    retry_s: float = 2.0
    queue_changes: int = 20_000
    queue_bytes: int = 64 << 20
    stream_batches: int = 20_000
    stream_s: float = 15.0
    open_requests: int = 20_000
    sessions: int = 100_000
    session_ttl_s: float = 600.0
    snapshot_bytes: int = 256 << 20
    snapshot_ttl_s: float = 3600.0
    snapshot_lease_s: float = 20.0


class ServerClock:
    """The server's clock in microseconds, of which each process knows how far its own is off.

    Args:
        local: a process's own clock, in seconds.
    """

    def __init__(self, local: Callable[[], float]) -> None:
        self.local = local
        self._offset_us = 0.0
        self._worst_s = inf  # longest journey of an answer that is believed

    async def measure(self, client: Any, *, anew: bool = False) -> None:
        """Ask the server, which may be another one now (``anew``).

        Raises:
            RedisError, OSError, TimeoutError: it fails.
        """
        if anew:
            self._worst_s = inf
        before_s = self.local()
        seconds, micros = await client.time()
        after_s = self.local()
        if after_s - before_s > self._worst_s:  # an answer that was on its way for long tells less
            self._worst_s *= 1.5
            return
        self._worst_s = 2 * (after_s - before_s)
        self._offset_us = seconds * 1_000_000 + micros - (before_s + after_s) * 0.5e6

    def us(self, local_s: float) -> int:
        """The server's time."""
        return round(local_s * 1e6 + self._offset_us)

    def now_us(self) -> int:
        """The server's time now."""
        return self.us(self.local())

    def local_s(self, server_us: int) -> float:
        """A process's own time, never later than now."""
        return min(self.local(), (server_us - self._offset_us) / 1e6)

    def age_s(self, server_us: int) -> float:
        """How long ago that was."""
        return self.local() - self.local_s(server_us)
