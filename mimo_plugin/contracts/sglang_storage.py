# SPDX-License-Identifier: Apache-2.0
"""SGLang symbols that HiCache over a page store relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_TIERS = ("tiers",)
_call = partial(call, features=_TIERS)
_class = partial(class_, features=_TIERS)

_STORAGE = "srt.mem_cache.hicache_storage"

STORAGE_ROWS: tuple[Contract, ...] = (
    _class(
        _STORAGE,
        "HiCacheStorage",
        "base of the backend",
        has="batch_exists batch_exists_v2 batch_get batch_get_v1 batch_get_v2 batch_set "
        "batch_set_v1 batch_set_v2 exists get on_host_pools_registered register_mem_host_pool_v2 "
        "register_mem_pool_host set",
    ),
    _call(
        _STORAGE,
        "HiCacheStorage.batch_get_v1",
        "pages in place",
        first="keys host_indices extra_info",
        accepts="",
    ),
    _call(
        _STORAGE,
        "HiCacheStorage.batch_exists_v2",
        "how long a prefix can be restored",
        first="keys pool_transfers extra_info",
        accepts="",
    ),
    _class(
        _STORAGE,
        "PoolHitPolicy",
        "what a pool needs of a prefix",
        has="ALL_PAGES TRAILING_PAGES",
    ),
    _class(_STORAGE, "PoolName", "names of pools", has="KV SWA"),
    _class(
        _STORAGE,
        "PoolTransfer",
        "what is moved",
        has="hit_policy host_indices keys name",
    ),
    _class(
        _STORAGE,
        "PoolTransferResult",
        "how long a prefix can be restored",
        has="extra_pool_hit_pages kv_hit_pages restorable_prefix_pages",
    ),
    _class(
        _STORAGE,
        "HiCacheStorageConfig",
        "ranks and the user's settings",
        has="attn_cp_rank attn_cp_size extra_config is_mla_model model_name pp_rank pp_size "
        "tp_rank tp_size",
    ),
)
"""Every row of the storage backend."""
