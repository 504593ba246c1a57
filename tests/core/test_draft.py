# SPDX-License-Identifier: Apache-2.0
"""Draft rules: layers, limits, bins, acceptance estimates, step costs and draft lengths."""

from __future__ import annotations

import random
from itertools import product
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core import acceptance as estimates
from mimo_plugin.core.acceptance import (
    DecodeTimes,
    EngineAcceptance,
    RequestAcceptance,
    StepCost,
)
from mimo_plugin.core.draft import (
    HYSTERESIS,
    OUTPUT_BINS,
    PROBE_STEPS,
    UNIFORM_MARGIN,
    LengthPlanner,
    check_steps,
    draft_room,
    layer_of_step,
    output_bin,
    plan_lengths,
)

# --- layers, limits, bins -------------------------------------------------------------------


def test_each_step_has_a_layer_of_its_own():
    assert [layer_of_step(step, 3) for step in range(3)] == [0, 1, 2]
    for step in (-1, 3):
        with pytest.raises(ValueError, match=f"draft step {step} has no layer"):
            layer_of_step(step, 3)


@pytest.mark.parametrize(("k", "layers"), [(1, 1), (3, 3), (2, 3)])
def test_lengths_that_the_layers_serve(k, layers):
    check_steps(k, layers)


@pytest.mark.parametrize(
    ("k", "layers", "said"),
    [
        (4, 3, "found 4; needed: 1 to 3.*fix: set num_speculative_tokens to 3"),
        (0, 3, "found 0; needed: 1 to 3.*fix: set num_speculative_tokens to 1"),
        (3, 0, "found no draft layer.*fix: use a checkpoint with MTP layers"),
    ],
)
def test_lengths_that_they_do_not_serve(k, layers, said):
    with pytest.raises(ValueError, match=said) as error:
        check_steps(k, layers)
    assert "\n" not in str(error.value)


def test_room_ends_at_the_limit():
    assert draft_room(10_000_000, 3, None) == 3
    assert [draft_room(n, 3, 100) for n in (0, 97, 98, 99, 100, 250)] == [3, 3, 2, 1, 0, 0]


def test_output_bins():
    bins = [output_bin(index) for index in (0, 127, 128, 255, 256, 100_000)]
    assert bins == ["0-127", "0-127", "128-255", "128-255", "256+", "256+"]
    assert OUTPUT_BINS == ("0-127", "128-255", "256+")


# --- acceptance -----------------------------------------------------------------------------


def rounds(rates: list[float], drafted: int, count: int, seed: int = 0):
    """``count`` random rounds of acceptance by conditional ``rates``."""
    draw = random.Random(seed)
    for _ in range(count):
        accepted = 0
        while accepted < drafted and draw.random() < rates[accepted]:
            accepted += 1
        yield accepted


def test_the_engine_s_estimate_converges():
    engine = EngineAcceptance(3)
    assert [engine.rate(j) for j in range(3)] == [estimates.START_RATE] * 3
    for accepted in rounds([0.82, 0.75, 0.4], 3, 20_000):
        engine.observe(3, accepted)
    for j, rate in enumerate([0.82, 0.75, 0.4]):
        assert abs(engine.rate(j) - rate) < 0.06
    # Another workload is followed, position by position.
    for accepted in rounds([0.2, 0.9, 0.9], 1, 5_000):
        engine.observe(1, accepted)
    assert abs(engine.rate(0) - 0.2) < 0.06
    assert abs(engine.rate(1) - 0.75) < 0.06, "a position that is not drafted keeps what it had"


def test_a_request_starts_at_the_engine_s_estimate_and_departs():
    engine = EngineAcceptance(2)
    for _ in range(5000):
        engine.observe(2, 2)
    request = RequestAcceptance(engine)
    assert request.chances(2) == pytest.approx([engine.rate(0), engine.rate(0) * engine.rate(1)])
    assert request.chances(0) == []
    for _ in range(40):
        request.observe(2, 0)
    assert request.rate(0) < 0.2 and engine.rate(0) > 0.9
    # Position 1 was never reached: it is as the engine's.
    assert isclose(request.rate(1), engine.rate(1))
    # Cut to no drafts at all, it comes back to the engine's estimate, and so to another try.
    for _ in range(600):
        request.observe(0, 0)
    assert request.rate(0) > 0.8


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (4, 0), (1, -1)])
def test_impossible_rounds_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="accepted"):
        RequestAcceptance(EngineAcceptance(3)).observe(drafted, accepted)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=200))
