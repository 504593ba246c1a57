# SPDX-License-Identifier: Apache-2.0
"""What a hit needs of the objects that LMCache keeps in several object groups.

LMCache cuts a prompt into chunks, and keeps of each chunk one object for each object group and
rank. Full attention is one group; with ``--separate-object-groups`` sliding-window layers are
another, of which a hit needs the last chunks only.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


def rows_of(objects: Sequence[Hashable]) -> list[list[int]]:
    """Indices of the objects of each row, in the order of their chunks.

    Args:
        objects: for each object asked for what it has in common with its row: all but the chunk.
    """
    rows: dict[Hashable, list[int]] = {}
    for index, row in enumerate(objects):
        rows.setdefault(row, []).append(index)
    return list(rows.values())


def longest_hit(rows: Sequence[Sequence[bool]], windows: Sequence[int | None]) -> int:
    """Chunks of the longest prefix that every row can serve: the least over all groups.

    Args:
        rows: which chunks of a row are there; all of one length.
        windows: chunks that a hit needs of each row at its end, >= 1; None: all before it.
    """
    if not rows:
        return 0
    best = 0
    runs = [0] * len(rows)
    for chunk in range(len(rows[0])):
        runs = [run + 1 if row[chunk] else 0 for run, row in zip(runs, rows, strict=True)]
        length = chunk + 1
        needs = (length if window is None else min(window, length) for window in windows)
        if all(run >= need for run, need in zip(runs, needs, strict=True)):
            best = length
    return best


def needed(
    objects: Sequence[Hashable],
    groups: Sequence[int],
    found: Sequence[bool],
    windows: Mapping[int, int],
) -> list[int]:
    """Indices of the objects that the longest hit among those found needs.

    Args:
        objects: as for :func:`rows_of`.
        groups: object group of each object.
        found: which objects are there.
        windows: chunks that a hit needs of an object group; a group that is not in it needs all.

    Rows of unequal length are no prefix; then every object that is there counts as needed.
    """
    rows = rows_of(objects)
    if len({len(row) for row in rows}) != 1:
        return [index for index, there in enumerate(found) if there]
    of_rows = [windows.get(groups[row[0]]) for row in rows]
    hit = longest_hit([[found[index] for index in row] for row in rows], of_rows)
    return [
        index
        for row, window in zip(rows, of_rows, strict=True)
        for index in row[0 if window is None else max(0, hit - window) : hit]
    ]
