# SPDX-License-Identifier: Apache-2.0
"""Small servers that answer as a vLLM worker does, and a router before them, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from mimo_plugin.router.app import App
from mimo_plugin.router.model import ModelFacts
from mimo_plugin.router.settings import Settings, WorkerSpec

MODEL = "tiny"
Answer = Callable[["FakeWorker", web.Request], Awaitable[web.StreamResponse]]


def chunks_of(text: str, usage: dict[str, Any] | None = None) -> list[bytes]:
    """The events of a streamed chat."""
    events = [{"choices": [{"delta": {"content": word}}]} for word in text.split()]
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    return [*(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events), b"data: [DONE]\n\n"]


def usage_of(prompt: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class FakeWorker:
    """One worker; ``answer`` makes its answers."""

    def __init__(self, answer: Answer | None = None, *, models: tuple[str, ...] = (MODEL,)) -> None:
        self.answer = answer or plain
        self.models = list(models)
        self.adapters: dict[str, str] = {}
        self.healthy = True
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.aborted = 0
        self.active = 0
        self.metrics = ""
        self.extra: dict[str, Any] = {"/version": {"version": "0.32.0"}}
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeWorker:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As if it was killed: connections are cut."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path == "/v1/models":
            cards = [{"id": name, "object": "model", "created": 1} for name in self.models]
            cards += [{"id": n, "object": "model", "parent": p} for n, p in self.adapters.items()]
            return web.json_response({"object": "list", "data": cards})
        if path == "/metrics":
            return web.Response(text=self.metrics)
        if path in self.extra:
            return web.json_response(self.extra[path])
        if path in ("/version", "/server_info", "/kv_event_sources"):
            return web.Response(status=404)
        self.paths.append(request.path_qs)
        self.headers.append(request.headers.copy())
        self.active += 1
        try:
            body = await request.read()
            try:
                self.seen.append(json.loads(body) if body else {})
            except ValueError:
                self.seen.append({"raw": body})
            return await self.answer(self, request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.active -= 1


class FakeWorkerAlias(FakeWorker):
    """Another one's address, which does not end with the router that is given it."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__()
        self.port = worker.port

    async def stop(self) -> None:
        pass


async def plain(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    """A whole answer, or a stream where the body asks for one."""
    body = worker.seen[-1]
    if body.get("stream"):
        return await stream(chunks_of("a b c", usage_of(100, 32)))(worker, request)
    return web.json_response(
        {"id": "x", "port": worker.port, "choices": [], "usage": usage_of(100, 64)}
    )


def stream(chunks: list[bytes], pause_s: float = 0.0) -> Answer:
    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            if pause_s:
                await asyncio.sleep(pause_s)
        await response.write_eof()
        return response

    return answer


def settings_for(*workers: FakeWorker | WorkerSpec, **options: Any) -> Settings:
    specs = tuple(w if isinstance(w, WorkerSpec) else WorkerSpec(w.url) for w in workers)
    chosen: dict[str, Any] = {
        "model": "unused",
        "port": 0,
        "health_interval_s": 0.1,
        "connect_timeout_s": 1.0,
        "read_timeout_s": 5.0,
        "grace_s": 1.0,
        "tokenizer": "none",
        "tokens_per_s": 20_000.0,
    }
    return Settings(workers=specs, **{**chosen, **options})


class Front:
    """A router, and a client of it."""

    def __init__(self, app: App, client: aiohttp.ClientSession) -> None:
        self.app, self.client = app, client
        self.url = f"http://127.0.0.1:{app.port}"

    async def chat(self, text: str = "hello", **more: Any) -> tuple[int, Any, bytes]:
        """Status, headers and body of a chat request."""
        headers = more.pop("headers", {})
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
        async with self.client.post(
            self.url + "/v1/chat/completions", json=body, headers=headers
        ) as response:
            return response.status, response.headers, await response.read()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.get(self.url + path, **options) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text

    async def decisions(self) -> list[dict[str, Any]]:
        return list((await self.get("/decisions?limit=1000"))[1]["decisions"])

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 where there is none."""
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(
                f'{k}="{v}"' in head for k, v in labels.items()
            ):
                return float(value)
        return 0.0


@asynccontextmanager
async def routing(*workers: FakeWorker | WorkerSpec, **options: Any) -> AsyncIterator[Front]:
    """A router before workers that were started."""
    model = ModelFacts("unused", 81_000.0, True)
    app = App(settings_for(*workers, **options), model)
    await app.start()
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    try:
        yield Front(app, client)
    finally:
        await client.close()
        await app.stop()
        for worker in workers:
            if isinstance(worker, FakeWorker):
                await worker.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something; a test that waits in vain fails here."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to be"
        await asyncio.sleep(0.01)