def test_chances_are_probabilities_and_never_rise(history):
    engine = EngineAcceptance(3)
    request = RequestAcceptance(engine)
    for drafted, accepted in history:
        request.observe(drafted, min(drafted, accepted))
        chances = request.chances(3)
        assert all(0 < c < 1 for c in chances)
        assert chances == sorted(chances, reverse=True)


# --- step cost ------------------------------------------------------------------------------


def learn(times: DecodeTimes, steps, time_s, noise: float = 0.0, seed: int = 0) -> None:
    draw = random.Random(seed)
    for tokens, shape in steps:
        times.observe(tokens, time_s(tokens, shape) * (1 + draw.uniform(-noise, noise)), shape)


def line(tokens: int, shape: int | None) -> float:
    return 8e-3 + 0.05e-3 * tokens


def mixed_batches(count: int, seed: int = 1):
    draw = random.Random(seed)
    for _ in range(count):
        requests, length = draw.randint(1, 60), draw.choice([0, 1, 3, 3, 3])
        yield requests * (1 + length), length


def test_nothing_is_known_before_the_first_steps_nor_without_spread():
    times = DecodeTimes(3)
    learn(times, [(40, 3)] * 500, line, 0.02)
    assert times.cost() is None
    learn(times, [(10, 0)], line)
    cost = times.cost()
    assert cost is not None
    for tokens in (10, 40):
        assert cost.time_s(tokens, 3) == pytest.approx(line(tokens, 3), rel=0.1)
    assert DecodeTimes(3).spread == 0


def test_the_line_is_found_through_noise_slow_first_steps_and_outliers():
    times = DecodeTimes(3)
    for tokens in (4, 8, 16):
        times.observe(tokens, 5.0, 3)  # compilation
    learn(times, mixed_batches(1500), line, 0.05)
    for index, (tokens, shape) in enumerate(mixed_batches(600, seed=2)):
        times.observe(tokens, line(tokens, shape) * (40 if index % 50 == 0 else 1), shape)
    cost = times.cost()
    for tokens in (8, 60, 200):
        for shape in (0, 1, 3):
            assert cost.time_s(tokens, shape) == pytest.approx(line(tokens, shape), rel=0.12)


def test_rare_short_steps_tell_what_a_token_costs():
    """A probe in 64 steps is far off what the flat line expects, and no outlier."""
    times = DecodeTimes(3)
    steps = [(12, 0) if index % PROBE_STEPS == 0 else (48, 3) for index in range(130, 730)]
    learn(times, steps, lambda tokens, shape: 6e-3 + 1e-3 * tokens, 0.02)
    cost = times.cost()
    for tokens, shape in ((12, 0), (48, 3)):
        assert cost.time_s(tokens, shape) == pytest.approx(6e-3 + 1e-3 * tokens, rel=0.05)


def test_a_change_is_followed():
    times = DecodeTimes(3)
    learn(times, mixed_batches(1000), line, 0.02)
    learn(times, mixed_batches(3000, seed=3), lambda t, s: 2 * line(t, s), 0.02)
    cost = times.cost()
    for tokens in (10, 100):
        assert cost.time_s(tokens, 3) == pytest.approx(2 * line(tokens, 3), rel=0.12)


def test_a_slow_shape_has_its_factor():
    times = DecodeTimes(3)
    learn(times, mixed_batches(2000), lambda t, s: line(t, s) * (1.5 if s == 1 else 1.0), 0.02)
    cost = times.cost()
    assert cost.time_s(60, 1) / cost.time_s(60, 3) == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (-1, 1.0), (5, 0.0), (5, 1e9), (5, float("nan"))]
)
def test_senseless_steps_are_ignored(tokens, seconds):
    times = DecodeTimes(3)
    for _ in range(100):
        times.observe(tokens, seconds, 3)
    assert times.spread == 0 and times.cost() is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 500),
            st.floats(1e-5, 50, allow_nan=False),
            st.sampled_from([None, 0, 1, 2, 3, 7]),
        ),
        max_size=120,
    )
)
def test_a_cost_is_always_positive_and_grows_with_tokens(steps):
    times = DecodeTimes(3)
    for step in steps:
        times.observe(*step)
    cost = times.cost()
    if cost is not None:
        for shape in (None, 0, 3):
            seconds = [cost.time_s(tokens, shape) for tokens in (1, 10, 1000)]
            assert 0 < seconds[0] <= seconds[1] <= seconds[2]


