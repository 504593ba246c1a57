# SPDX-License-Identifier: Apache-2.0
"""SGLang's waiting list in affinity order: nothing lost, bounded look-ups, ranks that agree."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.affinity import AffinityRule
from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.engines.sglang.sched.order import AffinityOrder, Clock


@dataclass(eq=False)
class Request:
    """What the order reads of SGLang's request."""

    rid: str
    tokens: int
    hit: int = 0
    priority: int | None = None
    is_retracted: bool = False
    output_ids: array = field(default_factory=lambda: array("q"))

    @property
    def origin_input_ids(self):
        return array("q", range(self.tokens))


class Bench:
    """An order with a clock that the test turns, and a record of the look-ups."""

    def __init__(self, *, max_wait=100.0, budget=8, tokens_clock=False, sign=1, **rule):
        self.now_s = 0.0
        self.seen = []
        clock = Clock.tokens(max_wait) if tokens_clock else Clock.seconds(max_wait, self._now)
        self.order = AffinityOrder(
            AffinityRule(max_wait_s=max_wait, **rule),
            PrefillCost(inf),
            self._look_up,
            clock,
            look_ups_per_pass=budget,
            priority_sign=sign,
        )

    def _now(self):
        return self.now_s

    def _look_up(self, request):
        self.seen.append(request.rid)
        return request.hit

    def sort(self, waiting, processed_tokens=0):
        self.seen.clear()
        self.order.sort(waiting, processed_tokens)
        return [request.rid for request in waiting]


def test_short_work_first_and_hits_count():
    bench = Bench()
    waiting = [Request("long", 4000), Request("warm", 4000, hit=3900), Request("short", 200)]
    assert bench.sort(waiting) == ["warm", "short", "long"]


def test_arrivals_and_departures_between_passes():
    bench = Bench()
    first, second = Request("a", 500), Request("b", 300)
    waiting = [first, second]
    assert bench.sort(waiting) == ["b", "a"]
    waiting = [first, Request("c", 100)]
    assert bench.sort(waiting) == ["c", "a"]
    assert len(bench.order) == 2 and bench.order.entry_of(second) is None
    assert bench.sort([]) == [] and len(bench.order) == 0


def test_a_request_that_comes_again_under_its_name_is_a_new_one():
    bench = Bench()
    bench.sort([Request("a", 500, hit=480), Request("b", 300)])
    again = Request("a", 900)
    assert bench.sort([again, Request("b", 300)]) == ["b", "a"]
    assert bench.order.entry_of(again).num_tokens == 900


def test_a_retracted_request_goes_first():
    bench = Bench()
    waiting = [Request("a", 100), Request("back", 5000, is_retracted=True), Request("b", 50)]
    assert bench.sort(waiting)[0] == "back"


def test_what_waits_too_long_is_passed_by_nobody():
    bench = Bench(max_wait=10.0)
    cold = Request("cold", 9000)
    waiting = [cold]
    bench.sort(waiting)
    for step in range(1, 15):
        bench.now_s = float(step)
        waiting = [cold, Request(f"warm-{step}", 4000, hit=3990)]
        first = bench.sort(waiting)[0]
        assert (first == "cold") is (step >= 10), step


def test_ranks_without_a_common_clock_count_tokens():
    bench = Bench(max_wait=5000, tokens_clock=True, age_credit=0.0)
    cold = Request("cold", 9000)
    bench.sort([cold], 100)
    assert bench.sort([cold, Request("w", 10)], 4000) == ["w", "cold"]
    assert bench.sort([cold, Request("x", 10)], 5100) == ["cold", "x"]


@pytest.mark.parametrize("sign", [1, -1])
def test_priority_outranks_the_score(sign):
    bench = Bench(by_priority=True, sign=sign)
    waiting = [Request("a", 10, priority=1), Request("b", 900, priority=0), Request("c", 10)]
    rids = bench.sort(waiting)
    assert rids == (["c", "b", "a"] if sign == 1 else ["a", "c", "b"])


def test_a_long_queue_is_still_ordered_and_look_ups_are_bounded():
    """SGLang's own policies fall back to the order of arrival above 128 waiting requests."""
    bench = Bench(budget=16)
    waiting = [Request(f"r{i}", 10_000 - i) for i in range(600)]
    waiting.append(Request("hot", 10_000, hit=9_990))
    for _ in range(601 // 16 + 1):
        rids = bench.sort(waiting)
        assert 1 <= len(bench.seen) <= 16
    assert rids[0] == "hot"
    assert rids.index("r599") < rids.index("r0")


def test_the_head_is_looked_up_last():
    """So what the first of the line hits is the youngest of the cache."""
    bench = Bench(budget=8)
    waiting = [Request("a", 300), Request("b", 200), Request("c", 100)]
    bench.sort(waiting)
    bench.sort(waiting)
    assert bench.seen[-1] == "c"


def test_every_request_is_looked_up_again_in_turn():
    bench = Bench(budget=4)
    waiting = [Request(f"r{i}", 1000 + i) for i in range(20)]
    for _ in range(5):
        bench.sort(waiting)
    looked = set()
    for _ in range(10):
        bench.sort(waiting)
        looked.update(bench.seen)
    assert looked == {request.rid for request in waiting}


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["cost", "longest-hit", "hrrn", "fcfs"]))
def test_random_histories_lose_nobody_and_ranks_agree(seed, mode):
    rng = random.Random(seed)
    budget = rng.choice([1, 4, 32])
    ranks = [Bench(mode=mode, max_wait=20_000, budget=budget, tokens_clock=True) for _ in "ab"]
    waiting, processed = [], 0
    for step in range(25):
        for number in range(rng.randrange(3)):
            tokens = rng.choice([20, 500, 4000, 90_000])
            waiting.append(
                Request(
                    f"{step}-{number}",
                    tokens,
                    hit=rng.randrange(tokens),
                    is_retracted=rng.random() < 0.1,
                )
            )
        before = {request.rid for request in waiting}
        other = list(waiting)
        assert ranks[0].sort(waiting, processed) == ranks[1].sort(other, processed)
        assert {request.rid for request in waiting} == before and len(waiting) == len(before)
        for _ in range(rng.randrange(3)):
            if waiting:
                gone = waiting.pop(0 if rng.random() < 0.8 else rng.randrange(len(waiting)))
                processed += gone.tokens - gone.hit
        for request in waiting:
            if rng.random() < 0.2:
                request.hit = rng.randrange(request.tokens)


def test_what_starts_leaves_the_line_at_once():
    """So that the oldest of the others is known when its admission is counted."""
    bench = Bench()
    first, second = Request("a", 100), Request("b", 50)
    bench.sort([first, second])
    entry, waited_s = bench.order.started(first)
    assert entry.item is first and waited_s >= 0
    assert bench.order.line.oldest().item is second
    assert bench.order.started(first) is None
    assert bench.order.started(Request("b", 50)) is None  # another request of that name
    waiting = [second]
    bench.sort(waiting)
    assert waiting == [second] and len(bench.order) == 1
