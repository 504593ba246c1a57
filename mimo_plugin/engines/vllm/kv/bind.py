# SPDX-License-Identifier: Apache-2.0
"""Puts our classes where the scheduler's constructor looks for its own.

The scheduler builds its KV cache manager from four module-level names. They are exchanged only
while one scheduler is being constructed and put back before the constructor returns, so nothing
stays patched, and a process that does not ask for the feature never gets here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

from mimo_plugin.core.candidates import Policy
from mimo_plugin.core.eviction import DeathOrder
from mimo_plugin.core.retention import Ladder, RetentionRule
from mimo_plugin.core.window import GroupGeometry, draft_swa_groups
from mimo_plugin.engines.vllm.kv.fit import why_groups_do_not_fit
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.errors import FeatureUnavailable, setting_error


@contextmanager
def _exchanged(*names: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    try:
        for module, name, value in names:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextmanager
def kv_feature(settings: KvSettings) -> Iterator[None]:
    """Within this context a scheduler that is constructed gets the plugin's KV cache manager.

    Raises:
        FeatureUnavailable: the model's KV cache groups are not full + sliding-window attention.
    """
    # Imported here: the engine's modules are heavy, and only the EngineCore needs them.
    from vllm.v1.core import kv_cache_coordinator as upstream_coordinator
    from vllm.v1.core import kv_cache_manager as upstream_manager
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        SlidingWindowManager,
    )

    from mimo_plugin.engines.vllm.kv.coordinator import MimoCoordinator
    from mimo_plugin.engines.vllm.kv.manager import MimoKVCacheManager
    from mimo_plugin.engines.vllm.kv.managers import (
        LeanFullAttentionManager,
        LeanSlidingWindowManager,
    )
    from mimo_plugin.engines.vllm.kv.queue import OrderedBlockPool
    from mimo_plugin.engines.vllm.kv.state import group_geometry

    upstream_scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
    make_stock_manager = upstream_coordinator.get_manager_for_kv_cache_spec
    subclass_of = {
        FullAttentionManager: LeanFullAttentionManager,
        SlidingWindowManager: LeanSlidingWindowManager,
    }

    def make_manager(*args: Any, **kwargs: Any) -> Any:
        manager = make_stock_manager(*args, **kwargs)
        # The stock factory works out the constructor's arguments; our subclasses add no state to
        # it, so the instance just becomes one of theirs.
        manager.__class__ = subclass_of.get(type(manager), type(manager))
        return manager

    def make_coordinator(**kwargs: Any) -> Any:
        reason = why_groups_do_not_fit(kwargs["kv_cache_config"].kv_cache_groups)
        if reason is None and not kwargs["enable_caching"]:
            reason = "prefix caching is off; start with --enable-prefix-caching"
        if reason is not None:
            raise FeatureUnavailable(f"feature kv: {reason}")
        coordinator = MimoCoordinator(**kwargs)
        geometry = group_geometry(coordinator)
        require_room(settings, geometry, kwargs["kv_cache_config"].num_blocks)
        rule = retention_rule(settings, geometry, coordinator.scheduler_block_size)

        def make_order(num_blocks: int) -> DeathOrder:
            full = [g for g in geometry if g.is_full]
            return DeathOrder(num_blocks, full, policy(settings, geometry, num_blocks))

        order = coordinator.block_pool.install_order(make_order)
        coordinator.configure(rule, order, settings)
        return coordinator

    manager_class = type(
        "BoundMimoKVCacheManager", (MimoKVCacheManager,), {"memoise": settings.memoise}
    )
    with _exchanged(
        (upstream_scheduler, "KVCacheManager", manager_class),
        (upstream_manager, "get_kv_cache_coordinator", make_coordinator),
        (upstream_coordinator, "BlockPool", OrderedBlockPool),
        (upstream_coordinator, "get_manager_for_kv_cache_spec", make_manager),
    ):
        yield


def policy(settings: KvSettings, geometry: tuple[GroupGeometry, ...], num_blocks: int) -> Policy:
    """Budgets in blocks for a pool of ``num_blocks``."""
    swa = max(1, int(settings.swa_share * num_blocks))
    draft = draft_swa_groups(geometry)
    return Policy(
        swa_limit_blocks=swa,
        full_limit_blocks=max(1, num_blocks - swa) if settings.strict_split else None,
        draft_limit_blocks=(
            max(checkpoint_blocks([geometry[i] for i in draft]), int(settings.draft_share * swa))
            if draft
            else None
        ),
        block_tokens=next(g.block_size_tokens for g in geometry if g.is_full),
        keep_unreachable=settings.tiers_below,
    )


def checkpoint_blocks(geometry: Iterable[GroupGeometry]) -> int:
    """Blocks of one checkpoint in the SWA groups of ``geometry``."""
    return sum(g.window_blocks + g.lookahead_blocks for g in geometry if not g.is_full)


def require_room(
    settings: KvSettings, geometry: tuple[GroupGeometry, ...], num_blocks: int
) -> None:
    """Refuse a share of the pool in which not one checkpoint fits.

    Raises:
        ConfigError: ``kv.swa_share`` of this pool is smaller than a checkpoint.
    """
    needed = checkpoint_blocks(geometry)
    if int(settings.swa_share * num_blocks) < needed:
        raise setting_error(
            "kv.swa_share",
            settings.swa_share,
            f"at least {ceil(1000 * needed / num_blocks) / 1000}: one checkpoint takes {needed} of "
            f"the pool's {num_blocks} blocks",
            "raise kv.swa_share, or give the KV cache more memory",
        )


def retention_rule(
    settings: KvSettings, geometry: tuple[GroupGeometry, ...], alignment_tokens: int
) -> RetentionRule:
    """Retention for these groups. Derived ladder: a rung costs no more than the span it saves."""
    spine = next(g for g in geometry if g.is_full)
    num_full = sum(g.is_full for g in geometry)
    worth_tokens = -(-checkpoint_blocks(geometry) * spine.block_size_tokens // num_full)
    smallest = settings.ladder_min_tokens or max(4 * alignment_tokens, worth_tokens)
    return RetentionRule(
        alignment_tokens=alignment_tokens,
        lookahead_tokens=max(g.lookahead_blocks * g.block_size_tokens for g in geometry),
        classes=frozenset(settings.classes),
        ladder=Ladder(smallest, settings.ladder_growth, alignment_tokens),
    )
