# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols of the scheduler that feature mtp relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_MTP = ("mtp",)
_call = partial(call, features=_MTP)
_class = partial(class_, features=_MTP)

_SCHEDULER = "v1.core.sched.scheduler"
_ASYNC = "v1.core.sched.async_scheduler"

MTP_SCHED_ROWS: tuple[Contract, ...] = (
    _class(
        _SCHEDULER,
        "Scheduler",
        "base class of the scheduler that decides draft lengths and where loaded requests go on",
        has="_free_request _preempt_request _update_after_schedule _update_waiting_for_remote_kv "
        "connector failed_recving_kv_req_ids kv_cache_manager make_spec_decoding_stats "
        "num_spec_tokens requests schedule update_draft_token_ids update_from_output",
    ),
    _class(
        _ASYNC,
        "AsyncScheduler",
        "hands out placeholders for drafts as soon as a step is scheduled",
        base="Scheduler",
        has="_spec_token_placeholders _update_after_schedule",
    ),
    *(
        _call(
            module,
            f"{name}._update_after_schedule",
            "draft lengths are decided before and applied after",
            first="scheduler_output",
            accepts="",
        )
        for module, name in ((_SCHEDULER, "Scheduler"), (_ASYNC, "AsyncScheduler"))
    ),
    _call(_SCHEDULER, "Scheduler.schedule", "steps are measured from here"),
    _call(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        "drafts are cut to a request's length",
        first="draft_token_ids",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "drafts whose step brought no verdict are counted",
        first="scheduler_output",
        closed=False,
    ),
    _call(
        _SCHEDULER,
        "Scheduler.make_spec_decoding_stats",
        "is called for every request whose drafts were verified",
        first="spec_decoding_stats",
        named="num_draft_tokens num_accepted_tokens num_invalid_spec_tokens request_id",
        accepts="",
    ),
    _call(
        _SCHEDULER,
        "Scheduler._preempt_request",
        "a preempted request loses its drafts",
        first="request",
        closed=False,
    ),
    _call(
        _SCHEDULER,
        "Scheduler._free_request",
        "a request that has ended is forgotten",
        first="request",
        closed=False,
    ),
    _class(
        "v1.core.sched.output",
        "SchedulerOutput",
        "what a step verifies, and how much is drafted after it",
        has="num_scheduled_tokens num_spec_tokens_to_schedule scheduled_spec_decode_tokens "
        "total_num_scheduled_tokens",
    ),
    _class(
        "v1.outputs",
        "DraftTokenIds",
        "drafts that come back from the worker",
        has="draft_token_ids req_ids",
    ),
    _class(
        "v1.request",
        "Request",
        "its drafts, and where it is in its output",
        has="is_prefill_chunk num_computed_tokens num_output_placeholders num_output_tokens "
        "num_tokens request_id spec_token_ids",
    ),
)
