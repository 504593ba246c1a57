# SPDX-License-Identifier: Apache-2.0
"""Several routers over the same workers, with a real Redis between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from mimo_plugin.errors import MimoError
from mimo_plugin.router.app import App
from mimo_plugin.router.model import ModelFacts
from tests.router.redis_server import RedisServer
from tests.router.test_app_proxy import in_loop
from tests.router.workers import FakeWorker, FakeWorkerAlias, routing, settings_for, until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.kill()


def holding(gate: asyncio.Event) -> Any:
    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.json_response({})

    return answer


@in_loop
async def test_routers_know_each_other_s_load_and_workers(redis: RedisServer) -> None:
    gate = asyncio.Event()
    workers = [await FakeWorker(holding(gate)).start() for _ in range(2)]
    extra = await FakeWorker().start()
    async with (
        routing(*workers, state=redis.url) as first,
        routing(*workers, state=redis.url) as second,
    ):
        await until(lambda: second.app.service.state.status["peers"] == 1)
        calls = [asyncio.create_task(first.chat("one " * 50))]
        loads = second.app.service.router.loads
        await until(lambda: sum(load.in_flight for load in loads.values()) == 1)
        calls.append(asyncio.create_task(second.chat("another " * 50)))
        await until(lambda: all(worker.active == 1 for worker in workers))
        gate.set()
        assert [(await call)[0] for call in calls] == [200, 200]
        await until(lambda: not any(load.in_flight for load in loads.values()))
        # Workers that come, rest and go at one router do so at the other one.
        url = first.url + "/workers"
        async with first.client.post(url, json={"url": extra.url}) as response:
            assert response.status == 200
        known = second.app.service.workers.by_url
        await until(lambda: extra.url in known and known[extra.url].up)
        async with first.client.post(f"{url}/drain?url={extra.url}") as response:
            assert response.status == 200
        await until(lambda: known[extra.url].state == "draining")
        async with first.client.post(f"{url}/drain?url={extra.url}&on=false") as response:
            assert response.status == 200
        await until(lambda: known[extra.url].state == "ready")
        async with second.client.delete(f"{second.url}/workers?url={extra.url}") as response:
            assert response.status == 200
        await until(lambda: extra.url not in first.app.service.workers.by_url)
        assert await first.metric("mimo_router:state_peers", kind="redis") == 1
    await extra.stop()


@in_loop
async def test_routers_know_what_decodes_elsewhere(redis: RedisServer) -> None:
    gate = asyncio.Event()

    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await gate.wait()
        return response

    worker = await FakeWorker(answer).start()
    async with (
        routing(worker, state=redis.url) as first,
        routing(FakeWorkerAlias(worker), state=redis.url) as second,
    ):
        await until(lambda: second.app.service.state.status["peers"] == 1)
        call = asyncio.create_task(first.chat("one", stream=True))
        load = second.app.service.router.loads[worker.url]
        await until(lambda: len(load.decodes) == 1 and load.in_flight == 0)
        gate.set()
        assert (await call)[0] == 200
        await until(lambda: not load.decodes)


@in_loop
async def test_a_session_stays_where_another_router_sent_it(redis: RedisServer) -> None:
    workers = [await FakeWorker().start() for _ in range(4)]
    async with (
        routing(*workers, state=redis.url) as first,
        routing(*workers, state=redis.url) as second,
    ):
        await until(lambda: second.app.service.state.status["peers"] == 1)
        for number in range(12):
            session = {"X-Session-Id": f"s{number}"}
            _, headers, _ = await first.chat(f"{number}", headers=session)
            home = headers["X-Mimo-Worker"]
            name = (await first.decisions())[0]["session"]

            def arrived(name: str = name, home: str = home) -> bool:
                router = second.app.service.router
                idle = not any(load.in_flight or load.decodes for load in router.loads.values())
                return idle and (name, home) in [(s, target) for s, target, _ in router.sessions()]

            await until(arrived)
            _, headers, _ = await second.chat(f"{number} again", headers=session)
            assert headers["X-Mimo-Worker"] == home


@in_loop
async def test_redis_may_die_and_come_back(redis: RedisServer) -> None:
    workers = [await FakeWorker().start() for _ in range(2)]
    async with routing(*workers, state=redis.url) as front:
        redis.kill()
        codes = {(await front.chat(f"{n}"))[0] for n in range(10)}
        assert codes == {200}
        status = front.app.service.state
        await until(lambda: not status.status["connected"], 10)
        assert await front.metric("mimo_router:state_connected", kind="redis") == 0
        assert (await front.get("/health"))[0] == 200
        redis.start()
        await until(lambda: status.status["connected"], 10)
        assert {(await front.chat(f"{n}"))[0] for n in range(10)} == {200}


@in_loop
async def test_no_redis_at_the_start_is_one_line() -> None:
    worker = await FakeWorker().start()
    settings = settings_for(worker, state="redis://127.0.0.1:1/0")
    app = App(settings, ModelFacts("unused", 81_000.0, True))
    with pytest.raises(MimoError) as error:
        await app.start()
    assert "\n" not in str(error.value) and "--state" in str(error.value)
    await worker.stop()
    assert json.dumps(str(error.value))
