# SPDX-License-Identifier: Apache-2.0
"""SGLang symbols that the switch and the feature kv rely on; other features beside this."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_
from mimo_plugin.contracts.sglang_sched import SCHED_ROWS
from mimo_plugin.contracts.sglang_storage import STORAGE_ROWS
from mimo_plugin.contracts.sglang_vision import VISION_ROWS

_KV = ("kv",)
_kv_call = partial(call, features=_KV)
_kv_class = partial(class_, features=_KV)

_ARGS = "srt.server_args"
_OVERRIDES = "srt.arg_groups.overrides"
_REGISTRY = "srt.mem_cache.registry"
_CACHE = "srt.mem_cache.unified_radix_cache"
_BASE = "srt.mem_cache.base_prefix_cache"
_SWA = "srt.mem_cache.unified_cache.components.swa"
_BATCH = "srt.managers.schedule_batch"
_ALLOCATOR = "srt.mem_cache.allocator.swa"

_SWITCH_ROWS: tuple[Contract, ...] = (
    Contract(
        module="srt.plugins",
        name="GENERAL_PLUGINS_GROUP",
        value="sglang.srt.plugins",
        why="the entry point group",
    ),
    call("srt.plugins", "load_plugins", "runs the entry point in each process"),
    call(_ARGS, "ServerArgs.add_cli_args", "adds --plugin", first="parser", accepts=""),
    call(_ARGS, "ServerArgs.from_cli_args", "takes --plugin over", first="args", accepts=""),
    call(_ARGS, "ServerArgs.resolve_once", "where features are switched on", accepts=""),
    class_(
        _ARGS,
        "ServerArgs",
        "carries the section to the other processes, through pickling",
        has="_resolution_finished _resolution_failed __reduce__ __setattr__",
    ),
    call(
        _OVERRIDES,
        "declare_resolution",
        "decides the radix backend",
        first="server_args source",
    ),
    call(
        "srt.arg_groups.model_override_base",
        "resolving_view",
        "reads resolved arguments",
        first="server_args",
    ),
    call(
        "srt.arg_groups.model_override_base",
        "model_config_of",
        "does the feature fit the model",
        first="server_args",
    ),
    class_(
        "srt.configs.model_config",
        "ModelConfig",
        "does the feature fit the model",
        has="is_hybrid_swa full_attention_layer_ids vocab_size",
    ),
    call(
        "srt.runtime_context",
        "publish",
        "every process calls it with its role",
        first="server_args",
        named="role",
    ),
    call(
        "srt.plugins.hook_registry",
        "HookRegistry.register",
        "hooks publish",
        first="target hook hook_type",
    ),
    class_("srt.plugins.hook_registry", "HookType", "hooks publish", has="AFTER"),
    class_(
        "srt.plugins.hook_registry", "HookRegistry", "is publish hooked", has="_patched apply_hooks"
    ),
    call("srt.runtime_context", "get_observability", "are there metrics"),
    call("srt.runtime_context", "get_parallel", "which rank writes metrics"),
    call("srt.runtime_context", "get_serving", "labels of the metrics"),
    call(_ARGS, "prepare_server_args", "reads a command for mimo doctor", first="argv"),
)

_KV_ROWS: tuple[Contract, ...] = (
    _kv_call(
        _REGISTRY,
        "register_radix_cache_backend",
        "makes the radix backend known",
        first="name factory",
    ),
    _kv_call(_REGISTRY, "get_radix_cache_factory", "registers it once", first="name"),
    _kv_call(
        _REGISTRY,
        "create_unified_radix_cache",
        "builds the cache with our class",
        first="ctx",
        named="cache_class",
    ),
    _kv_call(
        _REGISTRY,
        "default_radix_cache_factory",
        "stock's choice, where the feature is given up late",
        first="ctx",
    ),
    _kv_class(
        _REGISTRY,
        "TreeCacheBuildContext",
        "what the factory is told",
        has="server_args params is_hybrid_swa is_hybrid_ssm disable_radix_cache tp_worker "
        "model_config full_tokens_per_layer",
    ),
    _kv_class(
        "srt.mem_cache.cache_init_params",
        "CacheInitParams",
        "does retention fit the pools",
        has="enable_metrics token_to_kv_pool_allocator swa_gates_prefix_match "
        "decoder_swa_bounded_replay swa_retain_window",
    ),
    _kv_class(
        _CACHE,
        "UnifiedRadixCache",
        "base of the plugin's cache",
        has="components disable req_to_token_pool sliding_window_size "
        "token_to_kv_pool_allocator tree_core page_size",
        base="BasePrefixCache",
    ),
    _kv_call(_CACHE, "UnifiedRadixCache.__init__", "overridden", first="params", accepts=""),
    _kv_call(
        _CACHE,
        "UnifiedRadixCache.checkpoint_into_tree",
        "called once per checkpoint",
        first="req",
        named="up_to",
        accepts="",
    ),
    _kv_call(_CACHE, "UnifiedRadixCache.match_prefix", "counts hits", first="params", accepts=""),
    _kv_call(
        _CACHE,
        "UnifiedRadixCache._evict",
        "checkpoints die in the plugin's order",
        first="params",
        named="available_size_targets allocation_reclaim_satisfied",
    ),
    _kv_call(_CACHE, "UnifiedRadixCache._reset_full", "the order is reset too", accepts=""),
    _kv_call(
        _CACHE,
        "UnifiedRadixCache.lock",
        "holds windows while others are evicted",
        first="node_id",
        named="skip_lock_components",
    ),
    _kv_call(_CACHE, "UnifiedRadixCache.unlock", "releases them", first="lock"),
    _kv_class(
        _BASE,
        "EvictParams",
        "what to evict",
        has="num_tokens swa_num_tokens",
    ),
    _kv_class(
        _CACHE,
        "UnifiedRadixCache",
        "gauges of what is cached",
        has="full_evictable_size full_protected_size swa_evictable_size swa_protected_size",
    ),
    _kv_class(
        _BASE,
        "MatchResult",
        "full-attention KV that was there",
        has="device_prefix_len full_kv_hit_length",
    ),
    _kv_class(
        _BASE,
        "InsertParams",
        "the cursor before which sliding-window KV is gone",
        has="set_evicted_seqlen get_evicted_seqlen prev_prefix_len",
    ),
    _kv_class(
        _BASE,
        "EvictResult",
        "counts evictions",
        has="num_tokens_evicted swa_num_tokens_evicted",
    ),
    _kv_class(
        _SWA,
        "SWAComponent",
        "base of the plugin's component",
        has="cache component_type",
        base="TreeComponent",
    ),
    _kv_call(
        _SWA,
        "SWAComponent.prepare_for_caching_req",
        "a junction is one of the plugin's ends",
        first="req insert_params token_ids_len is_finished",
        accepts="",
    ),
    _kv_call(
        _SWA,
        "SWAComponent.free_out_of_window_slots",
        "the plugin frees what lies between checkpoints",
        first="req pre_len insert_params",
        accepts="",
    ),
    _kv_call(
        _SWA,
        "SWAComponent.cleanup_after_caching_req",
        "must not free before the last segment",
        first="req is_finished insert_result insert_params",
    ),
    _kv_class(
        "srt.mem_cache.unified_cache.component_type",
        "ComponentType",
        "which cursor",
        has="SWA",
    ),
    _kv_class(
        _BATCH,
        "ReqKvInfo",
        "what a request owns",
        has="cache_protected_len get_evicted_seqlen req_pool_idx set_evicted_seqlen swa_dead_lo",
    ),
    _kv_class(
        _BATCH,
        "Req",
        "tokens of the request and where it parted from others",
        has="finished kv last_node origin_input_ids output_ids swa_branching_seqlen",
    ),
    _kv_call(
        _ALLOCATOR,
        "SWATokenToKVPoolAllocator.free_swa_segment",
        "gives back sliding-window KV only",
        first="free_index",
        named="start_pos",
    ),
    _kv_class(
        _ALLOCATOR, "SWATokenToKVPoolAllocator", "size of the pool for windows", has="size_swa"
    ),
    _kv_class(
        "srt.mem_cache.rust_tree_core.adapter",
        "RustUnifiedTreeCore",
        "the tree core that is kept",
        has="is_eagle get_component_device_value collect_path_info",
    ),
    _kv_class(
        "srt.mem_cache.unified_cache.unified_tree_core_interface",
        "TreePathNodeInfo",
        "which checkpoint a request goes on from",
        has="node_id path_start path_end num_children",
    ),
)

SGLANG_CONTRACTS: tuple[Contract, ...] = tuple(
    replace(row, package="sglang")
    for row in (*_SWITCH_ROWS, *_KV_ROWS, *SCHED_ROWS, *STORAGE_ROWS, *VISION_ROWS)
)
"""Every row.  One without features concerns the plugin itself: the switch."""
