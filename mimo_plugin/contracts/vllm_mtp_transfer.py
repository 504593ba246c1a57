# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols of KV transfer that feature mtp relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_MTP = ("mtp",)
_call = partial(call, features=_MTP)
_class = partial(class_, features=_MTP)

_CONNECTORS = "distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTORS}.offloading.scheduler"

MTP_TRANSFER_ROWS: tuple[Contract, ...] = (
    _call(
        "v1.core.sched.scheduler",
        "Scheduler._update_waiting_for_remote_kv",
        "the load is complete, nothing of it is in the prefix cache yet",
        first="request",
        accepts="",
    ),
    _class(
        "v1.core.kv_cache_manager",
        "KVCacheManager",
        "blocks of a request, and the groups they belong to",
        has="get_blocks kv_cache_config",
    ),
    _call("v1.core.kv_cache_manager", "KVCacheManager.get_blocks", "as above", first="request_id"),
    _class(
        "v1.core.kv_cache_utils",
        "KVCacheBlock",
        "tells loaded blocks from those that were here, and from none",
        has="block_hash is_null",
    ),
    _class(
        "config.kv_transfer",
        "KVTransferConfig",
        "which connectors an engine has",
        has="kv_connector kv_connector_extra_config",
    ),
    _call(
        f"{_CONNECTORS}.nixl.metadata",
        "_get_speculative_compatibility_factors",
        "the number of MTP layers joins what both sides of a transfer must agree on",
        first="vllm_config",
        accepts="",
    ),
    _call(
        f"{_CONNECTORS}.nixl.metadata",
        "compute_nixl_compatibility_hash",
        "asks for the speculative factors by their name in the module",
        named="vllm_config",
        closed=False,
    ),
    _call(
        f"{_CONNECTORS}.nixl.base_scheduler",
        "NixlBaseConnectorScheduler._prefill_backoff",
        "the sender stops k-1 tokens early, which the receiver knows",
    ),
    _class(
        f"{_CONNECTORS}.mooncake.mooncake_connector",
        "MooncakeConnectorScheduler",
        "pairs blocks from their end, so the number of loaded tokens must stay as it says",
        has="_get_remote_prefill_token_count get_sw_clipped_blocks",
    ),
    _class(
        f"{_CONNECTORS}.multi_connector",
        "MultiConnector",
        "connectors inside it",
        has="sub_connectors",
    ),
    _class(
        f"{_CONNECTORS}.offloading_connector",
        "OffloadingConnector",
        "its scheduler half decides what is stored",
        has="connector_scheduler",
    ),
    _call(
        _OFFLOADING,
        "OffloadingConnectorScheduler._calc_num_offloadable_tokens",
        "blocks whose last rows can still change are held back",
        first="req_status num_computed_tokens",
        accepts="",
    ),
)
