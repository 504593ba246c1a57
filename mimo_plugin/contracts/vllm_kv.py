# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature kv relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced
from mimo_plugin.contracts.vllm_backend import BACKEND_ROWS

_KV = ("kv",)
_call = partial(call, features=_KV)
_class = partial(class_, features=_KV)
_replaced = partial(replaced, features=_KV)

_SCHEDULER = "v1.core.sched.scheduler"
_MANAGER = "v1.core.kv_cache_manager"
_COORDINATOR = "v1.core.kv_cache_coordinator"
_SINGLE = "v1.core.single_type_kv_cache_manager"
_POOL = "v1.core.block_pool"
_UTILS = "v1.core.kv_cache_utils"
_SPECS = "v1.kv_cache_interface"

FREE_QUEUE_METHODS = (
    "__init__",
    "popleft",
    "popleft_n",
    "remove",
    "append",
    "prepend_n",
    "append_n",
    "get_all_free_blocks",
    "iter_blocks_after",
)
"""Methods of the engine's free queue: the plugin's own queue has each of them, and a method that
upstream adds breaks the contract."""

_SCHEDULER_ROWS = (
    _replaced(_SCHEDULER, "KVCacheManager", "the scheduler builds its KV cache manager from it"),
    _class(
        _SCHEDULER,
        "Scheduler",
        "base class of the plugin's scheduler",
        has="kv_cache_manager make_stats",
    ),
    _call(
        _SCHEDULER,
        "Scheduler.__init__",
        "the factory hands its arguments through",
        named="vllm_config kv_cache_config structured_output_manager block_size",
        closed=False,
    ),
    _call(
        _SCHEDULER,
        "Scheduler.make_stats",
        "adds the plugin's counters to the step's statistics",
        named="spec_decoding_stats kv_connector_stats",
    ),
    _class(
        "v1.core.sched.async_scheduler",
        "AsyncScheduler",
        "the factory keeps asynchronous scheduling where it is on",
        base="Scheduler",
    ),
    _class(
        "v1.request",
        "Request",
        "positions of prompt end, turn end and junction",
        has="all_token_ids block_hashes num_computed_tokens num_in_flight_tokens "
        "num_prompt_tokens num_tokens request_id shared_prefix_boundary status",
    ),
)

_CONFIG_ROWS = (
    _call(
        "utils.import_utils",
        "resolve_obj_by_qualname",
        "finds the scheduler class that the user chose",
        first="qualname",
    ),
    _class("v1.request", "RequestStatus", "a running request is not refused", has="RUNNING"),
    _replaced("tokenizers", "cached_tokenizer_from_config", "reads the chat template"),
    _call(
        "tokenizers.registry",
        "cached_tokenizer_from_config",
        "reads the chat template",
        first="model_config",
    ),
    _class(
        _SPECS,
        "UniformTypeKVCacheSpecs",
        "a group of layers with one kind of attention and unequal shapes",
        has="kv_cache_specs",
    ),
)

