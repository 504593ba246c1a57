# SPDX-License-Identifier: Apache-2.0
"""From request to prompt: endpoints, tokens that requests bring, media, settings, odd bodies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.errors import ConfigError
from mimo_plugin.router.prompt import MediaSpan, Prompt
from mimo_plugin.router.prompt_found import MEDIUM_TOKENS
from mimo_plugin.router.prompt_local import THREAD_CHARS, LocalTokenizer
from mimo_plugin.router.prompt_render import Rendered
from mimo_plugin.router.prompts import PromptError, PromptReader
from tests.router import prompts_tokenizers as made
from tools.tiny_mimo import CHAT_TEMPLATE

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_model(tmp_path_factory.mktemp("model"), made.qwen(), CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def local(model: Path) -> LocalTokenizer:
    return LocalTokenizer.load(str(model))


class FakeRender:
    """Answers every request with the same tokens, or with nothing."""

    def __init__(self, answer: Rendered | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []
        self.status: dict[str, Any] = {}

    async def render(self, path: str, body: Any, headers: Any, worker: Any = None) -> Any:
        self.asked.append((path, body))
        return self.answer


def read(reader: PromptReader, path: str, body: Any, headers: Any = None) -> Prompt:
    return asyncio.run(reader.read(path, body, headers or {}))


def say(*texts: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def encoded(text: str) -> list[int]:
    return list(made.qwen().encode(text, add_special_tokens=False).ids)


def test_a_chat(local: LocalTokenizer) -> None:
    reader = PromptReader(local, base_models=["m"])
    body = {"model": "m", "messages": say("Hello", "Hi", "Bye"), "cache_salt": "s1"}
    prompt = read(reader, CHAT, body, {"X-Session-ID": "abc"})
    text = (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids == encoded(text)
    assert prompt.prompt_tokens == len(prompt.token_ids)
    assert (prompt.salt, prompt.lora, prompt.session) == ("s1", None, "abc")
    start = made.qwen().token_to_id("<|im_start|>")
    assert prompt.kept_tokens == tuple(
        i for i, token in enumerate(prompt.token_ids) if token == start
    )
    assert len(prompt.kept_tokens) == 4
    assert reader.status["prompts"]["local"] == 1


def test_another_name_is_an_adapter(local: LocalTokenizer) -> None:
    body = {"model": "poet", "messages": say("Hello")}
    assert read(PromptReader(local, base_models=["m"]), CHAT, body).lora == "poet"
    assert read(PromptReader(local, base_models=["m", "poet"]), CHAT, body).lora is None
    assert read(PromptReader(local), CHAT, body).lora is None
    sglang = {"text": "x", "lora_path": "prose"}
    assert read(PromptReader(local, base_models=["m"]), "/generate", sglang).lora == "prose"


@pytest.mark.parametrize(
    ("path", "body", "tokens", "total"),
    [
        ("/v1/completions", {"prompt": "The tide"}, encoded("The tide"), None),
        ("/v1/completions?x=1", {"prompt": [3, 4, 5]}, [3, 4, 5], 3),
        ("/v1/completions", {"prompt": [[3, 4], [5, 6, 7]]}, [3, 4], 5),
        ("/v1/completions", {"prompt": ["The tide", "a" * 40]}, encoded("The tide"), "+10"),
        ("/v1/completions", {"prompt": [3], "prompt_embeds": "x"}, [], 0),
        ("/v1/completions", {"prompt": "fn(", "suffix": ")"}, [], 1),
        ("/v1/completions", {}, [], 0),
        ("/v1/completions", {"prompt": []}, [], 0),
        ("/v1/embeddings", {"input": "The tide"}, encoded("The tide"), None),
        ("/v1/embeddings", {"input": ["The tide"]}, encoded("The tide"), None),
        ("/tokenize", {"prompt": "The tide"}, encoded("The tide"), None),
        ("/inference/v1/generate", {"token_ids": [9, 8]}, [9, 8], 2),
        ("/inference/v1/generate", {"token_ids": [9], "content_parts": [IMAGE]}, [], 1 + 1024),
        ("/generate", {"input_ids": [1, 2]}, [1, 2], 2),
        ("/generate", {"input_ids": [[1, 2], [3]]}, [1, 2], 3),
        ("/generate", {"text": "The tide"}, encoded("The tide"), None),
        ("/generate", {"input_ids": [1, 2], "image_data": "https://x/a.png"}, [], 2),
        ("/generate", {"input_embeds": [[0.5]]}, [], 0),
        ("/v1/rerank", {"query": "x"}, [], 0),
        (
            CHAT,
            {"messages": say("x"), "kv_transfer_params": {"prompt_token_ids": [7, 8]}},
            [7, 8],
            2,
        ),
    ],
)
def test_endpoints(local: LocalTokenizer, path: str, body: Any, tokens: Any, total: Any) -> None:
    prompt = read(PromptReader(local), path, body)
    assert list(prompt.token_ids) == tokens
    extra = int(total) if isinstance(total, str) else 0
    want = total if isinstance(total, int) else len(tokens) + extra
    assert prompt.prompt_tokens == want


def test_tokenize_of_a_chat_is_the_chat(local: LocalTokenizer) -> None:
    body = {"messages": say("Hello")}
    reader = PromptReader(local)
    assert read(reader, "/tokenize", body) == read(reader, CHAT, body)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, [], 400),
        (CHAT, {"messages": {}}, 400),
        (CHAT, {}, 400),
        ("/v1/responses", {"input": 5}, 400),
        ("/v1/messages", {"messages": "x"}, 400),
        ("/v1/completions", {"prompt": 5}, 400),
        ("/v1/completions", {"prompt": [1, "a"]}, 400),
        ("/v1/completions", {"prompt": [1, -1]}, 400),
        ("/v1/completions", {"prompt": [True]}, 400),
        ("/v1/completions", {"prompt": [1] * 101}, 413),
        ("/inference/v1/generate", {}, 400),
        ("/generate", {"input_ids": 7}, 400),
    ],
)
def test_what_every_worker_refuses(
    local: LocalTokenizer, path: str, body: Any, status: int
) -> None:
    with pytest.raises(PromptError) as caught:
        read(PromptReader(local, max_prompt_tokens=100), path, body)
    assert caught.value.status == status
    assert "\n" not in caught.value.message


def test_media_are_rendered_by_a_worker(local: LocalTokenizer) -> None:
    span = MediaSpan(1, 2, "hash")
    render = FakeRender(Rendered([1, 60, 60, 2], (span,), 4))
    body = {"messages": say("Look", "At what?", [{"type": "text", "text": "this"}, IMAGE])}
    reader = PromptReader(local, render)  # type: ignore[arg-type]
    prompt = read(reader, CHAT, body)
    assert (prompt.token_ids, prompt.media) == ([1, 60, 60, 2], (span,))
    assert len(prompt.media_keys) == 1
    assert reader.status["prompts"]["render"] == 1


@pytest.mark.parametrize("media", ["render", "prefix"])
def test_without_a_worker_media_end_what_is_known(local: LocalTokenizer, media: str) -> None:
    render = FakeRender(None)
    body = {"messages": say("Look", "At what?", [{"type": "text", "text": "this"}, IMAGE])}
    reader = PromptReader(local, render, media=media)  # type: ignore[arg-type]
    prompt = read(reader, CHAT, body)
    assert len(render.asked) == (1 if media == "render" else 0)
    known = "<|im_start|>user\nLook<|im_end|>\n<|im_start|>assistant\nAt what?<|im_end|>\n"
    assert prompt.token_ids == encoded(known)
    assert prompt.prompt_tokens > len(prompt.token_ids) + MEDIUM_TOKENS
    assert reader.status["prompts"]["beginning"] == 1


def test_a_shape_that_is_not_known_here_is_rendered(local: LocalTokenizer) -> None:
    render = FakeRender(Rendered([4, 5], (), 2))
    reader = PromptReader(local, render)  # type: ignore[arg-type]
    body = {"messages": say("a"), "chat_template": "{{ messages }}"}
    assert read(reader, CHAT, body).token_ids == [4, 5]
    assert "template" in reader.status["last_not_local"]
    body = {"model": "m", "messages": say("a"), "tools": [{"name": "x"}]}
    assert read(reader, "/v1/messages", body).token_ids == [4, 5]
    render.answer = None
    prompt = read(reader, CHAT, {"messages": [{"role": "critic", "content": "a" * 40}]})
    assert (list(prompt.token_ids), prompt.prompt_tokens) == ([], 10)


def test_disabled_thinking_is_not_rendered_unless_the_worker_means_the_same(
    local: LocalTokenizer,
) -> None:
    """The template ignores efforts, so the Messages API takes "low" where render takes "none"."""
    render = FakeRender(Rendered([4, 5], (), 2))
    reader = PromptReader(local, render)  # type: ignore[arg-type]
    body = {"messages": say("a"), "tools": [{"name": "x"}], "thinking": {"type": "disabled"}}
    assert local.chat.disabled_thinking_effort == "low"
    assert list(read(reader, "/v1/messages", body).token_ids) == []
    assert not render.asked


def test_modes(local: LocalTokenizer) -> None:
    render = FakeRender(Rendered([4, 5], (), 2))
    body = {"messages": say("Hello")}
    none = PromptReader(local, render, mode="none")  # type: ignore[arg-type]
    assert list(read(none, CHAT, body).token_ids) == []
    assert read(none, "/v1/completions", {"prompt": [1, 2]}).token_ids == [1, 2]
    assert not render.asked
    asking = PromptReader(None, render, mode="render")  # type: ignore[arg-type]
    assert read(asking, CHAT, body).token_ids == [4, 5]
    for arguments in (
        {"mode": "local"},
        {"mode": "render"},
        {"mode": "other"},
        {"local": local, "media": "other"},
    ):
        with pytest.raises(ConfigError):
            PromptReader(**arguments)  # type: ignore[arg-type]


def test_too_long_a_text_is_not_tokenised(local: LocalTokenizer) -> None:
    reader = PromptReader(local, max_text_chars=1000)
    for path, body in (
        (CHAT, {"messages": say("a" * 1001)}),
        ("/v1/completions", {"prompt": "a" * 1001}),
    ):
        prompt = read(reader, path, body)
        assert list(prompt.token_ids) == []
        assert 250 <= prompt.prompt_tokens <= 252


def test_a_long_new_text_leaves_the_event_loop_free(local: LocalTokenizer) -> None:
    text = "The tide came in and the boats went out. " * 20_000
    assert len(text) > THREAD_CHARS

    async def run() -> tuple[int, Prompt]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        prompt = await PromptReader(local).read(CHAT, {"messages": say(text)}, {})
        ticking.cancel()
        return ticks, prompt

    ticks, prompt = asyncio.run(run())
    assert ticks > 5
    want = encoded(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.token_ids == want


def test_tokenizers_that_are_not_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer=render"):
        LocalTokenizer.load(str(tmp_path / "nothing"))
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer=render"):
        LocalTokenizer.load(str(tmp_path))


def test_a_class_with_its_own_encoding_is_used_as_a_whole(model: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.upper(), **options)

    tokenizer = Own.from_pretrained(str(model))
    local = LocalTokenizer(tokenizer)
    assert "its own __call__" in (local.whole_because or "")
    prompt = read(PromptReader(local), "/v1/completions", {"prompt": "tide"})
    assert prompt.token_ids == encoded("TIDE")


def test_a_template_of_the_processor_counts_without_tools(model: Path, tmp_path: Path) -> None:
    made.write_model(tmp_path, made.qwen(), CHAT_TEMPLATE)
    own = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": own}))
    reader = PromptReader(LocalTokenizer.load(str(tmp_path)))
    assert read(reader, CHAT, {"messages": say("a")}).token_ids == encoded("[a]")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": say("a"), "tools": tools}
    assert read(reader, CHAT, body).token_ids == encoded(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["user", "text", "image_url", "\ud800", "data:,x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "type", "text", "image_url", "url", "name", "function", "uuid",
             "tool_calls", "arguments", "mm_hashes", "mm_placeholders", "image", "offset", "length",
             "id", "session_id", "user_id", "prompt_token_ids", "effort", "input_audio", "data"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
KEYS = st.sampled_from(
    ["messages", "prompt", "input", "input_ids", "text", "token_ids", "features", "content_parts",
     "tools", "model", "cache_salt", "session_id", "session_params", "metadata", "vllm_xargs",
     "chat_template_kwargs", "reasoning_effort", "documents", "add_special_tokens", "suffix",
     "truncate_prompt_tokens", "kv_transfer_params", "conversation", "system", "instructions",
     "thinking", "output_config", "reasoning", "image_data", "lora_path", "add_generation_prompt",
     "continue_final_message", "prompt_cache_key", "echo", "previous_response_id", "tool_choice"]
)  # fmt: skip
PATHS = st.sampled_from(
    [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize",
     "/inference/v1/generate", "/generate", "/pooling", "/other", "", "//"]
)  # fmt: skip


def test_no_body_breaks_it(local: LocalTokenizer) -> None:
    render = FakeRender(None)
    reader = PromptReader(local, render, base_models=["m"])  # type: ignore[arg-type]

    @settings(max_examples=600, deadline=None)
    @given(PATHS, st.one_of(JSON, st.dictionaries(KEYS, JSON, max_size=6)), st.booleans())
    def check(path: str, body: Any, named: bool) -> None:
        headers = {"x-session-id": "s"} if named else {}
        try:
            prompt = read(reader, path, body, headers)
        except PromptError as error:
            assert 400 <= error.status < 500
            return
        assert prompt.prompt_tokens >= len(prompt.token_ids)
        assert all(type(i) is int and i >= 0 for i in prompt.token_ids)
        assert all(s.start_tokens + s.length_tokens <= len(prompt.token_ids) for s in prompt.media)

    check()
    assert reader.status["prompts"]["errors"] == 0, "a body that was not foreseen"


def test_deep_nesting_does_no_harm(local: LocalTokenizer) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for body in (
        {"messages": say(deep)},
        {"messages": say("a"), "chat_template_kwargs": {"mood": deep}},
        {
            "messages": say("a"),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}],
        },
    ):
        read(PromptReader(local), CHAT, body)
