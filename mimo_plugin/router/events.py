# SPDX-License-Identifier: Apache-2.0
"""KV events of one target, from the engine's publisher into the index.

Batches come through a SUB socket. What is missing is asked for at the publisher's replay address
(ROUTER): all of it when the target is met, what was missed after a gap or a broken connection. A
publisher found on the same address may be another one, with other blocks; so a replay begins with
the last batch that was applied, and only goes on where that is still the same.

Until it is known what was missed the target counts as one without hits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mimo_plugin.core.engine_events import EngineEvent
from mimo_plugin.core.kv_events import AllBlocksCleared, Step
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.router.event_replay import MAX_QUEUED_MESSAGES, Replay, limit, replayed
from mimo_plugin.router.event_wire import PayloadError, decode, parse

logger = logging.getLogger(__name__)

REPLAY_WAIT_S = 5.0
"""How long a replay may say nothing."""
BACK_OFF_S = (0.1, 5.0)
"""Shortest and longest time between two attempts to connect."""
HEARTBEAT_S = 5.0
"""A publisher's machine that went away without a word is noticed after three of these."""
QUIET_S = (0.5, 60.0)
"""After this time without a batch it is asked whether one was lost; longer each time it was not.
The first time is soon: a subscription may begin a moment after the replay's end."""
_TURN_S = 0.005  # of work at a time, before other tasks get theirs


