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
from mimo_plugin.router.snapshots import SnapshotError
from mimo_plugin.router.state import SharedState

log = logging.getLogger(__name__)

REPLAYED_BATCHES = 5_000
"""Up to so many batches a replay tells all, and nothing is kept."""
SAVE_EVERY_S = 60.0
_LOAD_S = 10.0


async def restore(state: SharedState, index: NamedIndex, reader: EventReader) -> None:
    """Have what another router kept of a target, before its events are read."""
    try:
        data = await asyncio.wait_for(state.load_snapshot(reader.target), _LOAD_S)
        if data is not None:
            reader.restore(data)
    except (asyncio.TimeoutError, SnapshotError) as error:
        log.info("%s: nothing from the shared state: %r", reader.target, error)
        return
    if data is not None:
        blocks = index.blocks_of(reader.target)
        log.info("%s: %d blocks from the shared state", reader.target, blocks)


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
        next_seq = index.next_seq(target)
        if next_seq is None or next_seq <= self.replayed_batches:
            return
        if self._saved.get(target) == next_seq:
            return
        if await self._state.save_snapshot(target, reader.snapshot()):
            self._saved[target] = next_seq
            self.saves += 1
