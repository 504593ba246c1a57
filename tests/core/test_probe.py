# SPDX-License-Identifier: Apache-2.0
"""The cheap look-up for scoring against the oracle that tries every boundary."""

from __future__ import annotations

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.probe import probe_full, probe_windows
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit, longest_valid_hit

_SIZES = st.sampled_from([1, 2, 3, 4, 8])
_FULL = st.builds(GroupGeometry, _SIZES, st.none(), st.integers(0, 2))
_SWA = st.builds(GroupGeometry, _SIZES, st.integers(1, 24), st.integers(0, 2))


def probe_hit(groups, alignment, most, resident, *, before=(0, 0)):
    """Both probes, as the hit index asks them; ``before`` is the answer last time."""
    full = probe_full(groups, alignment, most, resident, guess_tokens=before[1])
    return probe_windows(groups, alignment, full, resident, before=before), full


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
@given(pool=pools())
def test_probe_equals_the_oracle(pool):
    groups, alignment, most, have = pool

    def resident(group: int, block: int) -> bool:
        assert block >= 0
        return block in have[group]

    hit, full = probe_hit(groups, alignment, most, resident)
    assert (hit, full) == oracle(groups, alignment, most, have)
    assert hit % alignment == 0 and full % alignment == 0 and 0 <= hit <= full <= max(0, most)


def oracle(groups, alignment, most, have):
    index = [i for i, g in enumerate(groups) if g.is_full]
    only_full = [groups[i] for i in index]
    return (
        longest_valid_hit(groups, alignment, most, lambda g, b: b in have[g]),
        longest_valid_hit(only_full, alignment, most, lambda g, b: b in have[index[g]]),
    )


@settings(max_examples=1500)
@given(pool=pools(), data=st.data())
def test_the_answer_of_last_time_gives_the_same_answer(pool, data):
    """Full prefixes grew or shrank, windows went, windows past the old prefix came."""
    groups, alignment, most, have = pool
    before = probe_hit(groups, alignment, most, lambda g, b: b in have[g])
    now = []
    for group, blocks in zip(groups, have, strict=True):
        size = group.block_size_tokens
        last = most // size + 2
        if group.is_full:
            now.append(set(range(data.draw(st.integers(0, last)))))
            continue
        kept = data.draw(st.sets(st.sampled_from(sorted(blocks)))) if blocks else set()
        first = before[1] // size + group.lookahead_blocks
        fresh = data.draw(st.sets(st.integers(first, max(first, last))))
        now.append(kept | fresh)
    answer = probe_hit(groups, alignment, most, lambda g, b: b in now[g], before=before)
    assert answer == oracle(groups, alignment, most, now)


def test_a_window_cached_below_the_old_prefix_is_not_seen():
    """What the docstring says; a look-up anew finds it."""
    groups = (GroupGeometry(2), GroupGeometry(2, 3))
    have = [set(range(40)), set()]
    before = probe_hit(groups, 2, 80, lambda g, b: b in have[g])
    assert before == (0, 80)
    have[1].add(9)
    assert probe_hit(groups, 2, 80, lambda g, b: b in have[g], before=before) == (0, 80)
    assert probe_hit(groups, 2, 80, lambda g, b: b in have[g]) == (20, 80)


def test_nothing_to_hit():
    full = GroupGeometry(4)
    assert probe_hit((full,), 4, 0, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, 3, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, -1, lambda g, b: True) == (0, 0)
    assert probe_hit((full,), 4, 100, lambda g, b: False, before=(40, 40)) == (0, 0)


def test_few_probes_for_a_long_prompt():
    """Logarithmic the first time; a handful when little has changed."""
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
    assert probe_hit((full, swa), 16, 1_000_000, resident, before=answer) == answer
    assert count <= 2 + swa.window_blocks
    count = 0
    trimmed = (0, answer[1] - 160)
    gone = lambda g, b: (resident(g, b), g == 0 and b < prefix)[1]  # noqa: E731
    assert probe_hit((full, swa), 16, 1_000_000, gone, before=trimmed) == (0, answer[1])
    assert count <= 12


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
