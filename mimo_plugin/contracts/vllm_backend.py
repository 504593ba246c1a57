# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols behind the check of the attention backend (keys and values of unequal width)."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

_KV = ("kv",)
_call = partial(call, features=_KV)
_class = partial(class_, features=_KV)

BACKEND_ROWS: tuple[Contract, ...] = (
    _class("config.device", "DeviceConfig", "no CPU backend for unequal widths", has="device_type"),
    _class("config.attention", "AttentionConfig", "the backend that was asked for", has="backend"),
    _call(
        "config.vllm",
        "set_current_vllm_config",
        "the user's choice of a FlashAttention version is respected",
        first="vllm_config",
    ),
    _call(
        "v1.attention.backends.fa_utils",
        "get_flash_attn_version",
        "which FlashAttention would compute keys and values of unequal width",
        named="head_size head_size_v has_sinks",
    ),
    _call(
        "v1.attention.backends.fa_utils",
        "is_flash_attn_varlen_func_available",
        "whether there is any FlashAttention",
    ),
    *(
        _class(
            f"v1.attention.backends.{module}",
            name,
            "keeps one value width for all layers; refused where two are needed",
            has="head_size_v set_head_size_v",
        )
        for module, name in (
            ("flash_attn_diffkv", "FlashAttentionDiffKVBackend"),
            ("triton_attn_diffkv", "TritonAttentionDiffKVBackend"),
        )
    ),
)