_MANAGER_ROWS = (
    _replaced(_MANAGER, "get_kv_cache_coordinator", "the manager builds its coordinator from it"),
    _class(
        _MANAGER,
        "KVCacheManager",
        "base class of the plugin's manager",
        has="block_pool coordinator create_kv_cache_blocks prefix_cache_lookup_enabled "
        "record_prefix_cache_stats",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.__init__",
        "the scheduler's keywords are handed through",
        named="kv_cache_config max_model_len scheduler_block_size hash_block_size enable_caching "
        "use_eagle",
        closed=False,
    ),
    _call(
        _MANAGER,
        "KVCacheManager.get_computed_blocks",
        "where a hit is remembered and counted",
        first="request",
        accepts="max_cache_hit_length",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.allocate_slots",
        "admission check of both logical pools",
        first="request num_new_tokens",
        named="num_new_computed_tokens new_computed_blocks num_external_computed_tokens",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.record_prefix_cache_stats",
        "a hit is counted at admission",
        first="request num_hits",
        accepts="",
    ),
    _call(_MANAGER, "KVCacheManager.free", "end of a turn", first="request", accepts=""),
    _call(
        _MANAGER,
        "KVCacheManager.pop_blocks_for_free",
        "end of a turn when frees are deferred",
        first="request",
        accepts="",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.create_kv_cache_blocks",
        "a remembered hit is handed back in the engine's own type",
        first="blocks",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.evict_blocks",
        "blocks that a connector failed to load",
        first="block_ids",
        accepts="",
    ),
    _call(_MANAGER, "KVCacheManager.reset_prefix_cache", "forgets every checkpoint", accepts=""),
    _replaced(_COORDINATOR, "BlockPool", "the coordinator builds its pool from it"),
    _replaced(
        _COORDINATOR,
        "get_manager_for_kv_cache_spec",
        "the coordinator builds its managers from it",
    ),
    _class(
        _COORDINATOR,
        "HybridKVCacheCoordinator",
        "base class of the plugin's coordinator",
        has="allocate_new_computed_blocks block_pool cache_blocks get_num_cacheable_tokens "
        "hash_block_size num_reprefillable_tokens remove_skipped_blocks reset_prefix_cache "
        "scheduler_block_size single_type_managers",
        base="KVCacheCoordinator",
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.__init__",
        "keywords are handed through",
        named="kv_cache_config max_model_len max_in_flight_tokens use_eagle enable_caching "
        "enable_kv_cache_events dcp_world_size pcp_world_size scheduler_block_size hash_block_size",
        closed=False,
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.cache_blocks",
        "decides which blocks are kept",
        first="request num_computed_tokens",
        accepts="",
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.allocate_new_computed_blocks",
        "where a request's hit enters its block tables",
        first="request_id new_computed_blocks num_local_computed_tokens "
        "num_external_computed_tokens",
        named="skip_zeroing_group_ids",
        accepts="",
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.remove_skipped_blocks",
        "frees a window that was held",
        first="request_id processed_computed_tokens",
        named="num_prompt_tokens",
        accepts="",
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.reset_prefix_cache",
        "forgets every checkpoint",
        accepts="",
    ),
    _call(
        _COORDINATOR,
        "HybridKVCacheCoordinator.get_num_cacheable_tokens",
        "how far a group's blocks are final",
        first="num_computed_tokens kv_cache_group_id",
    ),
)

_SINGLE_MEMBERS = (
    "_get_num_evictable_blocks _null_block block_pool block_size find_longest_cache_hit "
    "kv_cache_spec num_cached_block remove_skipped_blocks req_to_blocks use_eagle"
)

_HIT_PARAMETERS = (
    "block_hashes max_length kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block "
    "alignment_tokens"
)

_SINGLE_CALLS = (
    (
        "find_longest_cache_hit",
        _HIT_PARAMETERS,
        "",
        "dcp_world_size pcp_world_size",
        "the window-safe prefix match",
    ),
    (
        "remove_skipped_blocks",
        "request_id processed_computed_tokens",
        "num_prompt_tokens",
        "",
        "blocks that leave the window",
    ),
    ("_get_num_evictable_blocks", "blocks", "", None, "blocks a hit takes from the free queue"),
)

_SINGLE_ROWS = (
    _class(
        _SINGLE,
        "SlidingWindowManager",
        "base class of the plugin's sliding-window manager",
        has=f"{_SINGLE_MEMBERS} _contiguous_blocks_for_hit _remove_blocks_in_range",
        base="SingleTypeKVCacheManager",
    ),
    _class(
        _SINGLE,
        "FullAttentionManager",
        "manager of the full-attention groups",
        has=_SINGLE_MEMBERS,
        base="SingleTypeKVCacheManager",
    ),
    *(
        _call(_SINGLE, f"{manager}.{name}", why, first=first, named=named, accepts=accepts)
        for manager in ("SlidingWindowManager", "FullAttentionManager")
        for name, first, named, accepts, why in _SINGLE_CALLS
    ),
    _call(
        _SINGLE,
        "SlidingWindowManager._contiguous_blocks_for_hit",
        "blocks that a hit needs; core/window.py must agree",
        named="window_size block_size use_eagle",
    ),
    _call(
        _SINGLE,
        "SlidingWindowManager._remove_blocks_in_range",
        "gives back what left the window; overridden",
        first="request_id first_block last_block",
        accepts="",
    ),
)

