# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols of its connector that feature tiers relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_TIERS = ("tiers",)
_call = partial(call, features=_TIERS)
_class = partial(class_, features=_TIERS)

_V1 = "distributed.kv_transfer.kv_connector.v1"
_CONNECTOR = f"{_V1}.offloading_connector"
_SCHEDULER = f"{_V1}.offloading.scheduler"
_COMMON = f"{_V1}.offloading.common"
_CONFIG = f"{_V1}.offloading.config"
_MANAGER = "v1.core.kv_cache_manager"
_SINGLE = "v1.core.single_type_kv_cache_manager"
_POOL = "v1.core.block_pool"
_UTILS = "v1.core.kv_cache_utils"

_CONNECTOR_ROWS = (
    _class(
        "engine.arg_utils",
        "EngineArgs",
        "the feature writes the connector's configuration into it",
        has="kv_transfer_config",
    ),
    Contract(
        module="config",
        name="KVTransferConfig",
        importable=True,
        features=_TIERS,
        why="what the feature writes",
    ),
    _class(
        "config.kv_transfer",
        "KVTransferConfig",
        "what the feature writes",
        has="kv_connector kv_connector_module_path kv_role kv_load_failure_policy "
        "kv_connector_extra_config",
    ),
    _class(
        "config.parallel",
        "ParallelConfig",
        "several ranks of a node share host memory; of several nodes they don't",
        has="nnodes_within_dp pipeline_parallel_size prefill_context_parallel_size",
    ),
    _class(
        _CONNECTOR,
        "OffloadingConnector",
        "base class of the plugin's connector",
        has="_kv_transfer_config connector_scheduler connector_worker",
        base="SupportsHMA",
    ),
    _class(
        f"{_V1}.base",
        "KVConnectorBase_V1",
        "base class of vLLM's connector",
        has="_kv_transfer_config get_finished build_connector_meta",
    ),
    _class(f"{_V1}.base", "SupportsHMA", "without it vLLM drops the hybrid manager"),
    Contract(
        module=_V1,
        name="SupportsHMA",
        importable=True,
        features=_TIERS,
        why="where vLLM's connector has its base classes from",
    ),
    _call(
        _CONNECTOR,
        "OffloadingConnector.__init__",
        "the engine's arguments are handed through",
        first="vllm_config role kv_cache_config",
    ),
    _call(
        _CONNECTOR,
        "OffloadingConnector.bind_kv_cache_manager",
        "the device's cache becomes known",
        first="kv_cache_manager",
        accepts="",
    ),
    _class(
        f"{_V1}.offloading.worker",
        "OffloadingConnectorWorker",
        "its spec is told the layout of a row",
        has="spec",
    ),
    _call(
        _CONFIG,
        "build_offloading_config",
        "bytes of a block, before host memory exists",
        first="vllm_config kv_cache_config",
    ),
    _call(
        _CONFIG,
        "get_offloading_group_ids",
        "which groups are offloaded",
        first="kv_cache_config",
    ),
)

