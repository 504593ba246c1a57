# SPDX-License-Identifier: Apache-2.0
"""What a hit needs of LMCache's object groups, against the definition written out."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from mimo_plugin.tiers.lmcache_plan import longest_hit, needed, rows_of


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[bool]], list[int | None]]:
    chunks, count = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    bits = st.lists(st.booleans(), min_size=chunks, max_size=chunks)
    rows = draw(st.lists(bits, min_size=count, max_size=count))
    window = st.none() | st.integers(1, 9)
    return rows, draw(st.lists(window, min_size=count, max_size=count))


def servable(row: list[bool], window: int | None, length: int) -> bool:
    first = 0 if window is None else max(0, length - window)
    return all(row[first:length])


@given(grids())
@example(([[True] * 3, [True, False, True]], [None, 1]))
@example(([[True] * 3, [False] * 3], [None, 1]))
def test_a_hit_is_the_least_over_all_groups(
    grid: tuple[list[list[bool]], list[int | None]],
) -> None:
    rows, windows = grid
    lengths = [
        length
        for length in range(1, len(rows[0]) + 1)
        if all(servable(row, window, length) for row, window in zip(rows, windows, strict=True))
    ]
    assert longest_hit(rows, windows) == max(lengths, default=0)


@given(grids())
def test_what_is_needed_serves_that_hit_and_nothing_else(
    grid: tuple[list[list[bool]], list[int | None]],
) -> None:
    """The needed objects alone still serve the hit, and without any one of them it is shorter."""
    rows, windows = grid
    chunks = len(rows[0])
    groups = [group for group in range(len(rows)) for _ in range(chunks)]
    found = [there for row in rows for there in row]
    window_of = {group: window for group, window in enumerate(windows) if window is not None}
    hit = longest_hit(rows, windows)
    kept = needed(groups, groups, found, window_of)
    assert all(found[index] for index in kept) and len(set(kept)) == len(kept)

    def hit_with(indices: set[int]) -> int:
        left = [index in indices for index in range(len(found))]
        cut = [left[at * chunks : (at + 1) * chunks] for at in range(len(rows))]
        return longest_hit(cut, windows)

    assert hit_with(set(kept)) == hit
    for index in kept:
        assert hit_with(set(kept) - {index}) < hit


def test_rows_keep_the_order_of_chunks_however_they_are_mixed() -> None:
    assert rows_of(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert needed(["a", "b", "a", "b"], [0, 1, 0, 1], [True] * 4, {1: 1}) == [0, 2, 3]


def test_rows_of_unequal_length_are_all_needed() -> None:
    assert needed(["a", "a", "b"], [0, 0, 1], [True, False, True], {1: 1}) == [0, 2]


def test_nothing_asked_for_is_nothing_needed() -> None:
    assert longest_hit([], []) == 0
    assert needed([], [], [], {}) == []
