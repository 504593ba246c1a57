# SPDX-License-Identifier: Apache-2.0
"""Message starts are read off the chat template, whatever its form."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_plugin.chat_template import message_starts_from

Messages = list[dict[str, str]]


class FakeTokenizer:
    """Special tokens are one id each, in their order from 1; all other text a byte each."""

    def __init__(
        self,
        specials: tuple[str, ...],
        render: Callable[[Messages], str] | None,
        *,
        listed: bool = True,
        merges_space: bool = False,
    ) -> None:
        self.ids = {token: at + 1 for at, token in enumerate(specials)}
        self.render = render
        self.merges_space = merges_space
        self.added_tokens_decoder = {
            at: SimpleNamespace(content=token, special=True) for token, at in self.ids.items()
        }
        self.all_special_ids = list(self.ids.values()) if listed else []
        pattern = "|".join(re.escape(token) for token in specials)
        self._split = re.compile(f"({pattern})") if pattern else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        parts = self._split.split(text) if self._split else [text]
        out: list[int] = []
        for part in parts:
            out += [self.ids[part]] if part in self.ids else self._bytes(part)
        return out

    def _bytes(self, text: str) -> list[int]:
        ids = [1000 + byte for byte in text.encode()]
        if not self.merges_space:
            return ids
        # As most vocabularies: a space belongs to the letter after it.
        out: list[int] = []
        for i in ids:
            if out and out[-1] == 1000 + ord(" ") and i != 1000 + ord(" "):
                out[-1] = 2000 + i
            else:
                out.append(i)
        return out

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        assert options == {"tokenize": True, "return_dict": False}
        if self.render is None:
            raise ValueError("this tokenizer has no chat template")
        return self.encode(self.render(messages), add_special_tokens=False)

    def starts(self) -> set[str]:
        names = {i: token for token, i in self.ids.items()}
        return {names[i] for i in message_starts_from(self)}


def chatml(messages: Messages) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def chatml_with_tail(messages: Messages) -> str:
    return chatml(messages) + "<|im_start|>assistant\n"


def chatml_with_thinking(messages: Messages) -> str:
    """An empty thought before each answer, as reasoning models' templates write it."""
    out = ""
    for m in messages:
        thought = "<think></think>" if m["role"] == "assistant" else ""
        out += f"<|im_start|>{m['role']}\n{thought}{m['content']}<|im_end|>\n"
    return out


def llama3(messages: Messages) -> str:
    return "<|begin_of_text|>" + "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>"
        for m in messages
    )


def gemma(messages: Messages) -> str:
    if messages[0]["role"] == "system":
        first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        messages = [first, *messages[2:]]
    role = {"assistant": "model"}
    return "<bos>" + "".join(
        f"<start_of_turn>{role.get(m['role'], m['role'])}\n{m['content']}<end_of_turn>\n"
        for m in messages
    )


def mistral(messages: Messages) -> str:
    out = "<s>"
    for m in messages:
        if m["role"] == "system":
            out += f"[SYSTEM_PROMPT]{m['content']}[/SYSTEM_PROMPT]"
        elif m["role"] == "user":
            out += f"[INST]{m['content']}[/INST]"
        else:
            out += f"{m['content']}</s>"
    return out


def gpt_oss(messages: Messages) -> str:
    return "".join(
        f"<|start|>{m['role']}"
        + ("<|channel|>final" if m["role"] == "assistant" else "")
        + f"<|message|>{m['content']}<|end|>"
        for m in messages
    )


def deepseek(messages: Messages) -> str:
    out = "<|begin|>"
    for m in messages:
        if m["role"] == "system":
            out += m["content"]
        elif m["role"] == "user":
            out += f"<|User|>{m['content']}"
        else:
            out += f"<|Assistant|>{m['content']}<|end|>"
    return out


def plain(messages: Messages) -> str:
    return "".join(f"{m['role'].title()}: {m['content']}\n\n" for m in messages)


def no_system(messages: Messages) -> str:
    if messages[0]["role"] == "system":
        raise ValueError("System role not supported")
    return chatml(messages)


def alternating(messages: Messages) -> str:
    """Gemma's and Mistral's older templates: only user and assistant, in turn."""
    for at, m in enumerate(messages):
        if m["role"] != ("user", "assistant")[at % 2]:
            raise ValueError("Conversation roles must alternate user/assistant/user/assistant/...")
    return gemma(messages)


CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
GPT_OSS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
DEEPSEEK = ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>")


@pytest.mark.parametrize(
    ("specials", "render", "expected"),
    [
        (CHATML, chatml, {"<|im_start|>"}),
        (CHATML, chatml_with_tail, {"<|im_start|>"}),
        pytest.param(GEMMA, gemma, {"<start_of_turn>"}, id="gemma"),
        pytest.param(
            LLAMA3,
            llama3,
            {"<|start_header_id|>"},
            id="llama3",
        ),
        pytest.param(
            GPT_OSS,
            gpt_oss,
            {"<|start|>"},
            id="gpt-oss",
        ),
        pytest.param(
            (*CHATML, "<think>", "</think>"),
            chatml_with_thinking,
            {"<|im_start|>"},
            id="thinking",
        ),
    ],
)
def test_the_token_that_opens_every_message(
    specials: tuple[str, ...], render: Callable[[Messages], str], expected: set[str]
) -> None:
    assert FakeTokenizer(specials, render).starts() == expected


def test_mistral_opens_a_user_s_message_with_inst() -> None:
    found = FakeTokenizer(MISTRAL, mistral).starts()
    assert "[INST]" in found
    assert not found & {"</s>", "[/SYSTEM_PROMPT]"}


def test_roles_that_are_tokens_of_their_own() -> None:
    assert FakeTokenizer(DEEPSEEK, deepseek).starts() >= {"<|User|>", "<|Assistant|>"}


def test_special_tokens_known_only_as_added_tokens() -> None:
    assert FakeTokenizer(CHATML, chatml, listed=False).starts() == {"<|im_start|>"}


@pytest.mark.parametrize("render", [no_system, alternating])
def test_templates_that_refuse_a_system_message(render: Callable[[Messages], str]) -> None:
    """Their chats still have message starts."""
    specials = CHATML if render is no_system else GEMMA
    assert FakeTokenizer(specials, render).starts() == {specials[-2]}


def test_text_that_merges_with_the_space_before_it() -> None:
    def spaced(messages: Messages) -> str:
        return "".join(f"<|im_start|>{m['role']} {m['content']}<|im_end|>" for m in messages)

    assert FakeTokenizer(CHATML, spaced, merges_space=True).starts() == {"<|im_start|>"}


def test_no_special_tokens_means_no_boundaries() -> None:
    assert FakeTokenizer((), plain).starts() == set()
    assert FakeTokenizer(CHATML, plain).starts() == set()


def test_no_template_means_no_boundaries() -> None:
    assert FakeTokenizer(CHATML, None).starts() == set()
