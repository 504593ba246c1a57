# SPDX-License-Identifier: Apache-2.0
"""Does the KV feature fit this model and these settings of SGLang?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.config import KvConfig, MimoConfig
from mimo_plugin.engines.sglang.register import BACKEND
from mimo_plugin.errors import setting_error

#: settings of the section kv that only mean something where one pool holds all blocks
_ONE_POOL = ("swa_share", "strict_split", "draft_share")
#: settings that belong to code of the vLLM adapter
_VLLM_ONLY = ("memoise",)


def require(cfg: Any, model_config: Any, config: MimoConfig) -> None:
    """Refuse options that contradict the feature, and settings that would have no effect.

    Raises:
        ConfigError: another radix backend was chosen, a setting is for vLLM only, or a token id
            is outside the vocabulary.
    """
    if cfg.radix_cache_backend not in (None, BACKEND):
        raise setting_error(
            "--radix-cache-backend",
            cfg.radix_cache_backend,
            f"none, or {BACKEND!r}, with feature 'kv'",
            "drop it, or leave kv out of --plugin mimo:…",
        )
    stock = KvConfig()
    for name in (*_ONE_POOL, *_VLLM_ONLY):
        found = getattr(config.kv, name)
        if found != getattr(stock, name):
            fix = (
                "drop it; --swa-full-tokens-ratio sizes SGLang's pool for sliding-window layers"
                if name in _ONE_POOL
                else "drop it"
            )
            raise setting_error(f"mimo.kv.{name}", found, "no value on SGLang", fix)
    vocabulary = model_config.vocab_size
    wrong = [i for i in config.kv.message_start_token_ids or () if not 0 <= i < vocabulary]
    if wrong:
        raise setting_error(
            "mimo.kv.message_start_token_ids",
            wrong,
            f"token ids from 0 to {vocabulary - 1}",
            "take the ids of the chat template's message start from the tokenizer",
        )


def why_not(cfg: Any, model_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Args:
        cfg: the resolved server arguments.
        model_config: SGLang's configuration of the model.
    """
    if cfg.disable_radix_cache:
        return "prefix caching is off, there is nothing to retain; drop --disable-radix-cache"
    if not model_config.is_hybrid_swa:
        return (
            "SGLang serves this model without a pool for sliding-window layers; leave kv out of "
            "--plugin mimo:… for it, or drop --disable-hybrid-swa-memory"
        )
    if not model_config.full_attention_layer_ids:
        return "the model has no full-attention layer; leave kv out of --plugin mimo:…"
    for option, what in (
        ("enable_lmcache", "LMCache brings a radix cache of its own"),
        ("enable_flexkv", "FlexKV brings a radix cache of its own"),
        (
            "enable_unified_cache_external_linker",
            "the external linker accepts SGLang's own radix cache only",
        ),
        ("enable_session_radix_cache", "session references need SGLang's tree core in Python"),
        ("enable_kv_cache_sharding", "KV sharding accepts SGLang's own radix cache only"),
    ):
        if getattr(cfg, option, False):
            flag = f"--{option.replace('_', '-')}"
            return f"{what}; drop {flag}, or leave kv out of --plugin mimo:…"
    return None
