# SPDX-License-Identifier: Apache-2.0
"""The comparison of `make run`: workload, replay and arithmetic, without an engine."""

import json
import re

import pytest

from tools.run import compare, page
from tools.run.replay import Record, hash_tokens
from tools.run.text import ChatText, chat_text, load_tokenizer
from tools.run.workload import KINDS, Shape, build_sessions, lengths, turn_order

SHAPE = Shape(chats=6, chat_turns=5, agents=2, agent_steps=4).scaled(0.05)


@pytest.fixture
def text():
    """One token a character."""
    return ChatText(lambda s: [ord(c) for c in s], "<{role}>", "</>")


def play(shape, text, answer):
    """All (session, turn) prompts when every answer is made by ``answer(session, turn)``."""
    prompts = {}
    for number, session in enumerate(build_sessions(shape, text)):
        turn, count = next(session), 0
        try:
            while True:
                prompts[number, count] = turn
                turn = session.send(answer(turn))
                count += 1
        except StopIteration:
            continue
    return prompts


def record(session=0, turn=0, prompt=(1, 2, 3), answer=(4, 5), cached=0, ttft=0.1, kind="chat"):
    return Record(
        session=session,
        turn=turn,
        kind=kind,
        prompt_hash=hash_tokens(prompt),
        prompt_tokens=len(prompt),
        cached_tokens=cached,
        ttft_s=ttft,
        duration_s=1.0,
        answer=list(answer),
        prompt=list(prompt),
    )


def outcome(name, records, metrics=None):
    return compare.Outcome(name, records, 1.0, 2.0, metrics or {})


# --- workload -------------------------------------------------------------------------------


def test_one_seed_gives_one_workload(text):
    def answers(turn):
        return [7] * turn.answer_tokens

    assert play(SHAPE, text, answers) == play(SHAPE, text, answers)
    other = Shape(seed=1, chats=6, chat_turns=5, agents=2, agent_steps=4).scaled(0.05)
    assert play(SHAPE, text, answers) != play(other, text, answers)


def test_number_and_lengths_of_requests_do_not_depend_on_the_answers(text):
    ones = play(SHAPE, text, lambda turn: [1] * turn.answer_tokens)
    twos = play(SHAPE, text, lambda turn: [2] * turn.answer_tokens)
    assert ones.keys() == twos.keys()
    for key, turn in ones.items():
        assert len(turn.prompt) == len(twos[key].prompt)
        assert (turn.kind, turn.answer_tokens) == (twos[key].kind, twos[key].answer_tokens)
    assert sum(lengths(SHAPE, text)) == len(ones)


def test_sessions_continue_what_was_answered(text):
    prompts = play(SHAPE, text, lambda turn: [9] * turn.answer_tokens)
    before = None
    for (number, count), turn in prompts.items():
        if count and turn.kind in ("chat", "tool loop"):
            assert turn.prompt[: len(before.prompt)] == before.prompt
            answer = turn.prompt[len(before.prompt) :][: before.answer_tokens]
            assert answer == [9] * before.answer_tokens, (number, count)
        if turn.kind == "regenerate":
            assert turn.prompt == before.prompt
        before = turn


def test_system_prompts_are_shared_and_every_kind_occurs(text):
    prompts = play(Shape().scaled(0.02), text, lambda turn: [9] * turn.answer_tokens)
    assert {turn.kind for turn in prompts.values()} == set(KINDS)
    system = len("<system>") + Shape().scaled(0.02).system_tokens
    assert prompts[0, 0].prompt[:system] == prompts[3, 0].prompt[:system]
    assert prompts[0, 0].prompt[:system] != prompts[1, 0].prompt[:system]


def test_turn_order_keeps_a_session_apart():
    counts = [4, 4, 4, 4]
    order = turn_order(counts, seed=3, spacing=2)
    assert order == turn_order(counts, seed=3, spacing=2)
    assert [order.count(i) for i in range(4)] == counts
    crowded = sum(order[i] in order[max(0, i - 2) : i] for i in range(12))
    assert crowded == 0


def test_quick_is_smaller_and_scaling_keeps_the_traffic():
    assert Shape().quick().chats < Shape().chats
    scaled = Shape().scaled(0.5)
    assert scaled.answer_tokens == (75, 450) and scaled.chats == Shape().chats


# --- text -----------------------------------------------------------------------------------


def test_prose_has_the_asked_length_and_depends_on_the_seed(text):
    import random

    one = text.prose(random.Random(1), 200)
    assert len(one) == 200
    assert one == text.prose(random.Random(1), 200) != text.prose(random.Random(2), 200)


def test_chat_format_is_recognised_by_its_special_token(tmp_path):
    pytest.importorskip("tokenizers")
    from tools import tiny_mimo

    tiny_mimo.write_tokenizer(tiny_mimo.TinyMiMo(), tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    chat = chat_text(tokenizer)
    ids = chat.message("user", chat.encode("hi"))
    assert tokenizer.decode_ids(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_unknown_chat_format_is_plain_text():
    class Tokenizer:
        def encode_ids(self, text):
            return [ord(c) for c in text]

        def knows(self, token):
            return False

    chat = chat_text(Tokenizer())
    assert "".join(map(chr, chat.message("user", [65]))) == "\n\nuser: A"
    assert chat.close_message() == []


# --- arithmetic -----------------------------------------------------------------------------


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2.5), (90, 3.7), (100, 4)])
def test_percentile_interpolates(percent, value):
    assert compare.percentile([4, 1, 3, 2], percent) == pytest.approx(value)


