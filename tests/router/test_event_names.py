# SPDX-License-Identifier: Apache-2.0
"""Engines' block names to canonical ones: an index fed by vLLM's own cache manager foretells hits.

The manager plays random histories in a pool so small that something is evicted all the time. Before
each look-up the index is asked what the hit will be.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.block_hashes import PromptHasher, block_hashes
from mimo_plugin.core.engine_events import EngineStored
from mimo_plugin.core.event_names import BYTES_PER_NAME
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, Step
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.core.residency import BYTES_PER_BLOCK
from mimo_plugin.core.sparse_places import WindowRule, places
from mimo_plugin.router.prompt import MediaSpan, Prompt
from tests.profiles import load_vllm_profile

load_vllm_profile()

STEPS = 60


@dataclass(frozen=True)
class Case:
    """Groups as (block, window) or (block, window, "draft"); a full one has no window."""

    groups: tuple[tuple[Any, ...], ...]
    blocks: int
    options: dict[str, Any] = field(default_factory=dict)


STOCK = {"stock": {}, "dense": {"retention": None}, "every-8": {"retention": 8}}
MIMO = ((4, None), (2, 9), (2, 9), (2, 9))
SHAPES = {
    "one-size": Case(((4, None), (4, 6)), 24),
    "mimo": Case(MIMO, 120),
    "odd-windows": Case(((4, None), (2, 7)), 60),
    "window-group-first": Case(((2, 6), (4, None)), 60),
    "window-block-larger": Case(((2, None), (4, 7)), 60),
    "two-windows": Case(((4, None), (2, 4), (4, 10)), 60),
    "two-full": Case(((4, None), (4, None), (2, 5)), 70),
    "full-only": Case(((4, None),), 60),
}
CASES = {
    f"{shape}-{name}": Case(case.groups, case.blocks, options)
    for shape, case in SHAPES.items()
    for name, options in STOCK.items()
    if len(case.groups) > 1 or name == "stock"
}
CASES["mimo-kv"] = Case(MIMO, 120, {"plugin": True})
CASES["one-size-kv"] = Case(SHAPES["one-size"].groups, 30, {"plugin": True})
CASES["mimo-finer-hashes"] = Case(MIMO, 120, {"unit": 1})
CASES["one-size-drafts"] = Case(((4, None), (4, 9)), 60, {"use_eagle": True})
CASES["mimo-drafts-kv"] = Case(
    ((4, None), (2, 9), (2, 9, "draft")), 90, {"use_eagle": True, "plugin": True}
)


def player(case: Case, seed: int, **options: Any) -> Any:
    from tests.kv.harness import Group
    from tests.router.engine_player import Player

    groups = [Group(g[0], g[1] if len(g) > 1 else None, draft=len(g) > 2) for g in case.groups]
    return Player(groups, case.blocks, seed, **case.options, **options)


@pytest.mark.vllm
@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=8)
def test_every_hit_is_foretold(name, seed):
    engine = player(CASES[name], seed)
    for foretold, real in engine.play(STEPS):
        assert foretold <= real
        # What looks like a report of reuse is not counted, and that may cost a hit later.
        assert foretold == real or engine.index.name_counts("w").reuse_reports
    counts = engine.index.name_counts("w")
    assert counts.contradictions == counts.open_places == 0
    assert not counts.reuse_reports or "mimo-stock" not in name


ROUGH = {
    "four-in-one": Case(((8, None), (2, 9)), 70),
    "drafts": Case(((4, None), (2, 9), (2, 9, "draft")), 90, {"use_eagle": True}),
    "drafts-odd": Case(((4, None), (2, 6), (2, 4, "draft")), 80, {"use_eagle": True}),
    "odd-kv": Case(((4, None), (2, 7)), 60, {"plugin": True}),
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", ROUGH)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=8)
def test_no_more_than_is_there(name, seed):
    """Places that the rules leave open cost hits, but never invent any."""
    engine = player(ROUGH[name], seed)
    right = 0
    for _ in range(STEPS):
        engine.act()
        engine.listen()
        tokens = engine.prompt()
        there = engine.kv.longest_valid(engine.kv.request(tokens))
        foretold = engine.predicted(tokens)
        assert foretold <= there
        right += foretold == there
    assert right > 0.7 * STEPS


@pytest.mark.vllm
@given(seed=st.integers(0, 1 << 30), lost=st.integers(0, 20))
@settings(max_examples=10)
def test_who_listens_late_answers_less(seed, lost):
    engine = player(CASES["mimo-stock"], seed)
    late = NamedIndex(2)
    for step in range(STEPS):
        engine.act()
        before = len(engine.payloads)
        engine.listen()
        if step >= lost:
            from mimo_plugin.router.event_wire import decode

            for seq in range(before, len(engine.payloads)):
                late.apply("w", seq, decode(engine.payloads[seq])[0])
        tokens = engine.prompt()
        real = engine.kv.look_up(engine.kv.request(tokens))[1]
        hashes = PromptHasher(2).hashes(Prompt(tokens, len(tokens)))
        assert late.lookup(hashes, len(tokens) - 1).get("w", 0) <= real


@pytest.mark.vllm
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=10)
def test_snapshots_go_on(seed):
    engine = player(CASES["mimo-kv"], seed)
    engine.play(STEPS // 2)
    other = NamedIndex(2)
    other.restore_named("w", engine.index.named_snapshot("w"))
    engine.index = other
    for foretold, real in engine.play(STEPS):
        assert foretold == real


@pytest.mark.vllm
def test_many_workers_have_the_same_names():
    """Two engines, each with names of its own; one look-up serves both."""
    index = NamedIndex(2)
    engines = [player(CASES["mimo-stock"], 5, index=index, name=name) for name in "ab"]
    for engine in engines:
        assert all(foretold == real for foretold, real in engine.play(STEPS))
    tokens = engines[0].known[-1] + [7] * 8
    hashes = PromptHasher(2).hashes(Prompt(tokens, len(tokens)))
    hits = index.lookup(hashes, len(tokens) - 1)
    assert {name: hits.get(name, 0) for name in "ab"} == {
        engine.name: engine.kv.look_up(engine.kv.request(tokens))[1] for engine in engines
    }


HASH_SCRIPT = """
import sys
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as u
f = get_hash_fn_by_name(sys.argv[1]); u.init_none_hash(f)
last = None
for first in range(0, 12, 4):
    last = u.hash_block_tokens(f, last, list(range(first, first + 4)), None)
    print(u.maybe_convert_block_hash(last))
