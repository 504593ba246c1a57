# SPDX-License-Identifier: Apache-2.0
"""The router process: its HTTP server, its own paths, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mimo_plugin import __version__
from mimo_plugin.errors import ConfigError, MimoError, setting_error
from mimo_plugin.router import admin, incoming
from mimo_plugin.router.metrics import CONTENT_TYPE, Gauge, Metrics
from mimo_plugin.router.model import ModelFacts
from mimo_plugin.router.page import HEADERS, page_files
from mimo_plugin.router.problems import Problem
from mimo_plugin.router.prompts import PromptError
from mimo_plugin.router.proxy import Proxy
from mimo_plugin.router.server import Server
from mimo_plugin.router.service import Service
from mimo_plugin.router.settings import Settings, shown_state, worker_of, worker_url
from mimo_plugin.router.workers import Worker

log = logging.getLogger(__name__)

_DEFAULT_DECISIONS = 100
_IDLE_WORKER_S = 3.0  # engines close idle connections after 5 s

Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    """One router.

    Args:
        settings: all options.
        model: what the model's files say.
    """

    def __init__(self, settings: Settings, model: ModelFacts) -> None:
        self.settings, self.model = settings, model
        self.metrics = Metrics()
        self.port = 0
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/workers"): self._workers,
            ("POST", "/workers"): self._add_worker,
            ("DELETE", "/workers"): self._remove_worker,
            ("POST", "/workers/drain"): self._drain_worker,
            ("GET", "/decisions"): self._decisions,
            ("GET", "/resident"): self._resident_of_session,
            ("POST", "/resident"): self._resident,
        }
        self._own = {path for _, path in self._routes}
        self._page = page_files()

    async def start(self) -> None:
        """Ask the workers and listen.

        Raises:
            ConfigError: the address can't be listened at.
        """
        settings = self.settings
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_WORKER_S, ttl_dns_cache=30
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self.service = Service(settings, self.model, self.session, self.metrics)
        self.metrics.expose(self._gauges)
        self.proxy = Proxy(self.service, self.session)
        self.server = Server(
            self.handle,
            max_connections=settings.max_connections,
            header_timeout_s=settings.header_timeout_s,
            keepalive_timeout=75.0,
            lingering_time=1.0,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
        )
        self._runner = web.ServerRunner(
            self.server, handle_signals=False, shutdown_timeout=settings.grace_s
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port, backlog=1024)
        try:
            await self.service.start()
            await site.start()
        except MimoError:
            await self.stop()
            raise
        except OSError as error:
            await self.stop()
            raise setting_error(
                "--port",
                f"{settings.host}:{settings.port}",
                "an address of this machine that nobody listens at",
                f"choose another one ({error.strerror or error})",
            ) from None
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Take nothing new, let answers end for the time of grace, and end."""
        if hasattr(self, "proxy"):
            self.proxy.closing = True
        await self._runner.cleanup()
        await self.service.close()
        await self.session.close()

    def line(self) -> str:
        """What is running, in one line."""
        workers = list(self.service.workers.by_url.values())
        up = sum(worker.up for worker in workers)
        exact = sum(name in self.service.knowledge.readings for w in workers for name in w.targets)
        targets = sum(len(worker.targets) for worker in workers)
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return (
            f"mimo router {__version__}: http://{host}:{self.port}, {up} of {len(workers)} workers "
            f"up, tokenizer {self.settings.tokenizer}, state {shown_state(self.settings.state)}, "
            f"residency exact on {exact} of {targets} targets (the others publish no KV events)"
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path, method = request.path, request.method
        route = self._routes.get(("GET" if method == "HEAD" else method, path))
        if route is None and path not in self._own and path not in self._page:
            return await self.proxy.handle(request)
        try:
            if route is not None:
                return await route(request)
            if method in ("GET", "HEAD") and path in self._page:
                return self._file(request)
            raise Problem(405, f"{method} {path}: not allowed")
        except Problem as problem:
            return problem.response()

    def _file(self, request: web.BaseRequest) -> web.Response:
        file = self._page[request.path]
        headers = {**HEADERS, "ETag": file.etag}
        if file.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers={**headers, "Content-Type": file.content_type})

    # Open to all

    async def _health(self, request: web.BaseRequest) -> web.Response:
        ready = sum(1 for _ in self.service.workers.ready())
        status = "stopping" if self.proxy.closing else "ok" if ready else "no worker is ready"
        code = 200 if status == "ok" else 503
        return _json({"status": status, "ready_workers": ready}, code)

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return _json({"object": "list", "data": self.service.models()})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # For operators

    async def _workers(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        workers = self.service.workers.by_url.values()
        return _json({"workers": [self._worker(worker) for worker in workers]})

    async def _add_worker(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        admin.check_json(request)
        try:
            spec = worker_of(await self._body(request), "worker")
        except ConfigError as error:
            raise Problem(400, str(error)) from None
        worker = self.service.add_worker(spec)
        return _json({"url": worker.url, "state": worker.state})

    async def _remove_worker(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        url = _url_of(request)
        if not self.service.remove_worker(url):
            raise Problem(404, f"no worker {url}")
        return _json({"url": url, "state": "removed"})

    async def _drain_worker(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        on = request.query.get("on", "true")
        if on not in ("true", "false"):
            raise Problem(400, f"on: found {on!r}; allowed: true, false")
        url = _url_of(request)
        if not self.service.drain_worker(url, on == "true"):
            raise Problem(404, f"no worker {url}")
        return _json({"url": url, "state": self.service.workers.by_url[url].state})

    async def _decisions(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        text = request.query.get("limit", str(_DEFAULT_DECISIONS))
        if not text.isdigit() or len(text) > 6:
            raise Problem(400, f"limit: found {text!r}; allowed: a number >= 0")
        return _json({"decisions": self.service.records.last(int(text))})

    async def _resident_of_session(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        session = request.query.get("session", "")
        found = self.service.last_prompt(session)
        if found is None:
            raise Problem(404, f"session: found {session!r}; allowed: one that was seen lately")
        return _json(self.service.resident(*found))

    async def _resident(self, request: web.BaseRequest) -> web.Response:
        admin.check(request, self.settings.admin_key)
        admin.check_json(request)
        parsed = await self._body(request)
        if "messages" not in parsed and "prompt" not in parsed:
            raise Problem(400, "the body has neither messages nor prompt")
        path = "/v1/chat/completions" if "messages" in parsed else "/v1/completions"
        try:
            prompt = await self.service.tokens.reader.read(path, parsed, request.headers)
        except PromptError as error:
            raise Problem(error.status, error.message) from None
        hashes = self.service.knowledge.hashes(prompt)
        return _json(self.service.resident(hashes, prompt.prompt_tokens))

    async def _body(self, request: web.BaseRequest) -> dict[str, Any]:
        held = incoming.Held(self.proxy.budget)
        try:
            body = await incoming.read_body(
                request, self.settings.max_body_bytes, self.settings.body_timeout_s, held
            )
        finally:
            held.release()
        parsed = incoming.parse(request, body)
        if parsed is None:
            raise Problem(400, "the body is no JSON object")
        return parsed

    def _worker(self, worker: Worker) -> dict[str, Any]:
        facts, service = worker.facts, self.service
        targets = [self._target(name) for name in worker.targets if name in service.router.loads]
        return {
            "url": worker.url,
            "state": worker.state,
            "role": worker.spec.role,
            "model": next((n for n in worker.models if not service.workers.is_adapter(n)), None),
            "models": list(worker.models),
            "engine": facts.engine if facts is not None else worker.spec.engine,
            "version": facts.version if facts is not None else "",
            "exact": bool(worker.targets)
            and all(service.knowledge.is_exact(name) for name in worker.targets),
            "error": worker.error,
            "targets": targets,
        }

    def _target(self, name: str) -> dict[str, Any]:
        service, now_s = self.service, self.service.now_s()
        load, count = service.router.loads[name], service.counts[name]
        reading = service.knowledge.readings.get(name)
        return {
            "name": name,
            "rank": service.router.targets[name].rank,
            "in_flight": load.in_flight,
            "decoding": len(load.decodes),
            "decode_tokens": load.decode_tokens,
            "wait_s": load.wait_s(now_s),
            "recent_work_s": load.recent_work_s(now_s),
            "sessions": service.router.sessions_of(name),
            "blocks": service.knowledge.blocks_of(name),
            "trusted": service.knowledge.is_trusted(name),
            "known_from": service.knowledge.how(name),
            "hit_tokens": count.hit_tokens,
            "prompt_tokens": count.prompt_tokens,
            "requests": count.requests,
            "errors": count.errors,
            "how": service.knowledge.how(name),
            "events": dict(reading.reader.status) if reading is not None else None,
        }

    def _gauges(self) -> Iterable[Gauge]:
        service = self.service
        loads = service.router.loads
        yield (
            "in_flight",
            "Requests that have no first token yet, by target.",
            ("target",),
            [((name,), load.in_flight) for name, load in loads.items()],
        )
        yield (
            "decoding",
            "Requests that decode, by target.",
            ("target",),
            [((name,), len(load.decodes)) for name, load in loads.items()],
        )
        yield (
            "open_requests",
            "Requests in the router.",
            (),
            [((), self.proxy.in_flight)],
        )
        yield (
            "buffered_bytes",
            "Bytes of bodies that are held until a worker has begun to answer.",
            (),
            [((), self.proxy.budget.used_bytes)],
        )
        yield (
            "connections",
            "Connections of clients.",
            (),
            [((), len(self.server.connections))],
        )
        yield (
            "connections_refused",
            "Connections closed: too many, or no request in time.",
            ("reason",),
            [(("max_connections",), self.server.refused), (("header_timeout",), self.server.late)],
        )
        yield (
            "worker_up",
            "1 where a worker answers.",
            ("worker", "state"),
            [((w.url, w.state), w.up) for w in service.workers.by_url.values()],
        )
        yield (
            "index_blocks",
            "Blocks that a target is known to have, over all groups.",
            ("target",),
            [((name,), service.knowledge.blocks_of(name)) for name in loads],
        )
        yield (
            "events_exact",
            "1 where a target's events are read and none are missing.",
            ("target",),
            [((name,), service.knowledge.is_exact(name)) for name in loads],
        )
        yield from _state_gauges(service.state.status)
        for key in ("gaps", "replays", "restarts", "batches", "decode_errors"):
            yield (
                f"events_{key}",
                f"{key.replace('_', ' ').capitalize()} in a target's events.",
                ("target",),
                [
                    ((name,), reading.reader.status[key])
                    for name, reading in service.knowledge.readings.items()
                    if key in reading.reader.status
                ],
            )


def _state_gauges(status: Mapping[str, Any]) -> Iterable[Gauge]:
    help_texts = {
        "connected": "1 while the shared state is reached (always, where it is memory).",
        "queue": "Changes that wait to be told to other routers.",
        "dropped": "Changes that other routers learned late.",
        "lag_s": "Age of the last change when it came from another router.",
        "peers": "Other routers that are alive.",
        "received": "Changes that came from other routers.",
        "reconnects": "Times that the shared state was lost and found again.",
    }
    for key, text in help_texts.items():
        name = "state_lag_seconds" if key == "lag_s" else f"state_{key}"
        yield name, text, ("kind",), [((str(status["kind"]),), float(status[key]))]


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _url_of(request: web.BaseRequest) -> str:
    try:
        return worker_url(request.query.get("url", ""), "url")
    except MimoError as error:
        raise Problem(400, str(error)) from None


async def serve(settings: Settings, model: ModelFacts, ready: Callable[[App], None]) -> None:
    """Run until SIGTERM or SIGINT; a second one ends the grace.

    Args:
        ready: called when it listens.
    """
    app = App(settings, model)
    await app.start()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            log.warning("stopping at once")
            for connection in app.server.connections:
                connection.force_close()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    ready(app)
    await stop.wait()
    log.info("stopping: %d requests in flight, %g s grace", app.proxy.in_flight, settings.grace_s)
    await app.stop()
