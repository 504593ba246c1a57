# SPDX-License-Identifier: Apache-2.0
"""The radix backend ``mimo``: SGLang's unified radix cache with the plugin's retention."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
)

from mimo_plugin.config import MimoConfig
from mimo_plugin.engines.sglang import register
from mimo_plugin.engines.sglang.kv.accounting import NAMES, Accounting
from mimo_plugin.engines.sglang.kv.cache import MimoRadixCache
from mimo_plugin.engines.sglang.kv.settings import message_start_ids, retention_rule, swa_group
from mimo_plugin.engines.sglang.metrics import make_feature_sink
from mimo_plugin.errors import FeatureUnavailable, MimoError

logger = logging.getLogger(register.LOGGER_NAME)


def register_backend() -> None:
    """Make ``radix_cache_backend='mimo'`` known in this process; a second call changes nothing."""
    if get_radix_cache_factory(register.BACKEND) is None:
        register_radix_cache_backend(register.BACKEND, make_radix_cache)


def make_radix_cache(ctx: Any) -> Any:
    """Factory for SGLang's registry."""
    config = register.parse(getattr(ctx.server_args, register.RECORD_ATTRIBUTE, None), os.environ)
    try:
        if config is None:
            raise FeatureUnavailable(
                "the radix backend 'mimo' was chosen in a process without the plugin's section; "
                "fix: start the engine with --plugin mimo:kv"
            )
        cache = _make(ctx, config)
        register.log_active(register.SCHEDULER_ROLE, config)
        return cache
    except MimoError as error:
        if config is not None and not config.strict:
            logger.error("mimo-plugin is OFF for this engine (MIMO_STRICT=0): %s", error)
            return default_radix_cache_factory(ctx)
        # SGLang catches every Exception here and prints a traceback.
        raise SystemExit(f"mimo-plugin: error: {error}") from error.__cause__


def _make(ctx: Any, config: MimoConfig) -> Any:
    reason = why_pools_do_not_fit(ctx)
    if reason is not None:
        raise FeatureUnavailable(f"feature 'kv' can't run here: {reason}")
    cache = create_unified_radix_cache(ctx, cache_class=MimoRadixCache)
    group = swa_group(cache.sliding_window_size, cache.page_size)
    cache.configure(
        rule=retention_rule(config.kv, group),
        group=group,
        start_ids=message_start_ids(config.kv, lambda: getattr(ctx.tp_worker, "tokenizer", None)),
        accounting=Accounting(
            make_feature_sink(config, NAMES, enabled=ctx.params.enable_metrics), cache.page_size
        ),
    )
    core = type(cache.tree_core).__name__
    if "Rust" not in core:
        logger.warning("mimo kv: SGLang chose the tree core %s, not the one in Rust", core)
    return cache


def why_pools_do_not_fit(ctx: Any) -> str | None:
    """Reason, with its fix, why retention can't work over these pools; None if it can."""
    if not ctx.is_hybrid_swa or ctx.full_tokens_per_layer == 0:
        return "no pool for sliding-window beside one for full attention; leave kv out"
    if ctx.is_hybrid_ssm:
        return (
            "the model has recurrent layers, whose state decides where a hit may end; leave kv out"
        )
    if ctx.disable_radix_cache:
        return "prefix caching is off, there is nothing to retain; drop --disable-radix-cache"
    if getattr(ctx.params.token_to_kv_pool_allocator, "swa_req_ring", False):
        return "sliding-window KV is in rings per request, which a prefix can't keep; leave kv out"
    if not ctx.params.swa_gates_prefix_match or ctx.params.decoder_swa_bounded_replay:
        return (
            "this model recomputes its sliding window after a hit, nothing to retain; leave kv out"
        )
    return None
