# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiers on a CPU, to compare with: its connector, its manager, its rules.

Only what copies between the engine's memory and host memory is the plugin's, as vLLM's own copies
need a GPU; and, where both are compared over the same store, the plugin's store below host memory,
which vLLM's manager never touches.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from mimo_plugin.engines.vllm.tiers.connector import layout_of
from mimo_plugin.engines.vllm.tiers.copy_worker import HostCopyWorker
from mimo_plugin.engines.vllm.tiers.store_tier import StoreTier


class StockTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """``TieringOffloadingSpec`` whose worker needs no GPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker, made at the first call."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, region)
        return self._worker


class StockOverStore(OffloadingConnector):  # type: ignore[misc]
    """``OffloadingConnector`` that tells the plugin's store which bytes of a row are whose."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is None:
            return
        manager = self.connector_scheduler.manager
        row_bytes = manager.primary_tier.get_kv_memoryview().strides[0]
        sizes = build_offloading_config(vllm_config, kv_cache_config)
        for tier in manager.secondary_tiers:
            if isinstance(tier, StoreTier):
                tier.set_layout(layout_of(kv_cache_config, sizes, row_bytes))
