# SPDX-License-Identifier: Apache-2.0
"""A worker's answer on its way to the client.

Streams go on chunk by chunk, as they come, no faster than the client reads. Only an event that is
not whole yet waits for its rest: a worker that dies within one must not leave half of it with the
client, who gets an event that says what happened instead. Other answers are small; they are held
until they are whole, so that one that breaks off becomes an error of its own. What is larger than
``HELD_BYTES`` goes on as it comes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from mimo_plugin.router import problems

HELD_BYTES = 1 << 20
_TAIL_BYTES = 4096
_EVENT_BYTES = 1 << 20  # longest event that is waited for
_CACHED = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_LAST_EVENTS = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_PROMPT = re.compile(rb'(?<!\\)"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')

WorkerErrors = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class ClientGone(Exception):
    """The client closed the connection."""


class Closed(Exception):
    """The worker stopped before the first byte of its answer's body."""


@dataclass(slots=True)
class Relayed:
    """What became of an answer.

    Attributes:
        response: what was sent, or is to be sent.
        broken: why the worker stopped within it; None: it is whole.
        head: its first bytes.
        cached_tokens, prompt_tokens: what it said about its prompt; None: nothing.
    """

    response: web.StreamResponse
    head: bytes = b""
    broken: str | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


async def relay(
    request: web.BaseRequest,
    upstream: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    first_byte: Callable[[], None],
) -> Relayed:
    """Pass an answer on.

    Args:
        request: the client's.
        upstream: the worker's answer, of which nothing was read.
        headers: of the answer to the client.
        first_byte: called when a stream's first byte has come.

    Raises:
        Closed: nothing was sent to the client; the request may be tried elsewhere.
        ClientGone: there is nobody to answer.
    """
    if upstream.content_type == "text/event-stream":
        return await _stream(request, upstream, headers, first_byte)
    return await _held(request, upstream, headers)


async def _stream(
    request: web.BaseRequest,
    upstream: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    first_byte: Callable[[], None],
) -> Relayed:
    chunks = upstream.content.iter_any()
    try:
        chunk = await anext(chunks, b"")
    except WorkerErrors as error:
        raise Closed(words(error)) from None
    first_byte()
    headers.popall("Content-Length", None)
    response = web.StreamResponse(status=upstream.status, headers=headers)
    head, tail, pending, broken, torn = chunk[:_TAIL_BYTES], b"", b"", None, False
    try:
        await response.prepare(request)
        while chunk:
            if pending:
                chunk = pending + chunk
            end = _events_end(chunk)
            pending, torn = chunk[end:], torn and not end
            if len(pending) > _EVENT_BYTES:
                end, pending, torn = len(chunk), b"", True
            if end:
                sent = chunk if end == len(chunk) else chunk[:end]
                tail = sent[-_TAIL_BYTES:] if end >= _TAIL_BYTES else (tail + sent)[-_TAIL_BYTES:]
                await response.write(sent)
            try:
                chunk = await anext(chunks, b"")
            except WorkerErrors as error:
                broken = words(error)
                chunk = b""
        if broken is None:
            if pending:
                tail += pending
                await response.write(pending)
        else:
            text = f"the worker stopped within its answer: {broken}"
            await response.write((b"\n\n" if torn else b"") + problems.event(502, text))
        await response.write_eof()
    except (ConnectionError, RuntimeError, asyncio.CancelledError) as error:
        # Many clients close when they have read the last event: they have it all.
        if not tail.endswith(_LAST_EVENTS):
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ClientGone(str(error)) from None
    cached, prompt = usage(tail)
    if cached is None:
        cached, first_prompt = usage(head)
        prompt = prompt if prompt is not None else first_prompt
    return Relayed(response, head, broken, cached, prompt)


def _events_end(chunk: bytes) -> int:
    """Where the last whole event of a piece of a stream ends; 0: none does."""
    if chunk.endswith((b"\n\n", b"\r\n\r\n")):
        return len(chunk)
    plain, carriage = chunk.rfind(b"\n\n"), chunk.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)


async def _held(
    request: web.BaseRequest, upstream: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> Relayed:
    chunks = upstream.content.iter_any()
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > HELD_BYTES:
                return await _large(request, upstream, headers, b"".join(parts))
    except WorkerErrors as error:
        if not parts:
            raise Closed(words(error)) from None
        text = f"the worker stopped within its answer: {words(error)}"
        return Relayed(problems.Problem(502, text, "broken").response(), broken=text)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if request.method != "HEAD":
        headers.popall("Content-Length", None)
    cached, prompt = (None, None) if "Content-Encoding" in headers else usage(body[-65536:])
    response = web.Response(body=body, status=upstream.status, headers=headers)
    return Relayed(response, body[:_TAIL_BYTES], None, cached, prompt)


async def _large(
    request: web.BaseRequest,
    upstream: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    begin: bytes,
) -> Relayed:
    response = web.StreamResponse(status=upstream.status, headers=headers)
    broken = None
    chunk = begin
    try:
        await response.prepare(request)
        while chunk:
            await response.write(chunk)
            try:
                chunk = await upstream.content.readany()
            except WorkerErrors as error:
                broken = words(error)
                break
        if broken is None:
            await response.write_eof()
        elif request.transport is not None:
            request.transport.abort()  # part of it is there: only a cut says that it isn't all
    except (ConnectionError, RuntimeError) as error:
        raise ClientGone(str(error)) from None
    return Relayed(response, begin[:_TAIL_BYTES], broken)


def usage(text: bytes) -> tuple[int | None, int | None]:
    """Cached and prompt tokens that the end of an answer tells."""
    cached, prompt = _CACHED.findall(text), _PROMPT.findall(text)
    return int(cached[-1]) if cached else None, int(prompt[-1]) if prompt else None


def words(error: BaseException) -> str:
    """What an error says, in one line with its kind."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
