# SPDX-License-Identifier: Apache-2.0
"""Does the scheduler feature fit these settings of SGLang?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.config import MimoConfig, SchedulerConfig
from mimo_plugin.engines.sglang.register import POLICY, STOCK_POLICY
from mimo_plugin.errors import setting_error

#: settings of the section scheduler that belong to code of the vLLM adapter
_VLLM_ONLY = ("protect_hits",)


def require(cfg: Any, model_config: Any, config: MimoConfig) -> None:
    """Refuse options that contradict the feature, and settings that would have no effect.

    Raises:
        ConfigError: another schedule policy was chosen, or a setting is for vLLM only.
    """
    if cfg.schedule_policy not in (STOCK_POLICY, POLICY):
        raise setting_error(
            "--schedule-policy",
            cfg.schedule_policy,
            f"none, or {POLICY!r}, with feature 'scheduler'",
            "drop it, or leave scheduler out of --plugin mimo:…",
        )
    stock = SchedulerConfig()
    for name in _VLLM_ONLY:
        found = getattr(config.scheduler, name)
        if found != getattr(stock, name):
            raise setting_error(f"mimo.scheduler.{name}", found, "no value on SGLang", "drop it")


def why_not(cfg: Any, model_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Args:
        cfg: the resolved server arguments.
        model_config: SGLang's configuration of the model.
    """
    if cfg.disaggregation_mode == "decode":
        return "a decode server prefills nothing; leave scheduler out of --plugin mimo:… there"
    if getattr(cfg, "dllm_algorithm", None):
        return "a diffusion language model has a queue of its own; leave scheduler out"
    if cfg.disable_radix_cache:
        return "prefix caching is off, no request has a hit; drop --disable-radix-cache"
    return None
