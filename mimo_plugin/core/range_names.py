# SPDX-License-Identifier: Apache-2.0
"""Canonical hashes of the blocks that one stored event lists.

They follow from the event's token ids, given the canonical hash of the block before its range. A
sliding-window event may leave blocks out, with their extra keys and without telling which; and its
range may begin where no name is known (inside a full-attention block). So, one after the other:

* the full-attention event of the same prompt in the same batch, which has all of it;
* the parent's name and the token ids, as far as a listed block's name confirms them;
* a listed block with a name, at the place where token ids and what comes before it give that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.block_hashes import ExtraKeys, block_hashes
from mimo_plugin.core.engine_events import EngineStored, Groups, in_device
from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.sparse_places import places

ROOT = -1
"""Instead of a canonical hash: what comes before a prompt's first block."""
DEAD = -2
"""Instead of one: the name contradicted another."""
_UNKNOWN = -3  # in a list of hashes: a block before the first known one
_MAX_TRIED_PLACES = 64


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
    """Events of what a request found (``kv_cache_report_mode``), not of new copies."""
    ignored_events: int = 0
    """Events of other media, or of sizes that don't fit the group."""


@dataclass(slots=True)
class _Chain:
    """Canonical hashes of a full-attention event's range; ``hashes`` None: not known."""

    start: int | None
    token_ids: Sequence[int]
    hashes: list[int] | None


