# SPDX-License-Identifier: Apache-2.0
"""Keys of chats: the same in every turn and process, different for chats that share a head."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core import chat_key
from mimo_plugin.core.chat_key import Keys, answer_anchors, grid_anchors, named_key, seed_of

OPENING = (1, 2)


def ask(tokens: list[int]) -> list[int]:
    return [1, 3, *tokens, 1, 2]


TEXT = st.lists(st.integers(4, 2000), min_size=1, max_size=60)


@given(head=TEXT, talk=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
def test_every_turn_has_one_key_whoever_looks(head, talk):
    """Each turn comes to a process that has seen nothing, and to one that has seen all."""
    seen, keys, prompt = Keys(OPENING), set(), [1, 4, *head]
    for question, answer in talk:
        prompt = [*prompt, *ask(question)]
        keys.add(Keys(OPENING).find(prompt)[0])
        keys.add(seen.find(prompt)[0])
        prompt = [*prompt, *answer]
    assert len(keys) == 1


@given(head=TEXT, one=TEXT, other=TEXT)
def test_the_first_question_tells_chats_apart(head, one, other):
    found = [Keys(OPENING).find([1, 4, *head, *ask(text)])[0] for text in (one, other)]
    assert (found[0] == found[1]) == (one == other)


def test_a_head_with_examples_is_learnt():
    """Examples are answers too: without learning all chats behind them were one."""
    keys = Keys(OPENING)
    head = [1, 4, 9, *ask([5, 6]), 7, 8]
    first = [keys.find([*head, *ask([100 + i])])[0] for i in range(8)]
    assert len(set(first[: chat_key.ANSWER_BRANCHES])) == 1
    later = first[chat_key.ANSWER_BRANCHES :]
    assert len(set(later)) == len(later) and first[0] not in later
    # and a later turn of one of those has its key
    assert keys.find([*head, *ask([107]), 50, *ask([51])])[0] == first[7]


def test_chats_that_were_one_are_told_when_they_part():
    keys = Keys(OPENING)
    head = [1, 4, 9, *ask([5, 6]), 7, 8]
    told = [keys.find([*head, *ask([100 + i])])[1] for i in range(6)]
    count = chat_key.ANSWER_BRANCHES
    assert [len(parted) for parted in told] == [0] * (count - 1) + [count] + [0] * (6 - count)
    own = [keys.find([*head, *ask([100 + i])])[0] for i in range(count)]
    assert own == told[count - 1]


@pytest.mark.parametrize("length", [0, 50, 700, 5000])
def test_plain_text_grows_without_another_key(length):
    text = [7 * i % 991 for i in range(200 + length)]
    assert len({Keys().find(text[:n])[0] for n in range(64, len(text), 37)}) == 1


def test_plain_texts_behind_a_common_head_part():
    keys = Keys()
    head = [i % 89 for i in range(4096)]
    found = [keys.find([*head, *range(1000 * i, 1000 * i + 300)])[0] for i in range(16)]
    assert len(set(found)) >= 16 - chat_key.GRID_BRANCHES + 1


def test_a_short_body_behind_a_shared_head_still_spreads():
    """B27: where no anchor is left the whole prompt decides, not the head."""
    keys = Keys()
    head = [i % 89 for i in range(4096)]
    for i in range(4):
        keys.find([*head, *range(1000 * i, 1000 * i + 300)])
    assert len({keys.find([*head, i])[0] for i in range(8)}) == 8


def test_a_long_prefix_takes_more_forks_than_a_short_one():
    short, long = Keys.shared_after(1000, False), Keys.shared_after(65_536, False)
    assert short == chat_key.GRID_BRANCHES and long == short + 8
    keys = Keys()
    document = [i % 997 for i in range(65_536)]
    forks = {keys.find([*document, *range(5000 * i, 5000 * i + 3000)])[0] for i in range(9)}
    assert len(forks) == 1


def test_edits_of_a_question_stay_with_their_chat():
    keys = Keys(OPENING)
    chat = [1, 4, 9, *ask([5, 6]), 7, 8]
    assert len({keys.find([*chat, *ask([100 + i])])[0] for i in range(3)}) == 1


def test_adapters_salts_and_images_are_part_of_the_key():
    prompt = [1, 4, 9, *ask([5, 6, 6, 6])]
    found = [
        Keys(OPENING).find(prompt)[0],
        Keys(OPENING).find(prompt, seed=seed_of("adapter", "/a", None))[0],
        Keys(OPENING).find(prompt, seed=seed_of("adapter", "/b", None))[0],
        Keys(OPENING).find(prompt, seed=seed_of(None, None, "salt"))[0],
        Keys(OPENING).find(prompt, [(6, b"cat")])[0],
        Keys(OPENING).find(prompt, [(6, b"dog")])[0],
        Keys(OPENING).find(prompt, [(6, b"dog"), (7, b"cat")])[0],
    ]
    assert len(set(found)) == len(found)
    # an image of a later turn is not
    later = Keys(OPENING).find([*prompt, 8, *ask([6])], [(6, b"cat"), (12, b"dog")])[0]
    assert later == found[4]


def test_names_are_keys_of_their_own():
    assert named_key("a") == named_key("a") != named_key("b")
    assert named_key("a", seed_of("adapter", None, None)) != named_key("a")
    assert named_key("\ud800")  # what a JSON body may hold


def test_keys_do_not_depend_on_the_process():
    code = (
        "from mimo_plugin.core.chat_key import Keys, named_key;"
        "print(Keys((1, 2)).find([1, 4, 9, 1, 3, 5, 1, 2])[0], named_key('a'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert out.stdout.split() == [
        str(Keys((1, 2)).find([1, 4, 9, 1, 3, 5, 1, 2])[0]),
        str(named_key("a")),
    ]


def test_anchors():
    assert answer_anchors([1, 2, 5, 1, 2, 1, 3, 1, 2, 1], OPENING) == [3, 7]
    assert answer_anchors([1, 2, 5], ()) == []
    assert len(answer_anchors([0, *OPENING * 500], OPENING)) == chat_key.MOST_ANSWERS
    assert grid_anchors(63) == [] and grid_anchors(130) == [64, 128]
    places = grid_anchors(1 << 20)
    assert places == sorted(set(places)) and len(places) < 300
    assert all(b - a <= max(64, a // 32) for a, b in zip(places, places[1:], strict=False))


def test_memory_is_bounded():
    keys = Keys(max_prefixes=100)
    for i in range(50):
        keys.find(list(range(i, i + 3000)))
    assert len(keys) == 100
