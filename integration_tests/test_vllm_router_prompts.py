# SPDX-License-Identifier: Apache-2.0
"""Prompts of the router against a real ``vllm serve``: the tokens that the engine got."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from integration_tests.conftest import ModelFactory, ServerFactory
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.prompt_local import LocalTokenizer
from mimo_plugin.router.prompt_render import RenderClient
from mimo_plugin.router.prompts import PromptReader
from tools import tiny_omni
from tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
CHATS = 64
SNIPPETS = (
    "bada gedo", "  ", "\n\n", "Größe", "你好", "👋🏽", "<|im_start|>", "<think>", "</think>",
    "x = {'a': 1}", "12 345", "<tool_call>", "\t", "é", "a" * 50,
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
T = TypeVar("T")


def chat(seed: int) -> dict[str, Any]:
    """One chat; all shapes come up among the first sixty."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choice(SNIPPETS) for _ in range(draw.randrange(12)))

    def content() -> Any:
        if draw.random() < 0.7:
            return text()
        return [{"type": "text", "text": text()} for _ in range(draw.randrange(1, 3))]

    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        role = draw.choice(("system", "system", "developer"))
        messages.append({"role": role, "content": content()})
    for turn in range(draw.randrange(1, 6)):
        messages.append({"role": "user", "content": content()})
        if draw.random() < 0.2:
            call = {"name": "look_up", "arguments": json.dumps({"word": text(), "n": [turn, None]})}
            messages.append(
                {
                    "role": "assistant",
                    "content": draw.choice((None, text())),
                    "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": content()})
        answer: dict[str, Any] = {"role": "assistant", "content": text() or "so"}
        if draw.random() < 0.3:
            answer[draw.choice(("reasoning", "reasoning_content"))] = text()
        messages.append(answer)
    body: dict[str, Any] = {"messages": messages}
    if draw.random() < 0.2:
        body.update(add_generation_prompt=False, continue_final_message=True)
    else:
        messages.append({"role": "user", "content": content()})
    if draw.random() < 0.3:
        body["tools"] = [TOOL]
        body.update(draw.choice(({}, {"tool_choice": "none"}, {"tool_choice": "auto"})))
    if draw.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5}
    if draw.random() < 0.2:
        body["reasoning_effort"] = draw.choice(("none", "low", "high"))
    if draw.random() < 0.1:
        body["truncate_prompt_tokens"] = 20
    if draw.random() < 0.1:
        body["add_special_tokens"] = True
    return body


@pytest.fixture(scope="module")
def model(tiny_model_factory: ModelFactory) -> Path:
    return tiny_model_factory(layers=2, moe_layers=0, mtp_layers=0)


@pytest.fixture(scope="module")
def server(model: Path, serve_module: ServerFactory) -> VllmServer:
    arguments = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    served: VllmServer = serve_module(model, "--served-model-name=m", *arguments)
    return served


@pytest.fixture(scope="module")
def omni(
    tmp_path_factory: pytest.TempPathFactory, serve_module: ServerFactory
) -> Iterator[tuple[Path, VllmServer]]:
    model = tiny_omni.make(tmp_path_factory.mktemp("tiny-omni"), tiny_omni.TinyOmni())
    arguments = ("--served-model-name=m", "--trust-remote-code", "--enable-scale-out")
    yield model, serve_module(model, *arguments)


def with_reader(
    server: VllmServer,
    local: LocalTokenizer | None,
    do: Callable[[PromptReader], Awaitable[T]],
    **options: Any,
) -> T:
    """Run ``do`` with a reader that asks ``server``."""

    async def run() -> T:
        render = RenderClient([server.base_url], timeout_s=30.0)
        mode = "local" if local is not None else "render"
        try:
            return await do(PromptReader(local, render, mode=mode, base_models=["m"], **options))
        finally:
            await render.close()

    return asyncio.run(run())


def test_tokens_are_the_engine_s(model: Path, server: VllmServer) -> None:
    """Chats, local and rendered: the prompt's tokens as the engine's answer shows them."""
    bodies = [{"model": "m", **chat(seed)} for seed in range(CHATS)]
    settings = {"max_tokens": 1, "return_token_ids": True, "temperature": 0}
    engine = [server.post(CHAT, {**settings, **b})["prompt_token_ids"] for b in bodies]
    local = LocalTokenizer.load(str(model))
    assert local.whole_because is None

    async def check(reader: PromptReader) -> None:
        assert await reader.check(server.base_url) == "same"
        for body, tokens in zip(bodies, engine, strict=True):
            prompt = await reader.read(CHAT, body, {})
            assert list(prompt.token_ids) == tokens, body
        assert reader.status["prompts"]["local"] == CHATS

    async def tokenized(reader: PromptReader) -> None:
        """This server has no render endpoints."""
        for body, tokens in zip(bodies[:24], engine, strict=False):
            prompt = await reader.read(CHAT, body, {})
            known = "truncate_prompt_tokens" not in body
            assert list(prompt.token_ids) == (tokens if known else []), body

    with_reader(server, local, check)
    with_reader(server, None, tokenized)


