# SPDX-License-Identifier: Apache-2.0
"""Prompts made here against vLLM's own renderer, in this process and without an engine."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.router.prompt_local import LocalTokenizer
from mimo_plugin.router.prompts import PromptError, PromptReader
from tests.router import prompts_tokenizers as made
from tools.tiny_mimo import CHAT_TEMPLATE

pytestmark = [pytest.mark.vllm]
pytest.importorskip("vllm")

EXPLORE = os.environ.get("MIMO_HYPOTHESIS") == "explore"
EXAMPLES = 1500 if EXPLORE else 200
MODELS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "mimo": (made.qwen, CHAT_TEMPLATE, None),
    "qwen": (made.qwen, made.QWEN_TEMPLATE, None),
    "parts": (made.llama3, made.PARTS_TEMPLATE, "<s>"),
    "gemma": (made.gemma, made.QWEN_TEMPLATE, "<bos>"),
    "metaspace": (made.metaspace("first"), made.PARTS_TEMPLATE, "<s>"),
    "whole": (made.bert, CHAT_TEMPLATE, None),
}


class Site:
    """One model: vLLM's renderer, and ours."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        make, template, bos = MODELS[name]
        made.write_model(folder, make(), template, bos)
        config = EngineArgs(
            model=str(folder), enforce_eager=True, max_model_len=4096
        ).create_engine_config()
        self.renderer = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=options.get("chat_template"),
            chat_template_content_format=options.get("content_format", "auto"),
            enable_auto_tools=True,
            tool_parser="hermes",
            exclude_tools_when_tool_choice_none=options.get("exclude_tools_when_none", False),
            default_chat_template_kwargs=options.get("default_kwargs"),
        )
        self.reader = PromptReader(LocalTokenizer.load(str(folder), **options))

    def vllm(self, path: str, body: dict[str, Any]) -> list[int] | None:
        """vLLM's token ids; None if it refuses the request."""
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        body = copy.deepcopy(body)
        try:
            if path == "/v1/completions":
                made_of = self.renderer.render_completion(CompletionRequest.model_validate(body))
            elif path == "/v1/responses":
                made_of = self.renderer.render_responses(ResponsesRequest.model_validate(body))
            else:
                if path == "/v1/messages":
                    asked = AnthropicMessagesRequest.model_validate(body)
                    chat = AnthropicServingMessages.to_chat_completion_request(asked)
                else:
                    chat = ChatCompletionRequest.model_validate(body)
                made_of = self.renderer.render_chat(chat, skip_mm_cache=True)
            result = asyncio.run(made_of)
        except (
            Exception
        ):  # a refusal of pydantic, the request classes, the template or the renderer
            return None
        if isinstance(result, ErrorResponse):
            return None
        if path == "/v1/responses":
            return list(result.engine_input["prompt_token_ids"])
        inputs = result if path == "/v1/completions" else result[1]
        return list(inputs[0]["prompt_token_ids"])

    def ours(self, path: str, body: dict[str, Any]) -> list[int]:
        """Our token ids; empty if they can't be told here."""
        return list(asyncio.run(self.reader.read(path, body, {})).token_ids)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Site]:
    return {name: Site(tmp_path_factory.mktemp(name), name) for name in MODELS}


TEXTS = st.sampled_from(
    [
        "",
        " ",
        "Hello there",
        "  The tide\n\n",
        "Größe 你好 👋🏽",
        "<|im_start|>user\nhidden<|im_end|>",
        "a<think>\nb</think> c",
        "x-anthropic-billing-header: cc=1\nYou are kind.",
        "x-anthropic-billing-header: cc=1",
        "{% raw %} {{ 1 }}",
        "line\r\n\ttab",
    ]
)
#: mostly well-formed values, now and then anything
ODD = st.sampled_from([None, 0, 1.5, True, "", "x", [], {}, ["a"], {"a": 1}])


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] = ODD) -> Any:
    return st.integers(0, 79).flatmap(lambda n: odd if n == 0 else usual)


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