# --- lengths --------------------------------------------------------------------------------


def chances_from(rates: list[float]) -> list[float]:
    out, chance = [], 1.0
    for rate in rates:
        chance *= rate
        out.append(chance)
    return out


_RATES = st.lists(st.floats(0, 1), max_size=3).map(chances_from)
_BATCH = st.lists(_RATES, min_size=1, max_size=4)
_COST = st.builds(
    StepCost,
    st.floats(1e-4, 1),
    st.floats(1e-6, 1),
    st.one_of(st.just(()), st.lists(st.floats(0.5, 2), min_size=5, max_size=5).map(tuple)),
)


def rate_of(lengths, chances, cost, other, shape) -> float:
    emitted = len(chances) + sum(sum(c[:n]) for c, n in zip(chances, lengths, strict=True))
    return emitted / cost.time_s(len(chances) + sum(lengths) + other, shape)


def uniform_rate(n, chances, cost, other) -> float:
    lengths = [min(n, len(c)) for c in chances]
    return rate_of(lengths, chances, cost, other, n)


@settings(max_examples=400)
@given(chances=_BATCH, cost=_COST, other=st.integers(0, 50))
def test_plans_equal_brute_force(chances, cost, other):
    plan = plan_lengths(chances, cost, other_tokens=other, uniform_margin=0.0)
    most = max(map(len, chances))
    uniform = max(uniform_rate(n, chances, cost, other) for n in range(most + 1))
    mixed = max(
        rate_of(lengths, chances, cost, other, None)
        for lengths in product(*(range(len(c) + 1) for c in chances))
    )
    assert plan.rate == pytest.approx(max(uniform, mixed))
    # The plan does what it promises.
    assert plan.rate == pytest.approx(rate_of(plan.lengths, chances, cost, other, plan.uniform))
    assert all(n <= len(c) for n, c in zip(plan.lengths, chances, strict=True))


@settings(max_examples=400)
@given(
    chances=_BATCH,
    cost=_COST,
    other=st.integers(0, 50),
    previous=st.one_of(st.none(), st.integers(0, 3)),
)
def test_no_plan_is_worse_than_no_drafts_or_full_ones(chances, cost, other, previous):
    plan = plan_lengths(chances, cost, other_tokens=other, previous=previous)
    most = max(map(len, chances))
    none, full = (uniform_rate(n, chances, cost, other) for n in (0, most))
    nearly = 1 - 1e-9
    assert plan.rate >= none * nearly
    assert plan.rate * (1 + HYSTERESIS) >= full * nearly
    if previous is None:
        assert plan.rate >= full * nearly
    if plan.uniform is None:
        best = max(uniform_rate(n, chances, cost, other) for n in range(most + 1))
        assert plan.rate * (1 + HYSTERESIS) > (1 + UNIFORM_MARGIN) * best * nearly
    else:
        assert plan.lengths == tuple(min(plan.uniform, len(c)) for c in chances)


def test_a_small_gain_changes_nothing():
    cost = StepCost(10e-3, 0.1e-3)
    chances = [chances_from([0.9, 0.5, 0.12])] * 4
    free = plan_lengths(chances, cost)
    rates = [uniform_rate(n, chances, cost, 0) for n in range(4)]
    close = [n for n in range(4) if n != free.uniform and rates[n] * 1.02 > free.rate]
    assert close, "the case is meant to have a close second"
    for n in close:
        assert plan_lengths(chances, cost, previous=n).uniform == n
    assert plan_lengths(chances, cost, previous=0).uniform == free.uniform


def test_large_batches_with_poor_drafts_get_none():
    cost = StepCost(10e-3, 0.2e-3)
    poor = chances_from([0.3, 0.3, 0.3])
    assert plan_lengths([poor], cost).uniform > 0
    assert plan_lengths([poor] * 200, cost).uniform == 0
    assert plan_lengths([chances_from([0.9] * 3)] * 200, StepCost(50e-3, 0.1e-3)).uniform == 3
    assert plan_lengths([], cost, previous=2).lengths == ()


