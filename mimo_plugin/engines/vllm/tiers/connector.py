# SPDX-License-Identifier: Apache-2.0
"""The KV connector of the feature ``tiers``: vLLM's OffloadingConnector for sliding windows.

vLLM's connector moves the KV, and its manager orders the tiers. What is a hit, what is stored and
what is kept alive is decided here (``scheduler.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import lcm
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_offloading_group_ids,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from mimo_plugin.config import section_of
from mimo_plugin.config_tiers import TiersConfig
from mimo_plugin.core.retention import BOUNDARY, Ladder, RetentionRule
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.engines.vllm.kv.fit import why_groups_do_not_fit
from mimo_plugin.engines.vllm.kv.settings import message_starts_of
from mimo_plugin.engines.vllm.tiers.configure import settings_from
from mimo_plugin.engines.vllm.tiers.layout import RowLayout, row_layout
from mimo_plugin.engines.vllm.tiers.lookups import geometry_of
from mimo_plugin.engines.vllm.tiers.scheduler import TieredScheduler
from mimo_plugin.engines.vllm.tiers.spec import forget_name
from mimo_plugin.errors import FeatureUnavailable


class MimoTieredConnector(OffloadingConnector):  # type: ignore[misc]
    """See the module; vLLM makes one in the scheduler and one in each worker.

    Raises:
        ConfigError: a setting is unknown or out of range.
        FeatureUnavailable: the model's KV cache groups are not full + sliding-window attention.
    """

    #: what the project's patch of vLLM asks a connector; here blocks are taken over in ``joint.py``
    skips_cached_blocks = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        reason = why_groups_do_not_fit(kv_cache_config.kv_cache_groups)
        if reason is not None:
            raise FeatureUnavailable(f"feature tiers: {reason.replace('kv out', 'tiers out')}")
        super().__init__(vllm_config, role, kv_cache_config)
        self._tiered: TieredScheduler | None = None
        sizes = build_offloading_config(vllm_config, kv_cache_config)
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            row_bytes = manager.primary_tier.get_kv_memoryview().strides[0]
            layout = layout_of(kv_cache_config, sizes, row_bytes)
            manager.set_layout(layout, facts_of(vllm_config))
            self._tiered = self._adopt(vllm_config)
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            spec.layout = layout_of(kv_cache_config, sizes, spec.kv_bytes_per_chunk)

    def _adopt(self, vllm_config: Any) -> TieredScheduler:
        scheduler = self.connector_scheduler
        assert scheduler is not None
        settings = settings_from(self._kv_transfer_config.kv_connector_extra_config)
        geometry = geometry_of(scheduler.config.kv_group_configs)
        starts = message_starts(settings, vllm_config)
        return TieredScheduler.adopt(scheduler, retention_rule(settings, geometry), starts)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """As upstream; what the device still has is not loaded."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._tiered is not None:
            self._tiered.bind(kv_cache_manager)

    def shutdown(self) -> None:
        """As upstream."""
        if self.connector_worker is not None:
            forget_name(self.connector_worker.worker)
        super().shutdown()

    def mimo_payload(self) -> dict[str, Any] | None:
        """What was counted since the last call."""
        return None if self._tiered is None else self._tiered.manager.accounting.drain()


def layout_of(kv_cache_config: Any, sizes: Any, row_bytes: int) -> RowLayout:
    """Which bytes of a row of host memory each group fills.

    Args:
        kv_cache_config: vLLM's.
        sizes: vLLM's ``OffloadingConfig``, of single blocks a row.
        row_bytes: of a row.
    """
    return row_layout(
        kv_cache_config,
        get_offloading_group_ids(kv_cache_config),
        world_size=sizes.parallel.world_size,
        worker_row_bytes=sizes.worker_kv_bytes_per_block,
        row_bytes=row_bytes,
    )


def facts_of(vllm_config: Any) -> dict[str, object]:
    """What decides, beside shapes and names, which KV a block's hash stands for."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "hf_config": json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        "attention_backend": str(vllm_config.attention_config.backend),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
    }


def retention_rule(settings: TiersConfig, geometry: tuple[GroupGeometry, ...]) -> RetentionRule:
    """Where windows are stored for these groups; derived rungs are at least a window apart."""
    unit = lcm(*(g.block_size_tokens for g in geometry))
    window = max(g.window_tokens or 1 for g in geometry)
    return RetentionRule(
        alignment_tokens=unit,
        lookahead_tokens=max(g.lookahead_blocks * g.block_size_tokens for g in geometry),
        classes=frozenset(settings.classes),
        ladder=Ladder(settings.ladder_min_tokens or window, settings.ladder_growth, unit),
    )


def message_starts(settings: TiersConfig, vllm_config: Any) -> frozenset[int]:
    """Ids that open a chat message: those given, those of the feature kv, or the tokenizer's."""
    given = settings.message_start_token_ids
    if given is None:
        section = section_of(vllm_config.additional_config)
        kv = section.get("kv") if isinstance(section, Mapping) else None
        given = kv.get("message_start_token_ids") if isinstance(kv, Mapping) else None
    if given is None:
        given = message_starts_of(vllm_config) if BOUNDARY in settings.classes else ()
    return frozenset(given)