def test_percentile_of_nothing_is_refused():
    with pytest.raises(compare.RunError):
        compare.percentile([], 50)


def test_identical_answers():
    rows = [record(0, 0), record(1, 0)]
    identity = compare.compare_answers(rows, rows[::-1])
    assert (identity.identical_requests, identity.fraction) == (2, 1.0)
    assert identity.first_difference is None


def test_a_difference_counts_from_its_token_and_is_named():
    stock = [record(0, 0, answer=(4, 5, 6, 7)), record(0, 1)]
    plugin = [record(0, 0, answer=(4, 5, 0, 7)), record(0, 1)]
    identity = compare.compare_answers(stock, plugin)
    assert identity.identical_requests == 1
    assert identity.fraction == pytest.approx(4 / 6)
    assert identity.first_difference == "session 0, turn 0 (chat), answer token 2"


def test_the_same_answer_to_another_prompt_does_not_count():
    identity = compare.compare_answers([record(prompt=(1,))], [record(prompt=(2,))])
    assert identity.identical_tokens == 0 and identity.first_difference is not None


def test_a_missing_request_is_refused():
    with pytest.raises(compare.RunError, match="2 requests on stock, 1 with the plugin"):
        compare.compare_answers([record(0, 0), record(0, 1)], [record(0, 0)])


def test_unlimited_cache_counts_whole_blocks_of_earlier_requests():
    first = record(prompt=range(8), answer=range(8, 12))
    turn = record(prompt=range(14), answer=(0,))
    fork = record(prompt=(*range(6), 99, 98, 97), answer=(0,))
    assert compare.unlimited_cached_tokens([first], 4) == [0]
    assert compare.unlimited_cached_tokens([first, turn], 4) == [0, 12]
    assert compare.unlimited_cached_tokens([first, fork], 4) == [0, 4]


def test_unlimited_cache_never_holds_the_last_prompt_token():
    again = [record(prompt=range(8)), record(prompt=range(8))]
    assert compare.unlimited_cached_tokens(again, 4) == [0, 4]


def test_plugin_without_its_metrics_is_refused():
    with pytest.raises(compare.RunError, match="not active"):
        compare.require_plugin_metrics({"vllm:num_requests_running": [({}, 0.0)]})
    compare.require_plugin_metrics({"mimo:info": [({}, 1.0)]})


@pytest.fixture
def runs():
    prompts = [tuple(range(100)), tuple(range(100)), tuple(range(200, 300))]
    stock = [record(i, 0, p, cached=0, ttft=0.2) for i, p in enumerate(prompts)]
    cached = (0, 96, 0)
    plugin = [
        record(i, 0, p, cached=c, ttft=0.1)
        for i, (p, c) in enumerate(zip(prompts, cached, strict=True))
    ]
    trimmed = [
        ({"reason": "no_checkpoint", "engine": "0"}, 3.0),
        ({"reason": "no_checkpoint", "engine": "1"}, 4.0),
        ({"reason": "diverged", "engine": "0"}, 1.0),
    ]
    metrics = {
        "mimo:trimmed_tokens_total": trimmed,
        "mimo:cached_blocks": [({"kind": "swa", "cls": "turn_end"}, 5.0)],
    }
    return outcome("stock", stock), outcome("plugin", plugin, metrics)


def test_summary_and_claims(runs):
    figures = compare.summary(*runs, block_tokens=16)
    assert figures["runs"]["stock"]["recomputed_tokens"] == 300
    assert figures["recomputed_ratio"] == pytest.approx(204 / 300)
    assert figures["bound_ratio"] == pytest.approx(204 / 300)
    assert figures["ttft_p90_ratio"] == pytest.approx(0.5)
    assert figures["trimmed_tokens"] == {"diverged": 1, "no_checkpoint": 7}
    claims = compare.claims(figures, 5, "make run")
    assert [claim["id"] for claim in claims] == [
        "tokens_identical",
        "recomputed_ratio",
        "ttft_p50_ratio",
        "ttft_p90_ratio",
    ]
    for claim in claims:
        assert set(claim) == {"id", "value", "stock", "bound", "unit", "seeds", "how"}
        assert claim["seeds"] == [5]
    json.dumps(claims)


def test_table_names_every_trimmed_reason_and_aligns(runs):
    figures = compare.summary(*runs, block_tokens=16)
    printed = compare.format_table(compare.table(figures))
    assert "trimmed: no_checkpoint" in printed and "3 of 3" in printed
    assert re.search(r"recomputed tokens +300 +204 +0\.680", printed)


def test_ratio_of_nothing():
    assert compare.ratio(0, 0) == 1.0
    assert compare.ratio(1, 0) == float("inf")


def test_page_is_self_contained_and_escapes(runs, tmp_path):
    pytest.importorskip("matplotlib")
    figures = compare.summary(*runs, block_tokens=16)
    picture = page.draw(*runs, figures)
    assert picture.startswith(b"\x89PNG")
    path = tmp_path / "report.html"
    page.write_page(path, figures, compare.table(figures), picture, {"seed": "0"}, "<|im_end|>&")
    text = path.read_text()
    assert "&lt;|im_end|&gt;&amp;" in text
    assert "3 of 3" in text and "data:image/png;base64," in text
    assert not re.search(r"(?:src|href)=[\"']?https?:", text)
