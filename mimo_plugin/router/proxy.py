# SPDX-License-Identifier: Apache-2.0
"""Requests on their way through the router: read, decide, send, pass the answer on.

A request goes to another worker only while the client has seen nothing of an answer and the worker
gave none: it refused the connection, said 502 or 503, or closed before the first byte of a body.
The last may be the request's own doing, so it is tried again once only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from mimo_plugin.core.targets import Decision, NoTargetError
from mimo_plugin.router import disaggregated, incoming
from mimo_plugin.router.problems import Problem
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.prompts import PromptError
from mimo_plugin.router.relay import ClientGone, Closed, Relayed, WorkerErrors, relay, words
from mimo_plugin.router.responses import Responses
from mimo_plugin.router.service import Routing, Service
from mimo_plugin.router.settings import Settings

log = logging.getLogger(__name__)

_BUSY = {"Retry-After": "1"}
_AGAIN = (502, 503)
_MOST_CLOSED = 2  # workers that may close on one request
_ANSWER_BYTES = 64 << 20  # longest answer that is not for the client, or may not be


class Unstarted(Exception):
    """A worker did not begin to answer.

    Attributes:
        kind: ``connect``, ``closed``, ``status`` or ``timeout``.
        answer: what the worker said, to be passed on where nobody has a better one.
        refused: nobody listens there. That a connection takes long may be a crowd before it.
    """

    def __init__(
        self,
        kind: str,
        target: str,
        message: str,
        *,
        refused: bool = False,
        answer: Problem | None = None,
    ) -> None:
        super().__init__(f"{target}: {message}")
        self.kind, self.target, self.refused, self.answer = kind, target, refused, answer


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, as it is sent.

    Attributes:
        path: with its query.
        body: to be sent; of what was taken out nothing is in it.
        parsed: the body's JSON, or None.
        model: asked for; None: any.
        streamed: the client wants a stream.
        home: the one target that can take it; None: any.
        search: it asks for something that some worker has, and others say 404.
    """

    request: web.BaseRequest
    id: str
    path: str
    headers: CIMultiDict[str]
    body: bytes
    parsed: dict[str, Any] | None
    model: str | None
    routing: Routing
    held: incoming.Held
    streamed: bool
    home: str | None = None
    search: bool = False

    @property
    def plain(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


class Proxy:
    """Forwards requests.

    Args:
        service: decides.
        session: to workers, without limits of its own.
    """

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self._service, self._session = service, session
        self._settings: Settings = service.settings
        self._metrics = service.metrics
        self._responses = Responses()
        self.budget = incoming.Budget(self._settings.max_buffered_bytes)
        self.in_flight = 0
        self.closing = False
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._settings.connect_timeout_s,
            sock_read=self._settings.read_timeout_s,
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        fresh = uuid.uuid4().hex
        request_id = incoming.request_id(request, fresh)
        try:
            if self.closing:
                raise Problem(503, "the router is stopping", "overloaded", close=True)
            path = incoming.check_path(request)
            if self.in_flight >= self._settings.max_in_flight:
                text = f"{self.in_flight} requests are in flight (--max-in-flight)"
                raise Problem(503, text, "overloaded", headers=_BUSY)
            self.in_flight += 1
            held = incoming.Held(self.budget)
            try:
                response = await self._forward(request, path, request_id, fresh, held)
            finally:
                held.release()
                self.in_flight -= 1
        except Problem as problem:
            self._metrics.outcome(problem.outcome)
            response = problem.response()
            if not response.prepared:
                response.headers["X-Request-Id"] = request_id
        except ClientGone:
            self._metrics.outcome("disconnected")
            raise ConnectionResetError("the client is gone") from None
        except asyncio.CancelledError:
            self._metrics.outcome("disconnected")
            raise
        except Exception:
            self._metrics.outcome("internal")
            log.exception("request %s failed in the router", request_id)
            response = Problem(500, "the router failed; its log says why", "internal").response()
        return response

    async def _forward(
        self,
        request: web.BaseRequest,
        path: str,
        request_id: str,
        fresh: str,
        held: incoming.Held,
    ) -> web.StreamResponse:
        settings = self._settings
        body = await incoming.read_body(
            request, settings.max_body_bytes, settings.body_timeout_s, held
        )
        start = time.thread_time()
        parsed = incoming.parse(request, body)
        if parsed is not None and incoming.clean(parsed):
            body = msgspec.json.encode(parsed)
        model = incoming.model_of(body, parsed)
        if model is not None and not self._service.workers.serves(model):
            raise Problem(404, f"the model `{model}` does not exist")
        plain = path.partition("?")[0]
        prompt = await self._prompt(plain, parsed, request, len(body))
        routing = self._service.begin(fresh, request_id, plain, model, prompt)
        self._metrics.tokenise_s.observe(time.thread_time() - start)
        headers = incoming.forwarded_headers(request.headers)
        headers["X-Request-Id"] = request_id
        streamed = bool(parsed is not None and parsed.get("stream"))
        stored = self._responses.is_stored(plain)
        home = self._responses.where(plain) if stored else self._responses.home(parsed)
        exchange = Exchange(
            request,
            request_id,
            path,
            headers,
            body,
            parsed,
            model,
            routing,
            held,
            streamed,
            home,
            stored and home is None,
        )
        return await self._attempts(exchange)

    async def _prompt(
        self,
        path: str,
        parsed: dict[str, Any] | None,
        request: web.BaseRequest,
        body_bytes: int,
    ) -> Prompt:
        if parsed is None or incoming.NO_PREFILL.fullmatch(path):
            return Prompt((), 1 if parsed is not None else max(1, body_bytes // 4))
        try:
            prompt = await self._service.tokens.reader.read(path, parsed, request.headers)
        except PromptError as error:
            raise Problem(error.status, error.message) from None
        return prompt

    async def _attempts(self, exchange: Exchange) -> web.StreamResponse:
        routing = exchange.routing
        failed: dict[str, Unstarted] = {}
        closed = 0
        while True:
            try:
                decision = self._choose(exchange, failed)
            except NoTargetError as error:
                raise self._nobody(exchange, failed, str(error)) from None
            last = routing.record.retries >= self._settings.retries
            try:
                return await self._try(exchange, decision)
            except Unstarted as error:
                failed[error.target] = error
                closed += error.kind == "closed"
                retry = error.kind != "timeout" and closed < _MOST_CLOSED
                if not retry or (last and not exchange.search):
                    raise self._nobody(exchange, failed, str(error)) from None
                routing.record.retries += 1
                self._metrics.retries.inc()
                log.info("request %s again elsewhere: %s", exchange.id, error)

    def _choose(self, exchange: Exchange, failed: Mapping[str, Unstarted]) -> Decision:
        choose, routing, model = self._service.choose, exchange.routing, exchange.model
        if exchange.home is not None and exchange.home not in failed:
            others = self._service.router.targets.keys() - {exchange.home}
            with contextlib.suppress(NoTargetError):
                return choose(routing, model, "prefill", others)
        try:
            return choose(routing, model, "prefill", failed)
        except NoTargetError:
            # An idle connection may be closed just when a request goes out on it: where there is
            # nobody else, the same worker gets it on a new one.
            closed = [name for name, error in failed.items() if error.kind == "closed"]
            if not closed:
                raise
            return choose(routing, model, "prefill", failed.keys() - closed)

    def _nobody(self, exchange: Exchange, failed: Mapping[str, Unstarted], why: str) -> Problem:
        record = exchange.routing.record
        errors = list(failed.values())
        if not errors:
            record.status = 503
            return Problem(503, f"no worker can take it now: {why}", "no_worker", headers=_BUSY)
        if errors[-1].kind == "timeout":
            record.status = 504
            return Problem(504, f"no answer in time: {errors[-1]}", "timeout")
        if errors[-1].answer is not None:
            record.status = errors[-1].answer.status
            return errors[-1].answer
        record.status = 502
        text = f"no worker began to answer, of {len(errors)} asked; the last: {errors[-1]}"
        return Problem(502, text, "unstarted", headers=_BUSY)

    async def _try(self, exchange: Exchange, decision: Decision) -> web.StreamResponse:
        service, routing = self._service, exchange.routing
        service.sent(routing, decision)
        try:
            body, decoder = exchange.body, None
            target = service.router.targets[decision.target]
            if (
                target.role == "prefill"
                and exchange.parsed is not None
                and exchange.plain in disaggregated.PATHS
            ):
                decoder = self._decoder(exchange)
                transfer = await self._prefill(exchange, decision.target)
                service.prefilled(routing, decoder)
                body = disaggregated.decode_body(exchange.parsed, transfer)
            where = decoder.target if decoder is not None else decision.target
            if not exchange.streamed and decoder is None:
                service.expect_first_token(routing)
            upstream = await self._send(exchange, where, body)
            try:
                if upstream.status in _AGAIN or (exchange.search and upstream.status == 404):
                    raise await self._refusal(where, upstream)
                relayed = await self._relay(exchange, decision, where, upstream)
            finally:
                upstream.close()
        except Unstarted as error:
            self._blame(error)
            service.done(routing, failed=True, blame=error.target, status=502)
            raise
        except Problem as problem:
            service.done(routing, failed=True, status=problem.status)
            raise
        except BaseException:  # the client is gone, or the router stops
            service.done(routing, failed=True, status=499)
            raise
        self._responses.note(exchange.plain, relayed.head, where)
        self._finish(exchange, relayed, where)
        return relayed.response

    async def _refusal(self, target: str, upstream: aiohttp.ClientResponse) -> Unstarted:
        answer = await self._whole(target, upstream)
        text = f"it answers {upstream.status}"
        outcome = "worker_error" if upstream.status >= 500 else "ok"
        return Unstarted(
            "status", target, text, answer=Passed(upstream.status, answer, upstream, outcome)
        )

    async def _whole(self, target: str, upstream: aiohttp.ClientResponse) -> bytes:
        answer = bytearray()
        try:
            async for chunk in upstream.content.iter_any():
                answer += chunk
                if len(answer) > _ANSWER_BYTES:
                    raise Unstarted("status", target, "its answer is too long")
        except WorkerErrors as error:
            raise Unstarted("closed", target, words(error)) from None
        return bytes(answer)

    def _finish(self, exchange: Exchange, relayed: Relayed, target: str) -> None:
        status = relayed.response.status
        broken = relayed.broken is not None
        if broken:
            log.warning("request %s broke off at %s: %s", exchange.id, target, relayed.broken)
            worker = self._service.workers.by_target.get(target)
            if worker is not None:
                worker.failed(str(relayed.broken), down=False)
        self._metrics.outcome("broken" if broken else "worker_error" if status >= 500 else "ok")
        self._service.done(
            exchange.routing,
            failed=broken or status >= 400,
            blame=target if broken or status >= 500 else None,
            status=502 if broken else status,
            cached_tokens=relayed.cached_tokens,
            reported_prompt_tokens=relayed.prompt_tokens,
        )

    def _blame(self, error: Unstarted) -> None:
        worker = self._service.workers.by_target.get(error.target)
        if worker is not None:
            worker.failed(str(error), down=error.refused)

    async def _send(self, exchange: Exchange, target: str, body: bytes) -> aiohttp.ClientResponse:
        known = self._service.router.targets.get(target)
        if known is None:
            raise Unstarted("connect", target, "it was removed")
        headers = exchange.headers
        if known.rank is not None:
            headers = headers.copy()
            headers[incoming.RANK_HEADER] = str(known.rank)
        request = exchange.request
        try:
            return await self._session.request(
                request.method,
                URL(known.worker + exchange.path, encoded=True),
                data=body if body else None,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            raise Unstarted("connect", target, words(error), refused=True) from None
        except aiohttp.ConnectionTimeoutError as error:
            raise Unstarted("connect", target, words(error)) from None
        except asyncio.TimeoutError:
            text = f"nothing within {self._settings.read_timeout_s:g} s (--read-timeout)"
            raise Unstarted("timeout", target, text) from None
        except WorkerErrors as error:
            raise Unstarted("closed", target, words(error)) from None

    async def _relay(
        self,
        exchange: Exchange,
        decision: Decision,
        target: str,
        upstream: aiohttp.ClientResponse,
    ) -> Relayed:
        headers = incoming.answered_headers(upstream.headers)
        headers["X-Request-Id"] = exchange.id
        headers["X-Mimo-Worker"] = target
        headers["X-Mimo-Reason"] = decision.reason
        headers["X-Mimo-Predicted-Hit"] = str(decision.chosen.hit_tokens)

        def first_byte() -> None:
            exchange.body, exchange.parsed = b"", None  # it is not sent again any more
            exchange.held.release()
            self._service.first_token(exchange.routing)

        try:
            return await relay(exchange.request, upstream, headers, first_byte)
        except Closed as error:
            raise Unstarted("closed", target, str(error)) from None

    # Prefill and decode apart

    def _decoder(self, exchange: Exchange) -> Decision:
        try:
            return self._service.choose(exchange.routing, exchange.model, "decode", ())
        except NoTargetError as error:
            raise Problem(
                503, f"no worker can decode now: {error}", "no_worker", headers=_BUSY
            ) from None

    async def _prefill(self, exchange: Exchange, target: str) -> dict[str, Any] | None:
        assert exchange.parsed is not None
        upstream = await self._send(exchange, target, disaggregated.prefill_body(exchange.parsed))
        try:
            answer = await self._whole(target, upstream)
        finally:
            upstream.close()
        if upstream.status >= 500:
            raise Unstarted("status", target, f"its prefill answers {upstream.status}")
        if upstream.status >= 400:  # the client's fault: it gets the worker's words
            raise Passed(upstream.status, answer, upstream, "ok")
        try:
            return disaggregated.transfer_of(answer)
        except (ValueError, msgspec.DecodeError):
            raise Unstarted("status", target, "its prefill answer is no JSON object") from None


class Passed(Problem):
    """A worker's own refusal, passed on as it is."""

    def __init__(
        self, status: int, body: bytes, upstream: aiohttp.ClientResponse, outcome: str
    ) -> None:
        super().__init__(status, "refused by a worker", outcome)
        self._body = body
        self._headers = incoming.answered_headers(upstream.headers)
        self._headers.popall("Content-Length", None)

    def response(self) -> web.Response:
        """The answer."""
        return web.Response(body=self._body, status=self.status, headers=self._headers)
