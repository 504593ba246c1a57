# SPDX-License-Identifier: Apache-2.0
"""The scheduler class path that vLLM resolves when a feature of ours is switched on.

vLLM calls what ``scheduler_cls`` names with the scheduler's constructor arguments. A factory lets
us extend whatever class would have been used (``AsyncScheduler``, ``Scheduler`` or the user's own),
so overlap of scheduling and execution is never lost.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from mimo_plugin.config import SECTION, MimoConfig, parse_config
from mimo_plugin.engines.vllm.kv.backend import why_backend_unsafe
from mimo_plugin.engines.vllm.kv.bind import kv_feature
from mimo_plugin.engines.vllm.kv.settings import KvSettings, resolve_settings
from mimo_plugin.engines.vllm.mtp import configure as mtp_configure
from mimo_plugin.engines.vllm.mtp import lengths, transfer
from mimo_plugin.engines.vllm.register import LOGGER_NAME, leave_out, log_active
from mimo_plugin.engines.vllm.sched.extension import extended
from mimo_plugin.engines.vllm.sched.install import install
from mimo_plugin.engines.vllm.sched.settings import resolve_sched_settings
from mimo_plugin.engines.vllm.vision import configure as vision_configure
from mimo_plugin.errors import ConfigError, FeatureUnavailable
from mimo_plugin.metrics import merge_payloads

logger = logging.getLogger(LOGGER_NAME)


class SchedulerExtension:
    """Mixed in front of the stock scheduler class: hands our counters to the API process."""

    mimo_config: MimoConfig

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, with the plugin's counters beside a connector's."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is None:
            return None
        accounting = getattr(self.kv_cache_manager, "accounting", None)  # type: ignore[attr-defined]
        drafts = getattr(self, "draft_control", None)
        vision = getattr(self, "vision_counters", None)
        tiers = getattr(getattr(self, "connector", None), "mimo_payload", None)
        payload = merge_payloads(
            accounting.drain() if accounting is not None else None,
            self.affinity_payload(),  # type: ignore[attr-defined]
            drafts.report.drain() if drafts is not None else None,
            vision.drain() if vision is not None else None,
            tiers() if tiers is not None else None,
        )
        if payload is not None:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), SECTION: payload}
        return stats


def extend(base: Any) -> Any:
    """``base`` with :class:`SchedulerExtension` in front."""
    return type(f"Mimo{base.__name__}", (SchedulerExtension, extended(base)), {})


def base_class(vllm_config: Any, user_scheduler_cls: str | None) -> type[Any]:
    """The class that would be used without us: the user's own, else vLLM's choice."""
    if user_scheduler_cls is not None:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        chosen: type[Any] = resolve_obj_by_qualname(user_scheduler_cls)
        return chosen
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base: type[Any] = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return base


def build(base: type[Any], settings: KvSettings | None, *args: Any, **kwargs: Any) -> Any:
    """Construct an extended ``base``; with ``settings`` it gets the plugin's KV cache manager."""
    with ExitStack() as stack:
        if settings is not None:
            stack.enter_context(kv_feature(settings))
        return extend(base)(*args, **kwargs)


def without(config: MimoConfig, feature: str, reason: object) -> MimoConfig:
    """``config`` without a feature that doesn't fit, where the user did not name it.

    Raises:
        FeatureUnavailable: the user did.
    """
    leave_out(config, feature, reason)
    return replace(config, features=tuple(f for f in config.features if f != feature))


def make_scheduler(vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``scheduler_cls`` names: called by the EngineCore with the scheduler's arguments.

    Raises:
        ConfigError: there is no ``mimo`` section, or a setting does not fit the model.
        FeatureUnavailable: a feature that was asked for does not fit this model.
    """
    raw = (vllm_config.additional_config or {}).get(SECTION)
    config = parse_config(raw, environ={})
    if config is None:
        raise ConfigError(
            f"scheduler_cls is {__name__}.make_scheduler but additional_config has no 'mimo' "
            "section; start with --plugin mimo instead of naming the class"
        )
    unsafe = why_backend_unsafe(vllm_config)
    if unsafe is not None:
        # Not ours to refuse: stock would start as well. But wrong numbers must not come silently.
        logger.error("attention backend: %s", unsafe)
    settings = None
    if "kv" in config.features:
        tiers_below = "tiers" in config.features
        settings = resolve_settings(config.kv, vllm_config, tiers_below=tiers_below)
    sched = (
        resolve_sched_settings(config.scheduler, vllm_config)
        if "scheduler" in config.features
        else None
    )
    if "mtp" in config.features:
        mtp_configure.prepare_scheduler(kv_cache_config)
    vision = None
    if "vision" in config.features:
        vision = vision_configure.prepare_scheduler(vllm_config)
    base = base_class(vllm_config, config.user_scheduler_cls)
    scheduler = build(base, settings, vllm_config, kv_cache_config, *args, **kwargs)
    if sched is not None:
        try:
            install(scheduler, sched)
        except FeatureUnavailable as error:
            config = without(config, "scheduler", error)
    if "mtp" in config.features:
        mtp = lengths.resolve_mtp_settings(config.mtp, vllm_config)
        if mtp is not None:
            lengths.install(scheduler, mtp)
        transfer.guard(scheduler, vllm_config.num_speculative_tokens)
    scheduler.vision_counters = vision
    scheduler.mimo_config = config
    log_active("EngineCore", config)
    return scheduler
