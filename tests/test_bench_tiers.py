# SPDX-License-Identifier: Apache-2.0
"""The tiers benchmark without an engine: from results to claims, and replays of traces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiers_claims import bad_answers, claims, equal_part, excess
from benchmarks.tiers_traces import (
    FULL_BYTES,
    POLICIES,
    SWA_BYTES,
    UNIT_TOKENS,
    WINDOW_TOKENS,
    replay,
)
from benchmarks.workloads import TraceRequest

CLAIMS = [
    "ladder_bytes_vs_dense",
    "ladder_hits_equal_dense",
    "prompt_end_bytes_vs_ideal",
    "keepalive_fraction",
    "repair_excess_bytes",
    "ring_lose_one_hit_fraction",
    "kill9_failed_requests",
]
NAMES = ("full", "div1024", "div500", "ext")


def size(stored, *hits, chats=()):
    prompts = [
        {
            "seed": 0,
            "stored_bytes": stored,
            "hits": dict(zip(NAMES, hits, strict=True)),
            "answers": dict.fromkeys(NAMES, [1, 2]),
        }
    ]
    return {"prompts": prompts, "chats": list(chats)}


def traffic(exists, touches):
    calls = {"exists": exists, "touch": touches, "get": 0, "put": 1}
    return {"requests": 10, "calls": calls, "keys": {name: 5 * n for name, n in calls.items()}}


def moves(**moved):
    return {"repairs": {k: {"missing_bytes": 100, "moved_bytes": v} for k, v in moved.items()}}


def ring(keys_after, tokens_after):
    return {
        "keys": 100,
        "keys_after": keys_after,
        "tokens_before": 1000,
        "tokens_after": tokens_after,
        "wrong": 0,
    }


def results():
    return {
        "dense": size(1000, 1408, 1024, 384, 1408),
        "ladder": size(600, 1408, 1024, 384, 1408),
        "ideal": size(250, 1408, 0, 0, 1408),
        "prompt_ends": size(250, 1408, 0, 0, 1408),
        "keepalive": traffic(20, 10),
        "keepalive_stock": traffic(15, 0),
        "keepalive_restarted": {"hit_tokens": 1408},
        "keepalive_stock_restarted": {"hit_tokens": 0},
        "repairs": moves(a=100, b=100),
        "repairs_stock": moves(a=130, b=0),
        "ring_file_0": ring(70, 300),
        "ring_redis_0": ring(66, 200),
        "kills_reference": {"answers": [[[1, 2], [-0.5, -0.25]], [[3], [-1.0]]]},
        "kills": {
            "answers": [[[1, 2], [-0.5, -0.25]], [[3], [-1.0]]],
            "kills": 2,
            "failed": 0,
            "pages_got": 5,
            "pages_got_after_kills": [2, 3],
            "pages_put": 9,
            "calls_failed": 3,
        },
    }


def by_id(found):
    seeds = dict.fromkeys(CLAIMS, [0])
    return {claim["id"]: claim for claim in claims(found, seeds, "a command")}


def test_every_claim_of_the_issue_is_written_in_the_projects_format():
    found = by_id(results())
    assert list(found) == CLAIMS
    for claim in found.values():
        assert claim.keys() >= {"id", "value", "stock", "bound", "unit", "seeds", "how"}
    values = [claim["value"] for claim in found.values()]
    assert values == [0.6, 1.0, 1.0, 1.0, 0, 0.68, 0]
    stock = [claim["stock"] for claim in found.values()]
    assert stock == [1.0, 0.5, 4.0, 0.0, 130, 0.0, None]


def test_the_extra_calls_are_those_over_stock_for_each_request():
    claim = by_id(results())["keepalive_fraction"]
    assert claim["extra_exists_per_request"] == {"calls": 0.5, "keys": 2.5}
    assert claim["extra_touch_per_request"] == {"calls": 1.0, "keys": 5.0}


def test_moving_too_little_and_moving_too_much_do_not_cancel():
    assert excess(moves(a=70, b=130)) == 60


@pytest.mark.parametrize("answer", [[[1, 9], [-0.5, -0.25]], [[1, 2], [-0.5, -0.3]], [[], []]])
def test_wrong_tokens_wrong_logprobs_and_no_answer_are_bad(answer):
    wanted = [[1, 2], [-0.5, -0.25]]
    assert bad_answers([wanted], [wanted]) == 0
    assert bad_answers([answer], [wanted]) == 1


def test_a_shorter_hit_is_not_equal():
    dense = size(1, 1408, 1024, 384, 1408, chats=[{"hits": [128, 256]}])
    other = size(1, 1408, 896, 384, 1408, chats=[{"hits": [256, 128]}])
    assert equal_part(other, dense) == pytest.approx(4 / 6)


# -- traces ------------------------------------------------------------------------------------


def request(ids, tokens=None):
    return TraceRequest(0, tokens or len(ids) * UNIT_TOKENS + 1, 1, tuple(ids))


@given(st.integers(0, 10**6))
def test_dense_loses_nothing_and_no_rule_hits_beyond_full_attention(seed):
    rng = random.Random(seed)
    requests, chains = [], [()]
    for _ in range(25):
        ids = rng.choice(chains)
        ids = ids[: rng.randint(0, len(ids))]
        ids += tuple(rng.randrange(1 << 40) for _ in range(rng.randint(1, 30)))
        chains.append(ids)
        requests.append(request(ids))
    found = {name: replay(requests, "t", name, None) for name in POLICIES}
    full = found["dense"].full_hit_tokens
    assert found["dense"].hit_tokens == full
    for each in found.values():
        assert each.full_hit_tokens == full
        assert each.hit_tokens <= full
        assert each.stored_bytes <= found["dense"].stored_bytes
    # Denser rungs lie among others, so only against no rungs is more never less.
    for name in ("ladder 0.125", "ladder 0.5", "ladder 1"):
        assert found[name].hit_tokens >= found["no ladder"].hit_tokens


def test_what_is_written_is_the_prefix_and_one_window_at_each_point():
    once = replay([request(range(8))], "t", "prompt ends", None)
    assert once.stored_bytes == 8 * UNIT_TOKENS * FULL_BYTES + WINDOW_TOKENS * SWA_BYTES
    again = replay([request(range(8))] * 2, "t", "prompt ends", None)
    assert again.stored_bytes == once.stored_bytes
    assert again.hit_tokens == 8 * UNIT_TOKENS


def test_a_prompt_that_parts_from_another_finds_a_rung_or_nothing():
    pair = [request(range(8)), request([*range(3), 91, 92])]
    assert replay(pair, "t", "prompt ends", None).hit_tokens == 0
    assert replay(pair, "t", "ladder 0.5", None).hit_tokens == 3 * UNIT_TOKENS
    third = [*pair, request([*range(3), 93])]
    assert replay(third, "t", "no ladder", None).hit_tokens == 3 * UNIT_TOKENS
    assert replay(third, "t", "prompt ends", None).hit_tokens == 0


def test_a_full_store_drops_what_was_used_longest_ago():
    tb = (2 * 8 * UNIT_TOKENS * FULL_BYTES + 2 * WINDOW_TOKENS * SWA_BYTES) / 1e12
    one, two, three = (request(range(start, start + 8)) for start in (0, 100, 200))
    kept = replay([one, two, one, three, one], "t", "prompt ends", tb)
    assert kept.hit_tokens == 2 * 8 * UNIT_TOKENS
    lost = replay([one, two, one, three, two], "t", "prompt ends", tb)
    assert lost.hit_tokens == 8 * UNIT_TOKENS


def test_the_beginning_of_a_prefix_dies_last():
    tb = 12 * UNIT_TOKENS * (FULL_BYTES + SWA_BYTES) / 1e12
    one, two = request(range(8)), request(range(100, 108))
    assert replay([one, two, one], "t", "dense", tb).hit_tokens == 4 * UNIT_TOKENS
