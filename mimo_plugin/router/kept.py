# SPDX-License-Identifier: Apache-2.0
"""What targets hold, kept in the shared state for routers that start later.

A publisher replays its last batches only (10,000 by default). A router that starts after more of
them knows nothing of what was stored before, unless another one has kept it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.snapshots import pack, unpack
from mimo_plugin.router.state import SharedState

log = logging.getLogger(__name__)

REPLAYED_BATCHES = 5_000
"""Up to so many batches a replay tells all, and nothing is kept."""
SAVE_EVERY_S = 60.0
_LOAD_S = 10.0


async def restore(state: SharedState, index: NamedIndex, reader: EventReader) -> None:
    """Have what another router kept of a target, before its events are read."""
    target = reader.target
    try:
        data = await asyncio.wait_for(state.load_snapshot(target), _LOAD_S)
    except asyncio.TimeoutError:
        log.info("%s: the shared state does not say what it held", target)
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
        every_s: between two rounds.
        replayed_batches: fewer are not kept.
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
        self._every_s, self.replayed_batches = every_s, replayed_batches
        self._saved: dict[str, int] = {}
        self.saves = 0

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for target in list(self._readings()):
                await self.save(target)

    async def save(self, target: str) -> None:
        """Keep what a target holds, unless a replay tells as much, or nothing came since."""
        index, reader = self._readings().get(target, (None, None))
        if index is None or reader is None or not index.is_trusted(target):
            return
        last = reader.last
        if last is None or last[0] < self.replayed_batches or self._saved.get(target) == last[0]:
            return
        data = pack(index, target, last[1])
        if data is not None and await self._state.save_snapshot(target, data):
            self._saved[target] = last[0]
            self.saves += 1
