# SPDX-License-Identifier: Apache-2.0
"""Does the feature ``tiers`` fit these settings of SGLang?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.config_tiers import VLLM_ONLY, refuse_foreign, require_place
from mimo_plugin.engines.sglang.register import BACKEND as RADIX_BACKEND
from mimo_plugin.engines.sglang.storage.arguments import backend_arguments
from mimo_plugin.errors import setting_error
from mimo_plugin.tiers.open import require_store

LAYOUTS = ("page_first", "page_first_direct")
"""Layouts of host memory in which a page is one run of keys and one of values."""


def require(cfg: Any, model_config: Any, config: MimoConfig) -> None:
    """Refuse options that contradict the feature, and settings without which it can't run.

    Raises:
        ConfigError: which option or setting, and the fix.
        StoreError: a folder of the store can't be used.
        RedisUnavailable: no client library for the store's servers.
        MooncakeUnavailable: no client library, or no master.
    """
    refuse_foreign("mimo.tiers", config.tiers, VLLM_ONLY, "SGLang")
    wanted = backend_arguments(config.tiers)
    for name, ours in wanted.items():
        found = getattr(cfg, name)
        if found != ours:
            raise setting_error(
                f"--{name.replace('_', '-')}",
                found,
                "none with feature 'tiers', which sets it",
                "drop it, or leave tiers out of --plugin mimo:…",
            )
    require_place("mimo.tiers", config.tiers)
    if cfg.hicache_mem_layout not in LAYOUTS:
        raise setting_error(
            "--hicache-mem-layout",
            cfg.hicache_mem_layout,
            f"{' or '.join(LAYOUTS)} with feature 'tiers'",
            f"use --hicache-mem-layout {LAYOUTS[0]}",
        )
    if cfg.page_size == 1:
        raise setting_error(
            "--page-size",
            1,
            "more than 1 with feature 'tiers', which stores page by page",
            "use --page-size 64",
        )
    if config.tiers.host_swa_share is not None and not model_config.is_hybrid_swa:
        raise setting_error(
            "mimo.tiers.host_swa_share",
            config.tiers.host_swa_share,
            "no value for a model that SGLang serves without a pool for sliding-window layers",
            "drop it",
        )
    if cfg.enable_hierarchical_cache:
        require_store(config.tiers)


def why_not(cfg: Any, model_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Args:
        cfg: the resolved server arguments.
        model_config: SGLang's configuration of the model.
    """
    if cfg.disable_radix_cache:
        return "prefix caching is off, there is nothing to store; drop --disable-radix-cache"
    if not cfg.enable_hierarchical_cache:
        return (
            "pages go to the store through host memory, which is off; "
            "add --enable-hierarchical-cache"
        )
    if cfg.radix_cache_backend not in (None, RADIX_BACKEND):
        return (
            f"the radix backend {cfg.radix_cache_backend!r} has tiers of its own; "
            "drop --radix-cache-backend"
        )
    for option, what in (
        ("enable_lmcache", "LMCache brings tiers of its own"),
        ("enable_flexkv", "FlexKV brings tiers of its own"),
        ("enable_kv_cache_sharding", "a rank's page is not whole with KV sharding"),
    ):
        if getattr(cfg, option, False):
            return f"{what}; drop --{option.replace('_', '-')}, or leave tiers out"
    if getattr(cfg, "dcp_size", 1) > 1:
        return "a rank's page is not whole with --dcp-size above 1; use 1, or leave tiers out"
    return None
