# SPDX-License-Identifier: Apache-2.0
"""From one engine's names of its blocks to canonical ones (:mod:`mimo_plugin.core.block_hashes`).

A stored event tells the token ids of its range, so the canonical hash of each of its blocks can be
worked out, given that of the block before the range. What an engine calls a block is remembered
until no group has the block any more.

Sparse sliding-window events list only the kept blocks of a range, in order and without places.
Those that end with a full-attention block were named by that group's event, whichever of the two
comes first; the others are placed by :mod:`mimo_plugin.core.sparse_places`. What stays without a
canonical hash (its parent was stored before we listened; its place is open; the name contradicts
another one) is counted, and the index never hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from mimo_plugin.core.block_hashes import ExtraKeys, block_hashes
from mimo_plugin.core.kv_events import (
    FULL_KINDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hash,
    KvEvent,
)
from mimo_plugin.core.sparse_places import WindowRule, places
from mimo_plugin.core.window import GroupGeometry

BYTES_PER_NAME = 600
"""Bound of memory for one block of one worker, beside what the index takes for it."""

_ROOT = -1  # instead of a canonical hash: what comes before a prompt's first block
_DEAD = -2  # instead of one: the name contradicted another
_COUNT_BITS = 24  # of the copies that one group has
_MAX_EARLY = 4096


@dataclass(slots=True)
class EngineStored:
    """Blocks stored, as the engine tells it; see vLLM's ``BlockStored`` for the fields."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    medium: str | None = "GPU"

    @property
    def group(self) -> int:
        """KV cache group."""
        return self.group_idx or 0

    @property
    def is_full(self) -> bool:
        """Whether the group is one of full attention."""
        return (self.kv_cache_spec_kind or "full_attention") in FULL_KINDS

    @property
    def is_whole(self) -> bool:
        """Whether no block of the range was left out."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_size


EngineEvent: TypeAlias = EngineStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class Groups:
    """KV cache groups of the engines that serve one model, as their events tell of them.

    vLLM also names the end of a prompt that lies inside a full-attention block, by an event with
    the size of one hash: the first such event must not be taken for the group's block size.

    Args:
        hash_tokens: tokens of one canonical hash.
        lookahead_blocks: as in :class:`mimo_plugin.core.residency.ResidencyIndex`.
    """

    hash_tokens: int
    lookahead_blocks: Mapping[int, int] = field(default_factory=dict)
    geometry: dict[int, GroupGeometry] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)

    def learn(self, event: EngineStored) -> None:
        """See whether the event tells of a new group."""
        group, size = event.group, event.block_size
        if group in self.geometry or size <= 0 or size % self.hash_tokens:
            return
        if not event.is_full:
            window = event.kv_cache_spec_sliding_window
            if window:
                ahead = self.lookahead_blocks.get(group, 0)
                self.geometry[group] = GroupGeometry(size, window, ahead)
        elif size > self.hash_tokens or len(event.block_hashes) > 1:
            self.geometry[group] = GroupGeometry(size)
            self.full.add(group)

    def rule(self, group: int) -> WindowRule:
        """How the group's windows lie among the full-attention blocks."""
        geometry = self.geometry[group]
        size = geometry.block_size_tokens
        longest = max((self.geometry[g].block_size_tokens for g in self.full), default=size)
        step = longest // size if longest % size == 0 else 1
        return WindowRule.of(geometry.window_blocks, geometry.lookahead_blocks, step)


@dataclass(slots=True)
class _Chain:
    """Canonical hashes of a full-attention event's range; ``hashes`` None: not known."""

    start: int | None
    token_ids: Sequence[int]
    hashes: list[int] | None


@dataclass(slots=True)
class NameCounts:
    """What was left out, and why; all count since the start."""

    unknown_parents: int = 0
    """Events whose blocks could not be named: what comes before them is not known."""
    open_places: int = 0
    """Blocks of sparse events whose place stays open."""
    contradictions: int = 0
    """Blocks whose name contradicts another: dropped."""
    reuse_reports: int = 0
    """Events that tell of blocks a request found (``kv_cache_report_mode``), not of new copies."""
    ignored_events: int = 0
    """Events of other media, or of sizes that don't fit the group."""


