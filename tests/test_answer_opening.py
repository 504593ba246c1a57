# SPDX-License-Identifier: Apache-2.0
"""The tokens that open an answer are read off the chat template, whatever its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mimo_plugin.core.chat_key import answer_anchors
from mimo_plugin.engines.chat_template import answer_opening_from
from tests import test_message_starts as templates
from tests.test_message_starts import FakeTokenizer, Messages


class Tokenizer(FakeTokenizer):
    """Opens an answer with ``ask``."""

    def __init__(
        self, specials: tuple[str, ...], render: Callable[[Messages], str] | None, ask: str
    ) -> None:
        super().__init__(specials, render)
        self.ask = ask

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        ask = options.pop("add_generation_prompt", False)
        ids = super().apply_chat_template(messages, **options)
        return ids + (self.encode(self.ask, add_special_tokens=False) if ask else [])

    def opening(self) -> str:
        names = {i: token for token, i in self.ids.items()}
        return "".join(names.get(i) or chr(i - 1000) for i in answer_opening_from(self))


CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
CASES = {
    "chatml": (CHATML, templates.chatml, "<|im_start|>assistant\n", "<|im_start|>a"),
    "thinking": (
        CHATML, templates.chatml_with_thinking, "<|im_start|>assistant\n<think>", "<|im_start|>a",
    ),
    "a tail after every chat": (CHATML, templates.chatml_with_tail, "", "<|im_start|>a"),
    "llama 3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        templates.llama3,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>a",
    ),
    "gemma": (
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        templates.gemma,
        "<start_of_turn>model\n",
        "<start_of_turn>m",
    ),
    "gpt-oss": (
        ("<|start|>", "<|message|>", "<|end|>", "<|channel|>"),
        templates.gpt_oss,
        "<|start|>assistant",
        "<|start|>a",
    ),
    "deepseek": (
        ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>", "<think>"),
        templates.deepseek,
        "<|Assistant|><think>",
        "<|Assistant|>",
    ),
    "mistral": (
        ("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "</s>"),
        templates.mistral,
        "",
        "[/INST]",
    ),
    "plain": ((), templates.plain, "Assistant: ", ""),
    "none": ((), None, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_opens_an_answer(case: str) -> None:
    specials, render, ask, opening = CASES[case]
    assert Tokenizer(specials, render, ask).opening() == opening


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][3]])
def test_it_stands_once_for_each_answer_and_at_the_same_places(case: str) -> None:
    specials, render, ask, _ = CASES[case]
    tokenizer = Tokenizer(specials, render, ask)
    opening = answer_opening_from(tokenizer)
    messages = [{"role": "system", "content": "Be kind."}]
    places: list[int] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn}"})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **OPTIONS)
        now = answer_anchors(prompt, opening)
        assert len(now) == turn + 1 and now[:turn] == places
        places = now
        messages.append({"role": "assistant", "content": f"answer {turn}"})


OPTIONS = {"tokenize": True, "return_dict": False}
