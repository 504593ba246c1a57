# SPDX-License-Identifier: Apache-2.0
"""Nobody waits beyond the bound: adversarial arrivals on vLLM's scheduler with a clock of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.affinity import OVERDUE, PREEMPTED
from mimo_plugin.core.lanes import Lane
from tests.sched.harness import BASES, FULL, HYBRID, KV, Engine, empty, sched_settings, unique

MODES = ("cost", "longest-hit", "hrrn")


def watch_order(engine: Engine) -> list[str]:
    """Check each start against the requests that are overdue; the list collects violations."""
    queue = engine.queue
    wrong: list[str] = []
    original = queue.pop_request

    def pop_request() -> Any:
        now = queue.now_s()
        before = list(queue._entries.values())
        request = original()
        entry = queue._popped
        if entry is None or entry.group == PREEMPTED:
            return request
        for other in before:
            if other is entry or other.group == PREEMPTED:
                continue
            late = now - other.arrived_s >= queue.settings.max_wait_s
            more_urgent = queue.by_priority and entry.priority < other.priority
            first = entry.group == OVERDUE and entry.order < other.order
            lower = queue.by_priority and entry.priority == other.priority
            if late and not more_urgent and not first and (not queue.by_priority or lower):
                wrong.append(f"{request.request_id} before {other.item.request_id} at {now}")
        return request

    queue.pop_request = pop_request
    return wrong


_ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps until it arrives
        st.sampled_from(["warm", "cold", "long", "twin"]),
        st.integers(0, 400),
        st.integers(0, 2),
    ),
    min_size=4,
    max_size=40,
)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=40)
@given(
    arrivals=_ARRIVALS,
    mode=st.sampled_from(MODES),
    lanes=st.sampled_from([(), (Lane(100, 1),), (Lane(150, 2),)]),
    max_wait_s=st.sampled_from([2.0, 6.0, 15.0]),
    budget=st.sampled_from([64, 160]),
)
def test_nothing_passes_an_overdue_request(base, policy, arrivals, mode, lanes, max_wait_s, budget):
    """Warm, short, long and identical requests; parked behind leaders and held by lanes too."""
    engine = Engine(
        sched_settings(mode=mode, lanes=lanes, max_wait_s=max_wait_s, age_credit=0.001),
        base=base,
        policy=policy,
        geometry=FULL,
        blocks=70,
        max_batched_tokens=budget,
        max_requests=3,
    )
    engine.serve(unique(1, 200))
    wrong = watch_order(engine)
    for pause, kind, amount, priority in arrivals:
        for _ in range(pause):
            engine.step(1.0)
        if kind == "warm":
            prompt = unique(1, 200)[: 100 + amount // 4] + unique(50 + len(engine.known), 5)
        elif kind == "twin":
            prompt = unique(2, 100 + amount)
        else:
            prompt = unique(50 + len(engine.known), 20 + amount * (2 if kind == "long" else 1) // 2)
        engine.submit(prompt, 1 + amount % 6, priority=priority)
    engine.run(seconds=1.0)
    assert not wrong
    assert all(r.is_finished() for r in engine.known.values())
    empty(engine)


@pytest.mark.parametrize("mode", ["cost", "longest-hit"])
@pytest.mark.parametrize(
    "shape",
    [
        {"geometry": FULL, "blocks": 80},
        {"geometry": HYBRID, "blocks": 120, "kv": KV},
    ],
    ids=["full", "kv"],
)
def test_a_cold_request_under_an_endless_warm_stream(mode, shape):
    """Served when its waiting time is over, however many warm ones come; without it, never."""

    def first_step_of_cold(max_wait_s: float) -> float | None:
        engine = Engine(
            sched_settings(mode=mode, max_wait_s=max_wait_s, age_credit=0.0, lanes=()),
            max_requests=2,
            max_batched_tokens=96,
            **shape,
        )
        engine.serve(unique(1, 256))
        engine.submit(unique(1, 256) + unique(3, 10), 4)
        engine.submit(unique(1, 256) + unique(4, 10), 4)
        engine.step(1.0)
        arrived = engine.now_s
        cold = engine.submit(unique(2, 300), 2)
        for i in range(60):
            engine.submit(unique(1, 256) + unique(100 + 2 * i, 10), 4)
            engine.submit(unique(1, 256) + unique(101 + 2 * i, 10), 4)
            engine.step(1.0)
            if cold in engine.started:
                return engine.now_s - arrived
        return None

    assert first_step_of_cold(1e9) is None, "the stream is not endless enough"
    waited = first_step_of_cold(20.0)
    # After the limit it waits for a slot: at most as long as one warm request runs (4 steps) or,
    # where the pool is short, the two of them.
    assert waited is not None and 20.0 <= waited <= 20.0 + 10


@pytest.mark.parametrize("mode", ["cost", "hrrn"])
def test_ageing_alone_serves_a_cold_request(mode):
    """Within T / age_credit processed tokens after its arrival (T: cost and worth of the hits)."""
    credit, weight = 0.25, 1.0
    engine = Engine(
        sched_settings(
            mode=mode, max_wait_s=1e9, age_credit=credit, hit_weight=weight, lanes=(), dedupe=False
        ),
        blocks=200,
        max_requests=1,
        max_batched_tokens=512,
    )
    engine.serve(unique(1, 256))
    engine.submit(unique(1, 256) + unique(3, 10), 4)
    engine.step()
    start = engine.queue.clock_tokens
    cold = engine.submit(unique(2, 400), 2)
    cost = engine.settings.cost
    bound = (cost.cost(0, 400) + weight * cost.cost(0, 256)) / credit
    for i in range(400):
        # One more arrives at every step; all that arrive within the bound may go first.
        engine.submit(unique(1, 256) + unique(100 + i, 200), 1)
        engine.step()
        if cold in engine.started:
            break
    assert cold in engine.started
    passed = [n for n in engine.started[2:] if n != cold]
    assert passed, "not what is to be tested"
    assert len(passed) * 200 <= bound + engine.queue.clock_tokens - start


def test_overload_degrades_to_order_of_arrival():
    engine = Engine(
        sched_settings(max_wait_s=3.0, dedupe=True), blocks=200, max_requests=1,
        max_batched_tokens=64,
    )  # fmt: skip
    engine.serve(unique(1, 200))
    ids = []
    for i in range(30):
        kind = i % 3
        prompt = [unique(1, 200) + unique(20 + i, 5), unique(20 + i, 250), unique(9, 150)][kind]
        ids.append(engine.submit(prompt, 2))
    engine.now_s = 100.0
    engine.run(seconds=1.0)
    assert engine.started[1:] == ids
    assert engine.counters("scheduler_admissions") == {"arrival": 1, "max_wait": 30}
    empty(engine)


def test_an_overdue_request_that_does_not_fit_keeps_its_room():
    """Nothing else may use the blocks it waits for."""
    engine = Engine(
        sched_settings(max_wait_s=5.0, age_credit=0.0), blocks=40, max_requests=8,
        max_batched_tokens=256,
    )  # fmt: skip
    runner = engine.submit(unique(1, 330), 20)
    engine.step(1.0)
    engine.step(1.0)
    big = engine.submit(unique(2, 500), 1)
    engine.now_s += 6.0
    small = [engine.submit(unique(3 + i, 20), 1) for i in range(4)]
    for _ in range(6):
        engine.step(1.0)
        assert engine.started == [runner]
    assert engine.counters("scheduler_guard_steps")[""] >= 5
    engine.run(seconds=1.0)
    assert engine.started == [runner, big, *small]


def test_an_overdue_request_starts_in_a_step_that_a_long_prefill_would_fill():
    """A prefill of the lanes may not take whole steps while an overdue request waits for room.

    Stock lets it wait for the end of the prefill; also when it is long itself.
    """
    engine = Engine(
        sched_settings(max_wait_s=5.0, lanes=(Lane(300, 2),)), blocks=2000, max_batched_tokens=128
    )
    engine.submit(unique(1, 8000))
    engine.step(1.0)
    late = engine.submit(unique(2, 500))  # over the lane's limit itself, so not shorter work
    for _ in range(12):
        engine.step(1.0)
    assert late in engine.started
