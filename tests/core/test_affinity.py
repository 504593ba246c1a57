# SPDX-License-Identifier: Apache-2.0
"""The order of waiting requests: each mode's key, ageing, the hard limit, and the sorted line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.affinity import (
    COST,
    FCFS,
    HRRN,
    LONGEST_HIT,
    MODES,
    NORMAL,
    OVERDUE,
    PREEMPTED,
    AffinityLine,
    AffinityRule,
    Waiting,
)
from mimo_plugin.core.cost import PrefillCost

PARITY = PrefillCost(10_000.0)
LINEAR = PrefillCost(float("inf"))


def waiting(order: int, tokens: int = 100, **fields) -> Waiting:
    """A request that arrives at both clocks' zero unless told otherwise."""
    values = {"arrived_s": 0.0, "arrived_tokens": 0.0, "num_tokens": tokens, **fields}
    return Waiting(item=f"r{order}", order=order, **values)


def line_of(rule: AffinityRule, *entries: tuple[Waiting, int], cost=PARITY) -> AffinityLine:
    line = AffinityLine(rule, cost)
    for entry, hit in entries:
        line.add(entry, hit)
    return line


def order_of(line: AffinityLine) -> list[int]:
    return [entry.order for entry in line.ready()]


# -- modes -------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_issue():
    rule = AffinityRule()
    assert (rule.mode, rule.by_priority) == (COST, False)
    assert rule.age_credit >= 0 and rule.hit_weight >= 0 and rule.max_wait_s > 0
    assert set(MODES) == {"cost", "longest-hit", "hrrn", "fcfs"}


def test_fcfs_is_order_of_arrival_whatever_the_hit():
    line = line_of(
        AffinityRule(mode=FCFS),
        (waiting(0, 5000), 0),
        (waiting(1, 10), 8),
        (waiting(2, 900), 800),
    )
    assert order_of(line) == [0, 1, 2]
    assert line.advance(1e9, 1e12) == []
    assert order_of(line) == [0, 1, 2]


def test_fcfs_uses_the_engines_key_within_a_priority():
    line = line_of(
        AffinityRule(mode=FCFS, by_priority=True),
        (waiting(0, priority=1, stock_key=(1.0, "a")), 0),
        (waiting(1, priority=0, stock_key=(9.0, "b")), 0),
        (waiting(2, priority=0, stock_key=(3.0, "c")), 0),
        (waiting(-1, priority=0, stock_key=(5.0, "d"), group=PREEMPTED), 0),
    )
    assert order_of(line) == [2, -1, 1, 0]


def test_cost_puts_warm_and_short_first():
    rule = AffinityRule(mode=COST, hit_weight=1.0, age_credit=0.0)
    line = line_of(
        rule,
        (waiting(0, 2000), 0),  # cold, long
        (waiting(1, 300), 0),  # cold, short
        (waiting(2, 2000), 1900),  # warm
        (waiting(3, 310), 0),
    )
    assert order_of(line) == [2, 1, 3, 0]


def test_cost_counts_attention_over_the_cached_context():
    rule = AffinityRule(mode=COST, hit_weight=0.0, age_credit=0.0)
    # The same number of uncached tokens, behind a long and behind a short context.
    line = line_of(rule, (waiting(0, 9100), 9000), (waiting(1, 200), 100))
    assert order_of(line) == [1, 0]
    linear = line_of(rule, (waiting(0, 9100), 9000), (waiting(1, 200), 100), cost=LINEAR)
    assert order_of(linear) == [0, 1]


def test_without_weights_cost_is_shortest_first_and_ties_are_by_arrival():
    rule = AffinityRule(mode=COST, hit_weight=0.0, age_credit=0.0)
    line = line_of(rule, (waiting(0, 50), 0), (waiting(1, 20), 0), (waiting(2, 20), 0))
    assert order_of(line) == [1, 2, 0]


