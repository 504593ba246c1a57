# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature tiers relies on."""

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
_BASE = "v1.kv_offload.base"
_OFFLOAD_CONFIG = "v1.kv_offload.config"
_CPU = "v1.kv_offload.cpu"
_TIERING = "v1.kv_offload.tiering"
_MANAGER = "v1.core.kv_cache_manager"
_SINGLE = "v1.core.single_type_kv_cache_manager"
_POOL = "v1.core.block_pool"
_UTILS = "v1.core.kv_cache_utils"
_SPECS = "v1.kv_cache_interface"

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

_BASE_ROWS = (
    _class(
        _BASE,
        "LookupResult",
        "where a chunk is",
        has="HIT HIT_PENDING MISS RETRY",
    ),
    _class(_BASE, "OffloadPolicy", "whether all of a request is offered", has="CHUNK_LEVEL"),
    _class(_BASE, "Medium", "a store lies below host memory", has="STORAGE"),
    _class(_BASE, "RequestOffloadingContext", "chunks are stored one by one", has="policy"),
    _class(_BASE, "ScheduleEndContext", "the end of a step"),
    _class(_BASE, "ReqContext", "a request", has="load_tier_filter req_id"),
    _call(
        _BASE,
        "TierFilter.allows",
        "tiers that a request may be answered from",
        first="medium locality",
    ),
    _call(
        _BASE,
        "GPULoadStoreSpec.__init__",
        "blocks that a load fills",
        first="block_ids",
        named="group_sizes block_indices",
    ),
    _class(
        _BASE,
        "GPULoadStoreSpec",
        "blocks that a copy moves",
        has="block_ids group_sizes",
    ),
    _class(_BASE, "OffloadingWorker", "base class of the copy worker for CPUs"),
    *(
        _call(
            _BASE,
            f"OffloadingWorker.{name}",
            "copies on a CPU",
            first="job_id src_spec dst_spec",
            accepts=accepts,
        )
        for name, accepts in (("submit_store", ""), ("submit_load", "expedited"))
    ),
    _call(_BASE, "OffloadingWorker.get_finished", "copies on a CPU", accepts=""),
    _call(_BASE, "OffloadingWorker.wait", "copies on a CPU", first="job_ids", accepts=""),
    _call(_BASE, "OffloadingWorker.shutdown", "copies on a CPU", accepts=""),
    Contract(
        module=_BASE,
        name="TransferResult",
        members=("job_id", "success", "transfer_size", "transfer_time"),
        features=_TIERS,
        why="a copy that ended",
    ),
    _class(_BASE, "CanonicalKVCaches", "a worker's tensors", has="group_data_refs tensors"),
    _class(_BASE, "CanonicalKVCacheTensor", "one of them", has="page_size_bytes tensor"),
    _class(_BASE, "CanonicalKVCacheRef", "a layer in one", has="page_size_bytes tensor_idx"),
    *(
        _call(_BASE, name, "a chunk's block hash and group", first=first)
        for name, first in (
            ("get_offload_block_hash", "key"),
            ("get_offload_group_idx", "key"),
        )
    ),
    Contract(
        module=_BASE,
        name="OffloadKey",
        features=_TIERS,
        why="names a chunk",
    ),
)

