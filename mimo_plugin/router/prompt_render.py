# SPDX-License-Identifier: Apache-2.0
"""Prompts made by a worker: the calls of :mod:`mimo_plugin.router.prompt_calls`.

A render costs the worker what preparing the request costs: it also fetches and processes media
(what it processed it keeps for the next render, and sends none of it here: ``mm_payload``). A call
has a time limit; after a failure a worker is left alone for a while. Nothing here raises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mimo_plugin.router.prompt import MediaSpan
from mimo_plugin.router.prompt_calls import calls_for

if TYPE_CHECKING:
    from typing import TypeGuard

    import aiohttp

logger = logging.getLogger(__name__)

_ENTRY_BYTES = 400
_ANSWER_MAX_BYTES = 64 << 20
_MISSING_S = 60.0
#: endpoint and body of each call
_Calls = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a worker made of a request's (first) prompt.

    Attributes:
        token_ids: of the whole prompt, placeholders of media in place.
        media: spans of media, in order.
        prompts_tokens: tokens of all prompts of the request together.
    """

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    prompts_tokens: int = 0


@dataclass(slots=True)
class _Worker:
    """What is known of one worker: until when it is left alone, and which paths it lacks."""

    failures: int = 0
    alone_until_s: float = 0.0
    missing: dict[str, float] = field(default_factory=dict)


