# SPDX-License-Identifier: Apache-2.0
"""The order of death against a small engine that keeps its own books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from mimo_plugin.core.candidates import Policy
from mimo_plugin.core.eviction import DeathOrder
from mimo_plugin.core.window import GroupGeometry
from tests.core.engine_model import EngineModel

STEPS = 100_000

#: what no checkpoint makes reachable is dropped at once, or kept until its memory is needed
both_ways = pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])


def check_free_list(model: EngineModel) -> None:
    """Free + used is the pool, and each free block has exactly one place."""
    unreferenced = {b for b in range(model.blocks) if model.references[b] == 0}
    free = model.order.free_ids()
    assert len(free) == len(set(free)), "a block has two places"
    assert set(free) == unreferenced
    assert model.order.num_free_blocks == len(unreferenced)


def check_counts(model: EngineModel) -> None:
    """``cached`` by kind equals a recount of what is hashed, and nothing is negative."""
    counted = Counter("full" if kind == "f" else "swa" for kind, _ in model.key_of.values())
    claimed: Counter[str] = Counter()
    for (kind, _), count in model.order.cached.items():
        assert count >= 0, model.order.cached
        claimed[kind] += count
    assert +claimed == +counted


@both_ways
@pytest.mark.parametrize("blocks", [17, 48])
def test_b60_free_and_used_are_the_pool_after_each_of_many_steps(blocks: int, keep: bool) -> None:
    model = EngineModel(blocks, seed=60, keep_unreachable=keep)
    for _ in range(STEPS // 4):
        model.random_step()
        check_free_list(model)
    assert model.evicted, "the pool was never full"


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_counts_equal_a_recount(seed: int, keep: bool) -> None:
    model = EngineModel(40, seed=seed, window_blocks=1 + seed, keep_unreachable=keep)
    for _ in range(5000):
        model.random_step()
        check_counts(model)


@both_ways
def test_every_block_can_be_handed_out_again(keep: bool) -> None:
    for seed in range(75):
        model = EngineModel(24, seed=seed, keep_unreachable=keep)
        for _ in range(150):
            model.random_step()
        for request in list(model.running):
            model.stop(request)
        assert sorted(model.take(24)) == list(range(24))
        assert not model.key_of


def useful(model: EngineModel) -> tuple[set[int], set[int]]:
    """Cached blocks that a hit could use now, and the rest, by brute force over the keys."""
    keep: set[int] = set()
    for kind, symbols in list(model.resident):
        if kind != "s":
            continue
        window = [
            symbols[: i + 1] for i in range(max(0, len(symbols) - model.window), len(symbols))
        ]
        prefix = [symbols[: i + 1] for i in range(len(symbols))]
        if all(("s", w) in model.resident for w in window) and all(
            ("f", p) in model.resident for p in prefix
        ):
            keep |= {model.resident["s", w] for w in window}
            keep |= {model.resident["f", p] for p in prefix}
    return keep, set(model.key_of) - keep


def chosen(model: EngineModel) -> set[int]:
    """Blocks that were chosen to die already: they go before everything else."""
    return set(model.order._doomed)


def followed(model: EngineModel) -> set[int]:
    """Blocks of prefixes that a request is computing right now: its end may make them useful."""
    return {
        model.resident["f", r.symbols[: i + 1]]
        for r in model.running
        for i in range(r.computed)
        if ("f", r.symbols[: i + 1]) in model.resident
    }


@pytest.mark.parametrize("seed", range(6))
def test_nothing_useful_dies_while_something_useless_is_free(seed: int) -> None:
    """Empty and unreachable blocks go first, and a checkpoint takes along what only it reaches."""
    model = EngineModel(40, seed=seed)
    wrong: list[str] = []
    useful_deaths = 0

    def watch() -> Callable[[int], None]:
        keep, useless = useful(model)
        free = {b for b in range(model.blocks) if model.references[b] == 0}
        left = (free & useless) - followed(model)
        empty = free - set(model.key_of)
        going = chosen(model)

        def died(block: int) -> None:
            nonlocal useful_deaths
            if block not in keep:
                return
            useful_deaths += 1
            if block not in going and left:
                wrong.append(f"{block} died before {left}")
            if empty:
                wrong.append(f"{block} died before empty {empty}")

        return died

    model.watch = watch
    for _ in range(4000):
        model.random_step(invalidate=False)
    assert useful_deaths > 20
    assert not wrong, f"{len(wrong)} of {useful_deaths}: {wrong[:3]}"


@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_a_full_block_never_dies_before_the_checkpoint_it_serves(seed: int, keep: bool) -> None:
    """What is evicted first of a reachable prefix is its checkpoint, never a block below it."""
    model = EngineModel(40, seed=seed, keep_unreachable=keep)
    wrong: list[str] = []

    def watch() -> Callable[[int], None]:
        keep, _ = useful(model)
        windows = {b for b in keep if model.key_of[b][0] == "s" and not model.references[b]}
        live = {b for b in keep if model.order.tree.node_at(b) is not None}
        key_of = dict(model.key_of)

        def died(block: int) -> None:
            kind, symbols = key_of.get(block, ("", ()))
            if kind == "f" and block in live:
                # A checkpoint chosen to die takes its span along; any other one needs it.
                owner = model.order.tree.owner
                served = [
                    b
                    for b in windows
                    if key_of[b][1][: len(symbols)] == symbols
                    and (node := owner[b]) is not None
                    and node.swa is not None
                    and not node.dead
                ]
                if served:
                    wrong.append(f"full block {block} died before checkpoint blocks {served}")

        return died

    model.watch = watch
    for _ in range(4000):
        model.random_step(invalidate=False)
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"


def test_what_no_checkpoint_reaches_stays_until_its_memory_is_needed() -> None:
    """A window may come from a tier below; until then the blocks are the next to die."""
    left = {}
    for keep in (False, True):
        model = EngineModel(40, seed=3, keep_unreachable=keep)
        unreachable = []
        for _ in range(3000):
            model.random_step(invalidate=False)
            _, useless = useful(model)
            unreachable.append(len({b for b in useless if model.key_of[b][0] == "f"}))
        left[keep] = sum(unreachable)
    assert left[True] > 1.5 * left[False]


@both_ways
@pytest.mark.parametrize("seed", range(10))
def test_a_checkpoint_the_tree_believes_in_can_be_hit(seed: int, keep: bool) -> None:
    model = EngineModel(40, seed=seed, keep_unreachable=keep)
    tree = model.order.tree
    for _ in range(1500):
        model.random_step(invalidate=False)
        for node in tree.subtree(tree.root):
            if node.dead or node.swa is None:
                continue
            chain = [*reversed(list(node.ancestors())), node]
            keys = [model.key_of.get(b) for part in chain for b in part.full[0]]
            assert keys and keys[-1] is not None, "the span's last block is not cached"
            symbols = keys[-1][1]
            assert len(symbols) * 4 == node.tokens
            assert keys == [("f", symbols[: i + 1]) for i in range(len(symbols))]
            assert model.hit_of(symbols) == len(symbols)


def overshoot(model: EngineModel, kind: str, limit: int, steps: int = 6000) -> int:
    """Most idle blocks of a kind, those that die first left out, above ``limit``."""
    worst = 0
    for _ in range(steps):
        model.random_step()
        going = chosen(model)
        idle = [
            b
            for b, (of, _) in model.key_of.items()
            if of == kind and b not in going and not model.references[b]
        ]
        worst = max(worst, len(idle) - limit)
    return worst


#: a hit, or a checkpoint that shares blocks, may take blocks back that were chosen to die
TAKEN_BACK = 4


def test_share_limit_holds() -> None:
    for limit in (4, 9, 16):
        model = EngineModel(48, seed=limit, swa_limit_blocks=limit)
        assert overshoot(model, "s", limit) <= TAKEN_BACK


def test_strict_split_bounds_full_blocks() -> None:
    for seed in range(3):
        model = EngineModel(48, seed=seed, swa_limit_blocks=12, full_limit_blocks=20)
        assert overshoot(model, "f", 20) <= TAKEN_BACK


def test_checkpoint_larger_than_the_share_is_refused() -> None:
    order = DeathOrder(16, [GroupGeometry(4)], Policy(swa_limit_blocks=3))
    assert not order.admit_checkpoint(4)


def test_pop_of_more_than_is_free_is_refused() -> None:
    order = DeathOrder(8, [GroupGeometry(4)], Policy(swa_limit_blocks=4))
    order.add_empty([1, 2, 3])
    with pytest.raises(ValueError, match="3 are free"):
        order.pop(4)
    empty, evicted = order.pop(3)
    assert sorted(empty) == [1, 2, 3]
    assert evicted == []


def test_last_freed_empty_block_is_reused_first() -> None:
    order = DeathOrder(8, [GroupGeometry(4)], Policy(swa_limit_blocks=4))
    order.add_empty([1, 2])
    order.add_empty([3])
    assert order.pop(1) == ([3], [])
