# SPDX-License-Identifier: Apache-2.0
"""``mode: fcfs`` schedules bit for bit what stock vLLM does, and without the feature nothing moves.

The same operations are played on stock and on the plugin in lockstep; what each step tells the
workers must be equal: which requests, how many tokens of each, in which order, in which blocks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState

from tests.sched.harness import (
    BASES,
    FULL,
    HYBRID,
    KV,
    AsyncScheduler,
    Engine,
    Scheduler,
    grammar,
    grammar_request,
    sched_settings,
    snapshot,
    unique,
)

_OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive"] * 5
            + ["step"] * 8
            + ["abort", "reset", "preempt-all", "pause", "resume", "grammar", "ready"]
        ),
        st.integers(0, 9),
        st.integers(1, 300),
    ),
    min_size=10,
    max_size=70,
)


class Pair:
    """Stock and the plugin in mode fcfs, side by side."""

    def __init__(self, *, loras: int = 0, **kwargs: Any) -> None:
        self.stock = Engine(None, **kwargs)
        self.ours = Engine(sched_settings(mode="fcfs"), **kwargs)
        self.ids: list[str] = []
        self.blocked: list[tuple[Any, ...]] = []
        self.loras = loras
        if loras:
            for engine in self.both():
                engine.scheduler.lora_config = SimpleNamespace(max_loras=loras)

    def both(self) -> tuple[Engine, Engine]:
        return self.stock, self.ours

    def play(self, name: str, which: int, amount: int) -> None:
        if name == "arrive":
            prompt = unique(1 + which % 3, 40 * (which % 4)) + unique(100 + len(self.ids), amount)
            for engine in self.both():
                self.ids.append(
                    engine.submit(
                        prompt,
                        1 + which,
                        priority=which % 3,
                        lora=which % 4 if self.loras and which % 4 else None,
                        arrival_time=float(len(engine.known)) if which % 2 else 0.5,
                    )
                )
            self.ids.pop()
        elif name == "grammar":
            made = tuple(
                grammar_request(engine, unique(500 + len(self.ids), amount), 2)
                for engine in self.both()
            )
            for engine, request in zip(self.both(), made, strict=True):
                engine.add(request)
            self.ids.append(made[0].request_id)
            self.blocked.append(made)
        elif name == "ready" and self.blocked:
            for request in self.blocked.pop(which % len(self.blocked)):
                request.structured_output_request.grammar = grammar()
        elif name == "abort" and self.ids:
            for engine in self.both():
                engine.abort(self.ids[-1 - which % len(self.ids)])
        elif name == "reset":
            for engine in self.both():
                engine.scheduler.reset_prefix_cache()
        elif name == "preempt-all":
            for engine in self.both():
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif name in ("pause", "resume"):
            state = PauseState(which % 3) if name == "pause" else PauseState.UNPAUSED
            for engine in self.both():
                engine.scheduler.set_pause_state(state)
        elif name == "step":
            self.step()

    def step(self) -> None:
        left, right = (snapshot(engine.step()) for engine in self.both())
        assert left == right
        assert self.stock.running == self.ours.running
        assert self.stock.scheduler.get_request_counts() == self.ours.scheduler.get_request_counts()
        assert {r.request_id for r in self.stock.scheduler.deferred_waiting} == {
            r.request_id for r in self.ours.scheduler.deferred_waiting
        }

    def finish(self) -> None:
        for engine in self.both():
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for made in self.blocked:
            for request in made:
                request.structured_output_request.grammar = grammar()
        for _ in range(3000):
            if not self.stock.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.ours.scheduler.has_unfinished_requests()
        assert self.stock.finished == self.ours.finished
        assert self.stock.started == self.ours.started
        assert not self.ours.counters("scheduler_deferrals")


SHAPES = {
    "full": {"geometry": FULL, "blocks": 60},
    "full-tiny-pool": {"geometry": FULL, "blocks": 34, "max_batched_tokens": 96},
    "hybrid": {"geometry": HYBRID, "blocks": 90},
    "kv": {"geometry": HYBRID, "blocks": 90, "kv": KV},
    "priority": {"geometry": FULL, "blocks": 40, "policy": "priority"},
    "one-slot": {"geometry": FULL, "blocks": 60, "max_requests": 1},
    "lora": {"geometry": FULL, "blocks": 60, "loras": 2},
    "lora-priority": {"geometry": FULL, "blocks": 60, "loras": 1, "policy": "priority"},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(max_examples=40)
@given(ops=_OPS)
def test_every_step_equals_stock(base, shape, ops):
    pair = Pair(base=base, **SHAPES[shape])
    for op in ops:
        pair.play(*op)
    pair.finish()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=20)
@given(ops=_OPS)
def test_every_step_equals_stock_with_steps_in_flight(policy, ops):
    """As async scheduling runs: the next step is scheduled before the last has ended."""
    pair = Pair(base=AsyncScheduler, geometry=FULL, blocks=40, depth=2, policy=policy)
    for op in ops:
        pair.play(*op)
    pair.finish()


@pytest.mark.parametrize("base", BASES)
def test_workloads_that_preempt_equal_stock(base):
    pair = Pair(base=base, geometry=FULL, blocks=24, max_batched_tokens=64)
    for i in range(6):
        for engine in pair.both():
            engine.submit(unique(i, 60), 60)
    pair.finish()
    assert any(r.num_preemptions for r in pair.ours.known.values()), "not what is to be tested"


def test_a_failed_grammar_is_reported_when_stock_reports_it():
    """Bit for bit includes requests that are only waiting for their grammar."""
    pair = Pair(geometry=FULL, blocks=60, max_requests=1)
    for engine in pair.both():
        engine.submit(unique(1, 100), 6)
        engine.step()
        request = grammar_request(engine, unique(2, 40))
        engine.add(request)
        request.structured_output_request.grammar = ValueError("no such rule")
    for _ in range(12):
        pair.step()
        assert pair.stock.finished == pair.ours.finished


# -- not installed ---------------------------------------------------------------------------------


def test_importing_changes_nothing_of_vllm():
    """All of the plugin's scheduler code is imported here; what vLLM has is still vLLM's own."""
    from vllm.v1.core import block_pool, kv_cache_manager
    from vllm.v1.core.sched import async_scheduler, request_queue, scheduler

    for module in (block_pool, kv_cache_manager, async_scheduler, request_queue, scheduler):
        for name, value in vars(module).items():
            owner = getattr(value, "__module__", None)
            assert not str(owner).startswith("mimo_plugin"), f"{module.__name__}.{name}"
            if not isinstance(value, type) or owner != module.__name__:
                continue
            for attribute, member in vars(value).items():
                member = getattr(member, "__func__", member)
                owner = str(getattr(member, "__module__", None))
                assert not owner.startswith("mimo_plugin"), f"{name}.{attribute}"


def test_install_changes_no_class_of_vllm():
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    classes = (*BASES, BlockHashToBlockMap)
    before = [dict(vars(cls)) for cls in classes]
    engine = Engine(sched_settings())
    engine.serve(unique(1, 100), 3)
    assert [dict(vars(cls)) for cls in classes] == before
    other = Engine(None)
    assert type(other.scheduler) is Scheduler
    assert type(other.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) is (
        BlockHashToBlockMap
    )


def test_remove_gives_the_stock_queue_back():
    from vllm.v1.core.block_pool import BlockHashToBlockMap
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    from mimo_plugin.engines.vllm.sched.install import install, remove

    stock = Engine(None, blocks=60)
    ours = Engine(sched_settings(mode="cost"), blocks=60)
    ours.serve(unique(1, 100), 3)
    stock.serve(unique(1, 100), 3)
    remove(ours.scheduler)
    assert type(ours.scheduler.waiting) is FCFSRequestQueue
    pool = ours.scheduler.kv_cache_manager.block_pool
    assert type(pool.cached_block_hash_to_block) is BlockHashToBlockMap
    assert ours.scheduler.affinity_payload() is None
    for i in range(9):
        for engine in (stock, ours):
            engine.submit(unique(1, 100)[: 20 * i] + unique(i + 2, 90 - 10 * i), 3)
    while stock.scheduler.has_unfinished_requests():
        assert snapshot(stock.step()) == snapshot(ours.step())
    install(ours.scheduler, sched_settings(mode="cost"))
    ours.serve(unique(50, 100), 3)


def test_install_and_remove_refuse_while_requests_wait():
    from mimo_plugin.engines.vllm.sched.install import install, remove

    engine = Engine(sched_settings())
    engine.submit(unique(1, 10))
    with pytest.raises(ValueError, match="waiting"):
        install(engine.scheduler, sched_settings())
    with pytest.raises(ValueError, match="waiting"):
        remove(engine.scheduler)
    engine.run()
    install(engine.scheduler, sched_settings(mode="hrrn"))
    engine.serve(unique(2, 10))


def test_install_on_a_plain_scheduler():
    from mimo_plugin.engines.vllm.sched.install import install

    engine = Engine(None)
    install(engine.scheduler, sched_settings())
    assert isinstance(engine.scheduler, Scheduler)
    engine.serve(unique(1, 300), 2)
    assert engine.counters("scheduler_admissions") == {"arrival": 1}
