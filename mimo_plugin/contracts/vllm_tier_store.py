# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols below host memory that feature tiers relies on: the manager, stores, rows."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_TIERS = ("tiers",)
_call = partial(call, features=_TIERS)
_class = partial(class_, features=_TIERS)

_SPECS = "v1.kv_cache_interface"
_BASE = "v1.kv_offload.base"
_CONFIG = "v1.kv_offload.config"
_LOOKUP = "v1.kv_offload.tiering.async_lookup"
_TIER = "v1.kv_offload.tiering.base"
_MANAGER = "v1.kv_offload.tiering.manager"
_REGION = "v1.kv_offload.cpu.shared_offload_region"

TIER_STORE_ROWS: tuple[Contract, ...] = (
    # -- rows of host memory
    _class(
        _SPECS,
        "AttentionSpec",
        "bytes of a layer's page, and of it without padding",
        has="page_size_bytes unpadded_page_size_bytes has_layer_views get_block_stride_alignment",
    ),
    _class(
        _SPECS,
        "ChunkedLocalAttentionSpec",
        "its layers count as windowed",
        base="AttentionSpec",
    ),
    _call(_SPECS, "iter_layer_specs", "the specs of a group's layers", first="kv_cache_spec"),
    _class(
        _SPECS,
        "KVCacheTensor",
        "where the pages of layers lie",
        has="size layers layer_stride block_stride offset",
    ),
    _class(
        _SPECS,
        "KVCacheGroupSpec",
        "layers of a group, and whether a draft's",
        has="layer_names kv_cache_spec is_eagle_group",
    ),
    _class(
        _BASE,
        "CanonicalKVCaches",
        "what a worker registers is compared with what the scheduler derives",
        has="tensors group_data_refs",
    ),
    _class(_BASE, "CanonicalKVCacheTensor", "as above", has="page_size_bytes tensor"),
    _class(_BASE, "CanonicalKVCacheRef", "as above", has="tensor_idx page_size_bytes"),
    _call(
        _REGION,
        "SharedOffloadRegion.create_next_worker_view",
        "a rank's tensors lie behind each other in a row",
        first="tensor_page_size",
    ),
    _call(
        _REGION,
        "SharedOffloadRegion.create_kv_memoryview",
        "host memory as rows x bytes of a row",
    ),
    # -- what decides the meaning of bytes
    _class(
        _CONFIG,
        "OffloadingConfig",
        "part of the keys of pages",
        has="groups model cache parallel kv_cache_layout replicated_layout engine_id extra_config "
        "worker_kv_bytes_per_block",
    ),
    _class(
        _CONFIG, "OffloadingGroupConfig", "as above", has="group_id tokens_per_block layer_names"
    ),
    _class(_CONFIG, "OffloadingModelConfig", "as above", has="name dtype"),
    _class(_CONFIG, "OffloadingCacheConfig", "as above", has="tokens_per_hash blocks_per_chunk"),
    _class(
        _CONFIG,
        "OffloadingParallelConfig",
        "as above",
        has="rank world_size tp_size pp_size pcp_size dcp_size",
    ),
    # -- keys and answers
    _class(_BASE, "LookupResult", "answers to look-ups", has="HIT HIT_PENDING MISS RETRY"),
    _class(_BASE, "Medium", "where hits come from", has="STORAGE"),
    Contract(module=_BASE, name="OffloadKey", features=_TIERS, why="a key: hash and group"),
    _class(_BASE, "ReqContext", "repairs have one of their own", has="load_tier_filter req_id"),
    _class(_BASE, "RequestOffloadingContext", "a store takes chunks one by one", has="policy"),
    _class(_BASE, "ScheduleEndContext", "the end of a step"),
    _call(_BASE, "get_offload_block_hash", "part of the keys of pages", first="key"),
    _call(_BASE, "get_offload_group_idx", "part of the keys of pages", first="key"),
    # -- look-ups
    _class(
        _LOOKUP,
        "AsyncLookupManager",
        "asks the store on a thread; what is known later is corrected",
        has="lookup flush cleanup shutdown _lookup_state",
    ),
    _call(_LOOKUP, "AsyncLookupManager.__init__", "as above", named="tier_type"),
    _class(_LOOKUP, "LookupState", "as above", has="phase result"),
    _class(_LOOKUP, "LookupPhase", "as above", has="RESOLVED"),
    # -- tiers
    _class(
        _TIER,
        "SecondaryTierManager",
        "what a tier below host memory is asked",
        has="lookup submit_store submit_load get_finished_jobs has_pending_work touch "
        "on_new_request on_request_finished on_schedule_end drain_jobs shutdown block_size_bytes "
        "_primary_kv_view bp_detector locality medium tier_type",
    ),
    _call(
        _TIER,
        "SecondaryTierManager.__init__",
        "as above",
        first="offloading_spec primary_kv_view tier_type backpressure_detector",
    ),
    _class(
        _TIER,
        "TransferJob",
        "which rows go to or come from a store",
        has="job_id keys chunk_ids req_context",
    ),
    _class(
        _TIER,
        "JobResult",
        "what became of them",
        has="job_id success successful_keys transfer_time transfer_bytes",
    ),
    # -- the manager
    _class(
        _MANAGER,
        "TieringOffloadingManager",
        "keeps alive and repairs on top of it",
        has="primary_tier secondary_tiers create_store_job _should_store_to_tier "
        "_maybe_process_finished_jobs",
    ),
    _call(
        _MANAGER,
        "TieringOffloadingManager.__init__",
        "as above",
        first="primary_tier secondary_tiers",
    ),
    _call(
        _MANAGER,
        "TieringOffloadingManager.create_store_job",
        "pins rows and notes the job without a request's state",
        first="keys req_context tier_idx",
    ),
    _call(
        _MANAGER,
        "TieringOffloadingManager._should_store_to_tier",
        "vLLM's own back-pressure holds for repairs too",
        first="tier num_blocks",
    ),
    _class(
        _MANAGER,
        "CPUPrimaryTierOffloadingManager",
        "host memory",
        has="prepare_read complete_read get_kv_memoryview lookup touch _get_num_free_chunks "
        "_mmap_region _num_evictable_cache_chunks",
        base="CPUOffloadingManager",
    ),
)
