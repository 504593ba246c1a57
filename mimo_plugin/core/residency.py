# SPDX-License-Identifier: Apache-2.0
"""What a prompt would hit on each worker, from what the workers say about their blocks.

The answer is the engine's own: every full-attention block of the hit is resident, and so is the
window before its end in every sliding-window group (:mod:`mimo_plugin.core.window`). Where the
index knows less than the worker (it listened late, or events were lost) it answers less, never
more.

A look-up serves all workers at once (:mod:`mimo_plugin.core.residency_lookup`): worker ``i`` is
bit ``i`` of the integers that the tables hold.

Memory: at most ``BYTES_PER_BLOCK`` for each hash and group that at least one of up to 64 workers
holds, however many copies they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from mimo_plugin.core.kv_events import (
    FULL_KINDS,
    WINDOW_KINDS,
    AllBlocksCleared,
    BatchOrder,
    BlockRemoved,
    BlockStored,
    Hash,
    KvEvent,
    Step,
)
from mimo_plugin.core.residency_groups import Chains, Copies, Windows, parents
from mimo_plugin.core.residency_lookup import Prompt, bits, reached, safe_steps
from mimo_plugin.core.window import GroupGeometry

BYTES_PER_BLOCK = 1250
"""Bound of memory for one hash in one group, with 64 workers that all have several copies of it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One worker's blocks, to be given to another index of the same groups.

    Attributes:
        next_seq: number of the first batch that it does not hold; None: not known.
        groups: of each group: geometry, and for each block its copies, whether the block before it
            is known, and that block.
    """

    next_seq: int | None
    groups: Mapping[int, tuple[GroupGeometry, Mapping[Hash, tuple[int, bool, Hash | None]]]]


class _Worker:
    __slots__ = ("blocks", "order", "slot")

    def __init__(self, slot: int, max_held: int) -> None:
        self.slot = slot
        self.blocks = 0  # pairs of hash and group
        self.order: BatchOrder[Sequence[KvEvent]] = BatchOrder(max_held)


class ResidencyIndex:
    """Blocks of several workers that serve one model with one KV layout.

    Args:
        hash_block_tokens: tokens that each of a prompt's hashes stands for; every group's block
            size is a multiple of it.
        num_groups: KV cache groups of the model; nothing is a hit until all have been heard of.
            None: those heard of are all (an engine names every group in its first batch).
        lookahead_blocks: by group, blocks past the hit that it needs (1 for a draft model's).
        media: where a copy counts; ``None`` in it stands for copies that do not say.
        max_blocks_per_worker: pairs of hash and group beyond which a worker's reports are not
            believed: it is cleared, and counts again from there.
        max_held_batches: see :class:`BatchOrder`.
    """

    def __init__(
        self,
        hash_block_tokens: int,
        *,
        num_groups: int | None = None,
        lookahead_blocks: Mapping[int, int] | None = None,
        media: Iterable[str | None] = ("GPU", None),
        max_blocks_per_worker: int = 8_000_000,
        max_held_batches: int = 10_000,
    ) -> None:
        if hash_block_tokens <= 0:
            raise ValueError(f"hash_block_tokens: found {hash_block_tokens}; allowed: > 0")
        self.hash_block_tokens = hash_block_tokens
        self.num_groups = num_groups
        #: groups of a kind whose rule is not known here: with one of them nothing is a hit
        self.unknown_kinds: dict[int, str] = {}
        #: events that were left out: other media, sizes that contradict the group's
        self.ignored_events = 0
        #: removed copies that were never reported, as after a late start
        self.unknown_removals = 0
        #: workers cleared for reporting more blocks than allowed
        self.overflows = 0
        self._lookahead = dict(lookahead_blocks or {})
        self._media = frozenset(media)
        self._max_blocks = max_blocks_per_worker
        self._max_held = max_held_batches
        self._workers: dict[str, _Worker] = {}
        self._names: list[str | None] = []
        self._trusted = 0  # bits of workers without an open gap
        self._copies: dict[int, Copies] = {}
        self._geometry: dict[int, GroupGeometry] = {}
        self._chains: dict[GroupGeometry, Chains] = {}
        self._windows: dict[GroupGeometry, Windows] = {}
        self._alignment_tokens = hash_block_tokens

    # Workers and their reports

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(self._workers)

    @property
    def groups(self) -> Mapping[int, GroupGeometry]:
        """KV cache groups, as far as they were heard of."""
        return self._geometry

    @property
    def alignment_tokens(self) -> int:
        """Hits are multiples of this: the least common multiple of the groups' block sizes."""
        return self._alignment_tokens

    def blocks_of(self, worker: str) -> int:
        """Pairs of hash and group that the worker has."""
        return self._workers[worker].blocks if worker in self._workers else 0

    def next_seq(self, worker: str) -> int | None:
        """Number from which batches of the worker are missing; None before the first."""
        return self._workers[worker].order.next_seq if worker in self._workers else None

    def is_trusted(self, worker: str) -> bool:
        """False from a gap until it is filled, or given up by :meth:`skip_gap`: no hits there."""
        return worker in self._workers and bool(self._trusted >> self._workers[worker].slot & 1)

    def apply(
        self, worker: str, seq: int, events: Sequence[KvEvent], *, replayed: bool = False
    ) -> Step:
        """Take one batch of a worker; see :meth:`BatchOrder.offer`.

        After ``Step.GAP`` the caller asks the worker for the batches from ``next_seq`` on, hands
        them in with ``replayed``, and calls :meth:`skip_gap` where they don't come.
        """
        state = self._state(worker)
        step, batches = state.order.offer(seq, events, replayed=replayed)
        if step is Step.RESTART:
            self._clear(state)
        self._take(state, batches)
        return step

    def skip_gap(self, worker: str) -> None:
        """Batches are lost for good: forget the worker's blocks, go on with what came since."""
        state = self._state(worker)
        batches = state.order.skip_gap()
        if batches:
            self._clear(state)
            self._take(state, batches)

    def forget(self, worker: str) -> None:
        """Nothing is known of the worker any more, as when its connection was lost.

        A publisher that restarts unseen may go on with the number that was expected. So whoever
        reads events calls this whenever it connects again and can't have the missed ones replayed.
        """
        state = self._state(worker)
        state.order.forget()
        self._clear(state)
        self._take(state, ())

    def remove(self, worker: str) -> None:
        """The worker does not exist any more; its bit is free for another one."""
        state = self._workers.pop(worker, None)
        if state is not None:
            self._clear(state)
            self._trusted &= ~(1 << state.slot)
            self._names[state.slot] = None

    def snapshot(self, worker: str) -> Snapshot:
        """All that was applied of the worker."""
        state = self._state(worker)
        groups = {}
        for group, copies in self._copies.items():
            chain = self._chains.get(self._geometry[group])
            blocks: dict[Hash, tuple[int, bool, Hash | None]] = {}
            for block, count in copies.of(state.slot):
                link = chain.links.get(block) if chain is not None else None
                known = link is not None and link.known
                blocks[block] = count, known, link.parent if link is not None else None
            groups[group] = self._geometry[group], blocks
        return Snapshot(state.order.next_seq, groups)

    def restore(self, worker: str, snapshot: Snapshot) -> None:
        """The worker has what the snapshot says; batches go on from its ``next_seq``."""
        self.forget(worker)
        state = self._state(worker)
        state.order.next_seq = snapshot.next_seq
        for group, (geometry, blocks) in snapshot.groups.items():
            if not self._declare(group, geometry):
                continue
            for block, (count, known, parent) in blocks.items():
                for _ in range(count):
                    self._store(state, group, block, parent, known)

    def _state(self, worker: str) -> _Worker:
        state = self._workers.get(worker)
        if state is None:
            slot = self._names.index(None) if None in self._names else len(self._names)
            self._names[slot : slot + 1] = [worker]
            state = self._workers[worker] = _Worker(slot, self._max_held)
            self._trusted |= 1 << slot
        return state

    def _take(self, state: _Worker, batches: Iterable[Sequence[KvEvent]]) -> None:
        for batch in batches:
            for event in batch:
                if isinstance(event, BlockStored):
                    self._stored(state, event)
                elif isinstance(event, BlockRemoved):
                    self._removed(state, event)
                elif isinstance(event, AllBlocksCleared):
                    self._clear(state)
                else:
                    raise TypeError(f"not an event: {event!r}")
        if state.order.waiting:
            self._trusted &= ~(1 << state.slot)
        else:
            self._trusted |= 1 << state.slot

    def _clear(self, state: _Worker) -> None:
        for copies in self._copies.values():
            copies.clear(state.slot)
        for chain in self._chains.values():
            chain.clear(state.slot)
        for windows in self._windows.values():
            windows.clear(state.slot)
        state.blocks = 0

    def _stored(self, state: _Worker, event: BlockStored) -> None:
        group, kind = event.group_idx or 0, event.kv_cache_spec_kind or "full_attention"
        window = event.kv_cache_spec_sliding_window
        if event.medium not in self._media:
            self.ignored_events += 1
            return
        if kind not in FULL_KINDS and (kind not in WINDOW_KINDS or not window):
            self.unknown_kinds[group] = kind
            return
        geometry = GroupGeometry(
            event.block_size,
            window if kind in WINDOW_KINDS else None,
            self._lookahead.get(group, 0),
        )
        if not self._declare(group, geometry):
            self.ignored_events += 1
            return
        # Blocks were left out: which one comes before which is not known.
        whole = event.num_tokens == len(event.block_hashes) * event.block_size
        before = parents(event.block_hashes, event.parent_block_hash)
        for block, parent in zip(event.block_hashes, before, strict=False):
            self._store(state, group, block, parent, whole)

    def _store(
        self, state: _Worker, group: int, block: Hash, parent: Hash | None, known: bool
    ) -> None:
        geometry = self._geometry[group]
        if not self._copies[group].add(block, state.slot):
            if known and geometry.is_full:
                # Its first copy may have come without its place in the chain.
                self._chains[geometry].gained(block, state.slot, parent, known)
            return
        if state.blocks >= self._max_blocks:
            self.overflows += 1
            self._clear(state)
            return
        state.blocks += 1
        if geometry.is_full:
            self._chains[geometry].gained(block, state.slot, parent, known)
        else:
            self._windows[geometry].gained(block, state.slot)

    def _removed(self, state: _Worker, event: BlockRemoved) -> None:
        group = event.group_idx or 0
        copies = self._copies.get(group)
        if event.medium not in self._media or copies is None:
            self.ignored_events += 1
            return
        geometry = self._geometry[group]
        kind = self._chains[geometry] if geometry.is_full else self._windows[geometry]
        for block in event.block_hashes:
            last = copies.remove(block, state.slot)
            if last is None:
                self.unknown_removals += 1
            elif last:
                state.blocks -= 1
                kind.lost(block, state.slot)

    def _declare(self, group: int, geometry: GroupGeometry) -> bool:
        """Meet a group; False when its geometry is not the one that it had."""
        found = self._geometry.get(group)
        if found is not None:
            return found == geometry
        if geometry.block_size_tokens % self.hash_block_tokens:
            return False
        self._geometry[group] = geometry
        copies = self._copies[group] = Copies()
        if geometry.is_full:
            self._chains.setdefault(geometry, Chains(geometry)).join(copies)
        else:
            self._windows.setdefault(geometry, Windows(geometry)).join(copies)
        self._alignment_tokens = lcm(self._alignment_tokens, geometry.block_size_tokens)
        return True

    # Look-up

    def lookup(self, hashes: Sequence[Hash], max_hit_tokens: int) -> dict[str, int]:
        """What a prompt would hit on each worker, in tokens; those not named hit nothing.

        Args:
            hashes: of the prompt's blocks of ``hash_block_tokens``, in order.
            max_hit_tokens: longest hit allowed; engines compute at least a prompt's last token.
        """
        return self._named(hashes, max_hit_tokens, windows=True)

    def full_prefixes(self, hashes: Sequence[Hash], max_hit_tokens: int) -> dict[str, int]:
        """The same without sliding windows: what goes beyond the hit lacks a window."""
        return self._named(hashes, max_hit_tokens, windows=False)

    def _named(
        self, hashes: Sequence[Hash], max_hit_tokens: int, *, windows: bool
    ) -> dict[str, int]:
        if not self._complete():
            return {}
        prompt = Prompt(hashes, self.hash_block_tokens, self._alignment_tokens, max_hit_tokens)
        if not prompt.limit_tokens:
            return {}
        full = reached(prompt, tuple(self._chains.values()), self._trusted)
        joined = tuple(self._windows.values()) if windows else ()
        found: dict[str, int] = {}
        for tokens, mask in safe_steps(prompt, full, joined, self._trusted):
            for slot in bits(mask):
                found[self._names[slot] or ""] = tokens
        return found

    def _complete(self) -> bool:
        wanted = len(self._geometry) if self.num_groups is None else self.num_groups
        return bool(self._chains) and len(self._geometry) >= wanted and not self.unknown_kinds
