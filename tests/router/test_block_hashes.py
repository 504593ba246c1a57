# SPDX-License-Identifier: Apache-2.0
"""Canonical hashes: what they tell apart, what they don't, and what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.block_hashes import PromptHasher, block_hashes, prompt_extra_keys
from mimo_plugin.router.prompt import MediaSpan, Prompt

TOKENS = st.lists(st.integers(0, 200_000), max_size=80)


def hashes(tokens, block=4, **options):
    return PromptHasher(block).hashes(Prompt(tokens, len(tokens), **options))


@given(TOKENS, st.integers(1, 9), st.data())
def test_going_on_gives_the_same(tokens, block, data):
    whole = block_hashes(tokens, block)
    assert len(whole) == len(tokens) // block
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else None
    assert block_hashes(tokens[known * block :], block, parent=parent) == whole[known:]
    assert all(0 <= number < 1 << 64 for number in whole)


@given(TOKENS, TOKENS)
def test_equal_just_as_far_as_the_prompts(one, other):
    first, second = block_hashes(one, 4), block_hashes(other, 4)
    same = 0
    for at in range(min(len(first), len(second))):
        if one[: (at + 1) * 4] != other[: (at + 1) * 4]:
            break
        same += 1
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


def test_values_stay():
    """They are shared between router processes of different versions."""
    assert block_hashes([1, 2, 3, 4, 5, 6, 7], 3) == [1300477795223969280, 10745671114927303842]
    salted = hashes([1, 2, 3, 4], 4, lora="a", salt="b", media=(MediaSpan(1, 2, "i"),))
    assert salted == [6941010571873419045]


def test_adapter_and_salt_change_all_blocks():
    tokens = list(range(16))
    kinds = [hashes(tokens), hashes(tokens, lora="x"), hashes(tokens, salt="x")]
    kinds.append(hashes(tokens, lora="y"))
    kinds.append(hashes(tokens, lora="x", salt="x"))
    every = [number for kind in kinds for number in kind]
    assert len(set(every)) == len(every) == 5 * 4


def test_media_change_the_block_they_start_in_and_all_after():
    tokens = list(range(20))
    plain = hashes(tokens)
    one = hashes(tokens, media=(MediaSpan(5, 8, "one"),))
    moved = hashes(tokens, media=(MediaSpan(6, 8, "one"),))
    other = hashes(tokens, media=(MediaSpan(5, 8, "two"),))
    for kind in (one, moved, other):
        assert kind[0] == plain[0]
    rest = [number for kind in (plain, one, moved, other) for number in kind[1:]]
    assert len(set(rest)) == len(rest)


def test_a_medium_inside_of_another_is_left_out_as_in_the_engine():
    video, sound = MediaSpan(2, 20, "video"), MediaSpan(6, 3, "sound")
    assert hashes(list(range(30)), media=(video, sound)) == hashes(list(range(30)), media=(video,))
    # It counts where the other one ends in the same block.
    short = MediaSpan(2, 5, "video")
    assert prompt_extra_keys(Prompt([], 0, media=(short, sound)), 4)[1] == (("mm", "sound", 2),)


@pytest.mark.parametrize("tokens", [[-1] * 4, [1 << 32] * 4, ["1"] * 4, [None] * 4])
def test_what_is_no_token_is_refused_in_one_line(tokens):
    with pytest.raises(ValueError, match="token_ids"):
        block_hashes(tokens, 4)


@pytest.mark.parametrize("size", [0, -1])
def test_block_sizes(size):
    with pytest.raises(ValueError, match="> 0"):
        block_hashes([1], size)
    with pytest.raises(ValueError, match="> 0"):
        PromptHasher(size)


@dataclass
class Timed:
    tokens: int
    bound_ms: float


@pytest.mark.parametrize(
    "case", [Timed(2_000, 0.3), Timed(1_000_000, 100.0)], ids=lambda c: c.tokens
)
def test_cost(case):
    tokens = list(range(case.tokens))
    best_ms = float("inf")
    for _ in range(20):
        started = time.thread_time()
        block_hashes(tokens, 16)
        best_ms = min(best_ms, (time.thread_time() - started) * 1e3)
    assert best_ms < case.bound_ms
