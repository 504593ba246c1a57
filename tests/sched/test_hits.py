# SPDX-License-Identifier: Apache-2.0
"""The hits by which requests are ordered are those that the engine would find now.

Random histories of arrivals, admissions, evictions, preemptions, aborts and cache resets. After
each pass, every waiting request that the index does not itself call out of date must have the hit
that a fresh look-up of vLLM's own coordinator finds.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sim import Geometry
from tests.sched.harness import (
    FULL,
    HYBRID,
    KV,
    WIDE_SWA,
    AsyncScheduler,
    Engine,
    Scheduler,
    count_lookups,
    empty,
    sched_settings,
    unique,
)

SHAPES: dict[str, dict[str, Any]] = {
    "full": {"geometry": FULL, "blocks": 60},
    "full-tiny": {"geometry": FULL, "blocks": 40, "max_batched_tokens": 96},
    "two-full-groups": {"geometry": Geometry(full_groups=2, swa_groups=1), "blocks": 120},
    "hybrid-stock": {"geometry": HYBRID, "blocks": 80},
    "hybrid-dense": {"geometry": HYBRID, "blocks": 80, "retention_interval": None},
    "hybrid-kv": {"geometry": HYBRID, "blocks": 80, "kv": KV},
    "wide-swa-stock": {"geometry": WIDE_SWA, "blocks": 60},
    "wide-swa-dense": {"geometry": WIDE_SWA, "blocks": 60, "retention_interval": None},
    "wide-swa-kv": {"geometry": WIDE_SWA, "blocks": 60, "kv": KV},
}

_OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive"] * 6 + ["step"] * 9 + ["abort", "abort", "reset", "preempt-all", "evict"]
        ),
        st.integers(0, 9),
        st.integers(1, 300),
    ),
    min_size=20,
    max_size=90,
)


def fresh_hit(engine: Engine, request: Any) -> int:
    """What the engine's coordinator finds for a request."""
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    return int(coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


def check_scores(engine: Engine) -> int:
    """Compare scored and real hits; the number of requests whose score is exact.

    A score may be too long until the request heads the line, where it is looked up again: nobody
    is told of evictions. It is too short only on hybrid models, where a window may be cached
    anywhere; the index knows those requests.
    """
    hits = engine.queue.hits
    exact = 0
    for entry in engine.queue.line.ready():
        if hits.is_dirty(entry) or entry in hits._unsure:
            continue
        found = fresh_hit(engine, entry.item)
        assert entry.hit_tokens >= found, (
            f"{entry.item.request_id} of {entry.item.num_tokens} tokens is scored with a hit of "
            f"{entry.hit_tokens}, the engine finds {found}"
        )
        exact += entry.hit_tokens == found
    return exact


class History:
    """Plays operations on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.compared = 0
        self._resets = 0

    def play(self, name: str, which: int, amount: int) -> None:
        engine = self.engine
        if name == "arrive":
            shared = unique(1 + which % 2, 64 * (which % 5))
            if which % 2:
                shared = shared[:100] + unique(40 + which, which * 16)
            engine.submit(shared + unique(100 + len(engine.known), amount), 1 + 5 * (which % 4))
        elif name == "abort":
            live = [n for n, r in engine.known.items() if not r.is_finished()]
            if live:
                engine.abort(live[which % len(live)])
        elif name == "reset":
            engine.scheduler.reset_prefix_cache()
        elif name == "preempt-all":
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif name == "evict":
            pool = engine.scheduler.kv_cache_manager.block_pool
            free = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash]
            # From the end of prefixes, as an eviction in order would.
            if free and self.engine.settings is not None and engine.geometry is FULL:
                engine.scheduler.kv_cache_manager.evict_blocks(set(free))
        elif name == "step":
            engine.schedule()
            self.compared += check_scores(engine)
            engine.update()
            self.compared += check_scores(engine)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.scheduler.has_unfinished_requests():
                break
            self.play("step", 0, 0)
        empty(self.engine)
        known = self.engine.known
        assert all(r.is_finished() for r in known.values())


@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(max_examples=60)
@given(ops=_OPS, scan=st.sampled_from([1, 3, 64]), dedupe=st.booleans())
def test_scores_are_what_the_engine_finds(shape, ops, scan, dedupe):
    engine = Engine(
        sched_settings(scan_requests=scan, dedupe=dedupe, age_credit=0.01),
        max_requests=3,
        **SHAPES[shape],
    )
    history = History(engine)
    for op in ops:
        history.play(*op)
    history.finish()


def test_the_histories_compare_something():
    rng = random.Random(3)
    for shape, least in (("full-tiny", 100), ("hybrid-kv", 60), ("hybrid-stock", 60)):
        engine = Engine(sched_settings(), max_requests=2, **SHAPES[shape])
        history = History(engine)
        for i in range(30):
            history.play("arrive", rng.randrange(10), rng.randrange(1, 200))
            if i % 3 == 0:
                history.play("step", 0, 0)
        history.finish()
        assert history.compared >= least, shape
        hits = [e for e in engine.hits.values() if e]
        assert hits, shape


def test_a_boundary_of_two_full_blocks_is_watched_to_its_end():
    """Sliding-window blocks twice as large as the full ones: a hit grows by two full blocks.

    The leader's chunks end between the two, so the blocks are cached in different steps.
    """
    engine = Engine(
        sched_settings(dedupe=False, lanes=()),
        geometry=WIDE_SWA,
        blocks=200,
        retention_interval=None,
        max_batched_tokens=64,
        max_requests=1,
    )
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 16
    engine.submit(unique(1, 320), 2)
    engine.step()
    # The first of the line is looked up at every step anyway, the others are not.
    followers = [engine.submit(unique(1, 320) + unique(2 + i, 30)) for i in range(3)]
    compared = 0
    for _ in range(12):
        engine.step()
        compared += check_scores(engine)
    assert compared >= 24
    assert sorted(engine.waiting) == followers


@pytest.mark.parametrize("kv", [None, KV])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_the_loss_of_any_block_of_a_window_is_noticed(kv, which):
    """A window of four blocks; whichever is evicted, no request starts by the hit that is gone.

    Only the last block of a window is watched; the loss of another is noticed when the request
    heads the line, which is before it can start.
    """
    engine = Engine(
        sched_settings(dedupe=False),
        geometry=HYBRID,
        kv=kv,
        max_requests=1,
        retention_interval=None,
    )
    first = engine.submit(unique(1, 70), 2)
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    window = manager.get_block_ids(first)[1][:4]
    engine.run()
    engine.submit(unique(2, 40), 60)
    engine.step()
    for i in range(3):
        engine.submit(unique(1, 70) + unique(5 + i, 40))
    last = list(engine.queue.line.ready())[-1]
    assert last.hit_tokens == fresh_hit(engine, last.item) == 64
    manager.evict_blocks({window[which]})
    engine.step()
    found = fresh_hit(engine, last.item)
    assert found < 64
    known = engine.queue.hits.is_dirty(last) or last in engine.queue.hits._unsure
    assert known or last.hit_tokens == found


@pytest.mark.parametrize("shape", ["full", "hybrid-stock", "hybrid-kv"])
@settings(max_examples=15)
@given(ops=_OPS)
def test_nothing_is_left_with_steps_in_flight(shape, ops):
    engine = Engine(sched_settings(), base=AsyncScheduler, depth=2, max_requests=3, **SHAPES[shape])
    history = History(engine)
    for name, which, amount in ops:
        if name == "step":
            engine.step()
        else:
            history.play(name, which, amount)
    engine.run()
    empty(engine)


def test_a_cache_reset_is_noticed_and_the_old_map_let_go():
    engine = Engine(sched_settings(), max_requests=1)
    engine.serve(unique(1, 400))
    engine.submit(unique(2, 40), 60)
    engine.step()
    warm = [engine.submit(unique(1, 400)[: 100 * i] + unique(9, 10)) for i in range(1, 5)]
    assert [e.hit_tokens for e in engine.queue.line] and max(
        e.hit_tokens for e in engine.queue.line
    ) == 400
    old = engine.queue.hits._map
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert engine.queue.hits._map is not old
    assert engine.queue.hits._map is (
        engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    )
    check_scores(engine)
    engine.run()
    assert set(warm) <= engine.finished
    empty(engine)


def test_prefix_caching_off_means_no_hits():
    engine = Engine(sched_settings())
    engine.serve(unique(1, 400))
    manager = engine.scheduler.kv_cache_manager
    manager.enable_caching = False
    engine.submit(unique(1, 400))
    assert [e.hit_tokens for e in engine.queue.line] == [0]


def test_requests_that_do_not_read_the_cache_have_no_hit():
    from vllm import SamplingParams

    engine = Engine(sched_settings())
    engine.serve(unique(1, 400))
    params = SamplingParams(max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True)
    engine.submit(unique(1, 400), sampling_params=params)
    assert [e.hit_tokens for e in engine.queue.line] == [0]
    engine.run()
    empty(engine)


# -- the scan budget -------------------------------------------------------------------------------


def test_a_step_in_which_nothing_changes_looks_up_next_to_nothing():
    engine = Engine(sched_settings(), max_requests=1, base=Scheduler)
    engine.submit(unique(1, 40), 50)
    engine.step()
    for i in range(200):
        engine.submit(unique(2 + i, 50))
    engine.step()
    asked = count_lookups(engine)
    for _ in range(10):
        engine.step()
    assert len(asked) <= 10, "one check of the head per step"


def test_scan_budget_when_a_prefix_that_all_share_is_evicted():
    engine = Engine(sched_settings(scan_requests=8), max_requests=1, blocks=80)
    engine.serve(unique(1, 320))
    engine.submit(unique(2, 40), 300)
    engine.step()
    for i in range(60):
        engine.submit(unique(1, 320) + unique(9 + i, 8))
    asked = count_lookups(engine)
    engine.scheduler.kv_cache_manager.evict_blocks(
        {b.block_id for b in engine.scheduler.kv_cache_manager.block_pool.blocks if not b.ref_cnt}
    )
    for _ in range(3):
        del asked[:]
        engine.step()
        assert len(asked) <= 8 + 1


def test_scan_budget_when_a_leader_with_many_followers_goes():
    """``scan_requests`` bounds the look-ups of one step."""
    from mimo_plugin.core.lanes import Lane

    engine = Engine(
        sched_settings(scan_requests=8, lanes=(Lane(300, 4),)),
        max_requests=4,
        max_batched_tokens=128,
    )
    leader = engine.submit(unique(1, 1000), 2)
    engine.step()
    for i in range(40):
        engine.submit(unique(1, 250) + unique(9 + i, 8))
    for _ in range(12):
        engine.step()
        if engine.queue.line.num_parked >= 30:
            break
    parked = engine.queue.line.num_parked
    assert parked >= 8, "not what is to be tested"
    engine.abort(leader)
    asked = count_lookups(engine)
    engine.step()
    assert len(asked) <= 8 + 2


def test_scan_budget_when_many_requests_are_skipped_at_every_step():
    """Once wrong: what the engine skips (LoRA slots) is looked up again at every step."""
    from types import SimpleNamespace

    engine = Engine(sched_settings(scan_requests=8), max_requests=4)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    engine.submit(unique(1, 40), 50, lora=1)
    engine.step()
    for i in range(60):
        engine.submit(unique(2 + i, 50), lora=2)
    engine.step()
    asked = count_lookups(engine)
    engine.step()
    assert len(asked) <= 8 + 2
