# SPDX-License-Identifier: Apache-2.0
"""From one engine's names of its blocks to canonical ones (:mod:`mimo_plugin.core.block_hashes`).

A stored event tells the token ids of its range, so the canonical hash of each of its blocks can be
worked out (:mod:`mimo_plugin.core.range_names`). What an engine calls a block is remembered until
no group has the block any more.

What stays without a canonical hash (its parent was stored before we listened, its place is open, or
the name contradicts another one) is counted, and the index never hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mimo_plugin.core.engine_events import EngineEvent, EngineStored, Groups, in_device
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEvent
from mimo_plugin.core.range_names import DEAD, ROOT, NameCounts, RangeNames
from mimo_plugin.core.reuse_reports import ReuseReports
from mimo_plugin.core.window import GroupGeometry

BYTES_PER_NAME = 1000
"""Bound of memory for one block of one worker, beside what the index takes for it."""

SavedBlocks: TypeAlias = Mapping[Hash, tuple[int, bool, Hash | None]]
"""One group's blocks in a :class:`mimo_plugin.core.residency.Snapshot`."""

_COUNT_BITS = 24  # of the copies that one group has
_MASK = (1 << _COUNT_BITS) - 1
_MAX_EARLY = 4096


class Naming:
    """One worker's names.

    Args:
        groups: shared by all workers of the index.
    """

    __slots__ = (
        "_copies",
        "_early",
        "_out",
        "_ranges",
        "_reports",
        "counts",
        "engines",
        "groups",
        "names",
    )

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.counts = NameCounts()
        #: canonical hash of each engine hash that has one, or ``DEAD``
        self.names: dict[Hash, int] = {}
        #: the other way round
        self.engines: dict[int, Hash] = {}
        # Copies of each engine hash, one field of an integer for each group. Those of a block
        # without a name are not known to the index.
        self._copies: dict[Hash, int] = {}
        # Until it is known whether they are whole blocks or ends of prompts inside a block.
        self._early: list[EngineEvent] = []
        self._out: list[KvEvent] = []
        self._ranges = RangeNames(groups, self.names, self.engines, self.counts)
        self._reports = ReuseReports(groups, self.has)

    def __len__(self) -> int:
        """Blocks that the worker has, by engine hash."""
        return len(self._copies)

    def has(self, block: Hash, group: int) -> bool:
        """Whether a group has a block, by its engine hash."""
        return bool(self._copies.get(block, 0) >> _shift(group) & _MASK)

    def clear(self) -> None:
        """The worker has nothing."""
        self.names.clear()
        self.engines.clear()
        self._copies.clear()
        self._early.clear()
        self._ranges.before.clear()

    def snapshot(self) -> dict[Hash, tuple[int | None, int]]:
        """Of each engine hash with a canonical one: that one, and the one inside of its block.

        The second is -1 but for a full-attention block of two hashes, where it is the first of
        them. All else follows from the index's snapshot; blocks without a name are left out.
        """
        saved: dict[Hash, tuple[int | None, int]] = {}
        for block, name in self.names.items():
            if name != DEAD:
                before = self._ranges.before.get(name, ())
                saved[block] = name, before[1] if len(before) == 2 else -1
        return saved

    def restore(
        self, saved: Mapping[Hash, tuple[int | None, int]], groups: Mapping[int, SavedBlocks]
    ) -> None:
        """Have what ``snapshot`` gave; ``groups``: the index's blocks."""
        self.clear()
        for block, (name, inside) in saved.items():
            packed = 0
            for group, blocks in groups.items():
                if name is not None and name in blocks:
                    copies, known, parent = blocks[name]
                    packed += min(copies, _MASK) << _shift(group)
                    if group in self.groups.full and known and inside >= 0:
                        before = ROOT if parent is None else int(parent)
                        self._ranges.before[name] = before, inside
            if packed and name is not None:
                self._copies[block] = packed
                self.names[block], self.engines[name] = name, block

    def translate(self, batch: Sequence[EngineEvent]) -> list[KvEvent]:
        """The same events with canonical hashes, for the index; in order, once each."""
        self._out = []
        for event in batch:
            if isinstance(event, EngineStored) and in_device(event):
                self.groups.learn(event)
        batch = self._with_early(batch)
        self._ranges.begin([event for event in batch if isinstance(event, EngineStored)])
        for block, name in self._ranges.fresh.items():
            # What was told of before it could be named, as when a window's event comes first, gets
            # its name now; one that means two different blocks loses it.
            if block in self._copies:
                self._set_name(block, name)
        reports = self._reports.find(batch)
        for at, event in enumerate(batch):
            if isinstance(event, EngineStored):
                if at not in reports:
                    self._stored(event)
                elif not reports[at]:
                    self._stored(self._reports.certain_part(event))
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            else:
                self.clear()
                self._out.append(event)
        self._ranges.end()
        self.counts.reuse_reports = self._reports.seen
        out, self._out = self._out, []
        return out

    def _with_early(self, batch: Sequence[EngineEvent]) -> Sequence[EngineEvent]:
        """The batch without what is too early to tell, and with what was so until now."""
        early = [event for event in batch if self._is_early(event)]
        if not early and not self._early:
            return batch
        now = [event for event in self._early if not self._is_early(event)]
        self._early = [event for event in (*self._early, *early) if self._is_early(event)]
        del self._early[:-_MAX_EARLY]
        return [*now, *(event for event in batch if not self._is_early(event))]

    def _is_early(self, event: EngineEvent) -> bool:
        if isinstance(event, AllBlocksCleared) or not in_device(event):
            return False
        if isinstance(event, BlockRemoved):
            return (event.group_idx or 0) not in self.groups.geometry
        return event.is_full and event.group not in self.groups.geometry

    # Names

    def _set_name(self, block: Hash, name: int) -> bool:
        """Give a block its name; False when that contradicts what is known."""
        old = self.names.get(block)
        if old == name:
            return True
        if old == DEAD:
            return False
        other = self.engines.get(name)
        if old is None and other is None:
            self.names[block], self.engines[name] = name, block
            self._tell(block, name, gone=False)
            return True
        # One hash for two blocks, or two for one (an adapter's name that was given to other
        # weights): neither is to be trusted.
        self.counts.contradictions += 1
        self._kill(block)
        if other is not None:
            self._kill(other)
        return False

    def _kill(self, block: Hash) -> None:
        name = self.names.get(block)
        if name is not None and name != DEAD:
            self._tell(block, name, gone=True)
            self._drop_name(name)
        self.names[block] = DEAD

    def _drop_name(self, name: int) -> None:
        del self.engines[name]
        self._ranges.before.pop(name, None)

    def _tell(self, block: Hash, name: int, *, gone: bool) -> None:
        """The index hears of all copies that a block has in all groups."""
        packed = self._copies.get(block, 0)
        for group, geometry in self.groups.geometry.items():
            for _ in range(packed >> _shift(group) & _MASK):
                if gone:
                    self._out.append(BlockRemoved([name], group))
                else:
                    self._out.append(_event(geometry, group, [name], None, whole=False))

    # Events

    def _stored(self, event: EngineStored) -> None:
        group, geometry = event.group, self.groups.geometry.get(event.group)
        if not in_device(event):
            self.counts.ignored_events += 1
            return
        if geometry is None or event.block_size != geometry.block_size_tokens:
            # The end of a prompt inside a full-attention block is no copy of what counts.
            if not event.is_full:
                self.counts.ignored_events += geometry is not None
                self._out.append(event.kind_only())
            return
        names = self._ranges.of(event)
        parent = self._ranges.name_of(event.parent_block_hash)
        told: list[int] = []
        for block, name in zip(event.block_hashes, names, strict=True):
            if name is not None and self._set_name(block, name):
                told.append(name)
            self._copies[block] = self._copies.get(block, 0) + (1 << _shift(group))
        whole = event.is_whole and parent is not None and len(told) == len(names)
        before = parent if whole and parent != ROOT else None
        self._out.append(_event(geometry, group, told, before, whole=whole))

    def _removed(self, event: BlockRemoved) -> None:
        group = event.group_idx or 0
        if group not in self.groups.geometry or not in_device(event):
            return
        gone = []
        for block in event.block_hashes:
            if not self.has(block, group):
                continue
            name = self.names.get(block)
            if name is not None and name != DEAD:
                gone.append(name)
            left = self._copies[block] - (1 << _shift(group))
            if left:
                self._copies[block] = left
                continue
            del self._copies[block]
            if name is not None:
                del self.names[block]
                if name != DEAD:
                    self._drop_name(name)
        if gone:
            self._out.append(BlockRemoved(gone, group))


def _shift(group: int) -> int:
    return group * _COUNT_BITS


def _event(
    geometry: GroupGeometry, group: int, names: list[int], parent: int | None, *, whole: bool
) -> BlockStored:
    size = geometry.block_size_tokens
    # One block more than there are: the order is not known.
    tokens = (len(names) + (not whole)) * size
    kind = "full_attention" if geometry.is_full else "sliding_window"
    return BlockStored(names, parent, tokens, size, group, kind, geometry.window_tokens)
