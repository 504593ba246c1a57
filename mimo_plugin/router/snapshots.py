# SPDX-License-Identifier: Apache-2.0
"""What targets hold, kept in the shared state for routers that start later.

A publisher replays its last batches only (10,000 by default). A router that starts after more of
them knows nothing of what was stored before, unless another one has kept it: the blocks, the
engine's names of them, and the last batch that is in it. The reader goes on from there if the
publisher still has that batch, and forgets all where it has not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple

import msgspec

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.named_index import NamedIndex, NamedSnapshot
from mimo_plugin.core.residency import Snapshot
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.state import SharedState

log = logging.getLogger(__name__)

VERSION = 1
REPLAYED_BATCHES = 5_000
"""Up to so many batches a replay tells all, and nothing is kept."""
SAVE_EVERY_S = 60.0
_LOAD_S = 10.0

_Block = tuple[Hash, int, bool, Hash | None]


class _Group(msgspec.Struct, array_like=True):
    group: int
    geometry: tuple[int, int | None, int]
    blocks: list[_Block]


class _Kept(msgspec.Struct, array_like=True):
    version: int
    hash_tokens: int
    next_seq: int
    digest: bytes
    groups: list[_Group]
    names: list[tuple[Hash, int | None, int]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def pack(index: NamedIndex, target: str, digest: bytes) -> bytes | None:
    """All that is known of a target; None: no batch of it was applied.

    Args:
        digest: of the batch that was applied last.
    """
    snapshot = index.named_snapshot(target)
    if snapshot.blocks.next_seq is None:
        return None
    groups = []
    for group, (geometry, blocks) in snapshot.blocks.groups.items():
        size, window, lookahead = astuple(geometry)
        packed = [(block, *values) for block, values in blocks.items()]
        groups.append(_Group(group, (size, window, lookahead), packed))
    names = [(name, *values) for name, values in snapshot.names.items()]
    next_seq = snapshot.blocks.next_seq
    return _encode(_Kept(VERSION, index.hash_block_tokens, next_seq, digest, groups, names))


def unpack(data: bytes, hash_tokens: int) -> tuple[NamedSnapshot, bytes] | None:
    """A snapshot and the digest of its last batch; None: it is of another version or block size."""
    try:
        kept = _decode(data)
        if kept.version != VERSION or kept.hash_tokens != hash_tokens:
            return None
        groups: dict[int, tuple[GroupGeometry, Mapping[Hash, tuple[int, bool, Hash | None]]]] = {}
        for group in kept.groups:
            blocks = {block: (count, known, parent) for block, count, known, parent in group.blocks}
            groups[group.group] = GroupGeometry(*group.geometry), blocks
    except (msgspec.MsgspecError, ValueError):
        return None
    names = {name: (canonical, copies) for name, canonical, copies in kept.names}
    return NamedSnapshot(Snapshot(kept.next_seq, groups), names), kept.digest


async def restore(state: SharedState, index: NamedIndex, reader: EventReader) -> None:
    """Have what another router kept of a target, before its events are read."""
    target = reader.target
    try:
        data = await asyncio.wait_for(state.load_snapshot(target), _LOAD_S)
    except asyncio.TimeoutError:
        return
    found = unpack(data, index.hash_block_tokens) if data is not None else None
    if found is None:
        return
    snapshot, digest = found
    index.restore_named(target, snapshot)
    index.suspend(target)  # until the reader has asked what came after it
    reader.resume(digest)
    log.info("%s: %d blocks from the shared state", target, index.blocks_of(target))


class Saver:
    """Keeps what targets hold, one after the other.

    Args:
        state: where.
        readings: index and reader of each target whose events are read.
    """

    def __init__(
        self,
        state: SharedState,
        readings: Callable[[], Mapping[str, tuple[NamedIndex, EventReader]]],
        *,
        every_s: float = SAVE_EVERY_S,
        replayed_batches: int = REPLAYED_BATCHES,
    ) -> None:
        self._state, self._readings = state, readings
        self._every_s, self._replayed_batches = every_s, replayed_batches
        self._saved: dict[str, int] = {}
        self.saves = 0

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for target in list(self._readings()):
                await self._save(target)

    async def _save(self, target: str) -> None:
        index, reader = self._readings().get(target, (None, None))
        if index is None or reader is None or not index.is_trusted(target):
            return
        last = reader.last
        if last is None or last[0] < self._replayed_batches or self._saved.get(target) == last[0]:
            return
        data = pack(index, target, last[1])
        if data is not None and await self._state.save_snapshot(target, data):
            self._saved[target] = last[0]
            self.saves += 1
