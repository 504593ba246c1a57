# SPDX-License-Identifier: Apache-2.0
"""SGLang symbols that the feature scheduler relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_SCHEDULER = ("scheduler",)
_call = partial(call, features=_SCHEDULER)
_class = partial(class_, features=_SCHEDULER)
_name = partial(replaced, features=_SCHEDULER)

_POLICY = "srt.managers.schedule_policy"

SCHED_ROWS: tuple[Contract, ...] = (
    _name("srt.managers.scheduler", "SchedulePolicy", "the scheduler's policy is our subclass"),
    _class(
        _POLICY,
        "SchedulePolicy",
        "base of the policy",
        has="calc_priority enable_priority_scheduling policy priority_sign tree_cache",
    ),
    _call(
        _POLICY,
        "SchedulePolicy.__init__",
        "makes another policy of an unknown name",
        first="policy tree_cache enable_hierarchical_cache enable_priority_scheduling "
        "schedule_low_priority_values_first",
        accepts="",
    ),
    _call(
        _POLICY,
        "SchedulePolicy.calc_priority",
        "sorts the waiting queue",
        first="waiting_queue running_batch processed_tokens",
        accepts="",
    ),
    _call(
        _POLICY,
        "SchedulePolicy.shortest_prefill_chunk_limit",
        "long prefills leave room",
        first="chunked_req waiting_queue budget page_size",
        accepts="",
    ),
    _call(
        _POLICY,
        "SchedulePolicy.waiting_queue_prefix_matched",
        "says that hits are known",
        first="waiting_queue",
        accepts="",
    ),
    _class(_POLICY, "CacheAgnosticPolicy", "what upstream takes ours for", has="FCFS"),
    _class(_POLICY, "AddReqResult", "lets a request pass by", has="CONTINUE OTHER"),
    _class(
        _POLICY,
        "PrefillAdder",
        "the batch that is filled",
        has="can_run_list page_size",
    ),
    _call(
        _POLICY,
        "PrefillAdder.add_one_req",
        "followers wait for their leader",
        first="req has_chunked_req truncation_align_size",
        accepts="",
    ),
    _call(
        _POLICY,
        "PrefillAdder._select_prefill_admission",
        "one prefill in chunks at a time",
        first="req",
        named="has_chunked_req",
        closed=False,
    ),
    _class(_POLICY, "_PrefillAdmission", "one prefill in chunks at a time", has="is_chunked"),
    _call(
        "srt.mem_cache.common",
        "match_kv_cache",
        "looks a waiting request up",
        first="req tree_cache",
    ),
    _class(
        "srt.managers.schedule_batch",
        "Req",
        "what waits",
        has="cache_salt extend_end extra_key full_untruncated_fill_ids host_hit_length "
        "is_retracted lora_id num_matched_prefix_tokens origin_input_ids output_ids prefix_len "
        "priority rid",
    ),
    _call("srt.runtime_context", "get_parallel", "do several ranks have to agree"),
    _call("srt.runtime_context", "get_schedule", "tokens of a chunk"),
    _call("srt.runtime_context", "get_serving", "labels of the metrics"),
    _call("srt.runtime_context", "get_observability", "are metrics on"),
)
"""Every row of the feature scheduler."""
