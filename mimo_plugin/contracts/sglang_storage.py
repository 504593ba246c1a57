# SPDX-License-Identifier: Apache-2.0
"""SGLang symbols that HiCache over a page store relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_TIERS = ("tiers",)
_call = partial(call, features=_TIERS)
_class = partial(class_, features=_TIERS)

_STORAGE = "srt.mem_cache.hicache_storage"
_CACHE = "srt.mem_cache.unified_radix_cache"
_CONTROLLER = "srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_ASSEMBLER = "srt.mem_cache.hybrid_cache.hybrid_pool_assembler"

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
    _class(_STORAGE, "SidecarPoolSpec", "pools kept alive", has="indices_from_pool pool_name"),
    _class(
        "srt.arg_groups.fields.memory",
        "Memory",
        "the store is chosen by arguments",
        has="enable_hierarchical_cache hicache_mem_layout hicache_ratio hicache_size "
        "hicache_storage_backend hicache_storage_backend_extra_config",
    ),
    _class(
        "srt.mem_cache.storage.backend_factory",
        "StorageBackendFactory",
        "makes the backend dynamic from a class path",
        has="_create_dynamic_backend create_backend",
    ),
    _class(
        _CACHE,
        "UnifiedRadixCache",
        "prefixes are kept alive",
        has="_apply_cache_actions cache_controller components page_size sidecar_pool_specs "
        "sliding_window_size tree_core",
    ),
    _call(
        _CACHE,
        "UnifiedRadixCache.load_back",
        "loads one window",
        first="node_id mem_quota req",
        accepts="",
    ),
    _class("srt.mem_cache.unified_cache.component_type", "ComponentType", "windows", has="SWA"),
    _call(
        "srt.mem_cache.radix_cache",
        "RadixKey.__init__",
        "a prefix that ends inside a node",
        first="token_ids extra_key is_bigram limit cache_salt",
    ),
    _class("srt.mem_cache.base_prefix_cache", "MatchPrefixParams", "splits a node", has="key"),
    _class("srt.mem_cache.base_prefix_cache", "MatchResult", "of a split", has="cache_actions"),
    _class(
        "srt.mem_cache.unified_cache.unified_tree_core_interface",
        "TreePathNodeInfo",
        "where nodes begin",
        has="node_id path_end path_start",
    ),
    _call(
        _CACHE,
        "UnifiedRadixCache.checkpoint_into_tree",
        "a request's first one tells of its hit",
        first="req",
        named="up_to",
        accepts="",
    ),
    _class(
        "srt.managers.schedule_batch",
        "ReqKvInfo",
        "whether there was a hit",
        has="cache_protected_len",
    ),
    _class(
        "srt.managers.schedule_batch",
        "Req",
        "where it ended, and of what tokens it was",
        has="cache_salt extra_key full_untruncated_fill_ids kv last_node",
    ),
    _class(
        "srt.mem_cache.rust_tree_core.adapter",
        "RustUnifiedTreeCore",
        "keys of a prefix' pages, and where its last window begins",
        has="collect_path_info component_has_host_value_only get_hash_values "
        "get_last_hash_value get_prefix_hash_values is_eagle match_prefix",
    ),
    _class(
        _CONTROLLER,
        "HybridCacheController",
        "hits that host memory cuts end where they can be restored",
        has="mem_pool_host page_size storage_backend",
    ),
    _call(
        _CONTROLLER,
        "HybridCacheController._sync_prefetch_hit_query",
        "ranks agree on shorter lengths too",
        first="operation storage_hit_count",
        accepts="",
    ),
    _call(
        _CONTROLLER,
        "HybridCacheController.allocate_storage_hit",
        "room for a hit, or for a part of it",
        first="operation hit_tokens",
        named="allow_partial min_tokens",
        accepts="evict_host",
    ),
    _call(
        "srt.managers.cache_controller",
        "HiCacheController._all_reduce",
        "ranks agree on shorter lengths too",
        first="tensor op groups",
    ),
    _call(
        _ASSEMBLER,
        "build_hybrid_swa_group",
        "splits host memory between kinds of layers",
        named="full_kv_pool kv_host_size swa_host_size swa_kv_pool",
        closed=False,
    ),
    _call("srt.runtime_context", "get_memory", "size of host memory"),
)
"""Every row of the storage backend."""
