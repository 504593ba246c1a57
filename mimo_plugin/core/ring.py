# SPDX-License-Identifier: Apache-2.0
"""Which of several stores holds a key: a ring of points, of which each store has many.

Keys and points are hashed onto a circle of 2**64 places; a key belongs to the store of the first
point at its place or behind it (consistent hashing, Karger et al., STOC 1997). The points of a
store follow from its name alone. So every process finds the same store without asking anybody, in
whatever order the stores are listed; a store that joins takes its share of the keys and moves no
other; one that leaves gives its own to all the others.

A store's part of the keys is that of its points, give or take about ``1 / sqrt(points)`` of it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

EQUAL_POINTS = 1024
"""Points of each of several equal stores; up to 16 of them hold 0.8 to 1.2 of an even share."""

LEAST_POINTS = 64
"""Fewest points that a store should have."""

POINTS_PER_GIB = 2
"""Points of stores that differ in size: parts of the keys go by the capacity from 32 GiB on."""

_CIRCLE = 1 << 64
_PLACE_BYTES = 8
_PLACES_PER_HASH = 8
_OF_KEYS, _OF_STORES = b"mimo-ring-key", b"mimo-ring-store"


def points_for(capacity_bytes: int) -> int:
    """Points of a store among others of other sizes.

    It looks at this store alone: with points relative to the others, one that joins would move the
    keys of all.
    """
    return max(LEAST_POINTS, round(capacity_bytes * POINTS_PER_GIB / (1 << 30)))


class HashRing:
    """See the module. Never changes: stores that join or leave make another ring.

    Args:
        points: of each store, by name, >= 1; at least one store.
    """

    __slots__ = ("_names", "_places")

    def __init__(self, points: Mapping[str, int]) -> None:
        assert points and min(points.values()) >= 1, "a ring needs stores with points"
        # Two points at one place: the lesser name has it, whatever the order of ``points``.
        found = sorted((place, name) for name in points for place in _places(name, points[name]))
        self._places = [place for place, _ in found]
        self._names = [name for _, name in found]

    def store_of(self, key: str, away: Collection[str] = ()) -> str:
        """Name of the store that ``key`` belongs to.

        Args:
            key: any.
            away: stores, not all, whose keys belong to the next one meanwhile, as if they had left.
        """
        index = bisect_left(self._places, _place(key)) % len(self._names)
        while self._names[index] in away:
            index = (index + 1) % len(self._names)
        return self._names[index]

    def split(self, keys: Sequence[str], away: Collection[str] = ()) -> dict[str, list[int]]:
        """Indices of ``keys`` by the store that they belong to, each list ascending."""
        found: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            found.setdefault(self.store_of(key, away), []).append(index)
        return found

    def shares(self) -> dict[str, float]:
        """Part of all keys that belongs to each store; together 1."""
        places = dict.fromkeys(self._names, 0)
        before = self._places[-1] - _CIRCLE
        for place, name in zip(self._places, self._names, strict=True):
            places[name] += place - before
            before = place
        return {name: count / _CIRCLE for name, count in places.items()}


def _place(key: str) -> int:
    data = key.encode("utf-8", "surrogatepass")
    return int.from_bytes(
        hashlib.blake2b(data, digest_size=_PLACE_BYTES, person=_OF_KEYS).digest(), "big"
    )


def _places(name: str, count: int) -> list[int]:
    """Places of a store's points; the first ones stay where they are when there are more."""
    data = name.encode("utf-8", "surrogatepass")
    found: list[int] = []
    for start in range(0, count, _PLACES_PER_HASH):
        digest = hashlib.blake2b(
            data,
            digest_size=_PLACE_BYTES * _PLACES_PER_HASH,
            salt=start.to_bytes(16, "big"),
            person=_OF_STORES,
        ).digest()
        found.extend(
            int.from_bytes(digest[at : at + _PLACE_BYTES], "big")
            for at in range(0, len(digest), _PLACE_BYTES)
        )
    return found[:count]
