# SPDX-License-Identifier: Apache-2.0
"""Prompts that workers make: what is sent, what comes back, and workers that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from mimo_plugin.router.prompt import MediaSpan
from mimo_plugin.router.prompt_check import SAMPLES, Sample
from mimo_plugin.router.prompt_render import RenderClient, Rendered, rendered_of
from mimo_plugin.router.prompts import PromptReader

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True, "seed": 1}


class Worker:
    """A server that answers as told and notes what it got."""

    def __init__(self, answer: Any = None, status: int = 200, delay_s: float = 0.0) -> None:
        self.answer, self.status, self.delay_s = answer, status, delay_s
        self.got: list[tuple[str, Any, str | None]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.got.append((request.path, await request.json(), request.headers.get("Authorization")))
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        answer = self.answer(self.got[-1]) if callable(self.answer) else self.answer
        return web.Response(
            text=answer if isinstance(answer, str) else json.dumps(answer),
            status=403 if answer is None else self.status,
        )


def run(test: Callable[..., Awaitable[None]], *workers: Worker, **options: Any) -> None:
    """Run ``test(client, workers…)`` with the workers up."""

    async def main() -> None:
        runners = []
        for worker in workers:
            app = web.Application()
            app.router.add_post("/{path:.*}", worker.handle)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            worker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            runners.append(runner)
        client = RenderClient([w.url for w in workers], **options)
        try:
            await asyncio.wait_for(test(client, *workers), 20)
        finally:
            await client.close()
            for runner in runners:
                await runner.cleanup()

    asyncio.run(main())


def test_a_chat_is_rendered_once() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        body = dict(BODY)
        for headers in ({"Authorization": "Bearer k"}, {}):
            got = await client.render(CHAT, body, headers)
            assert got == Rendered([1, 2, 3], (), 3)
        assert body == BODY
        path, sent, key = worker.got[0]
        assert (path, key) == (CHAT + "/render", "Bearer k")
        assert sent == {"model": "m", "messages": BODY["messages"], "mm_payload": "none"}
        assert len(worker.got) == 1
        assert client.status["cache_hits"] == 1
        await client.render(CHAT, {**BODY, "seed": 2}, {})
        assert len(worker.got) == 1, "the seed changes no prompt"
        await client.render(CHAT, {**BODY, "cache_salt": "x"}, {})
        assert len(worker.got) == 2

    run(test, Worker({"token_ids": [1, 2, 3]}))


def test_media_come_with_their_places() -> None:
    answer = {
        "token_ids": [1, 9, 9, 2, 8],
        "features": {
            "mm_hashes": {"video": ["v"], "image": ["i"]},
            "mm_placeholders": {
                "video": [{"offset": 4, "length": 1}],
                "image": [{"offset": 1, "length": 2}],
            },
            "kwargs_data": None,
        },
    }
    assert rendered_of(answer) == Rendered(
        [1, 9, 9, 2, 8], (MediaSpan(1, 2, "i"), MediaSpan(4, 1, "v")), 5
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [None],
        {},
        {"token_ids": []},
        {"token_ids": [1, "a"]},
        {"token_ids": [True]},
        {"token_ids": [1], "features": 5},
        {"token_ids": [1], "features": {"mm_hashes": {"image": ["i"]}, "mm_placeholders": {}}},
        {
            "token_ids": [1],
            "features": {"mm_hashes": {"image": ["i"]}, "mm_placeholders": {"image": [{"x": 1}]}},
        },
    ],
)
def test_answers_that_are_not_understood(answer: Any) -> None:
    assert rendered_of(answer) is None


def test_several_prompts() -> None:
    assert rendered_of([{"token_ids": [1, 2]}, {"token_ids": [3]}]) == Rendered([1, 2], (), 3)


def test_a_slow_worker_costs_no_more_than_the_limit() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        started = time.monotonic()
        assert await client.render(CHAT, BODY, {}) is None
        assert time.monotonic() - started < 1.5
        started = time.monotonic()
        assert await client.render(CHAT, BODY, {}) is None
        assert time.monotonic() - started < 0.2, "it is left alone for a while"
        assert len(worker.got) == 1
        assert client.status["failed"] == 1
        assert "Timeout" in client.status["last_error"]

    run(test, Worker({"token_ids": [1]}, delay_s=3), timeout_s=0.3)


def test_another_worker_is_asked_after_a_failure() -> None:
    async def test(client: RenderClient, broken: Worker, good: Worker) -> None:
        answers = [await client.render(CHAT, {**BODY, "x": i}, {}) for i in range(4)]
        assert sum(a is None for a in answers) == 1
        assert (len(broken.got), len(good.got)) == (1, 3)

    run(test, Worker("no json"), Worker({"token_ids": [1]}))


def test_a_worker_without_the_endpoint_is_not_asked_again() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        for index in range(3):
            assert await client.render(CHAT, {**BODY, "x": index}, {}) is None
        assert [path for path, _, _ in worker.got] == [CHAT + "/render", "/tokenize"]
        await client.render("/v1/responses", {"input": "a"}, {})
        assert len(worker.got) == 3, "other endpoints may exist"

    run(test, Worker({}, status=404))


def test_tokenize_stands_in_for_render_where_it_can() -> None:
    """vLLM without ``--enable-scale-out``."""

    async def test(client: RenderClient, worker: Worker) -> None:
        image = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
        asked = [
            (CHAT, {**BODY, "reasoning_effort": "low", "documents": [1]}),
            ("/v1/completions", {"prompt": "a", "add_special_tokens": False}),
            (CHAT, {**BODY, "truncate_prompt_tokens": 5}),
            (CHAT, {"messages": [{"role": "user", "content": image}]}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/messages", BODY),
        ]
        answers = [await client.render(path, body, {}) for path, body in asked]
        assert [a is not None for a in answers] == [True, True, False, False, False, False]
        kwargs = {"enable_thinking": True, "reasoning_effort": "low", "documents": [1]}
        sent = [body for path, body, _ in worker.got if path == "/tokenize"]
        assert sent == [
            {"model": "m", "messages": BODY["messages"], "chat_template_kwargs": kwargs},
            {"prompt": "a", "add_special_tokens": False},
        ]

    worker = Worker()
    worker.answer = lambda got: {"tokens": [5]} if got[0] == "/tokenize" else None
    run(test, worker)


def test_a_refusal_says_nothing_of_the_worker() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        for index in range(3):
            assert await client.render(CHAT, {**BODY, "x": index}, {}) is None
        assert len(worker.got) == 3

    run(test, Worker({"error": {}}, status=400))


def test_nobody_there() -> None:
    async def main() -> None:
        client = RenderClient(["http://127.0.0.1:9"], timeout_s=1)
        try:
            assert await client.render(CHAT, BODY, {}) is None
            nobody = RenderClient(lambda: [])
            assert await nobody.render(CHAT, BODY, {}) is None
            assert await nobody.render("/v1/other", BODY, {}) is None
        finally:
            await client.close()

    asyncio.run(main())


def test_equal_requests_share_a_call_and_one_may_leave() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        calls = [asyncio.create_task(client.render(CHAT, BODY, {})) for _ in range(5)]
        await asyncio.sleep(0.1)
        calls[0].cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert all(d == Rendered([1], (), 1) for d in done[1:])
        assert len(worker.got) == 1

    run(test, Worker({"token_ids": [1]}, delay_s=0.3))


def test_calls_at_a_time_are_bounded() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        calls = [client.render(CHAT, {**BODY, "x": i}, {}) for i in range(6)]
        done = await asyncio.gather(*calls)
        assert sum(d is not None for d in done) == 2
        assert len(worker.got) == 2

    run(test, Worker({"token_ids": [1]}, delay_s=0.2), most_in_flight=2)


def test_the_cache_is_bounded() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        for index in range(50):
            await client.render(CHAT, {**BODY, "x": index}, {})
            assert client.status["cache_bytes"] <= 100_000
        await client.render(CHAT, {**BODY, "x": 49}, {})
        assert len(worker.got) == 50
        await client.render(CHAT, {**BODY, "x": 0}, {})
        assert len(worker.got) == 51

    run(test, Worker({"token_ids": list(range(200))}), cache_bytes=100_000)


def test_sglang_is_asked_by_tokenize() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        got = await client.render(CHAT, {**BODY, "temperature": 1}, {})
        assert got is not None and got.token_ids == [5, 6]
        await client.render("/generate", {"text": "a", "sampling_params": {}}, {})
        assert await client.render("/v1/messages", BODY, {}) is None
        assert worker.got[0][:2] == ("/tokenize", {"model": "m", "messages": BODY["messages"]})
        assert worker.got[1][:2] == ("/tokenize", {"prompt": "a"})

    run(test, Worker({"tokens": [5, 6], "count": 2, "max_model_len": 9}), kind="sglang")


class FakeLocal:
    """Counts characters; what it is told to differ in is one token longer."""

    message_start_token_ids: frozenset[int] = frozenset()
    status: dict[str, Any] = {}

    async def text_tokens(self, text: str, body: Any) -> list[int]:
        return [len(text)]

    async def chat_tokens(self, body: Any) -> Any:
        from mimo_plugin.router.prompt_local import LocalTokens

        return LocalTokens(tokens_of(body))


def tokens_of(body: Any) -> list[int]:
    return [len(json.dumps(body["messages"])), len(body.get("tools") or ())]


def answer_for(kind: str | None) -> Callable[[Any], Any]:
    def answer(got: tuple[str, Any, str | None]) -> Any:
        path, body, _ = got
        if path == "/v1/completions/render":
            return [{"token_ids": [len(body["prompt"])]}]
        extra = [7] if kind == ("tools" if body.get("tools") else "chat") else []
        return {"token_ids": tokens_of(body) + extra}

    return answer


@pytest.mark.parametrize("kind", [None, "tools", "chat"])
def test_check(kind: str | None, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        reader = PromptReader(FakeLocal(), client, base_models=["m"])  # type: ignore[arg-type]
        with caplog.at_level(logging.ERROR):
            state = await reader.check(worker.url)
        assert len(worker.got) == len(SAMPLES)
        assert all(body["model"] == "m" for _, body, _ in worker.got)
        assert state == reader.status["check"] == ("different" if kind else "same")
        for one in ("text", "chat", "tools"):
            assert reader.checks.differs(one) == (one == kind)
        if kind is None:
            assert not caplog.records
            return
        assert "other tokens" in caplog.text and kind in reader.status["difference"]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        if kind == "tools":
            body["tools"] = [{"type": "function", "function": {"name": "f"}}]
        prompt = await reader.read(CHAT, body, {})
        assert list(prompt.token_ids)[-1] == 7, "now the worker is asked"
        reader.checks.forget(worker.url)
        assert not reader.checks.differs(kind)

    run(test, Worker(answer_for(kind)))


def test_a_worker_that_can_not_say_leaves_it_unchecked() -> None:
    async def test(client: RenderClient, worker: Worker) -> None:
        reader = PromptReader(FakeLocal(), client)  # type: ignore[arg-type]
        assert await reader.check(worker.url) == "unchecked"
        assert reader.status["check"] == "unchecked"

    run(test, Worker({}, status=404))


def test_samples_are_what_can_be_made_here() -> None:
    assert {sample.kind for sample in SAMPLES} == {"text", "chat", "tools"}
    assert all(isinstance(sample, Sample) for sample in SAMPLES)