def test_longest_hit_first_aged_the_same_way():
    rule = AffinityRule(mode=LONGEST_HIT, age_credit=0.5)
    line = line_of(
        rule,
        (waiting(0, 1000), 100),
        (waiting(1, 9000, arrived_tokens=100.0), 200),
        (waiting(2, 9000, arrived_tokens=300.0), 200),
    )
    # 0: -100; 1: 50 - 200 = -150; 2: 150 - 200 = -50
    assert order_of(line) == [1, 0, 2]


def test_hrrn_prefers_the_highest_ratio_of_wait_and_cost_to_cost():
    rule = AffinityRule(mode=HRRN)
    line = line_of(
        rule,
        (waiting(0, 1000), 0),
        (waiting(1, 100, arrived_tokens=900.0), 0),
        cost=LINEAR,
    )
    line.advance(0.0, 1000.0)  # (1000 + 1000) / 1000 = 2 and (100 + 100) / 100 = 2: a tie
    assert order_of(line) == [0, 1]
    line.advance(0.0, 1010.0)  # 2.01 and 2.1
    assert order_of(line) == [1, 0]
    line.advance(0.0, 901.0)
    assert order_of(line) == [0, 1]


@given(
    requests=st.lists(
        st.tuples(st.integers(2, 5000), st.integers(0, 5000), st.integers(0, 4000)), max_size=12
    ),
    now=st.integers(4000, 9000),
)
def test_hrrn_is_sorted_by_the_ratio_at_any_time(requests, now):
    line = AffinityLine(AffinityRule(mode=HRRN), PARITY)
    for index, (tokens, hit, at) in enumerate(requests):
        line.add(waiting(index, tokens, arrived_tokens=float(at)), hit)
    line.advance(0.0, float(now))

    def ratio(entry: Waiting) -> float:
        cost = max(1.0, PARITY.cost(entry.hit_tokens, entry.uncached_tokens))
        return (now - entry.arrived_tokens + cost) / cost

    ratios = [ratio(entry) for entry in line.ready()]
    for first, second in zip(ratios, ratios[1:], strict=False):
        assert first >= second - 1e-9


def test_a_hit_of_the_whole_prompt_still_leaves_one_token():
    line = line_of(AffinityRule(), (waiting(0, 64), 64))
    (entry,) = line
    assert (entry.hit_tokens, entry.uncached_tokens) == (63, 1)
    assert line.uncached_tokens == 1


# -- preempted, priority -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [COST, LONGEST_HIT, HRRN])
def test_preempted_first_the_last_preempted_before_the_others(mode):
    line = line_of(
        AffinityRule(mode=mode, max_wait_s=1.0),
        (waiting(0, 10), 8),
        (waiting(1, 9999), 0),
        (waiting(-1, 9999, group=PREEMPTED), 0),
        (waiting(-2, 5000, group=PREEMPTED), 0),
    )
    assert order_of(line)[:2] == [-2, -1]
    line.advance(5.0, 0.0)
    assert order_of(line) == [-2, -1, 0, 1]
    assert all(entry.group == PREEMPTED for entry in list(line.ready())[:2])


@pytest.mark.parametrize("mode", [COST, LONGEST_HIT, HRRN])
def test_priority_outranks_preempted_and_overdue(mode):
    line = line_of(
        AffinityRule(mode=mode, by_priority=True, max_wait_s=1.0),
        (waiting(0, 5000, priority=1), 0),
        (waiting(-1, 5000, priority=1, group=PREEMPTED), 0),
    )
    assert [e.order for e in line.advance(2.0, 0.0)] == [0]
    line.add(waiting(1, 9000, priority=0, arrived_s=2.0), 0)
    line.add(waiting(2, 20, priority=0, arrived_s=2.0), 0)
    line.add(waiting(3, 20, priority=2, arrived_s=2.0), 16)
    assert set(order_of(line)[:2]) == {1, 2}
    assert order_of(line)[2:] == [-1, 0, 3]


