# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature dp_affinity relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_AFFINITY = ("dp_affinity",)
_call = partial(call, features=_AFFINITY)
_class = partial(class_, features=_AFFINITY)

_CLIENT = "v1.engine.core_client"

DP_AFFINITY_ROWS: tuple[Contract, ...] = (
    _class(
        _CLIENT,
        "DPLBAsyncMPClient",
        "vLLM's internal balancer: its books and the counts it gets",
        has="client_count core_engines engine_inflight engine_ranks_managed lb_engines "
        "reqs_in_flight",
        base="DPAsyncMPClient",
    ),
    _call(
        _CLIENT,
        "DPLBAsyncMPClient.__init__",
        "one balancer for each client",
        first="vllm_config",
        closed=False,
    ),
    _call(
        _CLIENT,
        "DPLBAsyncMPClient.get_core_engine_for_request",
        "chooses the rank, or takes the one that the request names",
        first="request",
        accepts="",
    ),
    _class(
        "v1.engine",
        "EngineCoreRequest",
        "what tells the chat of a request",
        has="cache_salt data_parallel_rank lora_request mm_features pooling_params prompt_embeds "
        "prompt_token_ids request_id session_id",
    ),
    _class(
        "multimodal.inputs",
        "MultiModalFeatureSpec",
        "which image stands where",
        has="identifier mm_position",
    ),
    _class("multimodal.inputs", "PlaceholderRange", "which image stands where", has="offset"),
    _class("lora.request", "LoRARequest", "chats of adapters", has="lora_name lora_path"),
    _class(
        "config.parallel",
        "ParallelConfig",
        "whether there are ranks for the internal balancer",
        has="data_parallel_external_lb data_parallel_hybrid_lb data_parallel_rank_local "
        "data_parallel_size data_parallel_size_local",
    ),
    replaced(
        "envs",
        "VLLM_USE_RUST_FRONTEND",
        "that front end balances requests itself",
        features=_AFFINITY,
    ),
    replaced(
        "tokenizers",
        "cached_tokenizer_from_config",
        "its chat template tells where answers begin",
        features=_AFFINITY,
    ),
)
"""Every row of feature dp_affinity."""
