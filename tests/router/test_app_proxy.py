# SPDX-License-Identifier: Apache-2.0
"""Requests through the router: streams byte by byte, faults of workers, what is passed on."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.workers import (
    MODEL,
    FakeWorker,
    WorkerSpec,
    chunks_of,
    plain,
    routing,
    stream,
    until,
    usage_of,
)

pytestmark = pytest.mark.timeout(30)


def in_loop(test: Any) -> Any:
    """Run an async test, which must end within some seconds."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), 25)

        asyncio.run(bounded())

    return run


async def die_before(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    """Close without a word."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def die_within(chunks: list[bytes], headers: dict[str, str]) -> Any:
    """Begin an answer, and close."""

    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def status(code: int) -> Any:
    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "mine", "code": code}}, status=code)

    return answer


SSE = {"Content-Type": "text/event-stream"}


# Streams


@in_loop
async def test_a_stream_is_passed_on_byte_by_byte_and_as_it_comes() -> None:
    events = [
        b": a comment\n\n",
        b'data: {"a":  1}\r\n\r\n',
        b"data: \xf0\x9f\x98",
        b"\x80 split\n",
        b"\n",
        b"data: [DONE]\n\n",
        b"no end of line",
    ]
    worker = await FakeWorker(stream(events, pause_s=0.1)).start()
    async with routing(worker) as front:
        loop = asyncio.get_running_loop()
        got: list[bytes] = []
        times: list[float] = []
        async with front.client.post(
            front.url + "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as response:
            assert response.content_type == "text/event-stream"
            assert response.headers["X-Mimo-Worker"] == worker.url
            assert response.headers["X-Mimo-Reason"] == "only"
            assert response.headers["X-Mimo-Predicted-Hit"] == "0"
            async for chunk in response.content.iter_any():
                got.append(chunk)
                times.append(loop.time())
        assert b"".join(got) == b"".join(events)
        assert got[0] == events[0]
        assert times[-1] - times[0] > 0.3
        assert (await front.decisions())[0]["ttft_s"] < 0.1


@in_loop
async def test_a_plain_answer_keeps_its_bytes_status_and_headers() -> None:
    body = b'{"a":  [1,2],\n "usage": {"prompt_tokens": 7, "prompt_tokens_details": null}}'

    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=body,
            status=418,
            headers={
                "X-Own": "1",
                "Content-Type": "application/json",
                "Keep-Alive": "timeout=5",
                "Connection": "keep-alive, x-hop",
                "X-Hop": "2",
            },
        )

    worker = await FakeWorker(answer).start()
    async with routing(worker) as front:
        code, headers, got = await front.chat()
        assert (code, got, headers["X-Own"]) == (418, body, "1")
        assert "Keep-Alive" not in headers and "X-Hop" not in headers
        assert (await front.decisions())[0]["actual_hit_tokens"] is None


@in_loop
async def test_500_streams_at_once_all_come_whole() -> None:
    chunks = chunks_of(" ".join(f"w{i}" for i in range(20)), usage_of(100, 48))
    workers = [await FakeWorker(stream(chunks, pause_s=0.02)).start() for _ in range(2)]
    async with routing(*workers) as front:

        async def one(number: int) -> bytes:
            code, _, body = await front.chat(f"chat {number} " * 30, stream=True)
            assert code == 200
            return body

        bodies = await asyncio.gather(*(one(i) for i in range(500)))
        assert set(bodies) == {b"".join(chunks)}
        share = [len(worker.seen) for worker in workers]
        assert sum(share) == 500 and max(share) <= 1.25 * 250
        assert await front.metric("mimo_router:requests_total", outcome="ok") == 500
        for target in (await front.get("/workers"))[1]["workers"]:
            assert target["targets"][0]["in_flight"] == target["targets"][0]["decoding"] == 0
        assert front.app.proxy.in_flight == 0


@in_loop
async def test_a_slow_client_holds_the_worker_back() -> None:
    sent = 0

    async def flood(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        event = b"data: " + b"x" * 65526 + b"\n\n"
        for _ in range(1600):
            await response.write(event)
            sent += len(event)
        return response

    worker = await FakeWorker(flood).start()
    async with (
        routing(worker) as front,
        front.client.post(
            front.url + "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as response,
    ):
        await response.content.readexactly(10)
        await asyncio.sleep(0.5)
        assert sent < 40 << 20
        rest = await response.read()
        assert len(rest) + 10 == 1600 * 65534


# Faults


@in_loop
@pytest.mark.parametrize("fault", ["closed", 502, 503])
async def test_what_a_worker_did_not_begin_goes_to_another_one(fault: Any) -> None:
    bad = await FakeWorker(die_before if fault == "closed" else status(fault)).start()
    good = await FakeWorker().start()
    async with routing(bad, good) as front:
        for number in range(8):
            code, headers, _ = await front.chat(f"{number} new", stream=number % 2 == 0)
            assert (code, headers["X-Mimo-Worker"]) == (200, good.url)
        assert len(bad.seen) > 0
        retried = [d for d in await front.decisions() if d["retries"]]
        assert len(retried) == len(bad.seen) and all(d["status"] == 200 for d in retried)
        assert await front.metric("mimo_router:retries_total") == len(bad.seen)


@in_loop
async def test_a_worker_that_dies_after_its_headers_has_not_begun() -> None:
    bad = await FakeWorker(die_within([], SSE)).start()
    good = await FakeWorker().start()
    async with routing(bad, good) as front:
        for number in range(6):
            code, _, body = await front.chat(f"{number} new", stream=True)
            assert code == 200 and body.endswith(b"[DONE]\n\n")
        assert bad.seen


@in_loop
async def test_a_connection_refused_is_no_error_and_the_worker_is_down_at_once() -> None:
    bad, good = await FakeWorker().start(), await FakeWorker().start()
    async with routing(bad, good, health_interval_s=60.0) as front:
        await bad.stop()
        for number in range(8):
            code, headers, _ = await front.chat(f"{number} new")
            assert (code, headers["X-Mimo-Worker"]) == (200, good.url)
        assert sum(d["retries"] for d in await front.decisions()) <= 1
        states = {w["url"]: w["state"] for w in (await front.get("/workers"))[1]["workers"]}
        assert states == {bad.url: "down", good.url: "ready"}


@in_loop
async def test_retries_end_and_a_request_that_kills_workers_kills_two_at_most() -> None:
    workers = [await FakeWorker(die_before).start() for _ in range(4)]
    async with routing(*workers, retries=3) as front:
        code, _, body = await front.chat()
        assert code == 502
        assert json.loads(body)["error"]["code"] == 502
        assert sum(len(worker.seen) for worker in workers) == 2
    workers = [await FakeWorker(status(503)).start() for _ in range(4)]
    async with routing(*workers, retries=1) as front:
        code, _, body = await front.chat()
        assert code == 503 and json.loads(body)["error"]["message"] == "mine"
        assert sum(len(worker.seen) for worker in workers) == 2


@in_loop
async def test_an_idle_connection_that_was_closed_is_no_error_with_one_worker() -> None:
    closes = 1

    async def once(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        nonlocal closes
        if closes:
            closes -= 1
            return await die_before(worker, request)
        return await plain(worker, request)

    worker = await FakeWorker(once).start()
    async with routing(worker) as front:
        assert (await front.chat())[0] == 200


@in_loop
async def test_other_errors_are_the_worker_s_own_and_not_tried_again() -> None:
    workers = [await FakeWorker(status(code)).start() for code in (500, 500)]
    async with routing(*workers) as front:
        code, _, body = await front.chat()
        assert code == 500 and json.loads(body)["error"]["message"] == "mine"
        assert sum(len(worker.seen) for worker in workers) == 1
        assert await front.metric("mimo_router:requests_total", outcome="worker_error") == 1


@in_loop
@pytest.mark.parametrize(
    "chunks",
    [
        [b'data: {"x": 1}\n\n', b'data: {"x": 2}\n\n'],
        [b'data: {"x": 1}\n\ndata: {"x": 2}\n\ndata: {"half'],
    ],
)
async def test_a_worker_killed_within_a_stream_leaves_a_clean_error(chunks: list[bytes]) -> None:
    bad = await FakeWorker(die_within(chunks, SSE)).start()
    good = await FakeWorker().start()
    async with routing(bad, good) as front:
        await front.get(f"/workers/drain?url={good.url}")
        async with front.client.post(f"{front.url}/workers/drain?url={good.url}") as response:
            assert response.status == 200
        code, _, body = await front.chat(stream=True)
        assert code == 200
        events = [event for event in body.split(b"\n\n") if event]
        assert events[:2] == [b'data: {"x": 1}', b'data: {"x": 2}']
        assert len(events) == 3
        error = json.loads(events[2].removeprefix(b"data: "))["error"]
        assert error["code"] == 502 and "within its answer" in error["message"]
        assert len(bad.seen) == 1 and not good.seen
        assert await front.metric("mimo_router:requests_total", outcome="broken") == 1
        async with front.client.post(f"{front.url}/workers/drain?url={good.url}&on=false"):
            pass
        await bad.stop()
        assert (await front.chat())[1]["X-Mimo-Worker"] == good.url


@in_loop
async def test_a_worker_killed_within_a_plain_answer_is_a_502_and_no_second_try() -> None:
    half = die_within([b'{"a": '], {"Content-Type": "application/json", "Content-Length": "99"})
    workers = [await FakeWorker(half).start() for _ in range(2)]
    async with routing(*workers) as front:
        code, _, body = await front.chat()
        assert code == 502
        assert json.loads(body)["error"]["type"] == "WorkerError"
        assert sum(len(worker.seen) for worker in workers) == 1
        assert (await front.decisions())[0]["status"] == 502


@in_loop
async def test_a_large_answer_is_passed_on_as_it_comes_and_cut_when_the_worker_dies() -> None:
    big = b"x" * (3 << 20)

    async def whole(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        return web.Response(body=big)

    worker = await FakeWorker(whole).start()
    async with routing(worker) as front:
        code, headers, body = await front.chat()
        assert code == 200 and body == big and headers["Content-Length"] == str(len(big))
        worker.answer = die_within([big], {"Content-Length": str(2 * len(big))})
        with pytest.raises(aiohttp.ClientPayloadError):
            await front.chat()


@in_loop
async def test_a_silent_worker_is_given_up_and_not_tried_again() -> None:
    async def silent(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    workers = [await FakeWorker(silent).start() for _ in range(2)]
    async with routing(*workers, read_timeout_s=0.3) as front:
        code, _, body = await front.chat()
        assert code == 504 and "--read-timeout" in json.loads(body)["error"]["message"]
        assert sum(len(worker.seen) for worker in workers) == 1
        await until(lambda: sum(worker.aborted for worker in workers) == 1)


@in_loop
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_ends_the_worker_s_work(streamed: bool) -> None:
    chunks = [b"data: 1\n\n"] * 1000

    async def slow(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        if streamed:
            return await stream(chunks, pause_s=0.05)(worker, request)
        await asyncio.sleep(60)
        raise AssertionError

    worker = await FakeWorker(slow).start()
    async with routing(worker) as front:
        call = asyncio.create_task(front.chat(stream=streamed))
        await until(lambda: worker.active == 1)
        await asyncio.sleep(0.1)
        call.cancel()
        await until(lambda: worker.aborted == 1 and worker.active == 0)
        await until(lambda: front.app.proxy.in_flight == 0)
        assert await front.metric("mimo_router:requests_total", outcome="disconnected") == 1
        state = (await front.get("/workers"))[1]["workers"][0]["targets"][0]
        assert state["in_flight"] == state["decoding"] == state["errors"] == 0


@in_loop
async def test_a_worker_that_flaps_loses_no_request() -> None:
    flapping, steady = await FakeWorker().start(), await FakeWorker().start()
    async with routing(flapping, steady, health_interval_s=0.05) as front:

        async def client(number: int) -> set[int]:
            codes = set()
            for turn in range(25):
                codes.add((await front.chat(f"{number} {turn}", stream=turn % 2 == 0))[0])
                await asyncio.sleep(0.02)
            return codes

        async def flap() -> None:
            for _ in range(6):
                await asyncio.sleep(0.1)
                await flapping.stop()
                await asyncio.sleep(0.1)
                await flapping.start()

        *codes, _ = await asyncio.gather(*(client(i) for i in range(8)), flap())
        assert set.union(*codes) == {200}
        assert front.app.proxy.in_flight == 0
        await until(lambda: front.app.service.workers.by_url[flapping.url].up)


# What goes on


@in_loop
async def test_headers_go_on_without_those_of_one_connection() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        _, headers, _ = await front.chat(
            headers={
                "Authorization": "Bearer k",
                "X-Request-Id": "mine-1",
                "X-Data-Parallel-Rank": "7",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "1",
                "TE": "trailers",
                "X-Session-Id": "s",
            }
        )
        seen = worker.headers[0]
        assert seen["Authorization"] == "Bearer k"
        assert seen["X-Request-Id"] == headers["X-Request-Id"] == "mine-1"
        assert seen["X-Session-Id"] == "s"
        assert seen["Host"] == worker.url.removeprefix("http://")
        for name in ("X-Data-Parallel-Rank", "X-Hop", "TE"):
            assert name not in seen
        _, headers, _ = await front.chat()
        assert len(headers["X-Request-Id"]) == 32
        assert worker.headers[1]["X-Request-Id"] == headers["X-Request-Id"]
        assert "User-Agent" in worker.headers[1] and "aiohttp" in worker.headers[1]["User-Agent"]


@in_loop
async def test_a_body_is_passed_on_as_it_is_but_for_what_is_not_for_clients() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        raw = b'{"model":"tiny",  "prompt":"\\u00e9", "n": 1.0,"big":12345678901234567890123}'
        seen: list[bytes] = []

        async def note(w: FakeWorker, request: web.Request) -> web.StreamResponse:
            seen.append(await request.read())
            return web.json_response({})

        worker.answer = note
        for body in (raw, b"", raw):
            async with front.client.post(front.url + "/v1/completions", data=body) as response:
                assert response.status == 200
        assert seen == [raw, b"", raw]
        await front.chat(
            routed_dp_rank=1,
            data_parallel_rank=2,
            kv_cache_report_mode="full",
            vllm_xargs={"kv_cache_report_mode": "full", "other": 1},
        )
        got = json.loads(seen[-1])
        assert got["vllm_xargs"] == {"other": 1}
        assert set(got) == {"model", "messages", "vllm_xargs"}
        code, _, body = await front.chat(kv_transfer_params={"remote_host": "10.0.0.1"})
        assert code == 400 and b"remote_host" in body


@in_loop
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/completions", 200),
        ("/v1/embeddings", 200),
        ("/v2/rerank", 200),
        ("/tokenize?x=%2F1", 200),
        ("/inference/v1/generate", 200),
        ("/generate", 200),
        ("/v1/../sleep", 400),
        ("/v1/%2e%2e/sleep", 400),
        ("/v1/%252e%252e/sleep", 400),
        ("/v1/..%2fsleep", 400),
        ("/v1//completions", 400),
        ("/v1/..\\sleep", 400),
        ("/sleep", 404),
        ("/server_info", 404),
        ("/reset_prefix_cache", 404),
        ("/generatex", 404),
        ("/v1/load_lora_adapter", 403),
        ("/v1/unload%5Flora_adapter", 403),
    ],
)
async def test_only_what_is_for_users_is_forwarded(path: str, code: int) -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.app.port)
        body = b'{"prompt": "x", "token_ids": [1, 2], "input": "x"}'
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
        writer.write(body)
        answer = await reader.read()
        writer.close()
        assert int(answer.split()[1]) == code, answer
        assert worker.paths == ([path] if code == 200 else [])


@in_loop
async def test_ranks_are_targets_and_told_by_header() -> None:
    worker = await FakeWorker().start()
    async with routing(WorkerSpec(worker.url, ranks=2)) as front:
        for number in range(12):
            _, headers, _ = await front.chat(f"{number} new")
            rank = worker.headers[-1]["X-data-parallel-rank"]
            assert headers["X-Mimo-Worker"] == f"{worker.url}#{rank}"
        ranks = {headers["X-data-parallel-rank"] for headers in worker.headers}
        assert ranks == {"0", "1"}
        targets = (await front.get("/workers"))[1]["workers"][0]["targets"]
        assert [target["rank"] for target in targets] == [0, 1]
        assert sum(target["requests"] for target in targets) == 12
    await worker.stop()


@in_loop
async def test_models_adapters_and_workers_without_them() -> None:
    base, other = await FakeWorker().start(), await FakeWorker(models=("other",)).start()
    other.adapters = {"style": "other"}
    async with routing(base, other) as front:
        _, models = await front.get("/v1/models")
        assert {card["id"] for card in models["data"]} == {MODEL, "other", "style"}
        for model, worker in ((MODEL, base), ("other", other), ("style", other)):
            for _ in range(3):
                _, headers, _ = await front.chat(model=model)
                assert headers["X-Mimo-Worker"] == worker.url
        code, _, body = await front.chat(model="nope")
        assert code == 404 and "`nope` does not exist" in json.loads(body)["error"]["message"]
        base.adapters = {"new": MODEL}
        await until(lambda: front.app.service.workers.is_adapter("new"), 10)
        assert (await front.chat(model="new"))[1]["X-Mimo-Worker"] == base.url
        base.healthy = False
        await until(lambda: not front.app.service.workers.by_url[base.url].up)
        code, headers, _ = await front.chat()
        assert code == 503 and headers["Retry-After"] == "1"
        assert {c["id"] for c in (await front.get("/v1/models"))[1]["data"]} == {"other", "style"}


@in_loop
async def test_forms_find_their_model_and_go_by_load() -> None:
    base, other = await FakeWorker().start(), await FakeWorker(models=("speech",)).start()
    async with routing(base, other) as front:
        for _ in range(4):
            form = aiohttp.FormData()
            form.add_field("file", b"\x00\xff" * 1000, filename="a.wav")
            form.add_field("model", "speech")
            async with front.client.post(
                front.url + "/v1/audio/transcriptions", data=form
            ) as response:
                assert response.status == 200
                assert response.headers["X-Mimo-Worker"] == other.url
        assert not base.seen and len(other.seen) == 4


@in_loop
async def test_hits_are_read_from_answers() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        await front.chat()
        await front.chat(stream=True)
        found = [d["actual_hit_tokens"] for d in await front.decisions()]
        assert found == [32, 64]
        assert await front.metric("mimo_router:hit_tokens_actual_total") == 96
        assert await front.metric("mimo_router:prompt_tokens_reported_total") == 200
        worker.answer = stream([b'data: {"x": "\\"cached_tokens\\": 5"}\n\n', b"data: [DONE]\n\n"])
        await front.chat(stream=True)
        assert (await front.decisions())[0]["actual_hit_tokens"] is None


# Prefill and decode


def prefill(transfer: Any) -> Any:
    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "p", "kv_transfer_params": transfer})

    return answer


@in_loop
async def test_prefill_and_decode_apart() -> None:
    transfer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "p"}
    first, second = await FakeWorker(prefill(transfer)).start(), await FakeWorker().start()
    specs = WorkerSpec(first.url, "prefill"), WorkerSpec(second.url, "decode")
    async with routing(*specs) as front:
        code, headers, body = await front.chat(
            stream=True, stream_options={"include_usage": True}, max_completion_tokens=50
        )
        assert code == 200 and body.endswith(b"[DONE]\n\n")
        assert headers["X-Mimo-Worker"] == second.url
        asked, got = first.seen[0], second.seen[0]
        assert (asked["stream"], asked["max_tokens"], asked["max_completion_tokens"]) == (
            False,
            1,
            1,
        )
        assert "stream_options" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert got["kv_transfer_params"] == transfer
        assert (got["stream"], got["max_completion_tokens"]) == (True, 50)
        assert first.headers[0]["X-Request-Id"] == second.headers[0]["X-Request-Id"]
        decision = (await front.decisions())[0]
        assert decision["target"] == first.url and decision["ttft_s"] is not None
        first.answer = prefill(None)
        assert (await front.chat())[0] == 200
        assert "kv_transfer_params" not in second.seen[1]
        first.answer = status(400)
        code, _, body = await front.chat()
        assert code == 400 and json.loads(body)["error"]["message"] == "mine"
        assert len(second.seen) == 2
        for worker in (await front.get("/workers"))[1]["workers"]:
            assert worker["targets"][0]["in_flight"] == worker["targets"][0]["decoding"] == 0
    await first.stop()
    await second.stop()


@in_loop
async def test_a_prefill_worker_that_fails_is_replaced() -> None:
    bad, good = await FakeWorker(die_before).start(), await FakeWorker(prefill({"a": 1})).start()
    decode = await FakeWorker().start()
    specs = [WorkerSpec(w.url, "prefill") for w in (bad, good)]
    async with routing(*specs, WorkerSpec(decode.url, "decode")) as front:
        for number in range(6):
            assert (await front.chat(f"{number} new"))[0] == 200
        assert bad.seen and len(decode.seen) == 6
        assert all(body["kv_transfer_params"] == {"a": 1} for body in decode.seen)
    for worker in (bad, good, decode):
        await worker.stop()


# Stored responses


def store(name: str) -> Any:
    """A worker that keeps what it made."""
    kept: set[str] = set()

    async def answer(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            found = request.path.rpartition("/")[2] in kept
            return web.json_response({"of": name}, status=200 if found else 404)
        made = f"resp_{name}{len(kept)}"
        kept.add(made)
        return web.json_response({"id": made, "object": "response"})

    return answer


@in_loop
async def test_a_stored_response_is_found_where_it_is() -> None:
    workers = [await FakeWorker(store(name)).start() for name in "abc"]
    async with routing(*workers) as front:
        url = front.url + "/v1/responses"
        for number in range(9):
            async with front.client.post(url, json={"input": f"{number}"}) as response:
                made, home = (await response.json())["id"], response.headers["X-Mimo-Worker"]
            asked = sum(len(worker.seen) for worker in workers)
            code, got = await front.get(f"/v1/responses/{made}")
            assert (code, got["of"]) == (200, made[5])
            assert sum(len(worker.seen) for worker in workers) == asked + 1
            again = {"input": f"other {number}", "previous_response_id": made}
            async with front.client.post(url, json=again) as response:
                assert response.headers["X-Mimo-Worker"] == home
        assert len({worker.url for worker in workers if worker.seen}) == 3
        front.app.proxy._responses._targets.clear()  # as another router knows it
        code, got = await front.get(f"/v1/responses/{made}")
        assert (code, got["of"]) == (200, made[5])
        code, _ = await front.get("/v1/responses/resp_none")
        assert code == 404


@in_loop
async def test_a_lone_worker_s_refusal_is_passed_on() -> None:
    worker = await FakeWorker(status(503)).start()
    async with routing(worker) as front:
        code, _, body = await front.chat()
        assert (code, json.loads(body)["error"]["message"]) == (503, "mine")
        assert len(worker.seen) == 1


@in_loop
async def test_a_client_may_wait_to_be_told_to_go_on() -> None:
    worker = await FakeWorker().start()
    async with routing(worker) as front:
        data = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        async with front.client.post(
            front.url + "/v1/completions", data=data, expect100=True
        ) as response:
            assert response.status == 200
        assert "Expect" not in worker.headers[0]
