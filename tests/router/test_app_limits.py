# SPDX-License-Identifier: Apache-2.0
"""The router against clients that mean no good, and who may do what."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.test_app_proxy import in_loop, stream
from tests.router.workers import MODEL, FakeWorker, routing, until

pytestmark = pytest.mark.timeout(30)

ADMIN = "a-key"


async def raw(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send pieces, and read until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def read() -> None:
        while chunk := await reader.read(65536):
            answer.extend(chunk)

    reading = asyncio.create_task(read())
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        await reading
    except ConnectionError:
        await asyncio.gather(reading, return_exceptions=True)
    writer.close()
    return bytes(answer)


# Bodies


@in_loop
async def test_a_body_of_100_mib_is_refused_and_not_held() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = 100 << 20
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = await raw(front.app.port, head + b"Content-Length: %d\r\n\r\n" % size)
        assert answer.split()[1] == b"413" and b"--max-body-mib" in answer

        async def endless() -> Any:
            for _ in range(100):
                yield b" " * (1 << 20)

        try:
            async with front.client.post(front.url + "/v1/completions", data=endless()) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == 413
        except aiohttp.ClientError:
            pass  # cut while it was still sending
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 80 << 10
        assert not worker.seen and front.app.proxy.in_flight == 0
        assert (await front.chat())[0] == 200


@in_loop
async def test_a_packed_body_counts_unpacked() -> None:
    import gzip

    worker = await FakeWorker().start()
    async with routing(worker, max_body_bytes=1 << 20) as front:
        text = json.dumps({"model": MODEL, "prompt": "x" * 1000})
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        url = front.url + "/v1/completions"
        async with front.client.post(url, data=gzip.compress(text.encode()), headers=headers) as r:
            assert r.status == 200
        assert worker.seen[0]["prompt"] == "x" * 1000
        assert "Content-Encoding" not in worker.headers[0]
        bomb = gzip.compress(b" " * (64 << 20))
        async with front.client.post(url, data=bomb, headers=headers) as response:
            assert response.status == 413
        assert len(worker.seen) == 1


@in_loop
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "messages": 1}',
        b'{"model": 5, "prompt": "x"}',
        b'{"a":' * 100_000,
        b"nonsense",
        b"\x00" * 100,
    ],
)
async def test_malformed_bodies_are_refused_in_the_api_s_form(body: bytes) -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        url = front.url + "/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        async with front.client.post(url, data=body, headers=headers) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["code"] == 400 and error["type"] == "BadRequestError" and error["message"]
        assert not worker.seen
        assert (await front.chat())[0] == 200
        assert await front.metric("mimo_router:requests_total", outcome="refused") == 1
        assert await front.metric("mimo_router:requests_total", outcome="internal") == 0


@in_loop
async def test_all_bodies_together_have_a_limit() -> None:
    gate = asyncio.Event()

    async def wait(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        if worker.seen[-1].get("stream"):
            return await stream([b"data: 1\n\n"] * 5, pause_s=0.2)(worker, request)
        await gate.wait()
        return web.json_response({})

    worker = await FakeWorker(wait).start()
    async with routing(worker, max_buffered_bytes=3 << 20) as front:
        text = "x" * (1 << 20)
        calls = [asyncio.create_task(front.chat(text)) for _ in range(2)]
        await until(lambda: worker.active == 2)
        code, headers, body = await front.chat(text)
        assert code == 503 and headers["Retry-After"] == "1"
        assert "--max-buffered-mib" in json.loads(body)["error"]["message"]
        gate.set()
        assert {(await call)[0] for call in calls} == {200}
        assert front.app.proxy.budget.used_bytes == 0
        # A stream that has begun needs its body no more.
        going = asyncio.create_task(front.chat(text, stream=True))
        await until(lambda: worker.active == 1)
        await asyncio.sleep(0.1)
        assert front.app.proxy.budget.used_bytes == 0
        assert (await going)[0] == 200


# Slow and greedy clients


@in_loop
async def test_a_header_that_does_not_end_is_cut() -> None:
    worker = await FakeWorker().start()
    async with routing(worker, header_timeout_s=0.4) as front:
        loop = asyncio.get_running_loop()
        start = loop.time()
        slow = [b"GET /health HTTP/1.1\r\nHost: x\r\n", *(b"X-%d: y\r\n" % i for i in range(20))]
        answers = await asyncio.gather(
            raw(front.app.port, *slow, pause_s=0.1),
            raw(front.app.port),
            raw(front.app.port, b"G"),
        )
        assert answers == [b"", b"", b""]
        assert loop.time() - start < 4
        assert front.app.server.late == 3
        # A second header on a connection has its time too.
        first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = await raw(front.app.port, first, *slow, pause_s=0.1)
        assert answer.count(b"200 OK") == 1
        assert front.app.server.late == 4


@in_loop
async def test_a_long_answer_is_not_taken_for_a_slow_header() -> None:
    worker = await FakeWorker(stream([b"data: 1\n\n"] * 10, pause_s=0.1)).start()
    async with routing(worker, header_timeout_s=0.3) as front:
        for _ in range(2):
            code, _, body = await front.chat(stream=True)
            assert code == 200 and body == b"data: 1\n\n" * 10
        await asyncio.sleep(0.5)
        assert (await front.chat(stream=True))[0] == 200
        assert front.app.server.late == 0


@in_loop
async def test_a_body_that_does_not_come_is_cut() -> None:
    worker = await FakeWorker().start()
    async with routing(worker, body_timeout_s=0.3) as front:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        answer = await raw(front.app.port, head, *[b" "] * 10, pause_s=0.1)
        assert answer.split()[1] == b"408"
        assert front.app.proxy.in_flight == 0 and not worker.seen
        assert await front.metric("mimo_router:requests_total", outcome="timeout") == 1


@in_loop
async def test_headers_too_long_and_too_many_are_refused() -> None:
    worker = await FakeWorker().start()
    async with routing(worker, max_header_bytes=1024, max_headers=20) as front:
        for header in (
            b"X: " + b"y" * 5000 + b"\r\n",
            b"".join(b"X-%d: y\r\n" % i for i in range(50)),
        ):
            head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n"
            answer = await raw(front.app.port, head)
            assert answer.split()[1] == b"400"
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400
        answer = await raw(front.app.port, b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.split()[1] == b"400"
        answer = await raw(front.app.port, b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert answer.split()[1] == b"400"
        assert (await front.get("/health"))[0] == 200


@in_loop
async def test_connections_beyond_the_limit_are_closed() -> None:
    worker = await FakeWorker().start()
    async with routing(worker, max_connections=3) as front:
        idle = [await asyncio.open_connection("127.0.0.1", front.app.port) for _ in range(5)]
        await until(lambda: front.app.server.refused == 2)
        for _, writer in idle:
            writer.close()
        await until(lambda: not front.app.server.connections)
        assert (await front.get("/health"))[0] == 200


@in_loop
async def test_requests_beyond_the_limit_are_told_to_come_again() -> None:
    gate = asyncio.Event()

    async def wait(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.json_response({})

    worker = await FakeWorker(wait).start()
    async with routing(worker, max_in_flight=2) as front:
        calls = [asyncio.create_task(front.chat()) for _ in range(2)]
        await until(lambda: worker.active == 2)
        code, headers, body = await front.chat()
        assert (code, headers["Retry-After"]) == (503, "1")
        assert "--max-in-flight" in json.loads(body)["error"]["message"]
        assert (await front.get("/health"))[0] == 200
        gate.set()
        assert {(await call)[0] for call in calls} == {200}


# Who may do what


@in_loop
async def test_workers_come_and_go_while_it_runs() -> None:
    first, second = await FakeWorker().start(), await FakeWorker().start()
    async with routing(first) as front:
        url = front.url + "/workers"
        async with front.client.post(url, json={"url": second.url, "role": "both"}) as response:
            assert response.status == 200
        await until(lambda: len(front.app.service.router.targets) == 2)
        seen = {(await front.chat(f"{n}"))[1]["X-Mimo-Worker"] for n in range(12)}
        assert seen == {first.url, second.url}
        # A stream goes on while its worker is drained, and even when it is removed.
        first.answer = stream([b"data: 1\n\n"] * 8, pause_s=0.1)
        async with front.client.post(url + f"/drain?url={second.url}") as response:
            assert (await response.json())["state"] == "draining"
        going = asyncio.create_task(front.chat(stream=True))
        await until(lambda: first.active == 1)
        async with front.client.post(url + f"/drain?url={second.url}&on=false") as response:
            assert (await response.json())["state"] == "ready"
        async with front.client.post(url + f"/drain?url={first.url}") as response:
            assert response.status == 200
        for number in range(6):
            _, headers, _ = await front.chat(f"drained {number}")
            assert headers["X-Mimo-Worker"] == second.url
        async with front.client.delete(url + f"?url={first.url}") as response:
            assert response.status == 200
        code, _, body = await going
        assert code == 200 and body == b"data: 1\n\n" * 8
        assert [w["url"] for w in (await front.get("/workers"))[1]["workers"]] == [second.url]
        assert list(front.app.service.router.targets) == [second.url]
        async with front.client.delete(url + f"?url={first.url}") as response:
            assert response.status == 404
        for wrong in ({"url": "ftp://x"}, {"url": second.url, "roel": "both"}, {"role": "both"}):
            async with front.client.post(url, json=wrong) as response:
                assert response.status == 400
                assert "allowed" in (await response.json())["error"]["message"]
    await second.stop()


OPERATOR_PATHS = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers?url=http://127.0.0.1:1"),
    ("POST", "/workers/drain?url=http://127.0.0.1:1"),
    ("GET", "/decisions"),
    ("GET", "/resident?session=x"),
    ("POST", "/resident"),
]


@in_loop
@pytest.mark.parametrize(("method", "path"), OPERATOR_PATHS)
async def test_without_a_key_only_this_machine_itself_may(method: str, path: str) -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        own = front.url.removeprefix("http://")
        port = own.partition(":")[2]
        body = {"url": "http://127.0.0.1:1"} if method == "POST" else None
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": f"evil.example:{port}"},
            {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"X-Forwarded-For": "10.0.0.9"},
            {"Forwarded": "for=10.0.0.9"},
        ):
            async with front.client.request(
                method, front.url + path, json=body, headers=headers
            ) as response:
                assert response.status == 403, headers
        for headers in (
            {},
            {"Origin": front.url, "Sec-Fetch-Site": "same-origin"},
            {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"},
        ):
            async with front.client.request(
                method, front.url + path, json=body, headers=headers
            ) as response:
                assert response.status in (200, 400, 404), headers
        if method == "POST" and "drain" not in path:
            form = aiohttp.FormData({"url": "http://127.0.0.1:1"})
            async with front.client.post(front.url + path, data=form) as response:
                assert response.status == 415
            text = {"Content-Type": "text/plain"}
            async with front.client.post(front.url + path, data=b"{}", headers=text) as response:
                assert response.status == 415


@in_loop
@pytest.mark.parametrize(("method", "path"), OPERATOR_PATHS)
async def test_with_a_key_nobody_may_without_it(method: str, path: str) -> None:
    worker = await FakeWorker().start()
    async with routing(worker, admin_key=ADMIN) as front:
        body = {"url": "http://127.0.0.1:1"} if method == "POST" else None
        for headers, allowed in (
            ({}, False),
            ({"Authorization": "Bearer wrong"}, False),
            ({"Authorization": ADMIN}, False),
            ({"X-Admin-Key": ADMIN + "x"}, False),
            ({"Authorization": f"Bearer {ADMIN}"}, True),
            ({"X-Admin-Key": ADMIN, "X-Forwarded-For": "10.0.0.9"}, True),
        ):
            async with front.client.request(
                method, front.url + path, json=body, headers=headers
            ) as response:
                assert (response.status in (200, 400, 404)) is allowed
                assert allowed or response.status == 401
        for path in ("/health", "/metrics", "/v1/models", "/"):
            assert (await front.get(path))[0] == 200


@in_loop
async def test_the_page_and_its_files() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        async with front.client.get(front.url + "/") as response:
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
            tag = response.headers["ETag"]
        again = {"If-None-Match": tag}
        async with front.client.get(front.url + "/", headers=again) as response:
            assert response.status == 304
        async with front.client.get(front.url + "/page.js") as response:
            assert response.status == 200 and response.content_type == "text/javascript"
        async with front.client.get(front.url + "/page.py") as response:
            assert response.status == 404
        async with front.client.post(front.url + "/") as response:
            assert response.status == 405


# The process


async def started(tmp_path: Path, worker: FakeWorker, *options: str) -> tuple[Any, int, str]:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
            }
        )
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "mimo_plugin.cli", "router", "--model", str(tmp_path), "--port", "0"),
        *("--tokenizer", "none", "--worker", worker.url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert "http://127.0.0.1:" in line, (line, await process.stderr.read())  # type: ignore[union-attr]
    return process, int(line.split("http://127.0.0.1:")[1].split(",")[0]), line


@in_loop
async def test_sigterm_lets_streams_end_and_takes_nothing_new(tmp_path: Path) -> None:
    worker = await FakeWorker(stream([b"data: 1\n\n"] * 10, pause_s=0.1)).start()
    process, port, line = await started(tmp_path, worker, "--grace", "10")
    assert "1 of 1 workers up" in line and "tokenizer none" in line and "state memory" in line
    body = {"model": MODEL, "prompt": "x", "stream": True}
    url = f"http://127.0.0.1:{port}"
    async with (
        aiohttp.ClientSession() as client,
        client.post(url + "/v1/completions", json=body) as response,
    ):
        await response.content.readexactly(9)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(url + "/health")
        assert await response.read() == b"data: 1\n\n" * 9
    assert await asyncio.wait_for(process.wait(), 5) == 0
    await worker.stop()


@in_loop
async def test_after_the_grace_it_ends_all_the_same(tmp_path: Path) -> None:
    worker = await FakeWorker(stream([b"data: 1\n\n"] * 600, pause_s=0.1)).start()
    process, port, _ = await started(tmp_path, worker, "--grace", "0.3")
    body = {"model": MODEL, "prompt": "x", "stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
        await response.content.readexactly(9)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    await until(lambda: worker.active == 0)
    await worker.stop()