def test_priority_is_ignored_without_priority_scheduling():
    rule = AffinityRule(hit_weight=0.0, age_credit=0.0)
    line = line_of(rule, (waiting(0, 50, priority=-5), 0), (waiting(1, 20, priority=7), 0))
    assert order_of(line) == [1, 0]


# -- ageing ----------------------------------------------------------------------------------------

_ARRIVALS = st.lists(
    st.tuples(st.integers(2, 20_000), st.floats(0, 1), st.integers(0, 5_000)),
    min_size=2,
    max_size=14,
)


@given(
    arrivals=_ARRIVALS,
    credit=st.sampled_from([0.05, 0.25, 1.0, 3.0]),
    weight=st.sampled_from([0.0, 0.5, 50.0]),
)
def test_only_requests_that_arrive_soon_pass(arrivals, credit, weight):
    """With T the cost plus the worth of the hit that passes, in equivalent tokens."""
    rule = AffinityRule(age_credit=credit, hit_weight=weight, long_growth=0.0)
    line = AffinityLine(rule, PARITY)
    clock = 0.0
    for index, (tokens, part, gap) in enumerate(arrivals):
        clock += gap
        line.add(waiting(index, tokens, arrived_tokens=clock), int(part * tokens))
    line.advance(0.0, clock)
    ready = list(line.ready())
    assert len(ready) == len(arrivals)
    for place, entry in enumerate(ready):
        for ahead in ready[:place]:
            if ahead.order < entry.order:
                continue
            saved = PARITY.cost(0, ahead.hit_tokens) if ahead.hit_tokens else 0.0
            own = PARITY.cost(entry.hit_tokens, entry.uncached_tokens)
            most = (own + weight * saved) / credit
            assert ahead.arrived_tokens - entry.arrived_tokens <= most + 1e-6