_TIERING_ROWS = (
    _class(
        f"{_TIERING}.spec",
        "TieringOffloadingSpec",
        "base class of the plugin's spec",
        has="_engine_id _manager _worker blocks_per_chunk config cpu_page_size_per_worker "
        "extra_config get_manager get_worker kv_bytes_per_chunk num_chunks",
        base="CPUOffloadingSpec",
    ),
    _call(
        f"{_TIERING}.spec",
        "TieringOffloadingSpec.__init__",
        "the engine's argument is handed through",
        first="config",
    ),
    _call(f"{_TIERING}.spec", "TieringOffloadingSpec.get_manager", "the plugin's", accepts=""),
    _call(
        f"{_TIERING}.spec",
        "TieringOffloadingSpec.get_worker",
        "on a CPU the plugin's, on a GPU vLLM's",
        first="kv_caches",
        accepts="",
    ),
    _class(
        f"{_TIERING}.manager",
        "TieringOffloadingManager",
        "base class of the plugin's manager",
        has="_maybe_process_finished_jobs _should_store_to_tier create_store_job primary_tier "
        "secondary_tiers",
    ),
    _call(
        f"{_TIERING}.manager",
        "TieringOffloadingManager.__init__",
        "tiers that vLLM has made are handed on",
        named="primary_tier secondary_tiers",
    ),
    _call(
        f"{_TIERING}.manager",
        "TieringOffloadingManager._should_store_to_tier",
        "whether repairs may be given to a tier",
        first="tier num_blocks",
    ),
    _call(
        f"{_TIERING}.manager",
        "TieringOffloadingManager.create_store_job",
        "pins what is written again",
        first="keys req_context tier_idx",
    ),
    *(
        _call(
            f"{_TIERING}.manager",
            f"TieringOffloadingManager.{name}",
            why,
            first=first,
            accepts=accepts,
        )
        for name, first, accepts, why in (
            ("lookup", "key req_context", None, "fetches what a hit needs"),
            ("touch", "keys req_context", "", "keeps alive"),
            ("prepare_load", "keys req_context", None, "pins what is loaded"),
            ("complete_load", "keys req_context", "", "counts what was loaded"),
            ("complete_store", "keys req_context success", "", "counts what was stored"),
            ("on_schedule_end", "context", "", "writes again what stores have lost"),
        )
    ),
    _class(
        f"{_TIERING}.manager",
        "CPUPrimaryTierOffloadingManager",
        "host memory",
        has="_get_num_free_chunks _mmap_region _num_evictable_cache_chunks get_kv_memoryview "
        "lookup touch",
        base="CPUOffloadingManager",
    ),
    _class(
        f"{_CPU}.shared_offload_region",
        "SharedOffloadRegion",
        "the mapping that is host memory",
        has="cleanup create_next_worker_view fd",
    ),
    _call(
        f"{_CPU}.shared_offload_region",
        "SharedOffloadRegion.__init__",
        "the copy worker for CPUs maps it",
        named="engine_id num_chunks rank kv_bytes_per_chunk cpu_page_size",
    ),
    _class(
        f"{_TIERING}.base",
        "SecondaryTierManager",
        "base class of the plugin's tier",
        has="_primary_kv_view block_size_bytes bp_detector locality medium tier_type",
    ),
    _call(
        f"{_TIERING}.base",
        "SecondaryTierManager.__init__",
        "the factory's arguments are handed through",
        first="offloading_spec primary_kv_view tier_type",
        named="backpressure_detector",
    ),
    *(
        _call(
            f"{_TIERING}.base",
            f"SecondaryTierManager.{name}",
            "a method of the plugin's tier",
            first=first,
            accepts="",
        )
        for name, first in (
            ("lookup", "key req_context"),
            ("on_new_request", "req_context"),
            ("on_request_finished", "req_context"),
            ("on_schedule_end", "context"),
            ("submit_load", "job_metadata"),
            ("submit_store", "job_metadata"),
            ("get_finished_jobs", ""),
            ("touch", "keys req_context"),
            ("has_pending_work", ""),
            ("drain_jobs", ""),
            ("shutdown", ""),
        )
    ),
    _class(
        f"{_TIERING}.base",
        "TransferJob",
        "pages between host memory and a store",
        has="chunk_ids job_id keys req_context",
    ),
    _class(
        f"{_TIERING}.base",
        "JobResult",
        "pages that were moved",
        has="job_id success successful_keys transfer_bytes transfer_time",
    ),
    _class(
        f"{_TIERING}.async_lookup",
        "AsyncLookupManager",
        "base class of the tier's look-ups",
        has="_lookup_state cleanup flush lookup shutdown",
    ),
    _call(
        f"{_TIERING}.async_lookup",
        "AsyncLookupManager.batch_lookup",
        "asks the store, on its thread",
        first="keys req_context",
        accepts="",
    ),
    _class(f"{_TIERING}.async_lookup", "LookupPhase", "answers that are known", has="RESOLVED"),
    _class(
        f"{_TIERING}.factory",
        "SecondaryTierFactory",
        "makes the tier from its entry, by module_path",
        has="create_secondary_tier",
    ),
)

_LAYOUT_ROWS = (
    _class(
        _SPECS,
        "KVCacheConfig",
        "where each layer's KV lies",
        has="kv_cache_groups kv_cache_tensors num_blocks",
    ),
    _class(
        _SPECS,
        "KVCacheTensor",
        "where each layer's KV lies",
        has="block_stride layer_stride layers offset size",
    ),
    _class(
        _SPECS,
        "KVCacheGroupSpec",
        "layers of a group",
        has="is_eagle_group kv_cache_spec layer_names",
    ),
    _class(
        _SPECS,
        "AttentionSpec",
        "bytes of a page, and how many are filled",
        has="get_block_stride_alignment has_layer_views page_size_bytes unpadded_page_size_bytes",
    ),
    _class(
        _SPECS,
        "SlidingWindowSpec",
        "tells windows",
        has="extra_retained_tokens sliding_window",
        base="AttentionSpec",
    ),
    _class(_SPECS, "ChunkedLocalAttentionSpec", "tells windows", base="AttentionSpec"),
    _class(
        _SPECS,
        "UniformTypeKVCacheSpecs",
        "a group of layers with unequal pages",
        has="kv_cache_specs",
    ),
    _call(_SPECS, "iter_layer_specs", "specs of a group's layers", first="kv_cache_spec"),
    _class(
        _OFFLOAD_CONFIG,
        "OffloadingConfig",
        "what decides the meaning of a page's bytes",
        has="cache engine_id extra_config groups kv_cache_layout model parallel "
        "replicated_layout worker_kv_bytes_per_block",
    ),
    _class(
        _OFFLOAD_CONFIG,
        "OffloadingParallelConfig",
        "areas of a row",
        has="dcp_size pcp_size pp_size rank tp_size world_size",
    ),
    _class(_OFFLOAD_CONFIG, "OffloadingModelConfig", "whose KV it is", has="dtype name"),
    _class(
        _OFFLOAD_CONFIG,
        "OffloadingCacheConfig",
        "tokens of a hash, blocks of a row",
        has="blocks_per_chunk tokens_per_hash",
    ),
    _class(
        _OFFLOAD_CONFIG,
        "OffloadingGroupConfig",
        "layers of a group",
        has="group_id layer_names tokens_per_block",
    ),
    _class(
        "platforms.interface",
        "Platform",
        "whether the engine runs on a CPU",
        has="device_name is_cpu",
    ),
    Contract(
        module="platforms",
        name="current_platform",
        importable=True,
        features=_TIERS,
        why="whether the engine runs on a CPU",
    ),
)

TIERS_ROWS: tuple[Contract, ...] = (
    *_CONNECTOR_ROWS,
    *_SCHEDULER_ROWS,
    *_DEVICE_ROWS,
    *_BASE_ROWS,
    *_TIERING_ROWS,
    *_LAYOUT_ROWS,
)
