# SPDX-License-Identifier: Apache-2.0
"""Dedupe and lanes on vLLM's scheduler: who computes what, who waits, and that nobody is stuck."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.lanes import Lane
from tests.sched.harness import (
    BASES,
    FULL,
    HYBRID,
    KV,
    WIDE_SWA,
    AsyncScheduler,
    Engine,
    Scheduler,
    empty,
    parked,
    sched_settings,
    unique,
)

#: the leader is long, so it leaves room in each step while shorter work waits
ROOMY = (Lane(300, 8),)


def roomy(base: type[Any] = Scheduler, **kwargs: Any) -> Engine:
    """An engine whose long prefills take half of a step of 128 tokens while shorter work waits."""
    values: dict[str, Any] = {"max_batched_tokens": 128, "max_requests": 8, **kwargs}
    given_settings = values.pop("settings", sched_settings(lanes=ROOMY))
    return Engine(given_settings, base=base, **values)


# -- leaders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_only_the_leader_of_identical_cold_prompts_computes(base):
    engine = roomy(base, blocks=1000)
    leader = engine.submit(unique(1, 1000))
    engine.step()
    followers = [engine.submit(unique(1, 1000)[:290] + unique(2 + i, 6)) for i in range(6)]
    other = engine.submit(unique(30, 40), 3)
    engine.run()
    assert engine.computed[leader] == 1000
    # 288 of 296 tokens come from the leader.
    assert [engine.computed[name] for name in followers] == [8] * 6
    assert engine.computed[other] == 40 + 2
    assert engine.started[:2] == [leader, other], "there was room for other work meanwhile"
    assert engine.counters("scheduler_deferrals")["duplicate"] == 6
    empty(engine)


@pytest.mark.parametrize("base", BASES)
def test_without_dedupe_they_all_compute(base):
    engine = roomy(base, blocks=1000, settings=sched_settings(lanes=ROOMY, dedupe=False))
    engine.submit(unique(1, 1000))
    engine.step()
    followers = [engine.submit(unique(1, 1000)[:290] + unique(2 + i, 6)) for i in range(3)]
    engine.run()
    assert sum(engine.computed[name] for name in followers) > 3 * 8
    assert engine.counters("scheduler_deferrals")["duplicate"] == 0


def test_followers_start_when_the_leader_has_passed_what_they_share():
    """Once wrong: parked work did not count as shorter work, so the leader took whole steps; in
    a step without room the queue was not asked and nobody was released until the leader's end.
    """
    engine = roomy(blocks=1000)
    leader = engine.submit(unique(1, 4000))
    engine.step()
    short = engine.submit(unique(1, 4000)[:200] + unique(2, 6))
    far = engine.submit(unique(1, 4000)[:290] + unique(3, 6))
    request = engine.known[leader]
    while far not in engine.started:
        engine.step()
        assert not request.is_finished()
    computed = request.num_computed_tokens
    assert engine.started == [leader, short, far]
    assert (engine.hits[short], engine.hits[far]) == (192, 288)
    assert computed < 1000, "they did not wait for the leader's end"
    engine.run()


def test_followers_of_a_preempted_leader_go_on():
    engine = roomy(blocks=1000)
    leader = engine.submit(unique(1, 1000), 4)
    engine.step()
    followers = [engine.submit(unique(1, 1000)[:290]) for _ in range(3)]
    engine.step()
    assert engine.queue.line.num_parked == 3
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert set(followers) | {leader} <= engine.finished
    empty(engine)


def test_an_overdue_follower_stops_waiting():
    """Once wrong: nothing grew overdue while a leader took whole steps."""
    engine = roomy(blocks=1000, settings=sched_settings(lanes=ROOMY, max_wait_s=5.0))
    engine.submit(unique(1, 4000))
    engine.step(1.0)
    follower = engine.submit(unique(1, 4000)[:2000])
    engine.submit(unique(2, 40), 50)
    while follower not in engine.started:
        engine.step(1.0)
        assert engine.now_s <= 10.0
    assert engine.now_s >= 5.0
    assert engine.counters("scheduler_admissions")["max_wait"] == 1
    engine.run()


def test_urgent_requests_do_not_wait_for_less_urgent_leaders():
    engine = roomy(blocks=1000, policy="priority")
    engine.submit(unique(1, 2000), priority=5)
    engine.step()
    same = engine.submit(unique(1, 2000)[:290], priority=5)
    urgent = engine.submit(unique(1, 2000)[:290], priority=1)
    engine.step()
    assert urgent in engine.started and same not in engine.started


def test_requests_that_do_not_read_the_cache_do_not_wait():
    from vllm import SamplingParams

    engine = roomy(blocks=1000)
    engine.submit(unique(1, 1000))
    engine.step()
    params = SamplingParams(max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True)
    alone = engine.submit(unique(1, 1000)[:290], sampling_params=params)
    engine.step()
    assert alone in engine.started


def test_another_salt_or_adapter_is_another_prefix():
    from types import SimpleNamespace

    engine = roomy(blocks=1000)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=4)
    engine.submit(unique(1, 1000))
    engine.step()
    salted = engine.submit(unique(1, 1000)[:290], cache_salt="x")
    adapted = engine.submit(unique(1, 1000)[:290], lora=1)
    plain = engine.submit(unique(1, 1000)[:290])
    engine.step()
    while not parked(engine):
        engine.step()
    assert parked(engine) == [plain]
    engine.run()
    assert engine.hits[salted] == engine.hits[adapted] == 0
    assert engine.hits[plain] == 288


@pytest.mark.parametrize(
    ("geometry", "kv", "interval"),
    [(HYBRID, KV, 0), (HYBRID, None, 0), (HYBRID, None, None), (HYBRID, None, 128)],
)
def test_followers_wait_only_for_what_the_leader_leaves_behind(geometry, kv, interval):
    """With sliding windows only some positions can be resumed from; none means no wait in vain."""
    engine = roomy(blocks=2000, geometry=geometry, kv=kv, retention_interval=interval)
    leader = engine.submit(unique(1, 1000))
    engine.step()
    follower = engine.submit(unique(1, 1000)[:290] + unique(2, 6))
    waited, before = False, 0
    for _ in range(200):
        if follower in engine.started:
            break
        engine.step()
        if parked(engine) and not waited:
            waited = True
            before = next(e.hit_tokens for e in engine.queue.line)
    engine.run()
    assert {leader, follower} <= engine.finished
    if waited:
        assert engine.hits[follower] > before, "it waited in vain"
    empty(engine)


# -- never stuck, nothing lost ---------------------------------------------------------------------

_OPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 6 + ["step"] * 8 + ["abort", "reset", "preempt-all"]),
        st.integers(0, 9),
        st.integers(1, 300),
    ),
    min_size=10,
    max_size=70,
)
_LANES = st.sampled_from(
    [
        (),
        (Lane(64, 1),),
        (Lane(100, 2), Lane(200, 1)),
        (Lane(1, 1),),
    ]
)
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"geometry": FULL, "blocks": 44},
    "hybrid": {"geometry": HYBRID, "blocks": 80},
    "kv": {"geometry": HYBRID, "blocks": 80, "kv": KV},
    "wide": {"geometry": WIDE_SWA, "blocks": 70, "retention_interval": None},
    "priority": {"geometry": FULL, "blocks": 44, "policy": "priority"},
    "async-depth-2": {"geometry": FULL, "blocks": 44, "base": AsyncScheduler, "depth": 2},
    "async-kv": {"geometry": HYBRID, "blocks": 80, "kv": KV, "base": AsyncScheduler},
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(max_examples=40)
@given(
    ops=_OPS,
    lanes=_LANES,
    mode=st.sampled_from(["cost", "longest-hit", "hrrn"]),
    share=st.sampled_from([0.1, 0.5, 0.9]),
    scan=st.sampled_from([1, 2, 64]),
    max_wait_s=st.sampled_from([3.0, 50.0]),
    budget=st.sampled_from([48, 128, 256]),
)
def test_every_request_ends(shape, ops, lanes, mode, share, scan, max_wait_s, budget):
    engine = Engine(
        sched_settings(
            lanes=lanes, mode=mode, lane_share=share, scan_requests=scan, max_wait_s=max_wait_s
        ),
        max_requests=4,
        max_batched_tokens=budget,
        **SHAPES[shape],
    )
    aborted: set[str] = set()
    for name, which, amount in ops:
        if name == "arrive":
            shared = unique(1 + which % 2, 64 * (which % 5))
            prompt = shared + unique(100 + len(engine.known), amount)
            engine.submit(prompt, 1 + 4 * (which % 4), priority=which % 3)
        elif name == "abort":
            live = [n for n, r in engine.known.items() if not r.is_finished()]
            if live:
                aborted.add(live[which % len(live)])
                engine.abort(live[which % len(live)])
        elif name == "step":
            engine.step(1.0)
        else:
            engine.scheduler.reset_prefix_cache(reset_running_requests=name == "preempt-all")
        running = engine.running
        assert len(set(running)) == len(running)
        assert not set(running) & set(engine.waiting)
        live = {n for n, r in engine.known.items() if not r.is_finished()}
        assert set(running) | set(engine.waiting) == live, "a request was lost"
    engine.run(seconds=1.0)
    for name, request in engine.known.items():
        assert request.is_finished(), name
        if name in aborted:
            continue
        assert request.num_output_tokens == request.max_tokens
        starts = engine.started.count(name)
        # With steps in flight a preempted request may end on an output that was under way.
        assert starts == 1 + request.num_preemptions or (
            engine.depth > 1 and starts == request.num_preemptions
        )
        needed = request.num_tokens - 1 - engine.hits[name]
        if request.num_preemptions == 0 and engine.depth == 1:
            assert engine.computed[name] == needed
        elif starts == 1 + request.num_preemptions:
            assert engine.computed[name] >= needed
    empty(engine)


# -- lanes -----------------------------------------------------------------------------------------


def left(request: Any) -> int:
    return request.num_tokens - request.num_computed_tokens


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(20, 700), min_size=3, max_size=14),
    lanes=st.sampled_from([(Lane(100, 1),), (Lane(100, 2),), (Lane(100, 3), Lane(300, 1))]),
    base=st.sampled_from(BASES),
)
def test_the_caps_hold(lengths, lanes, base):
    """Without overdue or preempted requests no lane ever holds more than it may."""
    engine = Engine(
        sched_settings(lanes=lanes, max_wait_s=1e9),
        base=base,
        blocks=1500,
        max_batched_tokens=200,
        max_requests=8,
    )
    for i, length in enumerate(lengths):
        engine.submit(unique(1 + i, length), 3)
    for _ in range(1000):
        if not engine.scheduler.has_unfinished_requests():
            break
        before = {n: left(engine.known[n]) for n in engine.running}
        engine.step()
        for lane in lanes:
            had = {n for n, tokens in before.items() if tokens > lane.over_tokens}
            have = {n for n in engine.running if left(engine.known[n]) > lane.over_tokens}
            assert len(have) <= lane.max_prefills
            if len(had) == lane.max_prefills:
                assert have <= had
    assert len(engine.finished) == len(lengths)
    assert not any(r.num_preemptions for r in engine.known.values())
    empty(engine)


def test_a_request_held_by_a_lane_starts_when_it_is_overdue():
    engine = Engine(
        sched_settings(lanes=(Lane(100, 1),), max_wait_s=5.0), blocks=1500, max_batched_tokens=128
    )
    # vLLM's own limit leaves room in each step.
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 64
    engine.submit(unique(1, 5000))
    engine.step(1.0)
    held = engine.submit(unique(2, 900))
    engine.submit(unique(3, 50), 60)
    for _ in range(20):
        engine.step(1.0)
        if held in engine.started:
            break
    assert 5.0 < engine.now_s <= 9.0
    assert engine.counters("scheduler_deferrals")["lane"] == 1
    assert engine.counters("scheduler_admissions")["max_wait"] == 1


def test_urgent_long_work_is_not_held_by_less_urgent_long_work():
    engine = Engine(
        sched_settings(lanes=(Lane(100, 1),)), blocks=1500, max_batched_tokens=128,
        policy="priority",
    )  # fmt: skip
    engine.submit(unique(1, 5000), priority=5)
    engine.step()
    held = engine.submit(unique(2, 900), priority=5)
    urgent = engine.submit(unique(3, 900), priority=1)
    engine.submit(unique(4, 50), 10, priority=5)
    for _ in range(3):
        engine.step()
    assert urgent in engine.started
    assert held not in engine.started


@pytest.mark.parametrize("base", BASES)
def test_a_short_request_beside_a_prefill_of_a_million_tokens(base):
    engine = Engine(
        sched_settings(lanes=(Lane(65_536, 2), Lane(262_144, 1)), lane_share=0.5),
        base=base,
        blocks=70_000,
        max_batched_tokens=8192,
        max_model_len=1_048_576,
    )
    million = engine.submit(range(1_000_000))
    for _ in range(3):
        output = engine.step()
        assert output.num_scheduled_tokens == {million: 8192}, "nobody else: the whole step"
    short = engine.submit(unique(2, 6000), 3)
    output = engine.step()
    assert output.num_scheduled_tokens == {million: 4096, short: 4096}
    output = engine.step()
    assert output.num_scheduled_tokens[short] == 6000 - 4096
    assert output.num_scheduled_tokens[million] >= 4096
    output = engine.step()
    # The short one decodes; one token is all that it needs.
    assert output.num_scheduled_tokens == {million: 8191, short: 1}
    for _ in range(2):
        engine.step()
    assert short in engine.finished
    assert engine.step().num_scheduled_tokens == {million: 8192}


def test_two_long_prefills_share_their_part():
    engine = Engine(
        sched_settings(lanes=(Lane(1000, 2),), lane_share=0.5, dedupe=False),
        blocks=3000,
        max_batched_tokens=512,
    )
    first, second = engine.submit(unique(1, 4000)), engine.submit(unique(2, 4000))
    engine.step()
    engine.step()
    short = engine.submit(unique(3, 900))
    for _ in range(4):
        output = engine.step()
        tokens = output.num_scheduled_tokens
        if short in engine.finished:
            break
        long = tokens.get(first, 0) + tokens.get(second, 0)
        assert long <= 256
        assert tokens.get(short, 0) > 0


def test_two_long_prefills_that_start_in_one_step_leave_room():
    """The share is for all prefills of the lanes together."""
    engine = Engine(
        sched_settings(lanes=(Lane(100, 4),), lane_share=0.5, age_credit=1e6, hit_weight=0.0),
        blocks=3000,
        max_batched_tokens=512,
    )
    long = [engine.submit(unique(1 + i, 4000)) for i in range(2)]
    engine.queue.processed(100.0)
    short = engine.submit(unique(9, 90))
    tokens = engine.step().num_scheduled_tokens
    # The second one gets a block all the same: a request that starts computes something.
    assert sum(tokens.get(name, 0) for name in long) <= 512 - 90 + 16
    assert tokens.get(short, 0) >= 90 - 16


def test_no_lanes_no_limit():
    engine = Engine(sched_settings(lanes=()), blocks=3000, max_batched_tokens=512)
    long = engine.submit(unique(1, 8000))
    engine.step()
    engine.submit(unique(2, 90))
    assert engine.step().num_scheduled_tokens == {long: 512}


def test_a_slot_that_gets_free_is_used_in_the_next_step():
    """Shorter work that could not start gets room again as soon as there is a slot."""
    engine = Engine(
        sched_settings(lanes=(Lane(500, 1),), lane_share=0.5),
        blocks=3000,
        max_batched_tokens=256,
        max_requests=2,
    )
    long = engine.submit(unique(1, 8000))
    decode = engine.submit(unique(2, 10), 4)
    engine.step()
    engine.step()
    waiting = engine.submit(unique(3, 60))
    while decode not in engine.finished:
        engine.step()
        assert waiting not in engine.started
    tokens = engine.step().num_scheduled_tokens
    assert tokens.get(waiting) == 60, tokens
    assert tokens[long] > 0
