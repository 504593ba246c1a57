# SPDX-License-Identifier: Apache-2.0
"""Pieces that are encoded one by one and kept give the ids of the whole text, for all designs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mimo_plugin.router.prompt_segments import SegmentEncoder, anchors_of, why_whole
from tests.router.prompts_tokenizers import DESIGNS, qwen

FRAGMENTS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<s>",
    "<bos>",
    "[CLS]",
    "<mask>",
    "<sep>",
    "<both>",
    " <x>",
    "<a>",
    "<a><b>",
    "b><",
    "<|im_",
    "im_start",
    "|>",
    "user\n",
    "\n",
    "\n\n",
    "\n\n\n",
    " ",
    "  ",
    "\t",
    "\r\n",
    "▁",
    "The tide",
    "Tide",
    "'ll",
    "12",
    "Größe",
    "Gro\u0308ße",
    "你好",
    "👋🏽",
    "\u0301",
    "\u200d",
    "<unk>",
    ".",
)
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: make() for name, make in DESIGNS.items()}


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize("design", DESIGNS)
def test_pieces_are_exact(design: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[design]
    kept, small = SegmentEncoder(tokenizer), SegmentEncoder(tokenizer, cache_bytes=4096)

    @settings(max_examples=120, deadline=None)
    @given(TEXTS.filter(encodable), st.booleans())
    def check(text: str, add: bool) -> None:
        whole = tokenizer.encode(text, add_special_tokens=add).ids
        for _ in range(2):
            assert kept.encode(text, add) == whole
        assert small.encode(text, add) == whole
        assert small.counts.bytes <= 4096

    check()
    assert kept.counts.hits > kept.counts.misses


@pytest.mark.parametrize("design", DESIGNS)
def test_stable_beginning(design: str, tokenizers: dict[str, Tokenizer]) -> None:
    """What lies before the last cut keeps its ids, whatever follows."""
    tokenizer = tokenizers[design]
    encoder = SegmentEncoder(tokenizer)

    @settings(max_examples=40, deadline=None)
    @given(TEXTS.filter(encodable), st.sampled_from((" a photo", "\n\n", "!", "x<|im_end|>")))
    def check(text: str, more: str) -> None:
        text += "<|im_start|>user\n"
        length = encoder.stable_length(text, len(text))
        begun = encoder.encode(text[:length], False)
        whole = tokenizer.encode(text + more, add_special_tokens=False).ids
        assert whole[: len(begun)] == begun
        assert length >= len(text) - len("<|im_start|>user\n") or design == "overlapping"

    check()


def test_next_turn_encodes_only_what_is_new() -> None:
    encoder = SegmentEncoder(qwen())
    chat = "".join(f"<|im_start|>user\nquestion {i}<|im_end|>\n" for i in range(40))
    encoder.encode(chat, False)
    before = encoder.counts.misses
    more = chat + "<|im_start|>user\nanother<|im_end|>\n"
    assert encoder.new_chars(more) == len("user\nanother")
    encoder.encode(more, False)
    assert encoder.counts.misses == before + 1


def _with(**token: bool) -> Tokenizer:
    tokenizer = qwen()
    tokenizer.add_tokens([AddedToken("word", normalized=False, **token)])
    return tokenizer


def test_refuses_what_would_not_be_exact() -> None:
    plain = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="no added token"):
        SegmentEncoder(plain)
    with pytest.raises(ValueError, match="whole words"):
        SegmentEncoder(_with(single_word=True))
    dropout = qwen()
    dropout.model.dropout = 0.5
    with pytest.raises(ValueError, match="random"):
        SegmentEncoder(dropout)
    literal = qwen()
    literal.encode_special_tokens = True
    with pytest.raises(ValueError, match="as text"):
        SegmentEncoder(literal)
    described = json.loads(qwen().to_str())
    described["post_processor"] = {"type": "Sequence", "processors": [{"type": "Other"}]}
    assert "post-processor" in (why_whole(described) or "")


def test_a_token_that_takes_white_space_is_no_cut() -> None:
    described = json.loads(DESIGNS["greedy"]().to_str())
    cuts = anchors_of(described)
    assert "<|im_start|>" in cuts
    assert not {"<mask>", "<sep>", "<both>", "\n\n", " <x>"} & set(cuts)


def test_padding_and_truncation_of_others_do_not_act() -> None:
    tokenizer = qwen()
    want = tokenizer.encode("The tide came in").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert SegmentEncoder(tokenizer).encode("The tide came in", False) == want
