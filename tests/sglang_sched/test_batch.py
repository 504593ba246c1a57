# SPDX-License-Identifier: Apache-2.0
"""Who joins a prefill batch of SGLang: followers wait, long prefills leave room."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.lanes import Lane
from mimo_plugin.engines.sglang.sched.batch import (
    LEAST_SAVED_TOKENS,
    RecentBatches,
    awaited_leader,
    chunk_limit_tokens,
    common_tokens,
    shorter_tokens,
)

PAGE = 16
LANES = (Lane(64_000, 2), Lane(256_000, 1))


@dataclass(eq=False)
class Request:
    """What the rules read of SGLang's request."""

    full_untruncated_fill_ids: array
    prefix_len: int = 0
    extend_end: int | None = None
    host_hit_length: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    rid: str = "r"


def ids(*parts):
    """Token ids of runs (seed, length)."""
    return array("q", [seed * 1_000_000 + i for seed, length in parts for i in range(length)])


def leader(parts=((1, 2000),), start=0, end=512, **more):
    return Request(ids(*parts), prefix_len=start, extend_end=end, **more)


def follower(parts=((1, 600), (2, 100)), hit=0, **more):
    return Request(ids(*parts), prefix_len=hit, **more)


def waits(one, *batch, dense=False):
    return awaited_leader(one, batch, PAGE, dense=dense) is not None


def test_a_follower_lets_the_leader_s_batch_go():
    assert waits(follower(), leader())
    assert waits(follower(), leader(((9, 50),), end=50), leader())
    assert not waits(follower())


def test_nothing_in_common_or_nothing_left_to_gain():
    assert not waits(follower(((3, 700),)), leader())
    assert not waits(follower(hit=592), leader(start=512, end=1024), dense=True)
    assert not waits(follower(((1, LEAST_SAVED_TOKENS // 2), (2, 900))), leader(), dense=True)


def test_it_resumes_only_where_the_leader_leaves_kv():
    """The batch computes to 1024, behind where the two part (600): nothing is left at 600."""
    behind = leader(start=512, end=1024)
    assert not waits(follower(hit=512), behind)
    assert waits(follower(hit=512), behind, dense=True)
    assert waits(follower(((1, 1100), (2, 5)), hit=512), behind)


def test_what_is_on_the_host_counts_as_found():
    assert not waits(follower(hit=16, host_hit_length=576), leader(), dense=True)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt", "lora_id"])
def test_requests_that_never_share_kv(name):
    assert not waits(follower(**{name: "x"}), leader(), dense=True)
    assert waits(follower(**{name: "x"}), leader(**{name: "x"}), dense=True)


def test_the_last_token_is_always_computed():
    """An equal prompt can reuse all but its last page."""
    same = follower(((1, 80),), hit=64)
    assert not waits(same, leader(((1, 80),), start=0, end=80), dense=True)


def test_a_batch_whose_results_are_not_there_yet_is_waited_for():
    """The overlap schedule fills a batch before the one before it has left its KV in the tree."""
    recent, first, second = RecentBatches(), [], []
    recent.note(first)
    first.append(leader())  # the list grows while the batch is filled
    recent.note(first)
    recent.note(second)
    assert list(recent.pending()) == first
    assert awaited_leader(follower(), recent.pending(), PAGE, dense=True) == ("r", 592)
    first[0].prefix_len = first[0].extend_end  # taken over into the tree
    assert not list(recent.pending())
    first[0].prefix_len, first[0].extend_end = 0, None  # or given back
    assert not list(recent.pending())


def test_batches_long_ago_are_forgotten():
    """A request that was given up must not hold others back for ever."""
    recent, gone = RecentBatches(), leader()
    recent.note([gone])
    for _ in range(4):
        recent.note([])
    assert not list(recent.pending())


@given(st.lists(st.integers(0, 3), max_size=1500), st.lists(st.integers(0, 3), max_size=1500))
def test_common_tokens_is_the_plain_count(a, b):
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    assert common_tokens(array("q", a), array("q", b)) == count


def test_common_tokens_of_long_prompts():
    a, b = ids((1, 100_000)), ids((1, 99_999), (2, 1))
    assert common_tokens(a, b) == 99_999 and common_tokens(a, a) == 100_000


def limit(left, shorter, budget=8192, share=0.5):
    return chunk_limit_tokens(left, shorter, budget, PAGE, lanes=LANES, share=share)


def test_only_long_prefills_leave_room_and_only_for_those_that_wait():
    assert limit(64_000, 4000) is None
    assert limit(100_000, 0) is None
    assert limit(100_000, 1000) == (8192 - 1000) // PAGE * PAGE
    assert limit(100_000, 50_000) == 4096
    assert limit(100_000, 50_000, share=0.0) == PAGE


@given(
    st.integers(64_001, 10**6),
    st.integers(1, 10**6),
    st.integers(2 * PAGE, 10**5),
    st.floats(0, 0.99),
)
def test_the_room_is_whole_pages_and_never_nothing(left, shorter, budget, share):
    found = limit(left, shorter, budget, share)
    assert found is None or (found % PAGE == 0 and PAGE <= found < budget)


def test_shorter_work_is_counted_in_pages_up_to_what_matters():
    def waiting(tokens, hit):
        return SimpleNamespace(
            origin_input_ids=range(tokens), output_ids=(), num_matched_prefix_tokens=hit
        )

    several = [waiting(100, 90), waiting(200_000, 0), waiting(200_000, 199_000)]
    assert shorter_tokens(several, LANES, PAGE, 10**6) == 16 + 1008
    assert shorter_tokens(several, LANES, PAGE, 500) == 500
