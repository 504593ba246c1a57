# SPDX-License-Identifier: Apache-2.0
"""SGLang's pools, allocators and radix cache as its scheduler makes them, without a model.

A token's KV is one number per layer here, so that pools of any size fit into memory. With a folder
for L3 the cache gets its host pools and the page store of the plugin, too; the copies between
device and host are those of the reference platform (``integration_tests/sglang_cpu``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: one rank of one, for code that asks for its place
_ALONE = {
    f"{group}_{what}": int(what == "size")
    for group in ("tp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp", "pp")
    for what in ("rank", "size")
}


@dataclass(frozen=True)
class Pools:
    """Sizes in tokens; a page belongs to one pool."""

    full_tokens: int = 200_000
    swa_tokens: int = 40_000
    page_tokens: int = 16
    window_tokens: int = 128
    chunk_tokens: int = 2048
    max_running: int = 16
    #: tokens that a running request grows by in one decode step; many at once only saves time
    decode_tokens: int = 16


@dataclass(frozen=True)
class Store:
    """A page store below the cache: where it is, and what its pages may take."""

    folder: Path
    capacity_bytes: int


def make_cache(pools: Pools, settings: dict[str, Any] | None, store: Store | None = None) -> Any:
    """A radix cache over new pools. Publishes the arguments for the whole process.

    Args:
        pools: sizes.
        settings: the plugin's section ``kv``; None is stock.
        store: L3, with host pools of twice the device's; None: device only.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(
        model_path="dummy",
        page_size=pools.page_tokens,
        device="cpu",
        **(_hierarchy(store) if store is not None else {}),
    )
    set_global_server_args_for_scheduler(arguments)
    allocator, rows = _make_pools(pools)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=pools.page_tokens,
        sliding_window_size=pools.window_tokens,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )
    cache = UnifiedRadixCache(params) if settings is None else _mimo_cache(params, settings)
    if store is not None:
        from mimo_sglang_cpu.host_copies import install

        install()
        get_parallel().override_permanently(**_ALONE)
        cache.init_hicache(arguments, params)
    return cache


def _make_pools(pools: Pools) -> tuple[Any, Any]:
    import torch
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    sizes = {
        "size": pools.full_tokens,
        "size_swa": pools.swa_tokens,
        "page_size": pools.page_tokens,
        "dtype": torch.bfloat16,
        "device": "cpu",
    }
    kv = SWAKVPool(
        **sizes,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
    )
    rows = ReqToTokenPool(
        size=pools.max_running + 1,
        max_context_len=pools.full_tokens,
        device="cpu",
        enable_memory_saver=False,
    )
    return SWATokenToKVPoolAllocator(**sizes, kvcache=kv, need_sort=False), rows


def _mimo_cache(params: Any, settings: dict[str, Any]) -> Any:
    from mimo_plugin.config import parse_config
    from mimo_plugin.engines.sglang.kv.accounting import Accounting
    from mimo_plugin.engines.sglang.kv.cache import MimoRadixCache
    from mimo_plugin.engines.sglang.kv.settings import (
        message_start_ids,
        retention_rule,
        swa_group,
    )

    config = parse_config({"kv": settings}, environ={}, engine="sglang")
    assert config is not None
    cache = MimoRadixCache(params)
    group = swa_group(cache.sliding_window_size, cache.page_size)
    cache.configure(
        rule=retention_rule(config.kv, group),
        group=group,
        start_ids=message_start_ids(config.kv, lambda: None),
        accounting=Accounting(None, cache.page_size),
    )
    return cache


def _hierarchy(store: Store) -> dict[str, Any]:
    extra = {
        "backend_name": "mimo",
        "interface_v1": 1,
        "module_path": "mimo_plugin.engines.sglang.storage.backend",
        "class_name": "MimoStorage",
        "path": str(store.folder),
        "capacity_gib": store.capacity_bytes / (1 << 30),
        "prefetch_threshold": 16,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
