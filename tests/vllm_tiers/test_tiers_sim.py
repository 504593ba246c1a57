# SPDX-License-Identifier: Apache-2.0
"""Random histories on vLLM's scheduler with the tiered connector: no KV is ever another's.

``MIMO_SIM_SEEDS=500 pytest tests/vllm_tiers/test_tiers_sim.py`` runs so many long histories more;
set ``PYTHONHASHSEED`` to see the same history of a seed twice.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_plugin.core.retention import CLASSES
from tests.vllm_tiers.tiers_sim import START, History, Setup, Shape, TiersSim

SHAPES = (
    Shape(),
    Shape(8, 4, 12, 1),
    Shape(4, 8, 17, 1),
    Shape(4, 4, 5, 2),
    Shape(8, 4, 21, 3),
    Shape(8, 4, 3, 1),
    Shape(16, 8, 9, 2),
)
MODES = [(plugin, overlap) for plugin in (False, True) for overlap in (False, True)]
LONGEST = 112
"""Tokens of a request, prompt and output."""


def setup_of(seed: int, *, plugin: bool, overlap: bool) -> Setup:
    """An engine that is as small as it may be, or a little larger."""
    rng = random.Random(seed)
    shape, drafts = rng.choice(SHAPES), rng.choice([0, 0, 1, 2])
    if drafts:
        shape = replace(shape, swa_groups=max(2, shape.swa_groups), draft=True)
    batch = rng.choice([16, 24, 48])
    window = shape.window + batch * (2 if overlap else 1) + 2 * drafts + 8
    swa_blocks = min(window, LONGEST) // shape.swa + 2
    needed = LONGEST // shape.full + shape.swa_groups * swa_blocks + 5
    return Setup(
        shape=shape,
        blocks=int(needed * rng.choice([1.02, 1.3, 2.2])),
        rows=int(needed * rng.choice([0.5, 1, 3])),
        store=rng.random() < 0.7,
        plugin=plugin,
        overlap=overlap,
        drafts=drafts,
        batch_tokens=batch,
        retention=rng.choice([0, 0, None]),
        classes=rng.choice([tuple(CLASSES), ("turn_end",), ("prompt_end", "ladder")]),
        outputs=rng.random() < 0.85,
        must_fit=rng.random() < 0.5,
    )


def live(setup: Setup, seed: int, steps: int, *, resets: bool) -> TiersSim:
    """A history to its end; the simulator, closed."""
    sim = TiersSim(setup, seed)
    try:
        History(sim, resets=resets).run(steps)
    finally:
        sim.close()
    return sim


@pytest.mark.parametrize(("plugin", "overlap"), MODES)
@pytest.mark.parametrize("resets", [False, True])
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 20))
def test_no_request_reads_the_kv_of_another(plugin, overlap, resets, seed):
    live(setup_of(seed, plugin=plugin, overlap=overlap), seed, 60, resets=resets)


@pytest.mark.parametrize(("plugin", "overlap"), MODES)
def test_histories_press(plugin, overlap):
    """The histories do what they are for: hits of several tiers are loaded, in each mode."""
    setup = setup_of(0, plugin=plugin, overlap=overlap)
    setup = replace(setup, shape=SHAPES[0], drafts=0, store=True, outputs=True, blocks=70, rows=60)
    sims = [live(setup, seed, 100, resets=False) for seed in range(4)]
    assert sum(sim.loads for sim in sims) > 5
    assert sum(len(sim.pages.pages) for sim in sims) > 40


@pytest.mark.skipif("MIMO_SIM_SEEDS" not in os.environ, reason="for long runs")
def test_many_long_histories():
    first = int(os.environ.get("MIMO_SIM_FIRST", "0"))
    for seed in range(first, first + int(os.environ["MIMO_SIM_SEEDS"])):
        plugin, overlap = MODES[seed % len(MODES)]
        try:
            setup = setup_of(seed, plugin=plugin, overlap=overlap)
            live(setup, seed, 200, resets=seed % 3 == 0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# --- regressions ------------------------------------------------------------------------------


def pushed_out(sim: TiersSim, prompt: list[int]) -> None:
    """Serve a prompt, and have the device forget it."""
    sim.submit(prompt, 4)
    sim.run()
    sim.scheduler.reset_prefix_cache()


def until(sim: TiersSim, condition) -> None:
    for _ in range(200):
        if condition():
            return
        sim.step()
    raise AssertionError("never came")


@pytest.fixture
def started():
    sims = []

    def make(**changes):
        sims.append(TiersSim(replace(Setup(rows=120, blocks=120), **changes), 3))
        return sims[-1]

    yield make
    for sim in reversed(sims):  # what one has patched, the one before had patched too
        sim.close()


def test_aborted_while_it_loads_into_holes(started):
    """What such a request was loading was remembered for ever."""
    sim = started(store=False)
    prompt = [START, *range(100, 145)]
    sim.submit(prompt, 4)
    sim.run()
    # The device keeps what comes after, and loses a block of full attention.
    cache = sim.scheduler.kv_cache_manager
    full = [b.block_id for b in cache.block_pool.blocks if b.block_hash and not b.block_hash[-1]]
    cache.evict_blocks({full[1]})
    sim.copies_pace = 0.0
    name = sim.submit([*prompt, *range(200, 220)], 4)
    until(sim, lambda: sim.loads)
    assert sim.tiered.device_blocks._fresh
    sim.abort(name)
    sim.copies_pace = 0.8
    sim.run()


def test_a_span_that_dies_while_its_blocks_are_adopted(started):
    """Such blocks were hashed a second time, which ends the engine."""
    sim = started(plugin=True, store=False)
    prompt = [START, *range(100, 145)]
    pushed_out(sim, prompt)
    first = sim.submit([*prompt, *range(200, 220)], 40)
    until(sim, lambda: sim.known[first].num_output_tokens > 20)
    cache = sim.scheduler.kv_cache_manager
    windows = {b.block_id for b in cache.block_pool.blocks if b.block_hash and b.block_hash[-1]}
    cache.evict_blocks(windows)
    before, sim.copies_pace, sim.lateness = sim.loads, 0.0, 0.0
    name = sim.submit([*prompt, *range(300, 320)], 4)
    until(sim, lambda: sim.loads > before)
    table = cache.coordinator.single_type_managers[0].req_to_blocks[name]
    adopted = [b.block_id for b in table if b.block_hash is not None]
    assert adopted
    for node in {cache.coordinator.order.tree.owner[b] for b in adopted}:
        node.dead = True
    sim.copies_pace = 0.8
    sim.run()


def test_after_a_reset_no_block_of_somebody_else_is_stored(started):
    """All was offered again, from ids of blocks that the window had left behind."""
    sim = started(store=False, outputs=True, classes=("prompt_end", "ladder"))
    name = sim.submit([START, *range(100, 140)], 60)
    until(sim, lambda: sim.known[name].num_output_tokens > 20)
    sim.reset(running=False, connector=True)
    for first in (300, 400, 500):
        sim.submit([START, *range(first, first + 40)], 2)
    sim.run()  # host memory is checked in every step


def test_preempted_by_a_reset_and_loading_in_the_same_step(started):
    """vLLM took the load for a store that has to be flushed."""
    sim = started(store=False, must_fit=False)
    prompt = [START, *range(100, 145)]
    pushed_out(sim, prompt)
    name = sim.submit(prompt, 30)
    until(sim, lambda: sim.known[name].num_output_tokens > 2)
    until(sim, lambda: not sim.tiered._jobs)
    before = sim.loads
    sim.reset(running=True, connector=False)
    sim.step()
    assert sim.loads > before
    sim.run()


def test_a_hit_that_does_not_fit_is_not_cut_below_what_host_memory_has(started):
    """Rows that another request was loading from counted twice, and nothing was left of the hit."""
    prompt = [START, *range(100, 200)]
    large, small = started(), started(rows=8)
    for tokens in (prompt[:20], prompt):
        large.submit(tokens, 1)
        large.run()
        large.scheduler.reset_prefix_cache()
    small.pages.pages.update(large.pages.pages)
    small.chain, small.contents = large.chain, large.contents
    small.copies_pace, small.pace, small.lateness = 0.0, 0.9, 0.0
    small.submit(prompt[:20], 1)
    until(small, lambda: small.loads == 1)
    second = small.submit(prompt, 1)
    for _ in range(20):
        small.step()
    assert second not in small.runners, "waits for what the first one loads"
    small.copies_pace = 0.9
    small.run()
