# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of tiers, which also keeps alive what is used and writes again what was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from mimo_plugin.core.touches import Touches
from mimo_plugin.engines.vllm.tiers.accounting import TierAccounting
from mimo_plugin.engines.vllm.tiers.layout import RowLayout
from mimo_plugin.engines.vllm.tiers.store_tier import REPAIR, StoreTier

REMEMBERED_KEYS = 1 << 17
"""Keys of which the last touch is known."""


class MimoTieringManager(TieringOffloadingManager):  # type: ignore[misc]
    """See the module.

    Args:
        primary_tier: host memory.
        secondary_tiers: below it.
        touch_interval_s: what is kept alive in these is not touched again sooner, >= 0.
        clock_s: monotonic seconds.
    """

    def __init__(
        self,
        primary_tier: Any,
        secondary_tiers: Sequence[Any] = (),
        *,
        touch_interval_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(primary_tier=primary_tier, secondary_tiers=list(secondary_tiers))
        self._clock_s = clock_s
        self._touches: Touches[OffloadKey] = Touches(touch_interval_s, REMEMBERED_KEYS)
        self._stores = {
            index: tier
            for index, tier in enumerate(self.secondary_tiers)
            if isinstance(tier, StoreTier)
        }
        self.accounting = TierAccounting([tier.stats for tier in self._stores.values()])
        for tier in self._stores.values():
            tier.accounting = self.accounting
        self._layout: RowLayout | None = None

    def set_layout(self, layout: RowLayout, facts: Mapping[str, object] | None = None) -> None:
        """Tell which bytes of a row are whose; before anything is asked for.

        Args:
            layout: of a row.
            facts: what else decides the meaning of the bytes.
        """
        self._layout = layout
        for tier in self._stores.values():
            tier.set_layout(layout, facts)

    # -- keeping alive -------------------------------------------------------------------------

    def keep_alive(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request uses keys, wherever they are: they are the last to die in host memory.

        Below it they are touched unless they were lately; what is found missing there, and is in
        host memory, is written again.

        Args:
            keys: in the order of the prefix, so that its end dies before its beginning.
            req_context: the request's.
        """
        self.primary_tier.touch(keys, req_context)
        if not self.secondary_tiers:
            return
        due = self._touches.due(keys, self._clock_s())
        if due:
            for tier in self.secondary_tiers:
                tier.touch(due, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As :meth:`keep_alive`."""
        self.keep_alive(keys, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """As upstream, and write again what stores have lost."""
        super().on_schedule_end(context)
        for index, tier in self._stores.items():
            self._repair(index, tier)

    def _repair(self, index: int, tier: StoreTier) -> None:
        """Give a store what it has lost, as far as host memory has it ready and rows may wait.

        What is left over is forgotten: whoever uses it next finds it missing again.
        """
        req_context = ReqContext(req_id=REPAIR)
        keys = [
            key
            for key in tier.take_missing()
            if self.primary_tier.lookup(key, req_context) is LookupResult.HIT
        ]
        room = tier.room_rows
        self.accounting.pages("dropped", max(0, len(keys) - room))
        keys = keys[:room]
        if keys and self._should_store_to_tier(tier, len(keys)):
            tier.submit_store(self.create_store_job(keys, req_context, index))

    # -- counting ------------------------------------------------------------------------------

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As upstream: keys were read from host memory to the device."""
        super().complete_load(keys, req_context)
        self._count("read", keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As upstream: keys were written from the device to host memory."""
        super().complete_store(keys, req_context, success)
        if success:
            self._count("written", keys)

    def adopted(self, group_ids: Iterable[int]) -> None:
        """Keys of these groups, once each, were part of a hit and not loaded: the device had them.

        Args:
            group_ids: as vLLM counts all groups.
        """
        if self._layout is not None:
            for kind, count_bytes in self._layout.bytes_by_kind(group_ids).items():
                self.accounting.adopted(kind, count_bytes)

    def _count(self, direction: str, keys: Collection[OffloadKey]) -> None:
        if self._layout is not None:
            sizes = self._layout.bytes_by_kind(map(get_offload_group_idx, keys))
            for kind, count_bytes in sizes.items():
                self.accounting.host_moved(direction, kind, count_bytes)
