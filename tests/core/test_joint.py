# SPDX-License-Identifier: Apache-2.0
"""Hits over device and lower tiers together: against the definition, for any mixture of places."""

from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.joint import JointHit, Place, joint_hit
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit, longest_valid_hit

BLOCK = 16
FULL = GroupGeometry(BLOCK)
SWA = GroupGeometry(BLOCK, window_tokens=33)  # two blocks
D, H, C, B, U, N = (
    Place.DEVICE,
    Place.HOST,
    Place.COMING,
    Place.BELOW,
    Place.UNSURE,
    Place.NOWHERE,
)


def table(*rows):
    """Places by group, one letter a block; nothing behind the end of a row."""
    letters = {"d": D, "h": H, "c": C, "b": B, "u": U, ".": N}

    def where(group, block):
        row = rows[group]
        return letters[row[block]] if block < len(row) else N

    return where


def hit(groups, rows, *, local=0, limit=None):
    limit = len(rows[0]) * BLOCK if limit is None else limit
    return joint_hit(groups, BLOCK, local, limit, table(*rows))


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        (("dddddd", "....hh"), 96),  # the device lost the window only
        (("dddhhh", "....dd"), 96),  # host memory lost the window, the device has it
        (("ddhhdd", "....hd"), 96),  # device, host, device
        (("hhhhhh", "......"), 0),
        (("hhhhhh", ".hh..."), 48),
        (("hh.hhh", "hh..hh"), 32),  # a hole in full attention ends it
        (("hhhhhh", "....h."), 0),  # half a window is none
        (("bbbbbb", "....bb"), 96),
    ],
)
def test_mixtures(rows, tokens):
    found = hit((FULL, SWA), rows)
    assert (found.tokens, found.unsure) == (tokens, False)


def test_what_has_to_be_loaded_is_what_the_device_lacks():
    found = hit((FULL, SWA), ("dddddd", "....hd"))
    assert found.at(H) == [(1, 4)]
    assert found.at(D) == [(0, block) for block in range(6)] + [(1, 5)]


def test_the_local_hit_is_not_looked_at_again():
    asked = []

    def where(group, block):
        asked.append((group, block))
        return H

    found = joint_hit((FULL, SWA), BLOCK, 64, 96, where)
    assert found.tokens == 96
    assert min(block for group, block in asked if group == 0) == 4
    assert len(asked) == len(set(asked))


def test_answers_that_are_missing_leave_what_is_sure():
    found = hit((FULL, SWA), ("hhhhuu", ".hh.hh"))
    assert found.unsure
    assert found.tokens == 48
    assert hit((FULL, SWA), ("hhhhhh", ".hh.uh")).unsure


def test_a_window_is_asked_for_in_the_other_groups_only_where_the_first_has_it():
    asked = []

    def where(group, block):
        asked.append((group, block))
        return N if group == 1 and block >= 3 else H

    found = joint_hit((FULL, SWA, SWA), BLOCK, 0, 160, where)
    assert found.tokens == 48
    assert {block for group, block in asked if group == 2} == {1, 2}


def test_a_draft_group_needs_the_block_behind_the_hit():
    draft = GroupGeometry(BLOCK, window_tokens=33, lookahead_blocks=1)
    assert hit((FULL, draft), ("hhhhhh", "...hhh")).tokens == 80
    assert hit((FULL, draft), ("hhhhhh", "...hh.")).tokens == 0
    ahead = GroupGeometry(BLOCK, lookahead_blocks=1)
    assert hit((ahead, SWA), ("hhhhhh", "hhhhhh")).tokens == 80


@st.composite
def cases(draw, unsure=False):
    """Groups of several block sizes, and a place for each block."""
    sizes = [draw(st.sampled_from((8, 16, 32))) for _ in range(draw(st.integers(1, 3)))]
    groups = [GroupGeometry(draw(st.sampled_from((16, 32))), None, draw(st.integers(0, 1)))]
    groups += [
        GroupGeometry(size, draw(st.sampled_from((9, 17, 33, 64))), draw(st.integers(0, 1)))
        for size in sizes
    ]
    unit = lcm(*(group.block_size_tokens for group in groups))
    limit = unit * draw(st.integers(1, 8))
    local = unit * draw(st.integers(0, limit // unit))
    choice = st.sampled_from((D, H, H, H, C, B, N) + ((U, U) if unsure else ()))
    places = {}
    for index, group in enumerate(groups):
        for block in range(limit // group.block_size_tokens + 2):
            places[index, block] = draw(choice)
        # A local hit is on the device.
        places.update(((index, block), D) for block in blocks_for_hit(group, local))
    return groups, unit, local, limit, places


@settings(max_examples=300, deadline=None)
@given(cases())
def test_it_is_the_longest_hit_there_is(case):
    groups, unit, local, limit, places = case
    found = joint_hit(groups, unit, local, limit, lambda g, b: places[g, b])
    oracle = longest_valid_hit(groups, unit, limit, lambda g, b: places[g, b] is not N)
    assert found.tokens == max(oracle, local)
    assert not found.unsure
    if found.tokens > local:
        for index, group in enumerate(groups):
            asked = set(found.places[index])
            needed = set(blocks_for_hit(group, found.tokens))
            if group.is_full:
                needed -= set(range(local // group.block_size_tokens))
            assert asked == needed
            assert N not in found.places[index].values()


@settings(max_examples=300, deadline=None)
@given(cases(unsure=True), st.data())
def test_once_all_answers_are_there_it_is_the_longest_hit(case, data):
    groups, unit, local, limit, places = case
    asked = set()

    def where(group, block):
        asked.add((group, block))
        return places[group, block]

    for _ in range(200):
        found = joint_hit(groups, unit, local, limit, where)
        for blocks in found.places:
            assert not {U, N} & set(blocks.values())
        if not found.unsure:
            break
        # Only what was asked for is ever answered.
        waiting = [key for key in sorted(asked) if places[key] is U]
        assert waiting
        for key in waiting:
            places[key] = data.draw(st.sampled_from((B, N)))
    assert not found.unsure
    oracle = longest_valid_hit(groups, unit, limit, lambda g, b: places[g, b] not in (U, N))
    maybe = longest_valid_hit(groups, unit, limit, lambda g, b: places[g, b] is not N)
    assert max(oracle, local) <= found.tokens
    assert found.tokens == max(maybe, local) == max(oracle, local)


def test_nothing_beyond_the_local_hit():
    assert hit((FULL, SWA), ("dddd..", "..dd.."), local=64) == JointHit(64, 64, False)