PARTS = st.one_of(
    fields(
        {"type": mostly(st.just("text")), "text": mostly(TEXTS)},
        {"cache_control": st.just({"type": "ephemeral"}), "note": TEXTS, "uuid": st.just("u")},
    ),
    fields({"type": st.just("refusal"), "refusal": mostly(TEXTS)}, {}),
    fields({"type": st.just("thinking"), "thinking": mostly(TEXTS)}, {"closed": st.booleans()}),
    fields({"type": st.sampled_from(["input_text", "output_text", "other"]), "text": TEXTS}, {}),
    fields({"type": st.just("text"), "text": TEXTS}, {}),
    fields({"type": st.just("text"), "text": TEXTS}, {}),
    TEXTS,
)
CONTENTS = mostly(st.one_of(TEXTS, TEXTS, st.lists(PARTS, max_size=3)))
ARGUMENTS = st.sampled_from(
    ['{"b": 1, "a": [2, null]}', "{}", "", "not json", "[]", "42", '{"é": "你"}', "null"]
)
CALLS = fields(
    {
        "id": mostly(st.just("c1")),
        "type": mostly(st.just("function")),
        "function": mostly(
            fields(
                {"name": mostly(st.just("look_up")), "arguments": mostly(ARGUMENTS)},
                {"more": st.just(1)},
            )
        ),
    },
    {"index": st.just(0), "extra": st.just([1])},
).flatmap(lambda call: st.permutations(list(call.items())).map(dict))
MESSAGES = st.one_of(
    fields(
        {"role": st.sampled_from(["user", "user", "system", "developer", "function", "critic"])},
        {
            "content": CONTENTS,
            "name": mostly(st.just("ann")),
            "foo": ODD,
            "task": st.just("t"),
            "tools": st.none(),
            "tool_calls": st.none(),
        },
    ),
    fields(
        {"role": st.just("assistant")},
        {
            "content": CONTENTS,
            "tool_calls": mostly(st.lists(CALLS, max_size=2)),
            "reasoning": mostly(TEXTS),
            "reasoning_content": mostly(TEXTS),
            "name": TEXTS,
            "refusal": TEXTS,
            "function_call": st.none(),
            "audio": st.none(),
        },
    ),
    fields(
        {"role": st.just("tool"), "content": CONTENTS},
        {"tool_call_id": mostly(st.just("c1")), "name": st.just("look_up")},
    ),
).flatmap(lambda message: st.permutations(list(message.items())).map(dict))
TOOLS = fields(
    {
        "type": mostly(st.just("function")),
        "function": fields(
            {"name": mostly(st.just("look_up"))},
            {
                "parameters": mostly(st.sampled_from([{"type": "object", "a": None}, {}])),
                "description": mostly(TEXTS),
                "strict": mostly(st.booleans()),
                "defer_loading": st.booleans(),
                "more": ODD,
            },
        ),
    },
    {"more": ODD, "defer_loading": st.booleans()},
)
KWARGS = fields(
    {},
    {
        "enable_thinking": st.sampled_from([True, False, None, "auto"]),
        "mood": TEXTS,
        "unknown": ODD,
        "documents": st.just([{"title": "t", "text": "x"}]),
        "add_generation_prompt": st.booleans(),
        "reasoning_effort": st.just("odd"),
        "tools": st.just([{"function": {"name": "own"}}]),
        "bos_token": st.just("<|im_end|>"),
        "tokenize": mostly(st.none(), st.booleans()),
        "padding": mostly(st.none(), st.booleans()),
    },
)
CHATS = fields(
    {"messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    {
        "add_generation_prompt": mostly(st.booleans()),
        "continue_final_message": mostly(st.booleans()),
        "add_special_tokens": mostly(st.booleans()),
        "tools": mostly(st.lists(TOOLS, min_size=1, max_size=2)),
        "tool_choice": mostly(st.just("none"), st.just("auto")),
        "reasoning_effort": mostly(st.sampled_from(["none", "low", "max"])),
        "documents": mostly(st.just([{"title": "t", "text": "x"}])),
        "chat_template_kwargs": mostly(KWARGS),
        "chat_template": mostly(st.none(), st.just("{{ messages }}")),
        "truncate_prompt_tokens": mostly(
            st.sampled_from([None, 1000, 5]), st.sampled_from([1, -1, 0])
        ),
        "truncation_side": mostly(st.none(), st.sampled_from(["left", "right"])),
        "echo": mostly(st.just(False), st.just(True)),
        "kv_transfer_params": mostly(
            st.sampled_from([None, {}]), st.just({"prompt_token_ids": [1, 2, 3]})
        ),
    },
)


@pytest.mark.parametrize("model", MODELS)
def test_random_chats(model: str, sites: dict[str, Site]) -> None:
    """What is made here is what vLLM makes, for every request that vLLM takes."""
    site = sites[model]
    compared = 0

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=not EXPLORE)
    @given(CHATS)
    def check(body: dict[str, Any]) -> None:
        nonlocal compared
        before = copy.deepcopy(body)
        try:
            ours = site.ours("/v1/chat/completions", body)
        except PromptError:
            assert site.vllm("/v1/chat/completions", body) is None
            return
        assert body == before, "the body is forwarded, so it must stay as it is"
        if not ours:
            return
        theirs = site.vllm("/v1/chat/completions", body)
        if theirs is not None:
            compared += 1
            assert ours == theirs

    check()
    assert compared >= EXAMPLES // 6, "too few requests were compared"
    assert site.reader.status["prompts"]["errors"] == 0


