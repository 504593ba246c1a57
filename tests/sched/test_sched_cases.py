# SPDX-License-Identifier: Apache-2.0
"""Cases of the scheduler area (shared/cases): B23, B24, B51, B70."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mimo_plugin.engines.vllm.sched.extension import extended
from mimo_plugin.engines.vllm.scheduler import base_class, extend
from tests.sched.harness import (
    BASES,
    FULL,
    AsyncScheduler,
    Engine,
    Scheduler,
    empty,
    sched_settings,
    snapshot,
    unique,
)

# -- B23: a scheduler class that loses the overlap -------------------------------------------------


@pytest.mark.parametrize(("overlap", "base"), [(True, AsyncScheduler), (False, Scheduler)])
def test_b23_the_base_follows_async_scheduling(overlap, base):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=overlap))
    assert base_class(config, None) is base
    ours = extend(base_class(config, None))
    assert issubclass(ours, base)
    assert issubclass(ours, AsyncScheduler) is overlap


def test_b23_every_method_of_async_scheduling_is_kept():
    ours = extend(AsyncScheduler)
    for name in ("_update_after_schedule", "_update_request_with_output"):
        assert getattr(ours, name) is getattr(AsyncScheduler, name)


def test_b23_a_users_own_class_is_extended_and_extending_twice_is_the_same():
    class Own(AsyncScheduler):
        pass

    ours = extend(Own)
    assert issubclass(ours, Own) and issubclass(ours, AsyncScheduler)
    assert extended(extended(Own)) is extended(Own)
    path = f"{AsyncScheduler.__module__}.{AsyncScheduler.__qualname__}"
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    assert base_class(config, path) is AsyncScheduler


@pytest.mark.parametrize("base", BASES)
def test_b23_the_built_scheduler_is_of_that_class(base):
    engine = Engine(sched_settings(), base=base)
    assert isinstance(engine.scheduler, base)
    assert isinstance(engine.scheduler, AsyncScheduler) is (base is AsyncScheduler)


def test_b23_steps_overlap_with_the_feature_as_without():
    """Two steps in flight: as many steps and tokens per step as stock."""

    def steps(settings):
        engine = Engine(settings, base=AsyncScheduler, depth=2)
        for i in range(6):
            engine.submit(unique(i, 100), 20)
        return engine.run(), engine.computed

    assert steps(None) == steps(sched_settings(mode="fcfs"))
    count, computed = steps(sched_settings())
    assert count == steps(None)[0]
    assert sum(computed.values()) == sum(steps(None)[1].values())


# -- B24: a cold request evicts what the next one would reuse --------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_b24_warm_first_cold_after_a_bounded_number_of_steps(base):
    """Pool nearly full, queue [cold, warm (2K shared)], one slot."""

    def drive(settings):
        engine = Engine(
            settings,
            base=base,
            geometry=FULL,
            blocks=150,  # 149 x 16 = 2,384 tokens
            max_requests=1,
            max_batched_tokens=512,
        )
        engine.serve(unique(1, 2048))
        cold = engine.submit(unique(2, 1000), 2)
        warm = engine.submit(unique(1, 2048) + unique(3, 40), 2)
        return engine, cold, warm, engine.run()

    engine, cold, warm, steps = drive(sched_settings())
    assert engine.started[1:] == [warm, cold]
    assert engine.hits[warm] == 2048
    assert engine.computed[warm] == 40 + 1
    assert steps <= 8
    empty(engine)
    stock, cold, warm, _ = drive(None)
    assert stock.started[1:] == [cold, warm], "stock has the problem"
    assert stock.hits[warm] < 2048


def test_b24_a_stream_of_warm_requests_does_not_keep_the_cold_one_waiting():
    """K steps: the warm ones that arrive within the ageing bound, one step each."""
    engine = Engine(
        sched_settings(age_credit=0.25, hit_weight=1.0, max_wait_s=30.0),
        blocks=150,
        max_requests=1,
        max_batched_tokens=512,
    )
    engine.serve(unique(1, 1024))
    cold = engine.submit(unique(2, 1000), 2)
    for i in range(100):
        engine.submit(unique(1, 1024) + unique(10 + i, 40), 1)
        engine.step(1.0)
        if cold in engine.started:
            break
    assert cold in engine.started
    assert engine.now_s <= 30.0 + 2.0


# -- B51: both model runners -----------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("v2", [False, True])
def test_b51_resumed_requests_under_both_runners(base, v2):
    engine = Engine(sched_settings(), base=base, v2_runner=v2, blocks=14, max_batched_tokens=128)
    for i in range(3):
        engine.submit(unique(i, 50), 60)
    resumed = 0
    for _ in range(600):
        if not engine.scheduler.has_unfinished_requests():
            break
        before = {n: r.num_preemptions for n, r in engine.known.items()}
        fresh = [n for n in engine.known if n not in engine.started]
        waiting = set(engine.waiting)
        output = engine.step()
        new = {r.req_id: r for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for name in output.num_scheduled_tokens:
            if name not in waiting:
                assert name in cached.req_ids and name not in cached.resumed_req_ids
                continue
            if name in fresh:
                assert name in new and name not in cached.req_ids
            elif v2:
                resumed += 1
                assert name in new and name not in cached.req_ids
                tokens = list(engine.known[name].all_token_ids)
                prefill = list(new[name].prefill_token_ids)
                assert prefill == tokens[: len(prefill)]
                assert len(prefill) >= len(tokens) - 1
            else:
                resumed += 1
                assert name in cached.resumed_req_ids and name not in new
                assert name in cached.all_token_ids
        if v2:
            assert not cached.resumed_req_ids
        assert all(r.num_preemptions >= before[n] for n, r in engine.known.items())
    assert resumed > 0
    assert len(engine.finished) == 3
    admissions = engine.counters("scheduler_admissions")
    assert admissions["preempted"] == resumed
    assert sum(admissions.values()) == 3 + resumed


@pytest.mark.parametrize("v2", [False, True])
def test_b51_off_equals_stock_under_both_runners(v2):
    ours = Engine(sched_settings(mode="fcfs"), v2_runner=v2, blocks=14, max_batched_tokens=128)
    stock = Engine(None, v2_runner=v2, blocks=14, max_batched_tokens=128)
    for i in range(4):
        for engine in (ours, stock):
            engine.submit(unique(i, 50), 60)
    while stock.scheduler.has_unfinished_requests():
        assert snapshot(ours.step()) == snapshot(stock.step())
    assert any(r.num_preemptions for r in ours.known.values())


# -- B70: bounded reorder with reasons -------------------------------------------------------------


def drive_b70(settings, base=Scheduler):
    """10 cold requests and a stream of warm ones, one second a step."""
    engine = Engine(settings, base=base, blocks=200, max_requests=2, max_batched_tokens=256)
    engine.serve(unique(1, 512))
    arrived, started_at = {}, {}

    def step():
        engine.step(1.0)
        for name in engine.started:
            started_at.setdefault(name, engine.now_s)

    cold = [engine.submit(unique(10 + i, 600), 2) for i in range(10)]
    arrived.update(dict.fromkeys(cold, engine.now_s))
    for i in range(80):
        warm = engine.submit(unique(1, 512) + unique(100 + i, 20), 2)
        arrived[warm] = engine.now_s
        step()
    while engine.scheduler.has_unfinished_requests():
        step()
    waits = {name: started_at[name] - at for name, at in arrived.items()}
    return engine, cold, waits


@pytest.mark.parametrize("base", BASES)
def test_b70_the_bound_holds_and_every_start_has_a_reason(base):
    limit = 25.0
    engine, cold, waits = drive_b70(sched_settings(max_wait_s=limit), base)
    stock_engine, _, stock_waits = drive_b70(None, base)
    # Overdue requests are served one after the other, so the last of ten cold ones waits for those
    # before it as well, as it does in stock.
    longest_queue = max(stock_waits[name] for name in cold)
    assert max(waits[name] for name in cold) <= limit + longest_queue + 2
    admissions = engine.counters("scheduler_admissions")
    assert sum(admissions.values()) == len(engine.started) == 91
    assert admissions["affinity"] > 0 and admissions["max_wait"] > 0
    warm = [name for name in waits if name not in cold]
    mean = sum(waits[n] for n in warm) / len(warm)
    assert mean < sum(stock_waits[n] for n in warm) / len(warm)
    assert set(waits) <= engine.finished and set(waits) <= stock_engine.finished


@pytest.mark.parametrize("base", BASES)
def test_b70_off_is_stock_order(base):
    ours, _, waits = drive_b70(sched_settings(mode="fcfs"), base)
    stock, _, stock_waits = drive_b70(None, base)
    assert ours.started == stock.started
    assert waits == stock_waits
    assert ours.counters("scheduler_admissions") == {"arrival": 91}
