# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols of host memory that feature tiers relies on: the spec, copies, tiers."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_TIERS = ("tiers",)
_call = partial(call, features=_TIERS)
_class = partial(class_, features=_TIERS)

_BASE = "v1.kv_offload.base"
_CPU = "v1.kv_offload.cpu"
_TIERING = "v1.kv_offload.tiering"
_SPECS = "v1.kv_cache_interface"

_BASE_ROWS = (
    _class(_BASE, "OffloadPolicy", "whether all of a request is offered", has="CHUNK_LEVEL"),
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
)

_TIERING_ROWS = (
    _class(
        f"{_CPU}.spec",
        "CPUOffloadingSpec",
        "sizes of host memory",
        has="cpu_page_size_per_worker kv_bytes_per_chunk num_chunks",
        base="OffloadingSpec",
    ),
    _class(
        f"{_CPU}.manager",
        "CPUOffloadingManager",
        "rows of host memory",
        has="_get_num_free_chunks _num_evictable_cache_chunks lookup touch",
        base="OffloadingManager",
    ),
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
        f"{_CPU}.shared_offload_region",
        "SharedOffloadRegion",
        "the mapping that is host memory",
        has="_creator cleanup create_next_worker_view fd mmap_path",
    ),
    _call(
        f"{_CPU}.shared_offload_region",
        "SharedOffloadRegion.__init__",
        "the copy worker for CPUs maps it",
        named="engine_id num_chunks rank kv_bytes_per_chunk cpu_page_size",
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
    _call(
        f"{_TIERING}.async_lookup",
        "AsyncLookupManager.batch_lookup",
        "asks the store, on its thread",
        first="keys req_context",
        accepts="",
    ),
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
        "SlidingWindowSpec",
        "tells windows",
        has="extra_retained_tokens sliding_window",
        base="AttentionSpec",
    ),
    _class(
        _SPECS,
        "UniformTypeKVCacheSpecs",
        "a group of layers with unequal pages",
        has="kv_cache_specs",
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

TIER_HOST_ROWS: tuple[Contract, ...] = (*_BASE_ROWS, *_TIERING_ROWS, *_LAYOUT_ROWS)