"""


@pytest.mark.vllm
def test_seed_and_algorithm_of_the_engine_do_not_matter():
    index, told = NamedIndex(4), list[tuple[int | bytes, ...]]()
    for worker, (seed, algorithm, form) in enumerate(
        [("0", "sha256", "1"), ("17", "sha256", "1"), ("0", "sha256_cbor", "0")]
    ):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "VLLM_LOGGING_LEVEL": "ERROR"}
        environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = form
        done = subprocess.run(
            [sys.executable, "-c", HASH_SCRIPT, algorithm],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        names = [eval(line) for line in done.stdout.split("\n")[-4:-1]]
        told.append(tuple(names))
        index.apply(str(worker), 0, [EngineStored(names, None, list(range(12)), 4)])
    assert len({name for names in told for name in names}) == 9
    assert isinstance(told[2][0], bytes) and isinstance(told[0][0], int)
    hits = index.lookup(block_hashes(list(range(20)), 4), 19)
    assert hits == {"0": 12, "1": 12, "2": 12}


# --- one event at a time ---------------------------------------------------------------------


def full(names, parent, tokens, size=4, **options):
    return EngineStored(names, parent, tokens, size, kv_cache_spec_kind="full_attention", **options)


def window(names, parent, tokens, size=2, group=1, **options):
    return EngineStored(
        names, parent, tokens, size, group_idx=group, kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=5, **options
    )  # fmt: skip


def tokens_of(start, count):
    return list(range(start, start + count))


def hit(index, tokens, worker="w", **options):
    prompt = Prompt([*tokens, 9, 9, 9, 9], len(tokens) + 4, **options)
    unit = index.hash_block_tokens
    return index.lookup(PromptHasher(unit).hashes(prompt), len(tokens)).get(worker, 0)


def fed(*batches, unit=2, **options):
    index = NamedIndex(unit, **options)
    for seq, batch in enumerate(batches):
        index.apply("w", seq, batch)
    return index


def test_a_window_event_before_the_full_one():
    tokens = tokens_of(0, 8)
    # Kept are blocks 2 and 3 of the window group: "c" has no other name, "y" is the full one too.
    one = fed([window(["c", "y"], None, tokens), full(["x", "y"], None, tokens)])
    later = fed([window(["c", "y"], None, tokens)], [full(["x", "y"], None, tokens)])
    assert hit(one, tokens) == 8
    # Alone the first one tells no place; with the full one "y" has one, "c" stays open.
    assert hit(later, tokens) == 0
    assert later.name_counts("w").open_places + later.name_counts("w").unknown_parents


def test_a_window_block_named_later_counts_from_then_on():
    tokens = tokens_of(0, 8)
    index = fed(
        [window(["x", "y"], None, tokens, size=4)],
        [full(["x", "y"], None, tokens)],
    )
    assert hit(index, tokens) == 8
    index.apply("w", 2, [BlockRemoved(["y"], 1)])
    assert hit(index, tokens) == 4


def test_the_end_of_a_prompt_inside_a_block_is_no_block():
    tokens = tokens_of(0, 8)
    end = full(["p"], None, tokens[:2], size=2)
    index = fed([end], [full(["x", "y"], None, tokens)], [BlockRemoved(["p"], 0)])
    assert index.groups[0].block_size_tokens == 4
    assert hit(index, tokens) == 8


def test_single_blocks_count_once_it_is_known_that_they_are_whole():
    tokens = tokens_of(0, 8)
    index = fed(
        [full(["a"], None, tokens[:2], size=2)],
        [full(["b"], "a", tokens[2:4], size=2)],
        [BlockRemoved(["b"], 0)],
        [full(["c", "d"], "a", tokens[2:6], size=2)],
    )
    assert hit(index, tokens) == 6


def test_an_unknown_parent_is_no_hit():
    tokens = tokens_of(0, 16)
    index = fed([full(["c", "d"], "b", tokens[8:])])
    assert hit(index, tokens) == hit(index, tokens[8:]) == 0
    assert index.name_counts("w").unknown_parents == 1


def test_copies_are_counted():
    tokens = tokens_of(0, 8)
    store, gone = full(["x", "y"], None, tokens), BlockRemoved(["x", "y"], 0)
    index = fed([store], [full(["x"], None, tokens[:4])], [BlockRemoved(["x"], 0)])
    assert hit(index, tokens) == 8
    index.apply("w", 3, [gone])
    assert hit(index, tokens) == 0 and index.blocks_of("w") == 0
    index.apply("w", 4, [gone, store])
    assert hit(index, tokens) == 8


def test_two_blocks_of_one_name_are_dropped():
    one, other = tokens_of(0, 8), tokens_of(100, 8)
    index = fed([full(["x", "y"], None, one)], [full(["y", "z"], None, other)])
    assert hit(index, one) == 4 and hit(index, other) == 0
    assert index.name_counts("w").contradictions == 1
    index.apply("w", 2, [BlockRemoved(["y"], 0), BlockRemoved(["y"], 0)])
    index.apply("w", 3, [full(["y"], "x", one[4:])])
    assert hit(index, one) == 8


def test_two_names_of_one_block_are_dropped():
    """An adapter's name that was given to other weights: events don't tell the weights."""
    tokens = tokens_of(0, 8)
    old = full(["x", "y"], None, tokens, lora_name="a", extra_keys=[["a"], ["a"]])
    new = full(["u", "v"], None, tokens, lora_name="a", extra_keys=[["a"], ["a"]])
    index = fed([old])
    assert hit(index, tokens, lora="a") == 8 and hit(index, tokens) == 0
    index.apply("w", 1, [new])
    assert hit(index, tokens, lora="a") == 0
    assert index.name_counts("w").contradictions == 2


def test_extra_keys_of_large_blocks():
    tokens = tokens_of(0, 16)
    media = (MediaSpan(3, 4, "i"), MediaSpan(9, 2, "j"))
    keys = [["l", ["i", 3], "s"], ["l", ["i", -1]], ["l", ["j", 1]], ["l"]]
    index = fed([full(["a", "b", "c", "d"], None, tokens, lora_name="l", extra_keys=keys)])
    assert hit(index, tokens, media=media, lora="l", salt="s") == 16
    assert hit(index, tokens, media=media[:1], lora="l", salt="s") == 8
    assert hit(index, tokens, media=media, lora="l") == 0
    assert hit(index, tokens, media=media, salt="s") == 0


def test_a_sparse_window_of_a_salted_prompt_is_not_taken_for_a_plain_one():
    tokens = tokens_of(0, 8)
    salted = full(["x", "y"], None, tokens, extra_keys=[["s"], None])
    plain = full(["p", "q"], None, tokens)
    # "c" lies before "y", whose prompt has the salt; its own keys don't tell.
    index = fed([salted, plain], [window(["c", "y"], None, tokens)])
    assert hit(index, tokens, salt="s") == 8
    assert hit(index, tokens) == 0


def test_cleared():
    tokens = tokens_of(0, 8)
    index = fed([AllBlocksCleared(), full(["x", "y"], None, tokens)], [BlockRemoved(["y"], 0)])
    assert hit(index, tokens) == 4
    index = fed([full(["x", "y"], None, tokens)], [AllBlocksCleared()])
    assert hit(index, tokens) == index.blocks_of("w") == 0
    index.apply("w", 2, [full(["x"], None, tokens[:4])])
    assert hit(index, tokens) == 4


def test_other_media_do_not_count():
    tokens = tokens_of(0, 8)
    index = fed([full(["x", "y"], None, tokens, medium="CPU")], [full(["x"], None, tokens[:4])])
    index.apply("w", 2, [BlockRemoved(["x"], 0, "CPU")])
    assert hit(index, tokens) == 4
    assert index.name_counts("w").ignored_events == 1


def test_reports_of_reuse_are_no_copies():
    tokens = tokens_of(0, 24)
    names, small = [f"f{i}" for i in range(6)], [f"s{i}" for i in range(12)]
    small[1::2] = names
    stored = [full(names, None, tokens), window(small[-2:], None, tokens)]
    report = [full(names, None, tokens), window(small, None, tokens)]
    index = fed(stored)
    assert hit(index, tokens) == 24 and hit(index, tokens[:12]) == 0
    index.apply("w", 1, report)
    # The report also lists window blocks that are long gone.
    assert hit(index, tokens[:12]) == 0
    index.apply("w", 2, [BlockRemoved(names[-1:], 0)])
    assert hit(index, tokens) == 0
    assert index.name_counts("w").reuse_reports == 1
    # Of an unknown prompt's report only that holds what a hit needs.
    again = [full(names[:5], None, tokens[:20]), window(small[:10], None, tokens[:20])]
    back = [full(names[-1:], names[-2], tokens[20:]), window(small[8:10], small[7], tokens[16:20])]
    index.apply("w", 3, back)
    for seq in (4, 5, 6):
        index.apply("w", seq, again)
    assert index.name_counts("w").reuse_reports == 4
    fresh = tokens_of(200, 24)
    more, tiny = [f"F{i}" for i in range(6)], [f"S{i}" for i in range(12)]
    tiny[1::2] = more
    index.apply("w", 7, [full(more, None, fresh), window(tiny, None, fresh)])
    assert hit(index, fresh) == 24 and hit(index, fresh[:12]) == 0


def test_suspended_workers_have_no_hits():
    tokens = tokens_of(0, 8)
    index = fed([full(["x", "y"], None, tokens)])
    index.suspend("w")
    assert hit(index, tokens) == 0 and not index.is_trusted("w")
    index.apply("w", 1, [full(["z"], "y", tokens_of(8, 4))])
    assert hit(index, tokens) == 0
    index.resume("w")
    assert hit(index, tokens_of(0, 12)) == 12


def test_batches_are_named_in_their_order():
    tokens = tokens_of(0, 16)
    index = fed([full(["a"], None, tokens[:4]), full(["b"], "a", tokens[4:8])])
    assert index.apply("w", 2, [full(["d"], "c", tokens[12:])]) is Step.GAP
    assert hit(index, tokens) == 0
    index.apply("w", 1, [full(["c"], "b", tokens[8:12])], replayed=True)
    assert hit(index, tokens) == 16


def test_memory_is_bounded_and_stated():
    rng = random.Random(1)
    index = NamedIndex(2)
    count = 20_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    parent = None
    for seq in range(count // 100):
        names = [rng.getrandbits(64) for _ in range(100)]
        small = [name for name in names for name in (rng.getrandbits(64), name)]
        tokens = [rng.randrange(1 << 17) for _ in range(400)]
        index.apply("w", seq, [full(names, parent, tokens), window(small, parent, tokens)])
        parent = names[-1]
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    pairs = index.blocks_of("w")
    assert pairs == 3 * count
    assert used < pairs * BYTES_PER_BLOCK + 2 * count * BYTES_PER_NAME
    assert used > pairs * 100


def test_a_worker_that_reports_too_much_starts_again():
    index = NamedIndex(2, max_blocks_per_worker=10)
    tokens = tokens_of(0, 4 * 25)
    for at in range(25):
        event = full([at + 1], at or None, tokens[at * 4 : at * 4 + 4])
        # In one batch with a block that is there for good.
        index.apply("w", at, [event, full([1000 + at], None, tokens_of(5000 + 4 * at, 4))])
        assert index.blocks_of("w") <= 10
        assert hit(index, tokens_of(5000, 4)) == (4 if at < 5 else 0)
    assert index.overflows
    # All that it does not know any more is removed: nothing may be left.
    names = [*range(1, 26), *range(1000, 1025)]
    index.apply("w", 25, [BlockRemoved(names, 0)])
    assert index.blocks_of("w") == 0 and index.unknown_removals == 0


# --- places ----------------------------------------------------------------------------------


@given(st.data())
def test_places_of_random_windows(data):
    """Any windows that an engine keeps, cut at either end: places are right, or left open."""
    step = data.draw(st.sampled_from([2, 4]))
    need, ahead = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 1))
    count = data.draw(st.integers(1, 60))
    ends = data.draw(st.lists(st.integers(1, count // step + 3), min_size=1, max_size=3))
    gone = data.draw(st.integers(0, count)) if data.draw(st.booleans()) else 0
    first = data.draw(st.integers(0, count - 1))
    kept = {
        place
        for end in ends
        for place in range(max(0, end * step - need), end * step + ahead)
        if max(first, gone) <= place < count
    }
    truth = [place - first for place in sorted(kept)]
    named = [place for place in range(count - first) if (place + first) % step == step - 1]
    known = [place if place in named else None for place in truth]
    free = [place not in named for place in range(count - first)]
    found = places(known, free, WindowRule.of(need, ahead, step))
    assert found is not None
    for place, real in zip(found, truth, strict=True):
        assert place is None or place == real


def test_known_places_must_rise():
    assert places([3, 1], [True] * 4, WindowRule(0, 0, 1)) is None
