# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering with the plugin's manager, on a GPU with vLLM's worker, on a CPU with ours."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from mimo_plugin.engines.vllm.tiers.configure import settings_from
from mimo_plugin.engines.vllm.tiers.copy_worker import HostCopyWorker
from mimo_plugin.engines.vllm.tiers.layout import RowLayout, check_refs
from mimo_plugin.engines.vllm.tiers.manager import MimoTieringManager
from mimo_plugin.engines.vllm.tiers.store_tier import StoreTier
from mimo_plugin.errors import setting_error


def unname(region: Any) -> None:
    """Take host memory's name away once all have it, so that it goes with them, killed or not.

    The workers map it when they are given their KV cache, which is before there is a scheduler. A
    scheduler that finds no such memory and makes it itself leaves the name for those who come.
    """
    if not region._creator:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(region.mmap_path)


def forget_name(worker: Any) -> None:
    """Before a worker lets go of host memory: the name that it made may be gone by now."""
    region = getattr(worker, "_mmap_region", None) or getattr(worker, "_region", None)
    if region is not None and not os.path.exists(region.mmap_path):
        region._creator = False


class MimoTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """``TieringOffloadingSpec`` whose manager keeps hits alive.

    Raises:
        ConfigError: a setting is unknown or out of range, or host memory holds no block.
    """

    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = settings_from(self.extra_config)
        #: what the scheduler takes a row to hold; set by the connector in a worker
        self.layout: RowLayout | None = None
        if self.num_chunks < 1:
            raise setting_error(
                "mimo.tiers.host_gib",
                self.settings.host_gib,
                f"at least one block of {self.kv_bytes_per_chunk} bytes",
                "give more host memory",
            )

    def get_manager(self) -> Any:
        """The manager, made at the first call."""
        if not isinstance(self._manager, MimoTieringManager):
            stock = super().get_manager()
            stop_polling = getattr(stock, "_stop_tier_poll_thread", None)  # vLLM 0.33
            if stop_polling is not None:
                stop_polling()  # its tiers get another manager, with a lock of its own
            region = stock.primary_tier._mmap_region
            unname(region)
            one_file = len(getattr(region, "_segments", ((),))) == 1
            for tier in stock.secondary_tiers:
                if isinstance(tier, StoreTier) and one_file:
                    tier.share_memory(region.fd)
            self._manager = MimoTieringManager(
                primary_tier=stock.primary_tier,
                secondary_tiers=stock.secondary_tiers,
                touch_interval_s=self.settings.touch_interval_s,
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker, made at the first call.

        Raises:
            FeatureUnavailable: it would fill other bytes of a row than the scheduler reads.
        """
        if self._worker is None and self.layout is not None:
            check_refs(
                self.layout,
                kv_caches,
                rank=self.config.parallel.rank,
                worker_row_bytes=self.cpu_page_size_per_worker,
                blocks_per_chunk=self.blocks_per_chunk,
            )
        if self._worker is None and current_platform.is_cpu():
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = HostCopyWorker(kv_caches, region)
            except Exception:
                region.cleanup()
                raise
        return super().get_worker(kv_caches) if self._worker is None else self._worker