_POOL_ROWS = (
    _class(
        _POOL,
        "BlockPool",
        "base class of the plugin's pool",
        has="_maybe_evict_cached_block _reuse_watchers blocks cached_block_hash_to_block "
        "enable_kv_cache_events evict_blocks free_block_queue free_blocks get_cached_block "
        "get_new_blocks hash_block_size metrics_collector null_block num_gpu_blocks "
        "reset_prefix_cache touch",
    ),
    _call(
        _POOL,
        "BlockPool.__init__",
        "keywords are handed through",
        first="num_gpu_blocks enable_caching hash_block_size",
        closed=False,
    ),
    _call(
        _POOL,
        "BlockPool.cache_full_blocks",
        "writes only the blocks of a checkpoint",
        named="request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id "
        "block_mask",
    ),
    _call(
        _POOL,
        "BlockPool.get_cached_block",
        "residency of one block",
        first="block_hash kv_cache_group_ids",
    ),
    _call(_POOL, "BlockPool.get_new_blocks", "order of death", first="num_blocks"),
    _call(_POOL, "BlockPool.touch", "a hit takes its blocks from the free queue", first="blocks"),
    _call(
        _POOL,
        "BlockPool.free_blocks",
        "freed blocks enter the queue by class",
        first="ordered_blocks",
    ),
    _call(_POOL, "BlockPool.evict_blocks", "explicit eviction", first="block_ids", accepts=""),
    _call(_POOL, "BlockPool.reset_prefix_cache", "forgets every checkpoint", accepts=""),
    _call(
        _POOL,
        "BlockHashToBlockMap.get_one_block",
        "residency of one block of one group",
        first="key",
    ),
    _call(
        _POOL,
        "BlockHashToBlockMap.insert",
        "hashes a block without the detour over the whole prompt",
        first="key block",
        closed=True,
    ),
    _call(
        _POOL,
        "BlockPool._maybe_evict_cached_block",
        "learns that a cached block died",
        first="block",
    ),
    Contract(
        module=_UTILS,
        name="FreeKVCacheBlockQueue",
        exact_methods=FREE_QUEUE_METHODS,
        members=("num_free_blocks",),
        features=_KV,
        why="the plugin's queue stands in its place",
    ),
    *(
        Contract(
            module=module,
            attribute_use="free_block_queue",
            members=(*FREE_QUEUE_METHODS, "num_free_blocks"),
            features=_KV,
            why="what the engine calls on the plugin's queue",
        )
        for module in (_POOL, _MANAGER, _COORDINATOR, _SINGLE, _SCHEDULER)
    ),
    _class(
        _UTILS,
        "KVCacheBlock",
        "the unit that is kept or dies",
        has="_block_hash block_hash block_id is_null next_free_block pool prev_free_block ref_cnt "
        "set_block_hash",
    ),
    _call(
        _UTILS,
        "KVCacheBlock.set_block_hash",
        "hashes a block without the detour over the whole prompt",
        first="block_hash",
        named="num_tokens",
    ),
    _class(
        _UTILS,
        "BlockHashListWithBlockSize",
        "one pass over the raw hashes: a larger block's hash is the one at its end",
        has="block_hashes scale_factor",
    ),
    _call(
        _UTILS,
        "make_block_hash_with_group_id",
        "key of a cached block",
        first="block_hash group_id",
    ),
    _call(
        _UTILS,
        "resolve_block_hashes",
        "hashes at a group's block size",
        first="block_hashes hash_block_size block_size",
    ),
    _class(
        _SPECS,
        "FullAttentionSpec",
        "geometry of a full-attention group",
        has="block_size",
        base="AttentionSpec",
    ),
    _class(
        _SPECS,
        "SlidingWindowSpec",
        "geometry of a sliding-window group",
        has="block_size sliding_window",
        base="AttentionSpec",
    ),
    _class(_SPECS, "KVCacheConfig", "pool size and groups", has="num_blocks kv_cache_groups"),
    _class(_SPECS, "KVCacheGroupSpec", "what a group holds", has="kv_cache_spec"),
)

KV_ROWS: tuple[Contract, ...] = (
    *_SCHEDULER_ROWS,
    *_CONFIG_ROWS,
    *BACKEND_ROWS,
    *_MANAGER_ROWS,
    *_SINGLE_ROWS,
    *_POOL_ROWS,
)
