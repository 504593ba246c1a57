# SPDX-License-Identifier: Apache-2.0
"""The cheap look-up for scoring against the oracle that tries every boundary."""

from __future__ import annotations

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.probe import probe_hit
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit, longest_valid_hit

_SIZES = st.sampled_from([1, 2, 3, 4, 8])
_FULL = st.builds(GroupGeometry, _SIZES, st.none(), st.integers(0, 2))
_SWA = st.builds(GroupGeometry, _SIZES, st.integers(1, 24), st.integers(0, 2))


@st.composite
def pools(draw):
    """``(groups, alignment, max hit, resident)``; full attention is resident without gaps."""
    full = draw(st.lists(_FULL, max_size=2))
    swa = draw(st.lists(_SWA, min_size=0 if full else 1, max_size=3))
    groups = draw(st.permutations([*full, *swa]))
    alignment = lcm(*(g.block_size_tokens for g in groups)) * draw(st.sampled_from([1, 1, 2]))
    most = alignment * draw(st.integers(0, 30)) + draw(st.integers(0, alignment))
    have: list[set[int]] = []
    for group in groups:
        blocks = (most + 2 * alignment) // group.block_size_tokens + 3
        if group.is_full:
            have.append(set(range(draw(st.integers(0, blocks)))))
        else:
            kept: set[int] = set()
            if draw(st.booleans()):
                kept = set(range(blocks))
            for _ in range(draw(st.integers(0, 4))):
                first = draw(st.integers(0, blocks))
                run = range(first, min(blocks, first + draw(st.integers(1, 12))))
                kept = kept - set(run) if len(kept) > blocks // 2 else kept | set(run)
            have.append(kept)
    return groups, alignment, most, have


@settings(max_examples=1500)
@given(pool=pools(), guess=st.integers(0, 400))
def test_probe_equals_the_oracle(pool, guess):
    groups, alignment, most, have = pool
    asked: list[tuple[int, int]] = []

    def resident(group: int, block: int) -> bool:
        assert block >= 0
        asked.append((group, block))
        return block in have[group]

    hit, full = probe_hit(groups, alignment, most, resident, guess_tokens=guess)
    assert hit == longest_valid_hit(groups, alignment, most, lambda g, b: b in have[g])
    assert hit % alignment == 0 and full % alignment == 0 and 0 <= hit <= full <= most
    index = [i for i, g in enumerate(groups) if g.is_full]
    only_full = [groups[i] for i in index]
    assert full == longest_valid_hit(only_full, alignment, most, lambda g, b: b in have[index[g]])


@given(pool=pools())
def test_any_guess_gives_the_same_answer(pool):
    groups, alignment, most, have = pool
    answers = {
        probe_hit(groups, alignment, most, lambda g, b: b in have[g], guess_tokens=guess)
        for guess in (0, 1, alignment, most // 2, most, most + 1, 10 * most + 7)
    }
    assert len(answers) == 1


def test_nothing_to_hit():
    full = GroupGeometry(4)
    assert probe_hit((full,), 4, 0, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, 3, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, -1, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, 100, lambda g, b: False, guess_tokens=40) == (0, 0)


def test_few_probes_for_a_long_prompt():
    """Logarithmic without a guess; with the right one a handful."""
    full, swa = GroupGeometry(16), GroupGeometry(16, 128)
    prefix = 30_000
    count = 0

    def resident(group: int, block: int) -> bool:
        nonlocal count
        count += 1
        return block < prefix

    answer = (prefix * 16, prefix * 16)
    assert probe_hit((full, swa), 16, 1_000_000, resident) == answer
    assert count <= 17 + swa.window_blocks
    count = 0
    assert probe_hit((full, swa), 16, 1_000_000, resident, guess_tokens=prefix * 16) == answer
    assert count <= 2 + swa.window_blocks


def test_a_gap_in_full_attention_only_makes_the_answer_too_long():
    """What the docstring says of a cache with gaps: never shorter than what is there."""
    groups = (GroupGeometry(2),)
    have = set(range(40)) - {3}
    hit, full = probe_hit(groups, 2, 80, lambda g, b: b in have)
    assert hit == full
    assert hit >= longest_valid_hit(groups, 2, 80, lambda g, b: b in have)


@given(
    size=_SIZES, window=st.integers(1, 24), ahead=st.integers(0, 2), hit=st.integers(0, 12)
)  # fmt: skip
def test_every_hit_that_a_writer_keeps_is_found(size, window, ahead, hit):
    """The writer keeps ``blocks_for_hit``; the probe must find exactly that hit."""
    groups = (GroupGeometry(size, None, ahead), GroupGeometry(size, window, ahead))
    tokens = hit * size
    have = [set(blocks_for_hit(g, tokens)) for g in groups]
    assert probe_hit(groups, size, 100 * size, lambda g, b: b in have[g])[0] == tokens