class EventReader:
    """Reads one target's events into the index.

    Args:
        target: name of the worker (with its rank) in the index.
        endpoint: where the publisher is bound, as this process reaches it.
        replay: its replay address; None where it has none: then every broken connection loses
            what was known.
        index: to apply the batches to.
        hash_block_tokens: must be the index's.
        topic: the publisher's, "" for all.
        on_change: called after batches were applied, with the target.
        decode: what reads a payload: another one for engines whose events differ from vLLM's.
    """

    def __init__(
        self,
        target: str,
        endpoint: str,
        replay: str | None,
        index: NamedIndex,
        hash_block_tokens: int | None = None,
        *,
        topic: str = "",
        on_change: Callable[[str], None] | None = None,
        replay_wait_s: float = REPLAY_WAIT_S,
        decode: Callable[[bytes], tuple[list[EngineEvent], int]] = decode,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        if hash_block_tokens not in (None, index.hash_block_tokens):
            raise ValueError(
                f"hash_block_tokens: found {hash_block_tokens}; "
                f"allowed: the index's {index.hash_block_tokens}"
            )
        self.target = target
        self.endpoint = endpoint
        self.replay = replay
        self.topic = topic
        self._index = index
        self._on_change = on_change
        self._replay_wait_s = replay_wait_s
        self._decode = decode
        self._context = context
        self._connected = False
        self._quiet_s = QUIET_S[0]
        self._last_live = -1
        self._digests: dict[int, bytes] = {}  # of the batch before ``next_seq`` and later ones
        self._last_event_s: float | None = None
        self._held: deque[tuple[int, bytes]] = deque()
        self._counts = dict.fromkeys(
            ("batches", "gaps", "replays", "failed_replays", "restarts", "connects",
             "decode_errors", "unknown_events", "errors"),
            0,
        )  # fmt: skip

    @property
    def status(self) -> dict[str, Any]:
        """Connection, position in the stream, and what happened since the start."""
        age = None if self._last_event_s is None else time.monotonic() - self._last_event_s
        return {
            "connected": self._connected,
            "trusted": self._index.is_trusted(self.target),
            "next_seq": self._index.next_seq(self.target),
            "last_event_age_s": age,
            **self._counts,
        }

    @property
    def last(self) -> tuple[int, bytes] | None:
        """Number and digest of the batch that was applied last; None: of none is it known."""
        next_seq = self._index.next_seq(self.target)
        digest = self._digests.get(next_seq - 1) if next_seq is not None else None
        return (next_seq - 1, digest) if next_seq is not None and digest is not None else None

    def resume(self, digest: bytes) -> None:
        """The index was given what the target held after the batch with this digest, before
        :meth:`run`: what came since is asked for, and all is forgotten where it is not to be had.
        """
        next_seq = self._index.next_seq(self.target)
        if next_seq is not None:
            self._digests[next_seq - 1] = digest

    async def run(self) -> None:
        """Read until cancelled."""
        context = self._context or zmq.asyncio.Context.instance()
        wait_s = BACK_OFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._session(context)
            except (zmq.ZMQError, OSError, ValueError) as error:
                self._counts["errors"] += 1
                logger.warning("Events of %s from %s: %s", self.target, self.endpoint, error)
                self._disconnected()
            if time.monotonic() - began > BACK_OFF_S[1]:
                wait_s = BACK_OFF_S[0]
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACK_OFF_S[1])

    # Connection

    async def _session(self, context: zmq.asyncio.Context) -> None:
        """One pair of sockets: the SUB socket and its monitor. Ends by an error only."""
        socket = context.socket(zmq.SUB)
        monitor = None
        try:
            limit(socket)
            socket.setsockopt(zmq.RECONNECT_IVL, int(BACK_OFF_S[0] * 1000))
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(BACK_OFF_S[1] * 1000))
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3 * HEARTBEAT_S * 1000))
            watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(watched)
            socket.subscribe(self.topic.encode())
            socket.connect(self.endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            if self.endpoint.startswith("inproc:"):
                await self._arrived(socket)  # such sockets have no connection to watch
            while True:
                ready = dict(await poller.poll(self._quiet_s * 1000))
                if monitor in ready:
                    await self._connection_changed(monitor, socket)
                if socket in ready:
                    self._quiet_s = QUIET_S[0]
                    await self._read(socket)
                elif not ready and self._connected:
                    await self._check(socket)
        finally:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            if monitor is not None:
                monitor.close(linger=0)
            socket.close(linger=0)

    async def _connection_changed(self, monitor: Any, socket: Any) -> None:
        while await monitor.poll(0):
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._arrived(socket)

    def _disconnected(self) -> None:
        self._connected = False
        self._index.suspend(self.target)

    async def _arrived(self, socket: Any) -> None:
        """The connection stands: find out what was missed."""
        self._connected, self._quiet_s = True, QUIET_S[0]
        self._counts["connects"] += 1
        self._index.suspend(self.target)
        # What is left of the connection before may be of another publisher.
        await self._hold(socket)
        self._held.clear()
        await self._catch_up(socket)
        self._apply_held()
        self._index.resume(self.target)
        self._changed()

    async def _catch_up(self, socket: Any) -> None:
        """Have all that the publisher sent so far, or know nothing."""
        if self.replay is not None:
            next_seq = self._index.next_seq(self.target)
            if next_seq is None:
                await self._replay(socket, 0)
                return
            digest = self._digests.get(next_seq - 1)
            if digest and await self._replay(socket, next_seq - 1, digest) is Replay.WHOLE:
                return
            # Another publisher on the same address, or one that no longer has what we missed.
            self._counts["restarts"] += 1
        self._forget()
        if self.replay is not None:
            await self._replay(socket, 0)

    async def _check(self, socket: Any) -> None:
        """Nothing came for some time: is there nothing, or was it lost?"""
        self._quiet_s = min(2 * self._quiet_s, QUIET_S[1])
        if self.replay is None:
            return
        before = self._counts["batches"]
        next_seq = self._index.next_seq(self.target)
        digest = self._digests.get(next_seq - 1) if next_seq is not None else None
        if next_seq is not None and digest is not None:
            answer = await self._replay(socket, next_seq - 1, digest)
            if answer is Replay.OTHER:
                await self._arrived(socket)
        else:
            await self._replay(socket, 0 if next_seq is None else next_seq)
        self._apply_held()
        if self._counts["batches"] != before:
            self._quiet_s = QUIET_S[0]
            self._changed()

    def _forget(self) -> None:
        self._index.forget(self.target)
        self._last_live = -1
        self._digests.clear()

    # Batches

    async def _read(self, socket: Any) -> None:
        """Apply what has come, for a short time."""
        until = time.monotonic() + _TURN_S
        while time.monotonic() < until:
            try:
                message = await self._received(socket)
            except zmq.Again:
                break
            if message is not None:
                await self._live(socket, *message)
        self._changed()
        await asyncio.sleep(0)

    async def _live(self, socket: Any, seq: int, payload: bytes) -> None:
        if seq <= self._last_live:
            # The publisher counts from the start again.
            self._counts["restarts"] += 1
            self._forget()
            self._index.suspend(self.target)
            self._held.append((seq, payload))
            await self._replay(socket, 0)
            self._index.resume(self.target)
            self._apply_held()
            return
        if self._apply(seq, payload) is Step.GAP:
            self._counts["gaps"] += 1
            next_seq = self._index.next_seq(self.target)
            if self.replay is not None and next_seq is not None:
                await self._replay(socket, next_seq)
            self._index.skip_gap(self.target)
            self._apply_held()

    def _apply(self, seq: int, payload: bytes, *, replayed: bool = False) -> Step:
        """Decode a batch and give it to the index."""
        events = self._events(payload)
        step = self._index.apply(self.target, seq, events, replayed=replayed)
        if not replayed:
            self._last_live = seq
        if step is not Step.SEEN:
            self._counts["batches"] += 1
            self._last_event_s = time.monotonic()
            self._digests[seq] = _digest(payload)
            oldest = (self._index.next_seq(self.target) or 0) - 1
            for old in [known for known in self._digests if known < oldest]:
                del self._digests[old]
        return step

    def _events(self, payload: bytes) -> Sequence[EngineEvent]:
        try:
            events, unknown = self._decode(payload)
        except PayloadError as error:
            # What was removed is not known, and so not what is left.
            self._counts["decode_errors"] += 1
            logger.warning("Events of %s: a batch can't be read: %s", self.target, error)
            return [AllBlocksCleared()]
        self._counts["unknown_events"] += unknown
        return events

    def _apply_held(self) -> None:
        while self._held:
            seq, payload = self._held.popleft()
            if self._apply(seq, payload) is Step.GAP:
                self._index.skip_gap(self.target)

    # Replays

    async def _replay(self, socket: Any, first: int, expected: bytes | None = None) -> Replay:
        """Ask for all batches from ``first`` on and apply them.

        Live ones that come meanwhile are held back. With ``expected`` the first batch must be the
        one with that digest, otherwise nothing is applied.
        """
        answer = Replay.SILENT
        if self.replay is None:
            return answer
        self._counts["replays"] += 1
        context = self._context or zmq.asyncio.Context.instance()
        old = replayed(
            context, self.replay, first, self._replay_wait_s, socket, lambda: self._hold(socket)
        )
        next_turn = time.monotonic() + _TURN_S
        async with contextlib.aclosing(old) as batches:
            async for message in batches:
                if message is None:
                    answer = Replay.WHOLE if expected is None else Replay.OTHER
                    break
                seq, payload = message
                if expected is not None:
                    if seq != first or _digest(payload) != expected:
                        answer = Replay.OTHER
                        break
                    expected = None
                    continue
                self._apply(seq, payload, replayed=True)
                if time.monotonic() > next_turn:
                    await asyncio.sleep(0)
                    next_turn = time.monotonic() + _TURN_S
        if answer is not Replay.WHOLE:
            self._counts["failed_replays"] += 1
        return answer

    async def _hold(self, socket: Any) -> None:
        """Keep live batches for after the replay."""
        while True:
            try:
                message = await self._received(socket)
            except zmq.Again:
                return
            if message is None:
                continue
            if len(self._held) == MAX_QUEUED_MESSAGES:
                self._held.popleft()
            self._held.append(message)

    async def _received(self, socket: Any) -> tuple[int, bytes] | None:
        """The next message that is there; None for one of another form, which is counted.

        Raises:
            zmq.Again: there is none.
        """
        message = parse(await socket.recv_multipart(zmq.NOBLOCK))
        if message is None or message[0] < 0:
            self._counts["decode_errors"] += 1
            return None
        return message

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.target)


def _digest(payload: bytes) -> bytes:
    """Names a batch: it holds the time at which it was made."""
    return hashlib.blake2b(payload, digest_size=16).digest()