_SCHEDULER_ROWS = (
    _class(
        _SCHEDULER,
        "OffloadingConnectorScheduler",
        "an instance becomes one of the plugin's: its state by name",
        has="_block_id_to_pending_jobs _chunks_being_loaded _current_batch_allocated_block_ids "
        "_current_batch_load_jobs _jobs _req_status config manager",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler.on_new_request",
        "a request's state is taken over",
        first="request",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler._lookup",
        "the joint hit of device, host memory and store",
        first="req_status max_num_new_tokens",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler.update_state_after_alloc",
        "only what the device lacks is loaded",
        first="request blocks num_external_tokens",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler._calc_num_offloadable_tokens",
        "the first call about a request whose chunks may be stored",
        first="req_status num_computed_tokens",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler._reachable_store_block_mask",
        "which windows are stored",
        first="group_config start_chunk_idx end_chunk_idx",
        closed=False,
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler._final_swa_alignment_blocks",
        "vLLM's own rule for the end of a request is not asked",
        first="group_config",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler._build_store_jobs",
        "called for a request that has ended, before its blocks are free",
        first="scheduler_output",
        accepts="",
    ),
    _call(_SCHEDULER, "OffloadingConnectorScheduler._generate_job_id", "numbers a load"),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler.request_finished",
        "the end of a turn is offered",
        first="request",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler.build_connector_meta",
        "what was offered early goes to the workers",
        first="scheduler_output",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "OffloadingConnectorScheduler.reset_cache",
        "forgets what was offered early",
        accepts="",
    ),
    _class(
        _SCHEDULER,
        "SchedulerOffloadConfig",
        "groups, and workers that a job waits for",
        has="kv_group_configs num_workers",
    ),
    _class(
        _SCHEDULER,
        "GroupOffloadConfig",
        "geometry of a group",
        has="group_idx is_eagle_group kv_cache_spec tokens_per_chunk",
    ),
    _class(
        _SCHEDULER,
        "RequestGroupState",
        "of sliding-window groups the newest chunks stay on offer",
        has="block_ids next_stored_chunk_idx offload_keys",
    ),
    _class(
        _SCHEDULER,
        "RequestOffloadState",
        "offers again only when a chunk was completed",
        has="group_states load_key_ranges max_load_tokens num_locally_computed_tokens "
        "offloading_context req req_context transfer_jobs",
    ),
    _call(
        _SCHEDULER,
        "RequestOffloadState.storable_chunks",
        "offers again only when a chunk was completed",
        first="group_config group_state num_offloadable_tokens",
        accepts="",
    ),
    _class(
        _SCHEDULER,
        "TransferJobStatus",
        "a load's bookkeeping",
        has="is_store keys pending_count req_id",
    ),
    _class(_COMMON, "TransferJob", "a load", has="dst_spec req_id src_spec"),
    _class(
        _COMMON,
        "OffloadingConnectorMetadata",
        "stores that go to the workers",
        has="store_jobs",
    ),
    _class(
        "v1.request",
        "Request",
        "what is stored of it",
        has="all_token_ids is_finished num_prompt_tokens num_tokens request_id "
        "shared_prefix_boundary",
    ),
    _class(
        "v1.core.sched.scheduler",
        "Scheduler",
        "where the plugin's counters are asked for",
        has="connector",
    ),
)

_DEVICE_ROWS = (
    _class(
        _MANAGER,
        "KVCacheManager",
        "two of its methods are wrapped; the cached blocks of the device",
        has="allocate_slots block_pool cache_blocks coordinator create_kv_cache_blocks",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.allocate_slots",
        "blocks that the device has are handed in as hits",
        first="request num_new_tokens",
        named="new_computed_blocks num_external_computed_tokens reserved_blocks",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.cache_blocks",
        "what was loaded between blocks that were there gets its hashes",
        first="request num_computed_tokens",
        accepts="",
    ),
    _call(_MANAGER, "KVCacheManager.create_kv_cache_blocks", "a request's hit", first="blocks"),
    _class(_MANAGER, "KVCacheBlocks", "a request's hit, by group", has="blocks"),
    _class(
        "v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        "block tables of the groups",
        has="single_type_managers",
    ),
    *(
        _class(
            _SINGLE,
            name,
            "block tables, and where a window begins",
            has="block_size get_num_skipped_tokens num_cached_block req_to_blocks",
        )
        for name in ("FullAttentionManager", "SlidingWindowManager")
    ),
    _call(
        _SINGLE,
        "SlidingWindowManager.get_num_skipped_tokens",
        "where a window begins",
        first="num_computed_tokens",
    ),
    _class(
        _POOL,
        "BlockPool",
        "cached blocks, and fresh ones",
        has="cached_block_hash_to_block get_new_blocks null_block",
    ),
    _call(_POOL, "BlockPool.get_new_blocks", "blocks between hits", first="num_blocks"),
    _call(
        _POOL,
        "BlockPool.cache_full_blocks",
        "hashes what was loaded",
        named="request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id",
    ),
    _call(_POOL, "BlockHashToBlockMap.get_one_block", "a cached block", first="key"),
    _class(
        _UTILS,
        "KVCacheBlock",
        "tells fresh blocks from hits, and from none",
        has="block_hash block_id is_null",
    ),
    _call(
        _UTILS,
        "make_block_hash_with_group_id",
        "key of a cached block",
        first="block_hash group_id",
    ),
)

TIERS_ROWS: tuple[Contract, ...] = (*_CONNECTOR_ROWS, *_SCHEDULER_ROWS, *_DEVICE_ROWS)
