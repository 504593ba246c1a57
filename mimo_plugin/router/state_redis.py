# SPDX-License-Identifier: Apache-2.0
"""State that router processes share through a Redis server, which may come and go.

Keys, all of which begin with ``mimo-router:1:NAMESPACE:``

- ``stream``: batches of changes, each by one process, for some seconds;
- ``open:PROCESS``: what that process has in flight, for who was not there or missed something;
- ``processes``: when each process was last heard of;
- ``workers``: changes of workers at run time;
- ``sessions``: where each session was, by when;
- ``snapshot:…``: see :mod:`mimo_plugin.router.state_snapshots`.

Nothing of it is needed to route: without the server each process goes on with what it knows, drops
what others have in flight after a lease, and writes all it has again when the server is back, empty
or not. All times on the wire are of the server's clock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from mimo_plugin.router.state import Change, Done, Listener, Sent, WorkerChanged
from mimo_plugin.router.state_batch import BatchWriter
from mimo_plugin.router.state_limits import ServerClock, StateLimits
from mimo_plugin.router.state_peers import SEQ, WHOLE, OpenRequests, Peers, encode, field_of
from mimo_plugin.router.state_sessions import SharedSessions
from mimo_plugin.router.state_snapshots import Snapshots
from mimo_plugin.router.state_url import (
    StateUnavailable,
    StateUrl,
    client,
    failure,
    library,
    require_version,
)
from mimo_plugin.router.state_workers import SharedWorkers

log = logging.getLogger(__name__)

_CHUNK = 500  # fields or members of one command


class RedisState:
    """See the module, and :class:`~mimo_plugin.router.state.SharedState`.

    Args:
        url: of the server; ``?namespace=`` keeps apart who shares a server, not workers.
        clock: of the listener's times.
        limits: what it may cost; None: the usual.

    Raises:
        ConfigError: the URL is none.
        FeatureUnavailable: no client library.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float], limits: StateLimits | None = None
    ) -> None:
        self.process = secrets.token_hex(6)
        self.where = StateUrl.parse(url)
        self._limits = limits = limits or StateLimits()
        self._clock = ServerClock(clock)
        self._errors: tuple[type[Exception], ...] = (
            library().exceptions.RedisError,
            OSError,
            asyncio.TimeoutError,
        )
        self._client = client(self.where, limits.timeout_s)
        self._prefix = f"mimo-router:1:{self.where.namespace}:"
        self._seq = 0  # of the last change
        self._open = OpenRequests(limits.open_requests)
        self._queue: deque[tuple[int, float, Change, int]] = deque()  # number, time, change, bytes
        self._queue_bytes = 0
        self._whole_at_seq: int | None = None  # what was written in full; None: nothing
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None  # wakes the writer
        self._task: asyncio.Task[None] | None = None
        self._connected = False
        self._lost_s = clock()
        self._cursor = b"0-0"
        self._counts = dict.fromkeys(("dropped", "decode_errors", "reloads", "reconnects"), 0)
        self._last_error = ""
        self._lag_s = 0.0
        self._listener: Listener
        self._peers: Peers
        self._workers: SharedWorkers
        self._loading = asyncio.Lock()
        self._batches = BatchWriter(self._client, self._prefix, self.process, limits.stream_batches)
        self._sessions = SharedSessions(self._client, self._prefix, self._clock, limits)
        self._snapshots = Snapshots(self._client, self._prefix, self.process, limits)

    # What a router calls

    async def start(self, listener: Listener, given: Mapping[str, dict[str, str]]) -> None:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        self._listener = listener
        self._workers = SharedWorkers(listener, self.process, given)
        self._peers = Peers(listener, self._workers.merge, self._clock.local_s)
        try:
            require_version((await self._client.info("server"))["redis_version"], self.where)
            await self._join()
        except self._errors as error:
            await self._client.aclose()
            raise StateUnavailable(
                f"--state: found {self.where.shown}, which fails: {failure(error)}; allowed: a "
                "Redis server that answers; fix: start it, or correct the address or the password"
            ) from error
        self._task = asyncio.create_task(self._run(), name="shared state")

    def publish(self, change: Change) -> None:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        now_s = self._clock.local()
        if isinstance(change, WorkerChanged):
            change = self._workers.stamp(change, self._clock.us(now_s))
        elif not isinstance(change, Sent) and change.id not in self._open:
            return  # over already
        self._push(change, now_s)
        if not isinstance(change, WorkerChanged):
            for name in self._open.add(self._seq, change, now_s)[1:]:
                self._push(Done(name), now_s)

    async def save_snapshot(self, target: str, data: bytes) -> bool:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        try:
            return await self._snapshots.save(target, data)
        except self._errors as error:
            self._last_error = f"snapshot: {failure(error)}"
            return False

    async def load_snapshot(self, target: str) -> bytes | None:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        try:
            return await self._snapshots.load(target)
        except self._errors as error:
            self._last_error = f"snapshot: {failure(error)}"
            return None

    @property
    def status(self) -> dict[str, Any]:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        started = self._task is not None
        return {
            "kind": "redis",
            "connected": self._connected,
            "queue": len(self._queue),
            "queue_bytes": self._queue_bytes,
            "last_error": self._last_error,
            "lag_s": self._lag_s,
            "peers": len(self._peers) if started else 0,
            "published": self._seq,
            "received": self._peers.received if started else 0,
            "open": len(self._open),
            **self._counts,
        }

    async def close(self) -> None:
        """See :class:`~mimo_plugin.router.state.SharedState`."""
        if self._task is not None:
            await _end([self._task])
            self._task = None
            if self._connected:
                try:
                    if self._queue and self._whole_at_seq is not None:
                        await self._write_batch()
                    async with self._client.pipeline(transaction=True) as batch:
                        batch.zrem(self._key("processes"), self.process)
                        batch.unlink(self._key("open:" + self.process))
                        batch.xadd(self._key("stream"), {"gone": self.process})
                        await asyncio.wait_for(batch.execute(), self._limits.timeout_s)
                except self._errors as error:
                    log.warning("shared state: no goodbye: %s", failure(error))
        self._connected = False
        await self._client.aclose()

    # Times and queue

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _push(self, change: Change, now_s: float) -> None:
        self._seq += 1
        if not self._connected:
            return  # all that is still true is written when it is
        size = 100 + (len(change.hashes) if isinstance(change, Sent) else 0)
        self._queue.append((self._seq, now_s, change, size))
        self._queue_bytes += size
        limits = self._limits
        if len(self._queue) > limits.queue_changes or self._queue_bytes > limits.queue_bytes:
            self._counts["dropped"] += len(self._queue)
            self._sessions.unheard_since(self._queue[0][1])
            self._empty()
            self._whole_at_seq = None
            self._wake.set()
        if isinstance(change, Sent | WorkerChanged):
            self._wake.set()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(limits.patience_s, self._wake.set)

    def _empty(self) -> None:
        self._queue.clear()
        self._queue_bytes = 0
        if self._later is not None:
            self._later.cancel()
            self._later = None

    # The connection's life

    async def _run(self) -> None:
        random, wait_s, first = Random(), 0.05, True
        while True:
            try:
                if not first:
                    await self._join()
                    quiet_s = self._limits.lease_s + self._limits.timeout_s
                    self._sessions.unheard_since(self._lost_s - quiet_s)
                    log.info("shared state: %s is back", self.where.shown)
                    self._counts["reconnects"] += 1
                first, wait_s = False, 0.05
                await self._work()
            except self._errors as error:
                self._lost(error)
            except Exception as error:  # a listener's, say; the task must not end
                log.exception("shared state: begins again")
                self._lost(error)
            if self._clock.local() - self._lost_s > self._limits.lease_s:
                self._peers.drop_all()
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, self._limits.retry_s)

    def _lost(self, error: Exception) -> None:
        self._last_error = failure(error)
        if self._connected:
            self._lost_s = self._clock.local()
            log.warning(
                "shared state: lost %s (%s); this process routes by what it knows",
                self.where.shown,
                self._last_error,
            )
        self._connected = False
        self._empty()
        self._whole_at_seq = None

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [self._write(), self._read(), self._beat(), self._sessions.keep(self._listener)]

    async def _work(self) -> None:
        """Until something fails; that is raised."""
        tasks = [asyncio.create_task(part) for part in self._parts()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _join(self) -> None:
        """Learn what is there, and write what is here."""
        await self._clock.measure(self._client, anew=True)
        last = await self._client.xrevrange(self._key("stream"), count=1)
        self._cursor = last[0][0] if last else b"0-0"
        await self._meet_workers()
        self._connected = True
        await self._write_whole()
        await self._meet(await self._alive())
        await self._sessions.learn(self._listener)

    # Writing

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._whole_at_seq is None:
                await self._write_whole()
            elif self._queue:
                await self._write_batch()
                await asyncio.sleep(self._limits.flush_s)

    async def _write_batch(self) -> None:
        changes = list(self._queue)
        self._empty()
        touched = {c.id for _, _, c, _ in changes if not isinstance(c, WorkerChanged)}
        fields = {name: self._open.field(name, self._clock.us) for name in touched}
        alive = {field_of(name): data for name, data in fields.items() if data is not None}
        over = [field_of(name) for name, data in fields.items() if data is None]
        seq = changes[-1][0]
        stamped = [(self._clock.us(at_s), change) for _, at_s, change, _ in changes]
        sessions = {
            self._sessions.member(change.session, change.target): at_us
            for at_us, change in stamped
            if isinstance(change, Sent) and change.session is not None
        }
        workers = {c.url: encode(c) for _, c in stamped if isinstance(c, WorkerChanged)}
        alive[SEQ] = str(seq).encode()
        await self._batches.write(encode((changes[0][0], stamped)), alive, over, sessions, workers)

    async def _write_whole(self) -> None:
        """All that is in flight here, and a batch of nothing that tells the others to read it."""
        own, seq = self._key("open:" + self.process), self._seq
        self._whole_at_seq = seq
        self._empty()
        names = self._open.names()
        async with self._client.pipeline(transaction=True) as batch:
            batch.unlink(own)
            for start in range(0, len(names), _CHUNK):
                part = {
                    field_of(name): self._open.field(name, self._clock.us)
                    for name in names[start : start + _CHUNK]
                }
                batch.hset(own, mapping=part)
            batch.hset(own, mapping={SEQ: seq, WHOLE: 1})
            batch.pexpire(own, self._lease_ms(4))
            batch.zadd(self._key("processes"), {self.process: self._clock.now_us()})
            batch.xadd(self._key("stream"), {"by": self.process, "is": encode((seq + 1, []))})
            await batch.execute()

    # Reading

    async def _read(self) -> None:
        # Shorter than the client's patience.
        block_ms = max(1, round(self._limits.timeout_s * 500))
        while True:
            found = await self._client.xread(
                {self._key("stream"): self._cursor}, count=200, block=block_ms
            )
            for _, entries in found or ():
                async with self._loading:
                    for entry, fields in entries:
                        await self._take(entry, fields)
                        self._cursor = entry

    async def _take(self, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        if b"sessions" in fields:
            self._sessions.take(fields[b"sessions"], self._listener)
            return
        if b"gone" in fields:
            self._peers.drop(fields[b"gone"].decode())
            return
        process = fields[b"by"].decode()
        if process == self.process:
            return
        sent_ms = int(entry.split(b"-")[0])
        self._lag_s = self._clock.age_s(sent_ms * 1000)
        try:
            if not self._peers.take(process, fields[b"is"]):
                await self._load(process)
                # What is over was missed too, and where it was.
                since_ms = int(self._cursor.split(b"-")[0])
                await self._sessions.learn(self._listener, (since_ms - 1000) * 1000)
        except (msgspec.MsgspecError, ValueError) as error:
            self._undecodable(process, error)

    async def _load(self, process: str) -> None:
        self._counts["reloads"] += 1
        fields = await self._client.hgetall(self._key("open:" + process))
        try:
            self._peers.load(process, fields)
        except (msgspec.MsgspecError, ValueError) as error:
            self._undecodable(process, error)

    def _undecodable(self, process: str, error: Exception) -> None:
        self._counts["decode_errors"] += 1
        if self._counts["decode_errors"] == 1:
            log.warning("shared state: can't read what %s wrote: %s", process, failure(error))
        self._last_error = f"from {process}: {failure(error)}"

    # Signs of life

    def _lease_ms(self, leases: float = 1.0) -> int:
        return round(self._limits.lease_s * 1000 * leases)

    async def _alive(self) -> list[str]:
        """Processes that were heard of lately, but for this one."""
        least_us = self._clock.now_us() - self._lease_ms() * 1000
        found = await self._client.zrangebyscore(self._key("processes"), least_us, "+inf")
        return [name.decode() for name in found if name.decode() != self.process]

    async def _meet(self, alive: list[str]) -> None:
        """Drop who is gone, and read what we lack of the others."""
        for process in set(self._peers) - set(alive):
            self._peers.drop(process)
        for process in alive:
            own = self._key("open:" + process)
            seq = await self._client.hget(own, SEQ)
            if seq is not None and self._peers.is_stuck(process, int(seq)):
                async with self._loading:
                    await self._load(process)

    async def _meet_workers(self) -> None:
        key = self._key("workers")
        written, forgotten = self._workers.meet(
            await self._client.hgetall(key), self._clock.now_us()
        )
        if written:
            await self._client.hset(key, mapping=written)
        if forgotten:
            await self._client.hdel(key, *forgotten)

    async def _beat(self) -> None:
        limits = self._limits
        while True:
            await asyncio.sleep(limits.heartbeat_s)
            await self._clock.measure(self._client)
            now_s = self._clock.local()
            now_us = self._clock.us(now_s)
            own = self._key("open:" + self.process)
            async with self._client.pipeline(transaction=False) as batch:
                batch.zadd(self._key("processes"), {self.process: now_us})
                dead_us = now_us - self._lease_ms(10) * 1000
                batch.zremrangebyscore(self._key("processes"), "-inf", dead_us)
                batch.pexpire(own, self._lease_ms(4))
                batch.xtrim(
                    self._key("stream"), minid=round(now_us / 1000 - limits.stream_s * 1000)
                )
                self._sessions.trim(batch)
                batch.hexists(own, WHOLE)
                whole = (await batch.execute())[-1]
            if not whole:  # the server was emptied
                self._whole_at_seq = None
                self._wake.set()
                self._sessions.unheard_since(now_s - limits.lease_s)
            await self._meet_workers()
            await self._meet(await self._alive())


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: ``asyncio.wait_for`` of Python 3.11 may lose a cancel."""
    alive = set(tasks)
    while alive:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=0.05)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # was told by who waited for it