def test_rendered_tokens_are_the_engine_s(omni: tuple[Path, VllmServer]) -> None:
    """Without a tokenizer here, and with one, on a server that renders."""
    model, server = omni
    bodies = [{"model": "m", **chat(seed)} for seed in range(24)]
    bodies = [b for b in bodies if "tools" not in b or b.get("tool_choice") == "none"]
    settings = {"max_tokens": 1, "return_token_ids": True, "temperature": 0}
    engine = [server.post(CHAT, {**settings, **b})["prompt_token_ids"] for b in bodies]

    async def rendered(reader: PromptReader) -> None:
        for body, tokens in zip(bodies, engine, strict=True):
            assert list((await reader.read(CHAT, body, {})).token_ids) == tokens, body

    with_reader(server, None, rendered)
    with_reader(server, LocalTokenizer.load(str(model)), rendered)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "bada gedo <|im_start|> Größe"}),
    ("/v1/completions", {"prompt": ["bada", "gedo"]}),
    ("/v1/responses", {"input": "bada", "instructions": "gedo"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "bada"}]}),
    ("/v1/messages", {"system": "be kind", "messages": [{"role": "user", "content": "bada"}]}),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "bada"}]}],
        },
    ),
]


def test_other_endpoints_agree_with_render(omni: tuple[Path, VllmServer]) -> None:
    model, server = omni
    local = LocalTokenizer.load(str(model))

    async def tokens(reader: PromptReader) -> list[list[int]]:
        found = []
        for path, body in OTHERS:
            prompt = await reader.read(path, {"model": "m", "max_tokens": 8, **body}, {})
            assert prompt.token_ids
            found.append(list(prompt.token_ids))
        return found

    assert with_reader(server, local, tokens) == with_reader(server, None, tokens)


def test_tool_use_of_the_messages_api_is_rendered(omni: tuple[Path, VllmServer]) -> None:
    model, server = omni
    tool = {"name": "look_up", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "t", "name": "look_up", "input": {"word": "bada"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "gedo"}
    body = {
        "model": "m",
        "max_tokens": 8,
        "tools": [tool],
        "tool_choice": {"type": "none"},
        "messages": [
            {"role": "user", "content": "bada?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }

    async def read(reader: PromptReader) -> Prompt:
        return await reader.read("/v1/messages", body, {})

    prompt = with_reader(server, LocalTokenizer.load(str(model)), read)
    counted = server.post("/v1/messages", body)["usage"]["input_tokens"]
    assert len(prompt.token_ids) == counted


def test_another_template_is_found_out(model: Path, server: VllmServer) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    local = LocalTokenizer.load(str(model), chat_template=template)

    async def check(reader: PromptReader) -> list[int]:
        assert await reader.check(server.base_url) == "different"
        assert not reader.checks.differs("text")
        body = {"model": "m", "messages": [{"role": "user", "content": "bada"}]}
        return list((await reader.read(CHAT, body, {})).token_ids)

    body = {"model": "m", "messages": [{"role": "user", "content": "bada"}]}
    settings = {"max_tokens": 1, "return_token_ids": True}
    engine = server.post(CHAT, {**settings, **body})["prompt_token_ids"]
    assert with_reader(server, local, check) == engine


def picture(shade: int) -> dict[str, Any]:
    """A small PNG as a content part."""
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (96, 64), (shade, 90, 10)).save(held, "PNG")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_media_have_the_engine_s_places(omni: tuple[Path, VllmServer]) -> None:
    model, server = omni
    messages = [
        {"role": "user", "content": "bada"},
        {"role": "assistant", "content": "gedo"},
        {
            "role": "user",
            "content": [picture(10), {"type": "text", "text": "and"}, picture(200)],
        },
    ]
    body = {"model": "m", "messages": messages}
    settings = {"max_tokens": 1, "return_token_ids": True}
    engine = server.post(CHAT, {**settings, **body})["prompt_token_ids"]
    local = LocalTokenizer.load(str(model))

    async def read(reader: PromptReader) -> Prompt:
        return await reader.read(CHAT, body, {})

    whole = with_reader(server, local, read)
    assert whole.token_ids == engine
    assert len(whole.media) == len(whole.media_keys) == 2
    assert len({span.identifier for span in whole.media}) == 2
    for span in whole.media:
        assert len({engine[span.start_tokens + i] for i in range(span.length_tokens)}) <= 3
    begun = with_reader(server, local, read, media="prefix")
    assert 0 < len(begun.token_ids) < whole.media[0].start_tokens
    assert list(begun.token_ids) == engine[: len(begun.token_ids)]
