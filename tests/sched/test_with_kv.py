# SPDX-License-Identifier: Apache-2.0
"""The queue on top of the feature ``kv`` (and of stock): scores, look-ups, evictions."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mimo_plugin.core.affinity import NORMAL
from mimo_plugin.core.lanes import Lane
from tests.sched.harness import (
    BASES,
    FULL,
    HYBRID,
    KV,
    Engine,
    RequestStatus,
    empty,
    sched_settings,
    unique,
)

SHAPES = {
    "full": {"geometry": FULL},
    "hybrid": {"geometry": HYBRID},
    "kv": {"geometry": HYBRID, "kv": KV},
}


def lookups(engine: Engine) -> Counter[str]:
    """Drained look-up counters of the feature ``kv``: full, memo."""
    payload = engine.scheduler.kv_cache_manager.accounting.drain() or {"inc": []}
    return Counter({labels[0]: n for name, labels, n in payload["inc"] if name == "lookups"})


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_score_at_the_start_is_what_admission_finds(base, shape):
    """The head of the line is looked up again when it is offered."""
    engine = Engine(
        sched_settings(dedupe=False), base=base, blocks=90, max_requests=3, **SHAPES[shape]
    )
    scored: dict[str, int] = {}
    original = engine.queue.pop_request

    def pop_request() -> Any:
        request = original()
        popped = engine.queue._popped
        if popped is not None and popped.group == NORMAL:
            scored[request.request_id] = popped.hit_tokens
        return request

    def step_and_compare() -> None:
        scored.clear()
        engine.step()
        for name, score in scored.items():
            # Without kv a window that was cached since may make more of a prefix usable.
            found = engine.hits[name]
            assert score == found or (shape == "hybrid" and score < found)

    engine.queue.pop_request = pop_request
    rng = random.Random(7)
    for i in range(40):
        prompt = unique(rng.randrange(4), rng.choice([64, 200, 256])) + unique(50 + i, 40)
        engine.submit(prompt, rng.choice([1, 6]))
        if rng.random() < 0.5:
            step_and_compare()
    for _ in range(400):
        if not engine.scheduler.has_unfinished_requests():
            break
        step_and_compare()
    assert any(engine.hits.values())
    empty(engine)


@pytest.mark.parametrize("base", BASES)
def test_waiting_requests_are_answered_from_their_memo(base):
    engine = Engine(sched_settings(), base=base, geometry=HYBRID, kv=KV, blocks=200, max_requests=1)
    engine.serve(unique(1, 512))
    engine.submit(unique(2, 40), 60)
    engine.step()
    for i in range(20):
        engine.submit(unique(1, 512) + unique(10 + i, 20))
    lookups(engine)
    for _ in range(40):
        engine.step()
    counted = lookups(engine)
    # The head is asked for at every step, in full once (or when something near it has changed).
    assert counted["full"] <= 4
    assert counted["memo"] >= 30


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_scores_are_refreshed_after_an_admission_that_evicts(shape):
    """In one step: a cold overdue request takes the blocks of the longer hit; the other goes on."""
    engine = Engine(
        sched_settings(max_wait_s=50.0, dedupe=False, lanes=(), age_credit=0.0, protect_hits=False),
        blocks={"full": 53, "hybrid": 68, "kv": 68}[shape],
        max_requests=2,
        max_batched_tokens=1024 if shape == "full" else 128,
        **SHAPES[shape],
    )
    engine.serve(unique(1, 512))
    engine.serve(unique(2, 256))
    cold = engine.submit(unique(3, 400), 30)
    engine.now_s = 49.0
    long_hit = engine.submit(unique(1, 512) + unique(4, 20), 2)
    short_hit = engine.submit(unique(2, 256) + unique(5, 20), 2)
    before = {e.item.request_id: e.hit_tokens for e in engine.queue.line}
    assert before[long_hit] > before[short_hit] > 0
    assert engine.waiting[0] == long_hit
    engine.now_s = 60.0
    while len(engine.started) < 4:
        engine.step()
    if shape == "full":
        assert engine.waiting == [long_hit], "both started in one step"
    assert engine.started[2:4] == [cold, short_hit]
    assert engine.hits[short_hit] == before[short_hit]
    engine.run()
    assert engine.hits[long_hit] < before[long_hit]
    empty(engine)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("protect", [True, False])
def test_what_a_waiting_request_hits_counts_as_used(shape, protect):
    """The older prefix is wanted, so the younger one makes room; nothing is held meanwhile."""
    engine = Engine(
        sched_settings(
            max_wait_s=50.0, dedupe=False, lanes=(), age_credit=0.0, protect_hits=protect
        ),
        blocks={"full": 46, "hybrid": 62, "kv": 62}[shape],
        max_requests=1,
        max_batched_tokens=128,
        **SHAPES[shape],
    )
    engine.serve(unique(1, 256))
    engine.serve(unique(2, 256))
    cold = engine.submit(unique(3, 400), 2)
    engine.now_s = 60.0
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    references = [block.ref_cnt for block in pool.blocks]
    warm = engine.submit(unique(1, 256) + unique(4, 20), 2)
    scored = next(e.hit_tokens for e in engine.queue.line if e.item.request_id == warm)
    assert scored > 0
    assert pool.get_num_free_blocks() == free
    assert [block.ref_cnt for block in pool.blocks] == references
    engine.run()
    assert engine.started[2:] == [cold, warm]
    assert (engine.hits[warm] == scored) is protect
    empty(engine)


def test_remote_prefills_are_short_work_with_kv_too():
    """Disaggregated serving: the local hit of a request whose KV comes from elsewhere says nothing.

    It neither counts in a lane nor waits for a leader.
    """
    from tests.sched.test_queue_contract import connect

    engine = Engine(
        sched_settings(lanes=(Lane(200, 1),), age_credit=0.0),
        geometry=HYBRID,
        kv=KV,
        blocks=400,
        max_requests=4,
        max_batched_tokens=64,
    )
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    connect(engine, {"r2": (991, True)})
    engine.submit(unique(1, 600), 2)
    engine.step()
    engine.submit(unique(2, 900), 2)
    remote = engine.submit(
        unique(3, 992), 2, extra_args={"kv_transfer_params": {"do_remote_prefill": True}}
    )
    engine.step()
    assert engine.known[remote].status == RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_request_gets_the_tokens_of_stock(shape):
    """The order changes what is cached, never what is computed for a request."""
    rng = random.Random(3)
    prompts = [
        unique(rng.randrange(3), rng.choice([64, 192])) + unique(50 + i, rng.randrange(5, 200))
        for i in range(25)
    ]

    def tokens(settings: Any) -> list[list[int]]:
        engine = Engine(settings, blocks=80, max_requests=3, **SHAPES[shape])
        for prompt in prompts:
            engine.submit(prompt, 4)
        engine.run()
        return [list(r.all_token_ids) for r in engine.known.values()]

    assert tokens(sched_settings()) == tokens(None)