@given(
    arrivals=st.lists(
        st.tuples(st.integers(2, 200_000), st.floats(0, 1), st.integers(0, 50_000)), max_size=12
    ),
    later=st.integers(0, 10**6),
    growth=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_long_prefills_age_faster(arrivals, later, growth):
    """At any time the line is in the order of the score that the module's text gives."""
    rule = AffinityRule(age_credit=0.3, hit_weight=2.0, long_tokens=1000, long_growth=growth)
    line = AffinityLine(rule, PARITY)
    clock, entries = 0.0, []
    for index, (tokens, part, gap) in enumerate(arrivals):
        clock += gap
        line.advance(0.0, clock)
        entries.append(waiting(index, tokens, arrived_tokens=clock))
        line.add(entries[-1], int(part * tokens))
    clock += later
    line.advance(0.0, clock)

    def score(entry: Waiting) -> float:
        rate = rule.rate(rule.rate_index(entry.uncached_tokens))
        saved = PARITY.cost(0, entry.hit_tokens)
        aged = 0.3 * rate * (clock - entry.arrived_tokens)
        return PARITY.cost(entry.hit_tokens, entry.uncached_tokens) - 2.0 * saved - aged

    scores = [score(entry) for entry in line.ready()]
    assert len(scores) == len(arrivals)
    for first, second in zip(scores, scores[1:], strict=False):
        assert first <= second + 1e-6 * max(1.0, abs(first), abs(second))


@given(tokens=st.integers(1, 10**7), growth=st.floats(0, 1), long_tokens=st.integers(1, 10**6))
def test_the_rate_of_a_length(tokens, growth, long_tokens):
    rule = AffinityRule(long_tokens=long_tokens, long_growth=growth)
    rate = rule.rate(rule.rate_index(tokens))
    exact = min(4.0, max(1.0, tokens / long_tokens) ** growth)
    # A few lines stand for all rates: none is off by more than one line.
    assert 1.0 <= rate <= exact * 1.0001
    assert exact <= rate * 2 ** (1 / 4) * 1.0001
    assert rule.rate(rule.rate_index(tokens + 1)) >= rate


def test_without_credit_nothing_ages_and_with_much_it_is_fcfs():
    requests = [(waiting(i, 5000 - i, arrived_tokens=10.0 * i), 0) for i in range(6)]
    rule = AffinityRule(age_credit=0.0, hit_weight=0.0)
    assert order_of(line_of(rule, *requests)) == [5, 4, 3, 2, 1, 0]
    again = [(waiting(i, 5000 - i, arrived_tokens=10.0 * i), 0) for i in range(6)]
    assert order_of(line_of(replace(rule, age_credit=1e6), *again)) == [0, 1, 2, 3, 4, 5]


def test_a_cold_request_is_served_under_an_endless_warm_stream():
    """One start per step, a new warm request per step: the cold one waits its bound, not longer."""
    rule = AffinityRule(age_credit=0.25, hit_weight=1.0, max_wait_s=1e9)
    line = AffinityLine(rule, LINEAR)
    line.add(waiting(0, 4000), 0)
    clock, order = 0.0, 0
    while line:
        order += 1
        line.add(waiting(order, 1100, arrived_tokens=clock), 1000)
        line.advance(0.0, clock)
        first = next(line.ready())
        line.remove(first)
        clock += first.uncached_tokens
        if first.order == 0:
            break
        assert clock < (4000 + 1000) / 0.25 + 100, "passed beyond the ageing bound"
    assert clock >= (4000 - 100) / 0.25, "the stream never passed it"


# -- the hard limit --------------------------------------------------------------------------------


def test_overdue_exactly_at_the_limit_and_in_order_of_arrival():
    line = line_of(
        AffinityRule(max_wait_s=10.0),
        (waiting(0, 100, arrived_s=3.0), 90),
        (waiting(1, 9000, arrived_s=0.0), 0),
        (waiting(2, 50, arrived_s=5.0), 40),
    )
    assert line.advance(9.999, 0.0) == []
    assert [e.order for e in line.advance(10.0, 0.0)] == [1]
    assert order_of(line)[0] == 1
    assert [e.order for e in line.advance(13.0, 0.0)] == [0]
    assert order_of(line) == [0, 1, 2], "overdue requests go by arrival"


def test_a_parked_request_comes_back_when_it_is_overdue():
    slow, other = waiting(0, 9000), waiting(1, 10, arrived_s=5.0)
    line = line_of(AffinityRule(max_wait_s=10.0), (slow, 0), (other, 8))
    line.park(slow)
    assert order_of(line) == [1] and line.num_parked == 1 and len(line) == 2
    assert line.advance(10.0, 0.0) == [slow]
    assert not line.is_parked(slow)
    assert slow.group == OVERDUE
    assert order_of(line) == [0, 1]


def test_a_request_that_was_skipped_keeps_its_age():
    """The engine pops a request to skip it and puts the same one back."""
    entry, late = waiting(0, 9000), waiting(1, 10, arrived_s=9.0)
    line = line_of(AffinityRule(max_wait_s=10.0), (entry, 0), (late, 8))
    for _ in range(50):
        line.remove(entry)
        line.add(entry, 0)
    assert line.advance(10.0, 0.0) == [entry]
    line.remove(entry)
    line.add(entry, 0)
    assert order_of(line) == [0, 1]
    assert line.advance(11.0, 0.0) == []


def test_overload_degrades_to_order_of_arrival():
    rng = random.Random(5)
    line = AffinityLine(AffinityRule(max_wait_s=5.0), PARITY)
    for i in range(40):
        tokens = rng.randrange(10, 9000)
        line.add(waiting(i, tokens, arrived_s=i / 10), rng.randrange(tokens))
    line.advance(100.0, 1e6)
    assert order_of(line) == list(range(40))


_OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "add", "preempt", "advance", "advance", "start", "start"]
            + ["park", "unpark", "rescore", "remove", "skip"]
        ),
        st.integers(0, 30),
        st.integers(2, 9000),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(
    ops=_OPS,
    mode=st.sampled_from([COST, LONGEST_HIT, HRRN, FCFS]),
    by_priority=st.booleans(),
    max_wait_s=st.sampled_from([1.0, 7.0, 40.0]),
)
def test_random_histories(ops, mode, by_priority, max_wait_s):
    """Nothing lost, nothing twice, sums right; only what may go before an overdue request does."""
    rule = AffinityRule(mode=mode, by_priority=by_priority, max_wait_s=max_wait_s, long_tokens=500)
    line = AffinityLine(rule, PARITY)
    inside: dict[int, Waiting] = {}
    now, clock, arrivals, preemptions = 0.0, 0.0, 0, 0

    def pick(which: int, *, parked: bool | None = None) -> Waiting | None:
        known = [e for e in inside.values() if parked is None or line.is_parked(e) is parked]
        return known[which % len(known)] if known else None

    def priority(entry: Waiting) -> int:
        return entry.priority if by_priority else 0

    for name, which, amount in ops:
        if name in ("add", "preempt"):
            preempted = name == "preempt"
            if preempted:
                preemptions -= 1
            else:
                arrivals += 1
            entry = waiting(
                preemptions if preempted else arrivals,
                amount,
                arrived_s=now,
                arrived_tokens=clock,
                priority=which % 3,
                group=PREEMPTED if preempted else NORMAL,
            )
            line.add(entry, which * 100)
            inside[entry.order] = entry
        elif name == "advance":
            now, clock = now + which / 10, clock + amount
            for entry in line.advance(now, clock):
                assert entry.group == OVERDUE and not line.is_parked(entry)
        elif name == "start":
            head = next(line.ready(), None)
            if head is None:
                continue
            if mode != FCFS:
                for entry in inside.values():
                    late = now - entry.arrived_s >= max_wait_s and entry.group == OVERDUE
                    if entry is head or not late or priority(entry) > priority(head):
                        continue
                    ahead = priority(head) < priority(entry) or head.group == PREEMPTED
                    assert ahead or (head.group == OVERDUE and head.order < entry.order)
            line.remove(head)
            del inside[head.order]
        elif name == "remove" and (entry := pick(which)) is not None:
            line.remove(entry)
            line.remove(entry)  # gone already: no error
            del inside[entry.order]
        elif name == "skip" and (entry := pick(which, parked=False)) is not None:
            line.remove(entry)
            line.add(entry, entry.hit_tokens)
        elif name == "rescore" and (entry := pick(which)) is not None:
            entry.num_tokens = max(entry.num_tokens, amount)
            line.rescore(entry, amount // 2)
        elif name == "park" and (entry := pick(which, parked=False)) is not None:
            if entry.group == NORMAL:
                line.park(entry)
        elif name == "unpark" and (entry := pick(which, parked=True)) is not None:
            line.unpark(entry)
        assert len(line) == len(inside)
        assert {e.order for e in line} == set(inside)
        assert len(list(line)) == len(inside)
        assert line.uncached_tokens == sum(e.uncached_tokens for e in inside.values())
        order = [(priority(e), e.group if mode != FCFS else NORMAL) for e in line.ready()]
        assert order == sorted(order)
        oldest = line.oldest()
        assert (oldest.order if oldest else None) == (min(inside) if inside else None)
    # Whatever is overdue now has come back, parked or not.
    line.advance(now + 1000.0, clock)
    if mode != FCFS:
        assert line.num_parked == 0
        groups = [e.group for e in line.ready()]
        assert NORMAL not in groups


def test_requests_that_are_skipped_at_every_step_do_not_pile_up():
    line = AffinityLine(AffinityRule(), PARITY)
    entries = [waiting(i, 100 + i) for i in range(20)]
    for entry in entries:
        line.add(entry, 0)
    for _ in range(500):
        for entry in entries[:15]:
            line.remove(entry)
        for entry in entries[:15]:
            line.add(entry, 0)
    assert len(line._arrivals) <= 200
    assert len(line._deadlines) <= 200
    assert len(line) == 20