class RangeNames:
    """Names of the blocks in one batch of one worker, beside those that the worker's have already.

    Args:
        groups: of the engine.
        names: canonical hash of each engine hash; ``DEAD`` for those that have none for good.
        engines: the other way round.
        counts: to count what stays without a name.
    """

    __slots__ = ("_chains", "before", "counts", "engines", "fresh", "groups", "names", "salted")

    def __init__(
        self,
        groups: Groups,
        names: Mapping[Hash, int],
        engines: Mapping[int, Hash],
        counts: NameCounts,
    ) -> None:
        self.groups = groups
        self.names = names
        self.engines = engines
        self.counts = counts
        #: names that this batch's full-attention events tell
        self.fresh: dict[Hash, int] = {}
        #: of a full-attention block with several hashes: that of the block before, and all but its
        #: last
        self.before: dict[int, tuple[int, ...]] = {}
        #: whether there was a prompt with a salt
        self.salted = False
        self._chains: list[_Chain] = []

    def name_of(self, block: Hash | None) -> int | None:
        """Canonical hash, None where it is not known; ``ROOT`` of None."""
        if block is None:
            return ROOT
        name = self.names.get(block)
        if name is None:
            name = self.fresh.get(block)
        return name if name != DEAD else None

    def begin(self, stored: Sequence[EngineStored]) -> None:
        """Name the full-attention blocks of a batch, before anything else is looked at."""
        unit = self.groups.hash_tokens
        for event in stored:
            if not (event.is_full and event.is_whole and event.block_hashes and in_device(event)):
                continue
            if event.block_size % unit:
                continue
            start = self.name_of(event.parent_block_hash)
            if start is None:
                self._chains.append(_Chain(None, event.token_ids, None))
                continue
            keys = self._keys(event, range(len(event.block_hashes)))
            hashes = _hashes(event.token_ids, unit, keys, start)
            self._chains.append(_Chain(start, event.token_ids, hashes))
            step = event.block_size // unit
            for at, block in enumerate(event.block_hashes):
                first, last = at * step, (at + 1) * step - 1
                self.fresh.setdefault(block, hashes[last])
                if step > 1:
                    previous = hashes[first - 1] if first else start
                    self.before[hashes[last]] = (previous, *hashes[first:last])

    def end(self) -> None:
        """The batch is done."""
        for name in self.fresh.values():
            if name not in self.engines:
                self.before.pop(name, None)
        self.fresh.clear()
        self._chains.clear()

    def of(self, event: EngineStored) -> list[int | None]:
        """Canonical hashes of an event's blocks, None for those that can't be named."""
        names = [self.name_of(block) for block in event.block_hashes]
        if None not in names:
            return names
        found = self._range(event, names)
        if found is None:
            self.counts.unknown_parents += 1
            return names
        hashes, sure = found
        at: Sequence[int | None] | None = range(len(event.block_hashes))
        if not event.is_whole:
            step = event.block_size // self.groups.hash_tokens
            at = self._places(event, names, hashes[step - 1 :: step])
        return self._named(event, names, at, hashes, sure) if at is not None else names

    def _named(
        self,
        event: EngineStored,
        names: Sequence[int | None],
        at: Sequence[int | None],
        hashes: list[int],
        sure: int,
    ) -> list[int | None]:
        """Names by places; behind the first ``sure`` hashes only what goes on unbroken."""
        unit = self.groups.hash_tokens
        step = event.block_size // unit
        keys = self._keys(event, at)
        found = list(names)
        for index, place in enumerate(at):
            if place is None:
                continue
            stop = (place + 1) * step
            if stop > sure:
                if place * step > sure:
                    break
                # Its own extra keys are told only with it.
                start = hashes[sure - 1] if sure else self.name_of(event.parent_block_hash)
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
        known = [None if name is None else where.get(name, -1) for name in names]
        told = set(self.fresh.values())
        free = [name >= 0 and name not in self.engines and name not in told for name in ends]
        found = None
        if -1 not in known:
            found = places(known, free, self.groups.rule(event.group))
        if found is None:
            self.counts.contradictions += 1
            return None
        self.counts.open_places += sum(place is None for place in found)
        return found

    def _keys(self, event: EngineStored, at: Sequence[int | None]) -> dict[int, ExtraKeys]:
        """Extra keys of a range's hashes; ``at``: places of the listed blocks."""
        unit = self.groups.hash_tokens
        found: dict[int, list[tuple[Any, ...]]] = {}
        if event.parent_block_hash is None and event.lora_name:
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
                self.salted = True
                found.setdefault(base, []).append(salt)
        return {block: tuple(keys) for block, keys in found.items()}

    # Hashes of a whole range, and how many of the first are certain

    def _range(
        self, event: EngineStored, names: Sequence[int | None]
    ) -> tuple[list[int], int] | None:
        unit = self.groups.hash_tokens
        start = self.name_of(event.parent_block_hash)
        if start is not None and event.is_whole:
            keys = self._keys(event, range(len(event.block_hashes)))
            hashes = _hashes(event.token_ids, unit, keys, start)
            return hashes, len(hashes)
        part = self._from_full(event, start, {name for name in names if name is not None})
        found: list[int] | None = None
        if part is not None:
            tail = event.token_ids[len(part) * unit :]
            found = part + _hashes(tail, unit, {}, part[-1])
            start = part[0]
        elif start is not None and not _has_keys(event):
            found = _hashes(event.token_ids, unit, self._keys(event, ()), start)
        if found is not None and all(name is None or name in found for name in names):
            return found, max(len(part or ()), self._confirmed(found, start, names))
        return self._from_anchor(event, names)

    def _confirmed(
        self, hashes: Sequence[int], start: int | None, names: Sequence[int | None]
    ) -> int:
        """How many of a range's hashes are certain although extra keys of blocks may be untold.

        Those up to one that the event lists. And up to one that the worker knows otherwise: but not
        from the start on where other prompts have the same tokens and a salt.
        """
        known: Sequence[int | None] | Set[int] = names
        if start != ROOT or not self.salted:
            known = self.engines.keys() | self.fresh.values()
        return max((at + 1 for at, name in enumerate(hashes) if name in known), default=0)

    def _from_full(
        self, event: EngineStored, start: int | None, names: Set[int]
    ) -> list[int] | None:
        """From a full-attention event of the same batch and prompt; at least one hash."""
        unit = self.groups.hash_tokens
        found: list[list[int]] = []
        for chain in self._chains:
            if start is None:
                offsets: Sequence[int] = range(self.groups.full_tokens // unit)
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

    def _from_anchor(
        self, event: EngineStored, names: Sequence[int | None]
    ) -> tuple[list[int], int] | None:
        """From the last listed block that has a name."""
        unit = self.groups.hash_tokens
        step, blocks = event.block_size // unit, len(event.token_ids) // event.block_size
        for index in range(len(names) - 1, -1, -1):
            name = names[index]
            before = self.before.get(name) if name is not None else None
            if name is None or (before is None and not event.is_whole):
                continue
            if event.is_whole:
                return self._around(event, name, (index + 1) * step - 1), blocks * step
            assert before is not None
            last = blocks - (len(names) - index)
            for place in range(last, max(index, last - _MAX_TRIED_PLACES) - 1, -1):
                end = (place + 1) * step
                at: list[int | None] = [None] * len(names)
                at[index] = place
                keys = self._keys(event, at).get(end - 1, ())
                tokens = event.token_ids[(end - 1) * unit : end * unit]
                if _hashes(tokens, unit, {0: keys}, before[-1]) == [name]:
                    return self._around(event, name, end - 1), end
        return None

    def _around(self, event: EngineStored, name: int, at: int) -> list[int]:
        """Hashes of a range from the one at ``at``: backwards what is known, onwards by tokens."""
        unit = self.groups.hash_tokens
        keys: dict[int, ExtraKeys] = {}
        if event.is_whole:
            keys = self._keys(event, range(len(event.block_hashes)))
        rest = {block - at - 1: value for block, value in keys.items()}
        found = [_UNKNOWN] * at + [name]
        found += _hashes(event.token_ids[(at + 1) * unit :], unit, rest, name)
        while at > 0 and (before := self.before.get(found[at])):
            for earlier in reversed(before):
                at -= 1
                if at >= 0:
                    found[at] = earlier
        return found


def _has_keys(event: EngineStored) -> bool:
    """Whether a listed block has extra keys beside the adapter's."""
    own = 1 if event.lora_name else 0
    return any(keys and len(keys) > own for keys in event.extra_keys or ())


def _hashes(
    token_ids: Sequence[int], unit: int, keys: Mapping[int, ExtraKeys], start: int
) -> list[int]:
    return block_hashes(token_ids, unit, keys, parent=None if start == ROOT else start)