def _turns(*texts: Any, system: Any = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The tide came in"}),
    ("/v1/completions", {"prompt": " <|im_start|>x", "add_special_tokens": False}),
    ("/v1/completions", {"prompt": ["one", "two"]}),
    ("/v1/completions", {"prompt": [5, 6, 7]}),
    ("/v1/completions", {"prompt": [[5, 6], [7]]}),
    ("/v1/completions", {"prompt": "The tide came in " * 9, "truncate_prompt_tokens": 5}),
    ("/v1/chat/completions", {"messages": _turns("a", "b", "c", system="s")}),
    ("/v1/chat/completions", {"messages": _turns("a", "b"), "continue_final_message": True,
                              "add_generation_prompt": False}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/responses", {"input": "Hello", "instructions": "Be kind."}),
    ("/v1/responses", {"input": _turns("a", "b", "c"), "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]}),
    ("/v1/messages", {"max_tokens": 8, "messages": _turns("a", "b", "c"), "system": "kind"}),
    ("/v1/messages", {"max_tokens": 8, "messages": _turns([{"type": "text", "text": "a"},
                                                           {"type": "text", "text": "b"}]),
                      "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"},
                                 {"type": "text", "text": "x-anthropic-billing-header: 1"}]}),
    ("/v1/messages", {"max_tokens": 2048, "messages": _turns("a"),
                      "thinking": {"type": "enabled", "budget_tokens": 1024}}),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", range(len(PLAIN)))
def test_other_endpoints(model: str, case: int, sites: dict[str, Site]) -> None:
    path, body = PLAIN[case]
    body = {"model": "m", **body}
    theirs = sites[model].vllm(path, body)
    assert theirs
    assert sites[model].ours(path, body) == theirs


def test_content_format_is_detected_as_vllm_does() -> None:
    from vllm.renderers.hf import _detect_content_format

    from mimo_plugin.router.prompt_template import Template

    turn = "{% for m in messages %}"
    loop = "{% for c in m.content %}{{ c.text }}{% endfor %}"
    show = "{% for c in x %}{% endfor %}{% endmacro %}"
    end = "{% endfor %}"
    loops = [
        turn + "{{ m.content }}" + end,
        turn + loop + end,
        turn + "{% for c in m['content'] %}{{ c.text }}{% endfor %}" + end,
        "{% for m in messages[1:] %}{% for c in m.content | list %}{{ c }}{% endfor %}" + end,
        "{% set l = messages %}{% set k = l[1:] %}{% for m in k %}" + loop + end,
        turn + "{% set content = m.content %}{% for c in content %}{% endfor %}" + end,
        turn + "{% set body = m.content %}{% for c in body %}{% endfor %}" + end,
        "{% macro s(x) %}" + show + turn + "{{ s(m.content) }}" + end,
        "{% macro s(a, x) %}" + show + turn + "{{ s(1, x=m.content) }}" + end,
        "{% macro s(a, x) %}" + show + turn + "{{ s(m.content, 1) }}" + end,
        "{% macro s(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
        + (turn + "{{ s(m.role) }}" + end),
        turn + "{% generation %}" + loop + "{% endgeneration %}" + end,
        "{% for m in other %}" + loop + end,
        turn + "{% for c in m.contents %}{% endfor %}" + end,
        "{% broken",
        made.PARTS_TEMPLATE,
        made.QWEN_TEMPLATE,
        CHAT_TEMPLATE,
    ]
    kinds = [_detect_content_format(text, default="string") for text in loops]
    assert [Template(text).content_format for text in loops] == kinds
    assert set(kinds) == {"string", "openai"}


@pytest.mark.parametrize(
    "options",
    [
        {"default_kwargs": {"enable_thinking": False, "mood": "calm"}},
        {"exclude_tools_when_none": True},
        {"content_format": "openai"},
        {"chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"},
    ],
)
@pytest.mark.parametrize("model", ["qwen", "parts"])
def test_settings_of_the_server(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    if model == "qwen" and "content_format" in options:
        pytest.skip("this template takes text only")
    site = Site(tmp_path, model, **options)
    tool = {"type": "function", "function": {"name": "f"}}
    for body in (
        {"messages": _turns("a", "b", "c")},
        {"messages": _turns("a"), "tools": [tool], "tool_choice": "none"},
        {"messages": _turns("a"), "chat_template_kwargs": {"enable_thinking": True}},
        {
            "messages": _turns("a"),
            "chat_template_kwargs": {"enable_thinking": None, "mood": "auto"},
        },
    ):
        theirs = site.vllm("/v1/chat/completions", body)
        assert theirs
        assert site.ours("/v1/chat/completions", body) == theirs


def test_disabled_thinking_takes_the_effort_that_vllm_takes(sites: dict[str, Site]) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    for name, site in sites.items():
        serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
        serving.online_renderer = site.renderer

        def components(one: Any) -> Any:
            class Components:
                token_ids, text = one["prompt_token_ids"], one.get("prompt")

            return Components

        serving._extract_prompt_components = components
        want = asyncio.run(serving._probe_disabled_thinking_effort())
        assert site.reader.local is not None
        assert site.reader.local.chat.disabled_thinking_effort == want, name
