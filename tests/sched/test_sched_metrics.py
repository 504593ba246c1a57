# SPDX-License-Identifier: Apache-2.0
"""Counters of the feature: one reason per admission, one wait, deferrals once per request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.affinity import NORMAL, OVERDUE, PREEMPTED, Waiting
from mimo_plugin.core.lanes import Lane
from mimo_plugin.engines.queue_report import QueueReport
from mimo_plugin.metrics import ADMISSION_REASONS, DEFERRAL_REASONS, SPECS, merge_payloads
from tests.sched.harness import (
    BASES,
    FULL,
    HYBRID,
    KV,
    Engine,
    Scheduler,
    sched_settings,
    unique,
)

LANES = (Lane(65_536, 2), Lane(262_144, 1))


def report_of(lanes: Sequence[Lane] = LANES, **options: Any) -> QueueReport:
    log = logging.getLogger("vllm.mimo_plugin")
    return QueueReport(lanes, log, lambda item: str(item.request_id), **options)


def waits(engine: Engine) -> list[float]:
    return [v for values in engine.observations("queue_wait_s").values() for v in values]


# -- per decision ----------------------------------------------------------------------------------


def entry(order: int, group: int = NORMAL, priority: int = 0, uncached: int = 10) -> Waiting:
    class Item:
        request_id = f"r{order}"

    made = Waiting(
        item=Item(), order=order, arrived_s=0.0, arrived_tokens=0.0, num_tokens=uncached,
        group=group, priority=priority,
    )  # fmt: skip
    made.uncached_tokens = uncached
    return made


@pytest.mark.parametrize(
    ("started", "oldest", "reason"),
    [
        (entry(3), None, "arrival"),
        (entry(3), entry(4), "arrival"),
        (entry(3), entry(2), "affinity"),
        (entry(3, priority=0), entry(2, priority=1), "priority"),
        (entry(3, OVERDUE), entry(2), "max_wait"),
        (entry(-1, PREEMPTED), entry(2), "preempted"),
    ],
)
def test_reason(started, oldest, reason):
    report = report_of(by_priority=True)
    report.admitted(started, oldest, 1.5, 1)
    payload = report.drain({})
    assert payload["inc"] == [["scheduler_admissions", [reason], 1]]
    assert payload["obs"] == [["queue_wait_s", ["0"], [1.5]]]
    assert report.drain({}) is None


@pytest.mark.parametrize(
    ("uncached", "lane"),
    [(10, "0"), (65_536, "0"), (65_537, "65536"), (262_144, "65536"), (10**6, "262144")],
)
def test_lane_of_a_wait(uncached, lane):
    report = report_of()
    report.admitted(entry(1, uncached=uncached), None, 0.0, 0)
    assert report.drain({})["obs"] == [["queue_wait_s", [lane], [0.0]]]
    assert report_of(()).lane_name(uncached) == "0"


def test_deferrals_are_counted_once_per_request_and_reason():
    """Once wrong: only the last reason is remembered, so a change of reasons counts again."""
    report = report_of()
    one, two = entry(1), entry(2)
    for _ in range(3):
        report.held(one)
        report.followed(one, "leader", 64)
        report.held(one)
        report.followed(two, "leader", 64)
    rows = {labels[0]: n for _, labels, n in report.drain({})["inc"]}
    assert rows == {"lane": 1, "duplicate": 2}


def test_gauges_are_sent_when_they_change():
    report = report_of()
    assert report.drain({"waiting_uncached_tokens": 5})["set"]
    assert report.drain({"waiting_uncached_tokens": 5}) is None
    assert report.drain({"waiting_uncached_tokens": 6})["set"] == [
        ["waiting_uncached_tokens", [], 6]
    ]


def test_every_name_is_declared():
    assert set(ADMISSION_REASONS) == {"arrival", "affinity", "priority", "max_wait", "preempted"}
    assert set(DEFERRAL_REASONS) == {"duplicate", "lane"}
    for name in ("scheduler_admissions", "scheduler_deferrals", "scheduler_guard_steps"):
        assert SPECS[name].kind == "counter"
    assert SPECS["queue_wait_s"].kind == "histogram"


# -- sums ------------------------------------------------------------------------------------------

_OPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 6 + ["step"] * 8 + ["abort", "preempt-all"]),
        st.integers(0, 9),
        st.integers(1, 200),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("mode", ["cost", "fcfs"])
@settings(max_examples=30)
@given(
    ops=_OPS,
    policy=st.sampled_from(["fcfs", "priority"]),
    log_stats=st.booleans(),
    lanes=st.sampled_from([(), (Lane(64, 1),)]),
)
def test_reasons_and_waits_sum_to_the_admissions(base, mode, ops, policy, log_stats, lanes):
    engine = Engine(
        sched_settings(mode=mode, lanes=lanes, max_wait_s=4.0),
        base=base,
        geometry=FULL,
        blocks=44,
        policy=policy,
        log_stats=log_stats,
        max_requests=3,
        max_batched_tokens=96,
    )
    for name, which, amount in ops:
        if name == "arrive":
            prompt = unique(1 + which % 2, 48 * (which % 3)) + unique(
                90 + len(engine.known), amount
            )
            engine.submit(prompt, 1 + which, priority=which % 3)
        elif name == "step":
            engine.step(1.0)
        elif name == "abort":
            live = [n for n, r in engine.known.items() if not r.is_finished()]
            engine.abort(*live[: which % 2])
        else:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run(seconds=1.0)
    admissions = engine.counters("scheduler_admissions")
    assert sum(admissions.values()) == len(engine.started)
    assert len(waits(engine)) == len(engine.started)
    assert admissions["preempted"] == len(engine.started) - len(set(engine.started))
    assert set(admissions) <= set(ADMISSION_REASONS)
    if mode == "fcfs":
        assert admissions["affinity"] == admissions["max_wait"] == 0
        assert not engine.counters("scheduler_deferrals")
        assert not engine.counters("scheduler_guard_steps")
    assert all(value >= 0 for value in waits(engine))


def test_priorities_are_no_reason_where_the_engine_ignores_them():
    """Once wrong: requests may carry a priority under fcfs scheduling too."""
    engine = Engine(sched_settings(), max_requests=1)
    engine.submit(unique(1, 40), 3)
    engine.step()
    engine.submit(unique(2, 400), priority=1)
    engine.submit(unique(3, 20), priority=2)
    engine.run()
    assert engine.counters("scheduler_admissions") == {"arrival": 2, "affinity": 1}


def test_waits_are_measured_from_arrival_to_start():
    engine = Engine(sched_settings(), max_requests=1)
    engine.submit(unique(1, 40), 3)
    engine.step(2.0)
    engine.submit(unique(2, 40), 1)
    engine.step(2.0)
    engine.step(2.0)
    engine.step(2.0)
    assert engine.started == ["r0", "r1"]
    assert sorted(waits(engine)) == [0.0, 4.0]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("mode", ["cost", "fcfs"])
def test_the_lane_of_a_wait_is_what_was_to_compute_at_the_start(base, mode):
    """Once wrong: the last start of a step is noted after the engine has advanced it."""
    engine = Engine(
        sched_settings(mode=mode, lanes=(Lane(200, 4), Lane(400, 4))),
        base=base,
        max_batched_tokens=128,
        blocks=300,
    )
    engine.submit(unique(1, 450), 1)
    engine.run()
    engine.submit(unique(2, 250), 1)
    engine.run()
    engine.submit(unique(3, 90), 1)
    engine.run()
    seen = {lane: len(values) for lane, values in engine.observations("queue_wait_s").items()}
    assert seen == {"400": 1, "200": 1, "0": 1}


def test_gauges_of_the_queue():
    engine = Engine(sched_settings(lanes=(Lane(300, 8),)), max_batched_tokens=128, blocks=300)
    engine.submit(unique(1, 1000), 1)
    engine.step()
    engine.submit(unique(1, 290), 1)
    engine.submit(unique(1, 280), 1)
    engine.step()
    gauges = engine.gauges()
    assert gauges["scheduler_parked_requests"] == 2
    # A parked request is scored by its hit when it was looked up: two blocks at least.
    assert 0 < gauges["waiting_uncached_tokens"] <= 570
    engine.run()
    gauges = engine.gauges()
    assert gauges["scheduler_parked_requests"] == gauges["waiting_uncached_tokens"] == 0


def test_reasons_are_in_the_debug_log(caplog):
    """Once wrong: the number of uncached tokens is not filled in ("%d")."""
    with caplog.at_level(logging.DEBUG, logger="vllm.mimo_plugin"):
        engine = Engine(sched_settings(lanes=(Lane(300, 1),)), max_batched_tokens=128, blocks=300)
        leader = engine.submit(unique(1, 1000), 1)
        engine.step()
        held = engine.submit(unique(2, 700), 1)
        follower = engine.submit(unique(1, 290), 1)
        for _ in range(3):
            engine.step()
        engine.run()
    text = caplog.text
    assert f"start {leader} (arrival)" in text
    assert f"defer {follower} (duplicate)" in text
    assert f"defer {held} (lane)" in text
    assert f"start {follower} (affinity)" in text
    assert "%d" not in text and "%s" not in text


# -- payloads --------------------------------------------------------------------------------------


def payload(**parts: Any) -> dict[str, Any]:
    return {"v": 1, "inc": [], "set": [], "obs": [], **parts}


def test_merge_payloads():
    assert merge_payloads() is None
    assert merge_payloads(None, None) is None
    one = payload(inc=[["lookups", ["full"], 2]])
    two = payload(inc=[["scheduler_admissions", ["arrival"], 1]], set=[["degraded", [], 0]])
    assert merge_payloads(one, None) == one
    assert merge_payloads(None, two) == two
    merged = merge_payloads(one, two)
    assert merged["v"] == 1
    assert merged["inc"] == [*one["inc"], *two["inc"]]
    assert merged["set"] == two["set"] and merged["obs"] == []
    assert one == payload(inc=[["lookups", ["full"], 2]]), "the parts are left alone"


@pytest.mark.parametrize("base", BASES)
def test_kv_and_scheduler_share_one_payload(base):
    engine = Engine(sched_settings(), base=base, geometry=HYBRID, kv=KV, log_stats=True)
    seen: dict[str, float] = {}
    for i in range(4):
        engine.submit(unique(1, 200) + unique(5 + i, 20), 2)
    for _ in range(20):
        engine.step()
        for out in engine.engine_outputs[-1].values():
            stats = out.scheduler_stats
            if stats is None or not stats.kv_connector_stats:
                continue
            assert set(stats.kv_connector_stats) == {"mimo"}
            for name, _, value in stats.kv_connector_stats["mimo"]["inc"]:
                assert name in SPECS
                seen[name] = seen.get(name, 0) + value
    assert seen["scheduler_admissions"] == 4
    assert seen["lookups"] >= 4
    assert seen["prompt_lookup_tokens"] == 4 * 220


def test_a_merged_payload_reaches_prometheus():
    prometheus = pytest.importorskip("prometheus_client")
    from mimo_plugin.engines.prometheus import PrometheusSink

    engine = Engine(sched_settings(), geometry=HYBRID, kv=KV)
    engine.submit(unique(1, 200), 2)
    engine.run()
    merged = merge_payloads(
        engine.scheduler.kv_cache_manager.accounting.drain(), engine.scheduler.affinity_payload()
    )
    sink = PrometheusSink("sched-sink-test", [0])
    sink.apply(merged, 0)

    def sample(name: str, **labels: str) -> float | None:
        return prometheus.REGISTRY.get_sample_value(
            name, {"model_name": "sched-sink-test", "engine": "0", **labels}
        )

    assert sample("mimo:scheduler_admissions_total", reason="arrival") == 1
    assert sample("mimo:queue_wait_s_count", lane="0") == 1
    assert sample("mimo:prompt_lookup_tokens_total") == 200


def test_stock_stats_are_untouched_when_off():
    engine = Engine(None, base=Scheduler, log_stats=True)
    engine.submit(unique(1, 100), 2)
    engine.run()
    for outputs in engine.engine_outputs:
        for out in outputs.values():
            if out.scheduler_stats is not None:
                assert out.scheduler_stats.kv_connector_stats is None
