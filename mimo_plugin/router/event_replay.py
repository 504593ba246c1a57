# SPDX-License-Identifier: Apache-2.0
"""Old batches from a publisher's replay address.

The request is an empty frame and the first wanted number; the answers are batches in order, then
one message with the number ``END_SEQ`` (``ZmqEventPublisher._service_replay`` of vLLM). The
publisher keeps its last 10,000 batches by default, and looks for requests between two batches, or
every 0.1 s when it is idle.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum
from typing import Any

import zmq
import zmq.asyncio

from mimo_plugin.router.event_wire import END_SEQ, SEQ_BYTES, parse

MAX_QUEUED_MESSAGES = 10_000
"""Held in a socket, and while a replay is awaited; what comes beyond is asked for again."""
MAX_MESSAGE_BYTES = 256 << 20


class Replay(Enum):
    """How a publisher answered."""

    WHOLE = "whole"
    OTHER = "other"
    """It does not have the batch that was applied last: another publisher, or much was missed."""
    SILENT = "silent"
    """No answer, or none to the end."""


def limit(socket: Any) -> None:
    """Bound what a socket may hold."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)


async def replayed(
    context: zmq.asyncio.Context,
    endpoint: str,
    first: int,
    wait_s: float,
    live: Any,
    hold: Callable[[], Awaitable[None]],
) -> AsyncGenerator[tuple[int, bytes] | None, None]:
    """Batches from number ``first`` on, and None at the end of the answer.

    Args:
        context: to make the socket in.
        endpoint: the replay address.
        first: number of the first wanted batch.
        wait_s: how long the publisher may say nothing; then it ends without None.
        live: the SUB socket, which goes on meanwhile.
        hold: takes what came there.
    """
    request = context.socket(zmq.DEALER)
    try:
        limit(request)
        request.connect(endpoint)
        await request.send_multipart([b"", first.to_bytes(SEQ_BYTES, "big")])
        poller = zmq.asyncio.Poller()
        poller.register(request, zmq.POLLIN)
        poller.register(live, zmq.POLLIN)
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            ready = dict(await poller.poll(left_s * 1000))
            if live in ready:
                await hold()
            if request not in ready:
                continue
            until = time.monotonic() + wait_s
            frames = await request.recv_multipart()
            if len(frames) >= 2 and bytes(frames[-2]) == END_SEQ:
                yield None
                return
            message = parse(frames)
            if message is not None:
                yield message
    finally:
        request.close(linger=0)