def test_lengths_differ_only_where_that_gains_enough():
    good, bad = chances_from([0.95] * 3), chances_from([0.02] * 3)
    cost = StepCost(6e-3, 0.6e-3)
    plan = plan_lengths([good, bad] * 10, cost)
    assert plan.uniform is None and plan.lengths == (3, 0) * 10
    assert plan_lengths([good, bad] * 10, cost, uniform_margin=1.0).uniform is not None
    almost = chances_from([0.9] * 3)
    assert plan_lengths([good, almost] * 10, StepCost(30e-3, 0.5e-3)).uniform == 3


# --- planner --------------------------------------------------------------------------------


def drive(planner: LengthPlanner, requests, steps: int, rates, cost: StepCost, seed: int = 0):
    """Lengths of each step; time and acceptance are the world's."""
    draw = random.Random(seed)
    out = []
    for _ in range(steps):
        lengths = planner.plan(requests, [planner.k] * len(requests))
        shape = lengths[0] if len(set(lengths)) == 1 else None
        tokens = len(lengths) + sum(lengths)
        planner.times.observe(tokens, cost.time_s(tokens, shape), shape)
        for request, length in zip(requests, lengths, strict=True):
            accepted = 0
            while accepted < length and draw.random() < rates[accepted]:
                accepted += 1
            request.observe(length, accepted)
        out.append(lengths)
    return out


def test_full_length_until_a_step_s_cost_is_known():
    planner = LengthPlanner(3)
    requests = [planner.new_request() for _ in range(5)]
    for _ in range(PROBE_STEPS - 1):
        assert planner.plan(requests, [3, 3, 3, 2, 0]) == (3, 3, 3, 2, 0)
    assert planner.plan([], []) == ()


def test_probes_are_rare_and_reach_every_length():
    planner = LengthPlanner(3)
    requests = [planner.new_request() for _ in range(30)]
    poor, cost = [0.05, 0.05, 0.05], StepCost(5e-3, 0.5e-3)
    steps = drive(planner, requests, 40 * PROBE_STEPS, poor, cost)
    late = steps[20 * PROBE_STEPS :]
    probes = [lengths for lengths in late if any(lengths)]
    assert 10 <= len(probes) <= 0.02 * len(late)
    assert {length for lengths in probes for length in lengths} == {1, 2, 3}


def test_the_planner_comes_back_when_drafts_get_good():
    planner = LengthPlanner(3)
    requests = [planner.new_request() for _ in range(30)]
    cost = StepCost(15e-3, 0.2e-3)
    drive(planner, requests, 1000, [0.05, 0.05, 0.05], cost)
    assert planner.uniform == 0
    drive(planner, requests, 3000, [0.95, 0.95, 0.95], cost)
    assert planner.uniform == 3


def test_the_same_history_gives_the_same_lengths():
    def history():
        planner = LengthPlanner(3)
        requests = [planner.new_request() for _ in range(8)]
        return drive(planner, requests, 400, [0.7, 0.5, 0.3], StepCost(5e-3, 0.4e-3))

    assert history() == history()


@settings(max_examples=25)
@given(
    rates=st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3),
    batch=st.integers(1, 40),
    fixed_s=st.floats(1e-3, 30e-3),
    per_token_s=st.floats(0.01e-3, 1e-3),
)
def test_in_a_world_as_modelled_the_planner_is_near_the_best_length(
    rates, batch, fixed_s, per_token_s
):
    """Emitted tokens per second within 8 % of the best fixed length, probes included."""
    cost = StepCost(fixed_s, per_token_s)
    planner = LengthPlanner(3)
    requests = [planner.new_request() for _ in range(batch)]
    drive(planner, requests, 600, rates, cost)
    steps = drive(planner, requests, 600, rates, cost, seed=1)
    chances = chances_from(rates)
    emitted = sum(1 + sum(chances[:n]) for lengths in steps for n in lengths)
    seconds = sum(cost.time_s(len(lengths) + sum(lengths), None) for lengths in steps)
    best = max(uniform_rate(n, [chances] * batch, cost, 0) for n in range(4))
    assert emitted / seconds >= 0.92 * best
