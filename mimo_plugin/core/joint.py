# SPDX-License-Identifier: Apache-2.0
"""The longest hit that the device and lower tiers hold together, and what of it has to be loaded.

Each block of each group may be on the device, in host memory, below it, or nowhere, in any mixture:
full blocks on the device and the window in a store, a prefix on the device with its continuation in
host memory, a hole in the middle. A hit needs what :func:`blocks_for_hit` says, wherever it is.

Tiers below host memory answer later. Until they have, a plan is ``unsure``: whoever asks for it
asks again, and the questions that were put meanwhile are those whose answers the plan needs: full
attention up to the first block that is nowhere, then the windows of one sliding-window group, and
those of the other groups only where that group has one (windows are stored in all groups together).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from mimo_plugin.core.window import GroupGeometry, blocks_for_hit


class Place(Enum):
    """Where a block is, from the nearest to the farthest."""

    DEVICE = auto()
    HOST = auto()
    #: on its way into host memory
    COMING = auto()
    BELOW = auto()
    #: asked for, not answered yet
    UNSURE = auto()
    NOWHERE = auto()


Where = Callable[[int, int], Place]
"""Group index and block index to the place; may ask lower tiers, which answer later."""


@dataclass(frozen=True, slots=True)
class JointHit:
    """A hit, or what is known of it so far.

    Attributes:
        tokens: length, aligned; the local hit where nothing lies beyond it.
        full_tokens: what full attention alone would allow, aligned, >= tokens.
        unsure: answers are missing, so that a longer hit may come out later.
        places: for each group the places of the blocks that the hit needs beyond the local hit, by
            block index.
    """

    tokens: int
    full_tokens: int
    unsure: bool
    places: tuple[dict[int, Place], ...] = ()

    def at(self, place: Place) -> list[tuple[int, int]]:
        """(group, block) of what the hit needs from there."""
        return [
            (group, block)
            for group, blocks in enumerate(self.places)
            for block, found in blocks.items()
            if found is place
        ]


@dataclass(slots=True)
class _Search:
    groups: Sequence[GroupGeometry]
    unit_tokens: int
    local_tokens: int
    where: Where
    unsure: bool = False
    known: dict[tuple[int, int], Place] = field(default_factory=dict)

    def place(self, group: int, block: int) -> Place:
        found = self.known.get((group, block))
        if found is None:
            found = self.known[group, block] = self.where(group, block)
        return found

    def align(self, tokens: int) -> int:
        return max(0, tokens // self.unit_tokens * self.unit_tokens)

    def full_reach(self, group: int, limit_tokens: int) -> tuple[int, int]:
        """Up to where a full group reaches: surely, and if all that is unsure is there."""
        geometry = self.groups[group]
        size, ahead = geometry.block_size_tokens, geometry.lookahead_blocks
        first = block = self.local_tokens // size
        end = limit_tokens // size + ahead
        sure: int | None = None
        while block < end:
            place = self.place(group, block)
            if place is Place.NOWHERE:
                break
            if place is Place.UNSURE and sure is None:
                sure = block
            block += 1
        reach = max(first, block - ahead) * size
        surely = reach if sure is None else max(first, sure - ahead) * size
        return surely, reach

    def needed(self, group: int, tokens: int) -> range:
        """What of a group a hit of ``tokens`` needs beyond the local hit."""
        blocks = blocks_for_hit(self.groups[group], tokens)
        if self.groups[group].is_full:
            size = self.groups[group].block_size_tokens
            return range(min(blocks.stop, self.local_tokens // size), blocks.stop)
        return blocks

    def window_fails(self, group: int, tokens: int) -> int | None:
        """None if the window of ``tokens`` is there, else the longest hit that may still be one."""
        geometry = self.groups[group]
        for block in reversed(self.needed(group, tokens)):
            place = self.place(group, block)
            if place is Place.UNSURE:
                self.unsure = True
            if place in (Place.UNSURE, Place.NOWHERE):
                ends_before = (block - geometry.lookahead_blocks) * geometry.block_size_tokens
                return self.align(min(ends_before, tokens - self.unit_tokens))
        return None


def joint_hit(
    groups: Sequence[GroupGeometry],
    unit_tokens: int,
    local_tokens: int,
    limit_tokens: int,
    where: Where,
) -> JointHit:
    """The longest hit of at most ``limit_tokens``.

    Args:
        groups: geometry of each group, at least one of full attention.
        unit_tokens: hits are multiples of this, which is a multiple of every block size.
        local_tokens: aligned hit on the device alone, whose blocks are not looked at again.
        limit_tokens: longest hit that may come out.
        where: asked at most once for each block.
    """
    search = _Search(groups, unit_tokens, local_tokens, where)
    full = [index for index, group in enumerate(groups) if group.is_full]
    windows = [index for index, group in enumerate(groups) if not group.is_full]
    surely = reach = search.align(limit_tokens)
    for index in full:
        sure, may = search.full_reach(index, reach)
        surely, reach = min(surely, search.align(sure)), min(reach, search.align(may))
    search.unsure = surely < reach
    tokens = _longest(search, windows, reach, surely)
    if tokens <= local_tokens:
        return JointHit(local_tokens, max(surely, local_tokens), search.unsure)
    places = tuple(
        {block: search.place(index, block) for block in search.needed(index, tokens)}
        for index in range(len(groups))
    )
    return JointHit(tokens, surely, search.unsure, places)


def _longest(search: _Search, windows: list[int], reach: int, surely: int) -> int:
    """The longest sure hit; puts the questions for longer ones that may come out."""
    tokens = reach
    while tokens > search.local_tokens:
        for index in windows:
            shorter = search.window_fails(index, tokens)
            if shorter is not None:
                tokens = shorter
                break
        else:
            if tokens <= surely:
                return tokens
            # What is longer has to wait for full attention; what is sure may have to do.
            tokens = surely
    return search.local_tokens
