# SPDX-License-Identifier: Apache-2.0
"""Faults that reviews found, each with the history that showed it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState

from mimo_plugin.config import MimoConfig
from mimo_plugin.core.lanes import Lane
from mimo_plugin.engines.vllm.sched.install import install
from mimo_plugin.engines.vllm.sched.queue import PARKS_PER_PASS, PROTECTED_BLOCKS_PER_PASS
from mimo_plugin.engines.vllm.scheduler import without
from mimo_plugin.errors import FeatureUnavailable
from tests.sched.harness import Engine, sched_settings, unique

ONE_LANE = (Lane(300, 1),)


def long_runner(**kwargs) -> tuple[Engine, str]:
    """An engine with one long prefill under way, 256 tokens a step."""
    engine = Engine(sched_settings(lanes=ONE_LANE), blocks=2000, **kwargs)
    long = engine.submit(unique(1, 8000))
    engine.step()
    return engine, long


def test_a_long_prefill_takes_what_shorter_work_leaves():
    engine, long = long_runner()
    short = engine.submit(unique(2, 10))
    assert engine.step().num_scheduled_tokens == {long: 246, short: 10}


def test_a_paused_queue_does_not_cut_chunks():
    engine, long = long_runner()
    engine.submit(unique(2, 200))
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {long: 256}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step().num_scheduled_tokens[long] == 128


def test_without_a_slot_chunks_are_not_cut_until_one_is_free():
    engine, long = long_runner(max_requests=2)
    decode = engine.submit(unique(2, 10), 6)
    engine.step()
    engine.submit(unique(3, 200))
    tokens = [engine.step().num_scheduled_tokens for _ in range(4)]
    # The first step finds out that there is no slot; the decode takes one token of the others.
    assert [step[long] for step in tokens][1:] == [255, 255, 255]
    while decode not in engine.finished:
        engine.step()
    assert engine.step().num_scheduled_tokens[long] == 128


def test_what_the_engine_skips_does_not_cut_chunks():
    """No adapter slot: the request is asked for and skipped, step after step."""
    engine = Engine(sched_settings(lanes=ONE_LANE), blocks=2000)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    long = engine.submit(unique(1, 8000), lora=1)
    engine.step()
    engine.submit(unique(2, 200), lora=2)
    engine.step()
    assert [engine.step().num_scheduled_tokens[long] for _ in range(5)] == [256] * 5


def test_images_that_must_not_be_split_are_not_cut():
    engine, _ = long_runner()
    engine.submit(unique(2, 200))
    chunks = engine.queue.chunks
    chunks.begin_pass(1)
    config = engine.scheduler.scheduler_config
    text = SimpleNamespace(num_tokens=5000, has_encoder_inputs=False)
    images = SimpleNamespace(num_tokens=5000, has_encoder_inputs=True)
    config.disable_chunked_mm_input = True
    assert chunks.cut(images, 0, 256) == 256
    assert chunks.cut(text, 0, 256) < 256
    config.disable_chunked_mm_input = False
    assert chunks.cut(images, 0, 256) < 256


def test_requests_held_back_are_no_lack_of_capacity():
    """vLLM lifts its throttle of prefills (data parallel) when requests wait for want of room."""
    engine = Engine(sched_settings(lanes=ONE_LANE), blocks=2000, max_batched_tokens=1024)
    engine.submit(unique(1, 900), 50)
    while engine.scheduler._inflight_prefills:
        engine.step()
    engine.submit(unique(2, 3000))
    engine.step()
    engine.submit(unique(3, 3000))
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 256
    engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert engine.scheduler.prefill_capacity_bound is False


def test_a_queue_of_the_users_own_is_not_replaced():
    engine = Engine(None)
    engine.scheduler.waiting = SimpleNamespace()
    with pytest.raises(FeatureUnavailable, match="a waiting queue of its own .*fix: "):
        install(engine.scheduler, sched_settings())
    del engine.scheduler.waiting
    with pytest.raises(FeatureUnavailable):
        install(engine.scheduler, sched_settings())


def test_what_was_not_named_is_left_out_when_it_does_not_fit(caplog):
    config = MimoConfig(features=("kv", "scheduler"), named=("kv",))
    assert without(config, "scheduler", "own queue").features == ("kv",)
    assert "leaves out feature 'scheduler': own queue" in caplog.text
    with pytest.raises(FeatureUnavailable, match="no room"):
        without(config, "kv", "no room")


def test_a_full_lane_is_passed_over_at_once():
    engine, _ = long_runner()
    for i in range(300):
        engine.submit(unique(2 + i, 400))
    asked = []
    original = engine.queue._may_start
    engine.queue._may_start = lambda entry: asked.append(entry) or original(entry)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 100
    short = engine.submit(unique(999, 20))
    assert short in engine.step().num_scheduled_tokens
    assert len(asked) <= 4


def test_parking_is_bounded_in_a_step():
    engine = Engine(sched_settings(lanes=()), blocks=3000, max_batched_tokens=256)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 64
    engine.submit(unique(1, 4000))
    engine.step()
    for i in range(3 * PARKS_PER_PASS):
        engine.submit(unique(1, 2000) + unique(2 + i, 10))
    parked = [engine.queue.line.num_parked]
    while parked[-1] < 3 * PARKS_PER_PASS and len(parked) < 12:
        engine.step()
        parked.append(engine.queue.line.num_parked)
    grown = [b - a for a, b in zip(parked, parked[1:], strict=False)]
    assert parked[-1] == 3 * PARKS_PER_PASS
    assert max(grown) <= PARKS_PER_PASS


def test_a_long_hit_is_protected_over_several_steps_and_once_for_all_who_share_it():
    engine = Engine(sched_settings(), blocks=2500, max_requests=1, max_model_len=40_000)
    tokens = 3 * PROTECTED_BLOCKS_PER_PASS * engine.geometry.alignment_tokens
    prefix = unique(1, tokens)
    engine.serve(prefix)
    engine.submit(unique(2, 20), 400)
    engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    moved: list[int] = []
    original = pool.free_block_queue.append_n
    pool.free_block_queue.append_n = lambda blocks: moved.append(len(blocks)) or original(blocks)
    for i in range(5):
        engine.submit(prefix + unique(3 + i, 10))
    assert not moved, "not while the request arrives"
    per_step = []
    while sum(moved) < tokens // engine.geometry.alignment_tokens - 1 and len(per_step) < 10:
        before = sum(moved)
        engine.step()
        per_step.append(sum(moved) - before)
    assert max(per_step) <= PROTECTED_BLOCKS_PER_PASS
    assert len(per_step) >= 3
    for _ in range(5):
        engine.step()
    assert sum(moved) <= tokens // engine.geometry.alignment_tokens


def test_protection_is_no_access_in_the_engines_statistics():
    engine = Engine(sched_settings(), blocks=400, max_requests=1)
    engine.serve(unique(1, 320))
    engine.submit(unique(2, 20), 100)
    engine.step()
    seen = []
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.metrics_collector = SimpleNamespace(
        on_block_accessed=seen.append, on_block_allocated=lambda b: None,
        on_block_evicted=lambda b: None,
    )  # fmt: skip
    waiting = engine.submit(unique(1, 320) + unique(3, 10))
    for _ in range(3):
        engine.step()
    engine.abort(waiting)
    assert seen == []


def test_an_overdue_request_gets_its_adapter_slot():
    """An endless stream of another adapter would keep the only slot for ever."""
    engine = Engine(sched_settings(max_wait_s=5.0), blocks=2000, max_requests=4)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    engine.submit(unique(0, 40), 3, lora=1)
    engine.step()
    late = engine.submit(unique(1, 40), lora=2)
    for i in range(60):
        engine.submit(unique(10 + i, 40), 3, lora=1)
        engine.step(1.0)
        if late in engine.started:
            break
    assert late in engine.started
    assert engine.now_s <= 15


def test_a_reset_while_nobody_waits_is_known_to_the_next_arrival():
    engine = Engine(sched_settings(), max_requests=1)
    engine.serve(unique(1, 320))
    assert engine.scheduler.reset_prefix_cache()
    name = engine.submit(unique(1, 320))
    (entry,) = list(engine.queue.line)
    assert (entry.item.request_id, entry.hit_tokens) == (name, 0)


def test_the_line_lets_go_of_those_that_left():
    engine = Engine(sched_settings(), blocks=400)
    for i in range(400):
        engine.submit(unique(1 + i, 20))
    engine.run()
    line = engine.queue.line
    assert len(line._arrivals) <= 64
    assert len(line._deadlines) <= 64
