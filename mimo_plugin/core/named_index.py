# SPDX-License-Identifier: Apache-2.0
"""The index of residency, fed with what the engines publish and asked with canonical hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.engine_events import Groups
from mimo_plugin.core.event_names import Naming, SavedBlocks
from mimo_plugin.core.kv_events import Hash, Step
from mimo_plugin.core.range_names import NameCounts
from mimo_plugin.core.residency import ResidencyIndex, Snapshot


@dataclass(frozen=True, slots=True)
class NamedSnapshot:
    """One worker's blocks and the engine's names of them.

    Attributes:
        blocks: by canonical hash.
        names: of each engine hash: see ``event_names.Naming.snapshot``.
    """

    blocks: Snapshot
    names: Mapping[Hash, tuple[int | None, int]]


class NamedIndex(ResidencyIndex):
    """A :class:`ResidencyIndex` whose batches hold the engines' own events.

    They are translated when their turn comes, so one that is held back while a replay is awaited
    changes no name. Look-ups take hashes of :mod:`mimo_plugin.core.block_hashes`.

    Memory: what the index takes, and ``event_names.BYTES_PER_NAME`` for each block (not: block and
    group) of each worker. Both are bounded by ``max_blocks_per_worker``.
    """

    def __init__(
        self,
        hash_block_tokens: int,
        *,
        lookahead_blocks: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(hash_block_tokens, lookahead_blocks=lookahead_blocks, **options)
        self._engine_groups = Groups(hash_block_tokens, dict(lookahead_blocks or {}))
        self._namings: dict[int, Naming] = {}
        self._suspended: set[int] = set()
        self._applying = False

    def name_counts(self, worker: str) -> NameCounts:
        """What was left out of the worker's events, and why."""
        return self._naming(self._state(worker)).counts

    def suspend(self, worker: str) -> None:
        """What is known may be out of date, as without a connection: no hits until ``resume``."""
        state = self._state(worker)
        self._suspended.add(state.slot)
        self._take(state, ())

    def resume(self, worker: str) -> None:
        """All that was missed is applied, or forgotten."""
        state = self._state(worker)
        self._suspended.discard(state.slot)
        self._take(state, ())

    def apply(
        self, worker: str, seq: int, events: Sequence[Any], *, replayed: bool = False
    ) -> Step:
        """Take one batch of engine events (``engine_events.EngineEvent``); see the base class."""
        return super().apply(worker, seq, events, replayed=replayed)

    def remove(self, worker: str) -> None:
        """As in the base class."""
        if worker in self._workers:
            slot = self._workers[worker].slot
            super().remove(worker)
            self._namings.pop(slot, None)
            self._suspended.discard(slot)

    def named_snapshot(self, worker: str) -> NamedSnapshot:
        """All that was applied of the worker, with its names."""
        return NamedSnapshot(self.snapshot(worker), self._naming(self._state(worker)).snapshot())

    def restore_named(self, worker: str, snapshot: NamedSnapshot) -> None:
        """The worker has what the snapshot says; batches go on from its ``next_seq``."""
        self.restore(worker, snapshot.blocks)
        groups: dict[int, SavedBlocks] = {}
        for group, (geometry, blocks) in snapshot.blocks.groups.items():
            if self.groups.get(group) == geometry:
                self._engine_groups.add(group, geometry)
                groups[group] = blocks
        self._naming(self._state(worker)).restore(snapshot.names, groups)

    def _naming(self, state: Any) -> Naming:
        naming = self._namings.get(state.slot)
        if naming is None:
            naming = self._namings[state.slot] = Naming(self._engine_groups)
        return naming

    def _take(self, state: Any, batches: Iterable[Sequence[Any]]) -> None:
        naming = self._naming(state)
        for batch in batches:
            overflows, told = self.overflows, naming.translate(batch)
            # What the batch says of all blocks is done with the names already.
            self._applying = True
            try:
                super()._take(state, (told,))
            finally:
                self._applying = False
            if self.overflows == overflows and len(naming) > self._max_blocks:
                self.overflows += 1
            if self.overflows != overflows:
                # Blocks that came after it in the batch have no names any more.
                self._clear(state)
        super()._take(state, ())
        if state.slot in self._suspended:
            self._trusted &= ~(1 << state.slot)

    def _clear(self, state: Any) -> None:
        super()._clear(state)
        naming = self._namings.get(state.slot)
        if naming is not None and not self._applying:
            naming.clear()