class RenderClient:
    """Asks workers for the tokens of requests.

    Args:
        workers: base URLs to ask, or a function that gives those that are ready now.
        kind: ``vllm`` or ``sglang``: which endpoints they have.
        timeout_s: limit of one call.
        cache_bytes: bound of the LRU of answers.
        most_in_flight: calls at a time; others are not made.
    """

    def __init__(
        self,
        workers: Sequence[str] | Callable[[], Sequence[str]],
        *,
        kind: str = "vllm",
        timeout_s: float = 2.0,
        cache_bytes: int = 32 << 20,
        most_in_flight: int = 32,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._workers = workers
        self.kind = kind
        self._timeout_s = timeout_s
        self._cache: OrderedDict[bytes, Rendered] = OrderedDict()
        self._cache_max_bytes = cache_bytes
        self._most_in_flight = most_in_flight
        self._in_flight: dict[bytes, asyncio.Task[Rendered | None]] = {}
        self._session = session
        self._own_session = session is None
        self._known: dict[str, _Worker] = {}
        self._turn = 0
        self._counts = {"asked": 0, "answered": 0, "refused": 0, "failed": 0, "cache_hits": 0}
        self._cache_bytes = 0
        self.last_error: str | None = None

    @property
    def status(self) -> dict[str, Any]:
        """Figures for people and metrics."""
        return {**self._counts, "cache_bytes": self._cache_bytes, "last_error": self.last_error}

    async def render(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        worker: str | None = None,
    ) -> Rendered | None:
        """The tokens of a request; None if no worker says them in time.

        Args:
            path: endpoint of the request.
            body: of the request, left as it is.
            headers: of the request; ``authorization`` is passed on.
            worker: ask this one and nobody else.
        """
        try:
            calls = [(where, _json(sent)) for where, sent in calls_for(self.kind, path, body)]
        except (TypeError, ValueError, RecursionError):
            return None
        if not calls:
            return None
        digest = blake2b(calls[0][0].encode() + calls[0][1], digest_size=16)
        if worker is not None:
            digest.update(worker.encode())
        key = digest.digest()
        held = self._cache.get(key)
        if held is not None:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            return held
        # Requests with one prompt share one call; who stops waiting does not end it for others.
        task = self._in_flight.get(key)
        if task is None:
            if len(self._in_flight) >= self._most_in_flight:
                return None
            task = asyncio.ensure_future(self._ask(calls, _authorization(headers), worker))
            self._in_flight[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(task)

    def _finish(self, key: bytes, done: asyncio.Task[Rendered | None]) -> None:
        del self._in_flight[key]
        if done.cancelled() or done.exception() is not None:
            return
        rendered = done.result()
        if rendered is None:
            return
        size = _size_bytes(rendered)
        if size > self._cache_max_bytes // 8:
            return
        self._cache[key] = rendered
        self._cache_bytes += size
        while self._cache_bytes > self._cache_max_bytes:
            self._cache_bytes -= _size_bytes(self._cache.popitem(last=False)[1])

    def _choose(self, calls: _Calls) -> str | None:
        workers = self._workers() if callable(self._workers) else self._workers
        now_s = time.monotonic()
        for step in range(len(workers)):
            worker = workers[(self._turn + step) % len(workers)].rstrip("/")
            known = self._known.setdefault(worker, _Worker())
            able = any(known.missing.get(where, 0.0) <= now_s for where, _ in calls)
            if able and known.alone_until_s <= now_s:
                self._turn = (self._turn + step + 1) % len(workers)
                return worker
        return None

    async def _ask(
        self, calls: _Calls, authorization: str | None, worker: str | None
    ) -> Rendered | None:
        chosen = worker.rstrip("/") if worker is not None else self._choose(calls)
        if chosen is None:
            return None
        known = self._known.setdefault(chosen, _Worker())
        for where, data in calls:
            if known.missing.get(where, 0.0) > time.monotonic():
                continue
            rendered = await self._call(known, chosen, where, data, authorization)
            if rendered is not None or where not in known.missing:
                return rendered
        return None

    async def _call(
        self, known: _Worker, worker: str, where: str, data: bytes, authorization: str | None
    ) -> Rendered | None:
        import aiohttp

        self._counts["asked"] += 1
        send = {"Content-Type": "application/json"}
        if authorization is not None:
            send["Authorization"] = authorization
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.post(
                worker + where,
                data=data,
                headers=send,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as response:
                if response.status != 200:
                    self._refused(known, worker, where, response.status)
                    return None
                answer = await _read(response)
        except (
            aiohttp.ClientError,
            TimeoutError,
            asyncio.TimeoutError,
            OSError,
            ValueError,
            RecursionError,
        ) as error:
            known.failures += 1
            known.alone_until_s = time.monotonic() + min(0.5 * 2**known.failures, 30.0)
            self._counts["failed"] += 1
            self.last_error = f"{worker}{where}: {type(error).__name__} {error}"[:300]
            return None
        known.failures = 0
        known.missing.pop(where, None)
        rendered = rendered_of(answer)
        self._counts["refused" if rendered is None else "answered"] += 1
        return rendered

    def _refused(self, known: _Worker, worker: str, where: str, status: int) -> None:
        """A worker's no: without the endpoint it is not asked again soon, else nothing changes.

        A request that it refuses to render it will refuse to serve, with its own message.
        """
        self._counts["refused"] += 1
        self.last_error = f"{worker}{where}: HTTP {status}"
        if status in (403, 404, 405, 501):
            known.missing[where] = time.monotonic() + _MISSING_S

    async def close(self) -> None:
        """End calls in flight, and the client's own session."""
        for task in list(self._in_flight.values()):
            task.cancel()
        if self._session is not None and self._own_session:
            await self._session.close()
            self._session = None


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def rendered_of(answer: Any) -> Rendered | None:
    """What a worker's answer says; None if it is not understood."""
    first = answer
    total = 0
    if isinstance(answer, list):
        if not answer or not all(isinstance(one, dict) for one in answer):
            return None
        first = answer[0]
        total = sum(len(one["token_ids"]) for one in answer if _are_ids(one.get("token_ids")))
    if not isinstance(first, dict):
        return None
    ids = first.get("token_ids", first.get("tokens"))
    if not _are_ids(ids):
        return None
    spans = _spans(first.get("features"))
    return None if spans is None else Rendered(ids, spans, max(total, len(ids)))


def _spans(features: Any) -> tuple[MediaSpan, ...] | None:
    """Spans of ``features``: hashes and placeholders by modality; None if they don't fit."""
    return spans_of(features) if features else ()


def spans_of(features: Any) -> tuple[MediaSpan, ...] | None:
    """Media of vLLM's ``features``, in the order of their places; None if they are malformed."""
    if not isinstance(features, Mapping):
        return None
    hashes, places = features.get("mm_hashes"), features.get("mm_placeholders")
    if not isinstance(hashes, Mapping) or not isinstance(places, Mapping):
        return None
    if hashes.keys() != places.keys():
        return None
    spans = []
    for modality, names in hashes.items():
        ranges = places[modality]
        if not isinstance(names, list) or not isinstance(ranges, list) or len(names) != len(ranges):
            return None
        for name, span in zip(names, ranges, strict=True):
            offset = span.get("offset") if isinstance(span, Mapping) else None
            length = span.get("length") if isinstance(span, Mapping) else None
            if type(offset) is not int or type(length) is not int or not isinstance(name, str):
                return None
            if offset < 0 or length < 1:
                return None
            spans.append(MediaSpan(offset, length, name))
    return tuple(sorted(spans, key=lambda span: span.start_tokens))


def _are_ids(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids)


def _size_bytes(rendered: Rendered) -> int:
    return _ENTRY_BYTES + 36 * len(rendered.token_ids) + 200 * len(rendered.media)


def _authorization(headers: Mapping[str, str]) -> str | None:
    return next((v for k, v in headers.items() if k.lower() == "authorization"), None)


async def _read(response: aiohttp.ClientResponse) -> Any:
    """The answer's JSON.

    Raises:
        ValueError: it is too long, or no JSON.
    """
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > _ANSWER_MAX_BYTES:
            raise ValueError("the answer is too long")
        parts.append(part)
    return json.loads(b"".join(parts))
