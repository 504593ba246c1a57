# SPDX-License-Identifier: Apache-2.0
"""Where sessions were, for routers that start later and for the time without the server.

``sessions`` is a sorted set: session and target, by when. While all goes well the others learn of
sessions from the requests themselves.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import msgspec

from mimo_plugin.router.state import Listener
from mimo_plugin.router.state_limits import ServerClock, StateLimits

_CHUNK = 500  # of one command
_CLOCK_ERROR_S = 0.02  # of times that went to the server and back

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, str, int]]).decode


class SharedSessions:
    """See the module.

    Args:
        client: of the server.
        prefix: of all keys.
        clock: the server's.
        limits: of number and time.
    """

    def __init__(self, client: Any, prefix: str, clock: ServerClock, limits: StateLimits) -> None:
        self._client, self._clock, self._limits = client, clock, limits
        self._key, self._stream = prefix + "sessions", prefix + "stream"
        self._wake = asyncio.Event()
        self._unheard_s = inf  # from when on others may not have heard of them

    def member(self, session: str, target: str) -> str:
        """A session at a target."""
        return f"{session}\0{target}"

    def unheard_since(self, local_s: float) -> None:
        """Others may not have heard of sessions since then."""
        self._unheard_s = min(self._unheard_s, local_s)
        self._wake.set()

    async def keep(self, listener: Listener) -> None:
        """Write all that are known here when it is time to; what was written later stays."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            known = list(listener.sessions())
            for start in range(0, len(known), _CHUNK):
                part = known[start : start + _CHUNK]
                unheard = [
                    (session, target, self._clock.us(at_s))
                    for session, target, at_s in part
                    if at_s >= self._unheard_s
                ]
                async with self._client.pipeline(transaction=False) as batch:
                    self.add(
                        batch, {self.member(s, t): self._clock.us(at_s) for s, t, at_s in part}
                    )
                    if unheard:
                        batch.xadd(self._stream, {"sessions": _encode(unheard)})
                    await batch.execute()
            if not self._wake.is_set():
                self._unheard_s = inf

    def add(self, batch: Any, members: dict[str, int]) -> None:
        """Note sessions, as part of a pipeline."""
        batch.zadd(self._key, members, gt=True)

    def trim(self, batch: Any) -> None:
        """Forget what is old or too much, as part of a pipeline."""
        least_us = self._clock.now_us() - round(self._limits.session_ttl_s * 1e6)
        batch.zremrangebyscore(self._key, "-inf", least_us)
        batch.zremrangebyrank(self._key, 0, -self._limits.sessions - 1)

    def take(self, data: bytes, listener: Listener) -> None:
        """What another process tells.

        Raises:
            msgspec.MsgspecError: it can't be read.
        """
        for session, target, at_us in _decode(data):
            self._tell(listener, session, target, at_us)

    async def learn(self, listener: Listener, since_us: int = 0) -> None:
        """Read what is there."""
        found = await self._client.zrangebyscore(self._key, since_us, "+inf", withscores=True)
        for member, at_us in found:
            session, _, target = member.decode().rpartition("\0")
            self._tell(listener, session, target, int(at_us))

    def _tell(self, listener: Listener, session: str, target: str, at_us: int) -> None:
        """It may be what this process wrote itself, just before the session moved on."""
        listener.session(session, target, self._clock.local_s(at_us) - _CLOCK_ERROR_S)
