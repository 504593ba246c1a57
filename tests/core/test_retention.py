# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are kept: the ladder's bound, prompt ends, message starts, the plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.retention import (
    CLASSES,
    STRENGTH,
    Ladder,
    RetentionRule,
    find_message_starts,
)

ALIGNMENTS = st.sampled_from([1, 16, 32, 256])
GROWTH = st.floats(0.01, 1.0)


@given(st.integers(1, 5000), GROWTH, ALIGNMENTS, st.integers(0, 2_000_000))
def test_ladder_keeps_its_stated_bound(
    smallest: int, growth: float, alignment: int, full_hit: int
) -> None:
    ladder = Ladder(smallest, growth, alignment)
    rungs = ladder.between(0, full_hit)
    hit = rungs[-1] if rungs else 0
    assert full_hit - hit <= ladder.max_loss_tokens(full_hit)
    # as the design states it, up to the rounding to the alignment
    assert full_hit - hit <= max(smallest, growth * full_hit) + alignment


@given(st.integers(1, 500), GROWTH, ALIGNMENTS, st.lists(st.integers(0, 60_000), max_size=6))
def test_rungs_depend_on_the_position_alone(
    smallest: int, growth: float, alignment: int, cuts: list[int]
) -> None:
    whole = list(Ladder(smallest, growth, alignment).between(0, 60_000))
    assert whole == sorted(set(whole))
    assert all(rung % alignment == 0 for rung in whole)
    ladder = Ladder(smallest, growth, alignment)
    for cut in cuts:  # whatever was asked before
        ladder.between(0, cut)
    edges = [0, *sorted(cuts), 60_000]
    pieces = [r for a, b in zip(edges, edges[1:], strict=False) for r in ladder.between(a, b)]
    assert pieces == whole


@pytest.mark.parametrize("bad", [(0, 0.5, 1), (1, 0.0, 1), (1, 1.5, 1), (1, 0.5, 0)])
def test_impossible_ladder_is_refused(bad: tuple[int, float, int]) -> None:
    with pytest.raises(ValueError, match="ladder needs"):
        Ladder(*bad)


def test_ladder_is_sparse_for_long_prompts() -> None:
    ladder = Ladder(1536, 0.25, 32)
    assert len(ladder.between(0, 1_000_000)) < 40


def rule(
    alignment: int = 32, lookahead: int = 0, classes: frozenset[str] | None = None
) -> RetentionRule:
    return RetentionRule(
        alignment_tokens=alignment,
        lookahead_tokens=lookahead,
        classes=frozenset(CLASSES) if classes is None else classes,
        ladder=Ladder(4 * alignment, 0.25, alignment),
    )


@given(st.integers(1, 3000), st.sampled_from([(32, 0), (32, 16), (32, 32), (2, 2), (256, 64)]))
def test_prompt_ends_hold_the_best_resend_and_extension(
    length: int, geometry: tuple[int, int]
) -> None:
    alignment, lookahead = geometry
    ends = rule(alignment, lookahead).prompt_ends(length)
    assert list(ends) == sorted(set(ends))
    assert all(0 < end <= length and end % alignment == 0 for end in ends)
    # With look-ahead a hit needs KV past it, which a resend may own entirely.
    for limit in (min(length - 1, length - lookahead), length - lookahead):
        best = max(0, limit // alignment * alignment)
        assert best == 0 or best in ends


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_message_starts_are_all_found(ids: list[int], first: int, stop: int) -> None:
    stop = min(stop, len(ids))
    starts = frozenset({1, 3})
    naive = [i for i in range(first, stop) if ids[i] in starts]
    assert find_message_starts(ids, starts, first, stop) == naive


@given(st.lists(st.integers(0, 40_000), max_size=80, unique=True))
def test_thinning_keeps_first_and_last_and_spaces_the_rest(starts: list[int]) -> None:
    starts.sort()
    r = rule()
    kept = r.thin_boundaries(starts, 0)
    usable = [s for s in starts if r.align(s) > 0]
    assert set(kept) <= set(usable)
    assert kept == sorted(kept)
    if usable:
        assert kept[0] == usable[0]
        assert kept[-1] == usable[-1]
    for before, this in zip(kept, kept[1:-1], strict=False):
        assert this - before >= max(r.ladder.min_tokens, int(r.ladder.growth * this))


SPANS = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(
    SPANS,
    st.integers(1, 2500),
    st.lists(st.integers(0, 2000), max_size=4),
    st.lists(st.integers(0, 2000), max_size=6),
    st.sampled_from([0, 16, 32]),
    st.sets(st.sampled_from(CLASSES)),
)
def test_plan(
    span: list[int],
    prompt: int,
    junctions: list[int],
    starts: list[int],
    lookahead: int,
    classes: set[str],
) -> None:
    low, middle, high = (32 * x for x in span)
    r = rule(32, lookahead, frozenset(classes))
    plan = r.plan(low, high, prompt, junctions, starts)
    positions = [tokens for tokens, _ in plan]
    assert positions == sorted(set(positions))
    assert all(low < tokens <= high and tokens % 32 == 0 for tokens in positions)
    assert {cls for _, cls in plan} <= classes
    # Prefill in two chunks plans what prefill in one does.
    assert plan == [
        *r.plan(low, middle, prompt, junctions, starts),
        *r.plan(middle, high, prompt, junctions, starts),
    ]
    named = dict(plan)

    def holds(tokens: int, cls: str) -> None:
        if cls in classes and low < tokens <= high:
            assert STRENGTH[named[tokens]] >= STRENGTH[cls]

    for end in r.prompt_ends(prompt):
        holds(end, "prompt_end")
    for start in starts:
        holds(start // 32 * 32, "boundary")
    for junction in junctions:
        holds(junction // 32 * 32, "junction")
    for rung in r.ladder.between(low, high):
        holds(rung, "ladder")


def test_tail_is_one_unit_before_the_prompt_end() -> None:
    plan = dict(rule().plan(0, 320, 321))
    assert plan[320] == "prompt_end"
    assert plan[288] == "tail"


def test_strength_orders_the_classes() -> None:
    assert sorted(CLASSES, key=lambda c: -STRENGTH[c]) == list(CLASSES)
    assert STRENGTH["none"] < min(STRENGTH[c] for c in CLASSES)
