# SPDX-License-Identifier: Apache-2.0
"""Which windows are stored: those of hits at kept points, no more and no less."""

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.retention import CLASSES, Ladder, RetentionRule
from mimo_plugin.core.store_plan import StorePlan, waiting_blocks
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit, is_valid_hit, last_safe_boundary

FULL = GroupGeometry(128)
SWA = GroupGeometry(128, 128)


def rule(*classes, unit=128, lookahead=0, least=128, growth=0.5):
    return RetentionRule(unit, lookahead, frozenset(classes), Ladder(least, growth, unit))


def stored(plan, group, blocks):
    return [block for block in range(blocks) if plan.wanted(group, block)]


def test_a_prompt_end_is_one_window():
    plan = StorePlan((FULL, SWA), rule("prompt_end"))
    plan.extend(1500, 1500)
    assert plan.points == [1408]
    assert stored(plan, 1, 11) == [10]
    assert stored(plan, 0, 11) == list(range(11))


def test_the_ladder_takes_65_percent_of_all_windows_and_has_the_hits_of_all():
    plan = StorePlan((FULL, SWA), rule("prompt_end", "ladder"))
    plan.extend(1500, 1500)
    assert plan.points == [128, 256, 384, 640, 1024, 1408]
    layers_full, layers_swa = 2, 12
    taken = layers_full * 11 + layers_swa * len(stored(plan, 1, 11))
    assert taken / (11 * (layers_full + layers_swa)) <= 0.65
    for parted, dense in ((1024, 1024), (500, 384), (1500, 1408)):
        assert max(p for p in plan.points if p <= parted) == dense


def test_junctions_and_messages_are_kept():
    plan = StorePlan((FULL, SWA), rule("junction", "boundary"))
    plan.extend(2048, 2000, junctions=[700], message_starts=[300, 1300])
    assert plan.points == [256, 640, 1280]


def test_the_end_of_a_turn_is_known_at_the_end():
    plan = StorePlan((FULL, SWA), rule("turn_end", "prompt_end"))
    plan.extend(1500, 1500)
    assert not plan.wanted(1, 12)
    plan.finish(1700)
    assert plan.points == [1408, 1664]
    assert plan.wanted(1, 12)
    assert not plan.wanted(1, 11)


def test_an_early_end():
    plan = StorePlan((FULL, SWA), rule("turn_end", "tail"))
    plan.finish(100)
    assert plan.points == []
    plan.finish(150)
    assert plan.points == [128]


@st.composite
def plans(draw):
    sizes = [draw(st.sampled_from((16, 32, 64))) for _ in range(draw(st.integers(1, 3)))]
    groups = [GroupGeometry(draw(st.sampled_from((16, 64))), None, draw(st.integers(0, 1)))]
    groups += [
        GroupGeometry(size, draw(st.sampled_from((17, 64, 128))), draw(st.integers(0, 1)))
        for size in sizes
    ]
    unit = lcm(*(group.block_size_tokens for group in groups))
    ahead = max(g.lookahead_blocks * g.block_size_tokens for g in groups)
    classes = draw(st.sets(st.sampled_from(CLASSES), min_size=1))
    return groups, rule(*classes, unit=unit, lookahead=ahead, least=draw(st.integers(1, 300)))


@settings(max_examples=200, deadline=None)
@given(
    plans(), st.lists(st.integers(1, 900), max_size=4), st.integers(1, 1500), st.integers(0, 400)
)
def test_what_is_stored_is_what_hits_at_the_points_need(made, starts, prompt, more):
    groups, chosen = made
    plan = StorePlan(groups, chosen)
    for upto in (*sorted(starts), prompt, prompt + more):
        plan.extend(upto, prompt, junctions=starts[:1], message_starts=starts)
    plan.finish(prompt + more)
    needed = {
        (index, block)
        for index, group in enumerate(groups)
        for point in plan.points
        for block in blocks_for_hit(group, point)
    }
    for index, group in enumerate(groups):
        last = max((prompt + more, *plan.points)) // group.block_size_tokens + 3
        found = {(index, block) for block in range(last) if plan.wanted(index, block)}
        if not group.is_full:
            assert found == {key for key in needed if key[0] == index}
    assert all(
        is_valid_hit(groups, point, lambda index, block: plan.wanted(index, block))
        for point in plan.points
    )


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 1500))
def test_blocks_that_wait_hold_the_last_windows(made, tokens):
    """What the points known at the end need has not been passed by."""
    groups, chosen = made
    end = last_safe_boundary(groups, chosen.alignment_tokens, tokens)
    points = [end] if "turn_end" in chosen.classes else []
    if "tail" in chosen.classes:
        points.append(end - chosen.alignment_tokens)
    for group in groups:
        first = tokens // group.block_size_tokens - waiting_blocks(group, chosen)
        for point in points:
            if point > 0 and not group.is_full:
                assert min(blocks_for_hit(group, point)) >= max(0, first)
