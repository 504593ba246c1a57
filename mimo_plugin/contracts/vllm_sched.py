# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature scheduler relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_SCHED = ("scheduler",)
_call = partial(call, features=_SCHED)
_class = partial(class_, features=_SCHED)

_SCHEDULER = "v1.core.sched.scheduler"
_QUEUE = "v1.core.sched.request_queue"
_POOL = "v1.core.block_pool"
_MANAGER = "v1.core.kv_cache_manager"
_COORDINATOR = "v1.core.kv_cache_coordinator"
_UTILS = "v1.core.kv_cache_utils"
_SPECS = "v1.kv_cache_interface"

QUEUE_METHODS = (
    "add_request",
    "pop_request",
    "peek_request",
    "prepend_request",
    "prepend_requests",
    "remove_request",
    "remove_requests",
    "__bool__",
    "__len__",
    "__iter__",
)
"""Methods of the engine's request queue: the plugin's queue has each of them, and a method that
upstream adds breaks the contract."""

WAITING_USES = (*(name for name in QUEUE_METHODS if not name.startswith("__")),)
"""What the scheduler may call on its waiting queue."""

SCHED_ROWS: tuple[Contract, ...] = (
    Contract(
        module=_QUEUE,
        name="RequestQueue",
        exact_methods=QUEUE_METHODS,
        features=_SCHED,
        why="the affinity queue takes the place of one",
    ),
    Contract(
        module=_SCHEDULER,
        attribute_use="waiting",
        members=WAITING_USES,
        features=_SCHED,
        why="what the scheduler calls on the affinity queue",
    ),
    _call(_QUEUE, "create_request_queue", "puts the stock queue back", first="policy"),
    *(
        _class(
            _QUEUE,
            name,
            "a stock queue, which the affinity queue may replace",
            base="RequestQueue",
        )
        for name in ("FCFSRequestQueue", "PriorityRequestQueue")
    ),
    _class(
        _SCHEDULER,
        "Scheduler",
        "base class of the plugin's scheduler",
        has="_handle_blocked_waiting_request _inflight_prefills _is_blocked_waiting_status "
        "_reserve_prefill_lookahead kv_cache_manager max_num_scheduled_tokens "
        "need_mamba_block_aligned_split num_spec_tokens pause_state policy "
        "prefill_capacity_bound requests running schedule scheduler_config set_pause_state "
        "update_from_output waiting",
    ),
    _class(
        "v1.core.sched.async_scheduler",
        "AsyncScheduler",
        "the plugin's scheduler derives from it where async scheduling is on",
        base="Scheduler",
    ),
    _call(_SCHEDULER, "Scheduler.schedule", "a scheduling pass of the affinity queue"),
    _call(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "measures how long a step took",
        first="scheduler_output",
        closed=False,
    ),
    _call(
        _SCHEDULER,
        "Scheduler.set_pause_state",
        "pauses don't make requests overdue",
        first="pause_state",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "Scheduler._reserve_prefill_lookahead",
        "the chunk of a long prefill is cut to its lane's share",
        first="request num_computed_tokens num_new_tokens",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "Scheduler._handle_blocked_waiting_request",
        "a blocked request is scored once it is ready",
        first="request",
    ),
    _call(
        _SCHEDULER,
        "Scheduler._is_blocked_waiting_status",
        "blocked requests are not scored",
        first="status",
    ),
    _class(
        "v1.core.sched.output",
        "SchedulerOutput",
        "the tokens of a step, which waiting requests age by",
        has="num_scheduled_tokens total_num_scheduled_tokens",
    ),
    _class(
        "v1.request",
        "Request",
        "its length, place in the queue and block hashes",
        has="all_token_ids arrival_time block_hashes has_encoder_inputs is_prefill_chunk "
        "kv_transfer_params lora_request num_computed_tokens num_preemptions num_prompt_tokens "
        "num_tokens priority request_id shared_prefix_boundary skip_reading_prefix_cache status",
    ),
    _class(
        "v1.request",
        "RequestStatus",
        "tells a request that started from one that was skipped",
        has="PREEMPTED RUNNING WAITING_FOR_REMOTE_KVS",
    ),
    _class(
        _MANAGER,
        "KVCacheManager",
        "scores look up its cache",
        has="block_pool coordinator prefix_cache_lookup_enabled",
    ),
    _call(
        _MANAGER,
        "KVCacheManager.prefix_cache_lookup_enabled",
        "a request that reads no cache has no hit",
        first="request",
    ),
    _class(
        _COORDINATOR,
        "KVCacheCoordinator",
        "block sizes, groups and retention",
        has="enable_partial_hash_hits retention_interval scheduler_block_size single_type_managers",
    ),
    _call(
        _COORDINATOR,
        "KVCacheCoordinator.find_longest_cache_hit",
        "scores models with other kinds of attention",
        first="block_hashes max_cache_hit_length",
    ),
    _class(
        _POOL,
        "BlockPool",
        "the map of cached blocks",
        has="cached_block_hash_to_block free_block_queue get_num_free_blocks hash_block_size",
    ),
    *(
        _call(
            _UTILS, f"FreeKVCacheBlockQueue.{name}", "hits of waiting requests die last", first=to
        )
        for name, to in (("remove", "block"), ("append_n", "blocks"))
    ),
    _class(_UTILS, "KVCacheBlock", "whether a request holds a block", has="ref_cnt"),
    _class("v1.core.sched.interface", "PauseState", "nothing starts while paused", has="UNPAUSED"),
    _class(
        "config.scheduler",
        "SchedulerConfig",
        "whether chunks may be cut",
        has="disable_chunked_mm_input enable_chunked_prefill",
    ),
    Contract(
        module=_POOL,
        name="BlockHashToBlockMap",
        exact_methods=(
            "__init__",
            "get_one_block",
            "contain",
            "insert",
            "pop",
            "__len__",
            "_unexpected_blocks_type",
        ),
        features=_SCHED,
        why="every change of it passes through insert and pop, which tell whose hit changed",
    ),
    _call(
        _POOL,
        "BlockHashToBlockMap.insert",
        "a cached block may lengthen a hit",
        first="key block",
        accepts="",
    ),
    _call(
        _POOL,
        "BlockHashToBlockMap.pop",
        "an evicted block may shorten a hit",
        first="key block_id",
        accepts="",
    ),
    _call(
        _POOL,
        "BlockHashToBlockMap.get_one_block",
        "whether a block is cached",
        first="key",
    ),
    _call(
        _UTILS,
        "make_block_hash_with_group_id",
        "keys of the map",
        first="block_hash group_id",
    ),
    _call(
        _UTILS,
        "resolve_block_hashes",
        "block hashes at a group's block size",
        first="block_hashes hash_block_size block_size",
    ),
    _class(_SPECS, "FullAttentionSpec", "tells full attention", has="block_size"),
    _class(_SPECS, "SlidingWindowSpec", "tells windows", has="block_size sliding_window"),
)