class Naming:
    """One worker's names.

    Args:
        groups: shared by all workers of the index.
    """

    __slots__ = ("_chains", "_copies", "_early", "_fresh", "_out", "counts", "engines", "groups",
                 "names")  # fmt: skip

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.counts = NameCounts()
        #: canonical hash of each engine hash that has one
        self.names: dict[Hash, int] = {}
        self.engines: dict[int, Hash] = {}
        # Copies of each engine hash, one field of an integer for each group. Those of a block
        # without a name are not known to the index.
        self._copies: dict[Hash, int] = {}
        # Until it is known whether they are whole blocks or ends of prompts inside a block.
        self._early: list[EngineEvent] = []
        # Of the batch at hand:
        self._fresh: dict[Hash, int] = {}
        self._chains: list[_Chain] = []
        self._out: list[KvEvent] = []

    def __len__(self) -> int:
        """Blocks that the worker has, by engine hash."""
        return len(self._copies)

    def clear(self) -> None:
        """The worker has nothing."""
        self.names.clear()
        self.engines.clear()
        self._copies.clear()
        self._early.clear()

    def snapshot(self) -> dict[Hash, tuple[int | None, int]]:
        """Of each engine hash: canonical one, and packed number of copies."""
        return {block: (self.names.get(block), copies) for block, copies in self._copies.items()}

    def restore(self, saved: Mapping[Hash, tuple[int | None, int]]) -> None:
        """Have what ``snapshot`` gave."""
        self.clear()
        for block, (name, copies) in saved.items():
            self._copies[block] = copies
            if name is not None:
                self.names[block] = name
                if name != _DEAD:
                    self.engines[name] = block

    def translate(self, batch: Sequence[EngineEvent]) -> list[KvEvent]:
        """The same events with canonical hashes, for the index; in order, once each."""
        self._out = []
        for event in batch:
            if isinstance(event, EngineStored) and _counts(event.medium):
                self.groups.learn(event)
        batch = self._with_early(batch)
        self._name_full([event for event in batch if isinstance(event, EngineStored)])
        reports = self._find_reports(batch)
        for at, event in enumerate(batch):
            if isinstance(event, EngineStored):
                if at in reports:
                    if not reports[at]:
                        self._stored(self._found_only(event))
                else:
                    self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            else:
                self.clear()
                self._out.append(event)
        self._fresh.clear()
        self._chains.clear()
        out, self._out = self._out, []
        return out

    def _with_early(self, batch: Sequence[EngineEvent]) -> Sequence[EngineEvent]:
        """The batch without what is too early to tell, and with what was so until now."""
        early = [e for e in batch if self._is_early(e)]
        if not early and not self._early:
            return batch
        now = [e for e in self._early if not self._is_early(e)]
        self._early = [e for e in (*self._early, *early) if self._is_early(e)]
        del self._early[:-_MAX_EARLY]
        return [*now, *(e for e in batch if not self._is_early(e))]

    def _is_early(self, event: EngineEvent) -> bool:
        if isinstance(event, AllBlocksCleared) or not _counts(event.medium):
            return False
        if isinstance(event, BlockRemoved):
            return (event.group_idx or 0) not in self.groups.geometry
        return event.is_full and event.group not in self.groups.geometry

    # Names

    def _name_of(self, block: Hash | None) -> int | None:
        """Canonical hash, None where it is not known; of None the root."""
        if block is None:
            return _ROOT
        name = self.names.get(block)
        if name is None:
            name = self._fresh.get(block)
        return name if name != _DEAD else None

    def _name_full(self, stored: Sequence[EngineStored]) -> None:
        """Names of all full-attention blocks of the batch, before anything else is looked at."""
        unit = self.groups.hash_tokens
        for event in stored:
            whole = event.is_whole and event.block_hashes and event.block_size % unit == 0
            if not event.is_full or not whole or not _counts(event.medium):
                continue
            start = self._name_of(event.parent_block_hash)
            if start is None:
                self._chains.append(_Chain(None, event.token_ids, None))
                continue
            keys = self._keys(event, range(len(event.block_hashes)))
            hashes = _hashes(event.token_ids, unit, keys, start)
            self._chains.append(_Chain(start, event.token_ids, hashes))
            step = event.block_size // unit
            for block, name in zip(event.block_hashes, hashes[step - 1 :: step], strict=True):
                self._fresh.setdefault(block, name)
        for block, name in self._fresh.items():
            # What was told of before it could be named, as when a window's event comes first, gets
            # its name now; one that means two different blocks loses it.
            if block in self._copies:
                self._set_name(block, name)

    def _set_name(self, block: Hash, name: int) -> bool:
        """Give a block its name; False when that contradicts what is known."""
        old = self.names.get(block)
        if old == name:
            return True
        if old == _DEAD:
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
        if name is not None and name != _DEAD:
            self._tell(block, name, gone=True)
            del self.engines[name]
        self.names[block] = _DEAD

    def _tell(self, block: Hash, name: int, *, gone: bool) -> None:
        """The index hears of all copies that a block has in all groups."""
        packed = self._copies.get(block, 0)
        for group, geometry in self.groups.geometry.items():
            for _ in range(packed >> _shift(group) & _MASK):
                if gone:
                    self._out.append(BlockRemoved([name], group))
                else:
                    self._out.append(_event(geometry, group, [name], None, whole=False))

    def _keys(self, event: EngineStored, at: Sequence[int | None]) -> dict[int, ExtraKeys]:
        """Extra keys of a range's hash blocks; ``at``: places of the listed blocks."""
        unit = self.groups.hash_tokens
        found: dict[int, list[tuple[Any, ...]]] = {}
        first = event.parent_block_hash is None
        if first and event.lora_name:
            found[0] = [("lora", event.lora_name)]
        for place, keys in zip(at, event.extra_keys or (), strict=False):
            if place is None or not keys:
                continue
            base = place * (event.block_size // unit)
            salt = None
            # vLLM puts the adapter's name first, where there is one.
            for key in keys[1:] if event.lora_name else keys:
                if isinstance(key, str):
                    salt = ("salt", key)
                elif isinstance(key, bytes):
                    found.setdefault(base, []).append(("embeds", key))
                elif key[1] >= 0:
                    block, offset = divmod(key[1], unit)
                    found.setdefault(base + block, []).append(("mm", key[0], offset))
            if salt is not None:
                found.setdefault(base, []).append(salt)
        return {block: tuple(keys) for block, keys in found.items()}

    # Stored and removed

    def _stored(self, event: EngineStored) -> None:
        group, geometry = event.group, self.groups.geometry.get(event.group)
        if not _counts(event.medium):
            self.counts.ignored_events += 1
            return
        if geometry is None or event.block_size != geometry.block_size_tokens:
            # The end of a prompt inside a block is no copy of anything that counts.
            if not event.is_full:
                self._out.append(_unnamed(event))
            return
        if not event.block_hashes:
            self._out.append(_event(geometry, group, [], None, whole=True))
            return
        names = self._names_of_range(event)
        parent = self._name_of(event.parent_block_hash)
        whole = event.is_whole and parent is not None and None not in names
        told: list[int] = []
        shift = _shift(group)
        for block, name in zip(event.block_hashes, names, strict=True):
            good = name is not None and self._set_name(block, name)
            if good and name is not None:
                told.append(name)
            self._copies[block] = self._copies.get(block, 0) + (1 << shift)
        whole = whole and len(told) == len(names)
        before = parent if whole and parent != _ROOT else None
        if told:
            self._out.append(_event(geometry, group, told, before, whole=whole))

    def _removed(self, event: BlockRemoved) -> None:
        group = event.group_idx or 0
        geometry = self.groups.geometry.get(group)
        if geometry is None or not _counts(event.medium):
            return
        shift, gone = _shift(group), []
        for block in event.block_hashes:
            packed = self._copies.get(block, 0)
            if not packed >> shift & _MASK:
                continue
            name = self.names.get(block)
            if name is not None and name != _DEAD:
                gone.append(name)
            packed -= 1 << shift
            if packed:
                self._copies[block] = packed
                continue
            del self._copies[block]
            if name is not None:
                del self.names[block]
                if name != _DEAD:
                    del self.engines[name]
        if gone:
            self._out.append(BlockRemoved(gone, group))

    # Ranges

    def _names_of_range(self, event: EngineStored) -> list[int | None]:
        """Canonical hashes of an event's blocks."""
        names = [self._name_of(block) for block in event.block_hashes]
        if None not in names:
            return names
        count = len(event.token_ids) // event.block_size
        chain = self._chain_of(event, names)
        if chain is None:
            self.counts.unknown_parents += 1
            return names
        hashes, sure = chain
        step = event.block_size // self.groups.hash_tokens
        ends = hashes[step - 1 :: step]
        if event.is_whole:
            at: Sequence[int | None] = range(count)
        else:
            found = self._places(event, names, ends)
            if found is None:
                return names
            at = found
            self.counts.open_places += sum(place is None for place in at)
        return self._named(event, names, at, hashes, sure)

    def _named(
        self,
        event: EngineStored,
        names: list[int | None],
        at: Sequence[int | None],
        hashes: list[int],
        sure: int,
    ) -> list[int | None]:
        """Names by places; behind the first ``sure`` hash blocks only what goes on unbroken."""
        unit = self.groups.hash_tokens
        step = event.block_size // unit
        keys = self._keys(event, at)
        found = list(names)
        for index, place in enumerate(at):
            if place is None:
                continue
            first, stop = place * step, (place + 1) * step
            if stop > sure:
                if first > sure:
                    break
                # Its own extra keys are told only with it.
                start = hashes[sure - 1] if sure else self._name_of(event.parent_block_hash)
                if start is None:
                    break
                tail = {block - sure: value for block, value in keys.items()}
                tokens = event.token_ids[sure * unit : stop * unit]
                hashes[sure:stop] = _hashes(tokens, unit, tail, start)
                sure = stop
            if found[index] is None and hashes[stop - 1] >= 0:
                found[index] = hashes[stop - 1]
        return found

    def _places(
        self, event: EngineStored, names: Sequence[int | None], ends: Sequence[int]
    ) -> list[int | None] | None:
        where = {name: place for place, name in enumerate(ends)}
        known = [where.get(name) if name is not None else None for name in names]
        if any(
            place is None and name is not None for place, name in zip(known, names, strict=True)
        ):
            self.counts.contradictions += 1
            return None
        told = set(self._fresh.values())
        free = [name not in self.engines and name not in told for name in ends]
        found = places(known, free, self.groups.rule(event.group))
        if found is None:
            self.counts.contradictions += 1
        return found

    def _chain_of(
        self, event: EngineStored, names: Sequence[int | None]
    ) -> tuple[list[int], int] | None:
        """Canonical hashes of the range's hash blocks, and how many of the first are certain."""
        unit = self.groups.hash_tokens
        start = self._name_of(event.parent_block_hash)
        count = len(event.token_ids) // unit
        if start is not None and event.is_whole:
            keys = self._keys(event, range(len(event.block_hashes)))
            return _hashes(event.token_ids, unit, keys, start), count
        found = self._from_full(event, start, {name for name in names if name is not None})
        if found is not None:
            sure = len(found)
            tail = event.token_ids[sure * unit :]
            return found + (_hashes(tail, unit, {}, found[-1]) if len(tail) >= unit else []), sure
        if start is not None and not (start == _ROOT and not event.is_whole):
            if any(
                keys and (len(keys) > 1 or not event.lora_name) for keys in event.extra_keys or ()
            ):
                return None
            hashes = _hashes(event.token_ids, unit, {}, start)
            last = max((hashes.index(n) for n in names if n in hashes), default=-1)
            return hashes, last + 1
        if event.is_whole:
            return self._from_names(event, names)
        return None

    def _from_full(
        self, event: EngineStored, start: int | None, names: Set[int]
    ) -> list[int] | None:
        """The range's hashes from a full-attention event of the same batch and prompt."""
        unit = self.groups.hash_tokens
        sizes = [self.groups.geometry[group].block_size_tokens for group in self.groups.full]
        steps = max(sizes, default=unit) // unit
        found: list[list[int]] = []
        for chain in self._chains:
            if start is None:
                offsets: Sequence[int] = range(steps)
            elif chain.hashes is None:
                continue
            elif chain.start == start:
                offsets = (0,)
            elif start in chain.hashes:
                offsets = (chain.hashes.index(start) + 1,)
            else:
                continue
            for offset in offsets:
                there = chain.token_ids[offset * unit : offset * unit + len(event.token_ids)]
                if not there or event.token_ids[: len(there)] != there:
                    continue
                if chain.hashes is None:
                    return None
                part = chain.hashes[offset : offset + len(there) // unit]
                if part and (len(part) * unit < len(event.token_ids) or names <= set(part)):
                    found.append(part)
        # Prompts that go on alike (from different parents, or with other extra keys) can't be told
        # apart here.
        longest = max(found, key=len, default=None)
        if longest is None or any(part != longest[: len(part)] for part in found):
            return None
        return longest

    def _from_names(
        self, event: EngineStored, names: Sequence[int | None]
    ) -> tuple[list[int], int] | None:
        """The hashes of a range of which nothing is left out, from its first block with a name."""
        first = next((at for at, name in enumerate(names) if name is not None), None)
        if first is None:
            return None
        unit, name = self.groups.hash_tokens, names[first]
        assert name is not None
        skipped = (first + 1) * (event.block_size // unit)
        keys = self._keys(event, range(len(event.block_hashes)))
        rest = {block - skipped: value for block, value in keys.items()}
        hashes = _hashes(event.token_ids[skipped * unit :], unit, rest, name)
        # What comes before it has no name; the blocks there keep None by that number.
        return [_ROOT] * (skipped - 1) + [name, *hashes], len(event.token_ids) // unit

    # Reports of what a request found

    def _find_reports(self, batch: Sequence[EngineEvent]) -> dict[int, bool]:
        """Events that tell of a hit: one for each group in a row, whole, from the start on.

        By index; True where it is certain, because the hit was known. Then there is nothing new in
        it: a request does not store what it finds (but for a prompt of one aligned block, whose
        second copy goes uncounted). Once an engine is known to publish reports the others of that
        form are doubtful.
        """
        groups = sorted(self.groups.geometry)
        found: dict[int, bool] = {}
        at = 0
        while groups and at + len(groups) <= len(batch):
            row = self._row(batch[at : at + len(groups)], groups)
            if row:
                certain = all(self._has_hit(event) for event in row)
                self.counts.reuse_reports += certain
                if self.counts.reuse_reports:
                    found.update(dict.fromkeys(range(at, at + len(groups)), certain))
                at += len(groups)
            else:
                at += 1
        return found

    def _found_only(self, event: EngineStored) -> EngineStored:
        """What holds of a doubtful report: blocks that a hit needs, and that are not known yet."""
        geometry, shift = self.groups.geometry[event.group], _shift(event.group)
        first = 0 if geometry.is_full else max(0, len(event.block_hashes) - geometry.window_blocks)
        listed = [
            (block, keys)
            for at, (block, keys) in enumerate(
                zip_longest(event.block_hashes, event.extra_keys or ())
            )
            if at >= first and not self._copies.get(block, 0) >> shift & _MASK
        ]
        hashes, keys = [block for block, _ in listed], [keys for _, keys in listed]
        return replace(event, block_hashes=hashes, extra_keys=keys)

    def _row(self, row: Sequence[EngineEvent], groups: Sequence[int]) -> list[EngineStored]:
        """The events if they have a report's form, else none."""
        found: list[EngineStored] = []
        for event, group in zip(row, groups, strict=True):
            if (
                not isinstance(event, EngineStored)
                or event.group != group
                or event.parent_block_hash is not None
                or not event.block_hashes
                or not event.is_whole
                or not _counts(event.medium)
                or event.block_size != self.groups.geometry[group].block_size_tokens
                or (found and event.token_ids != found[0].token_ids)
            ):
                return []
            found.append(event)
        return found

    def _has_hit(self, event: EngineStored) -> bool:
        """Whether the group has what a hit of the whole range needs."""
        geometry, shift = self.groups.geometry[event.group], _shift(event.group)
        count = len(event.block_hashes)
        first = 0 if geometry.is_full else max(0, count - geometry.window_blocks)
        return all(
            self._copies.get(block, 0) >> shift & _MASK for block in event.block_hashes[first:]
        )


_MASK = (1 << _COUNT_BITS) - 1


def _shift(group: int) -> int:
    return group * _COUNT_BITS


def _counts(medium: str | None) -> bool:
    """Whether copies in this medium count: those in the device's memory."""
    return medium is None or medium == "GPU"


def _hashes(
    token_ids: Sequence[int], unit: int, keys: Mapping[int, ExtraKeys], start: int
) -> list[int]:
    return block_hashes(token_ids, unit, keys, parent=None if start == _ROOT else start)


def _event(
    geometry: GroupGeometry, group: int, names: list[int], parent: int | None, *, whole: bool
) -> BlockStored:
    size = geometry.block_size_tokens
    # One block more than there are: the order is not known.
    tokens = (len(names) + (not whole)) * size
    kind = "full_attention" if geometry.is_full else "sliding_window"
    return BlockStored(names, parent, tokens, size, group, kind, geometry.window_tokens)


def _unnamed(event: EngineStored) -> BlockStored:
    """For the index to see which kinds of groups there are, no more."""
    return BlockStored(
        (),
        None,
        0,
        event.block_size,
        event.group,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
    )
