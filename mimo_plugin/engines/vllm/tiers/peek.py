# SPDX-License-Identifier: Apache-2.0
"""Where the lower tiers hold a chunk, without moving it.

vLLM's own look-up fetches into host memory whatever it finds below, so that looking for a window
fetches every window of the prompt that is there. Here a look-up only asks; what a hit needs is
fetched once the hit is known.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from mimo_plugin.core.joint import Place

_IN_HOST = {LookupResult.HIT: Place.HOST, LookupResult.HIT_PENDING: Place.COMING}


def peek(manager: Any, key: Any, req_context: Any) -> Place:
    """The nearest tier that holds a chunk.

    Args:
        manager: vLLM's TieringOffloadingManager.
        key: of the chunk.
        req_context: vLLM's context of the request, whose tier filter holds.
    """
    manager._maybe_process_finished_jobs()
    found = _IN_HOST.get(manager.primary_tier.lookup(key, req_context))
    if found is not None:
        return found
    unsure = False
    for tier in manager.secondary_tiers:
        if not req_context.load_tier_filter.allows(tier.medium, tier.locality):
            continue
        result = tier.lookup(key, req_context)
        if result is LookupResult.HIT:
            return Place.BELOW
        unsure = unsure or result is not LookupResult.MISS
    return Place.UNSURE if unsure else Place.NOWHERE


def fetch(manager: Any, keys: Collection[Any], req_context: Any) -> int:
    """Have chunks brought into host memory; how many of them it has room for."""
    return sum(manager.lookup(key, req_context) is not LookupResult.MISS for key in keys)


def free_rows(manager: Any) -> int:
    """Rows of host memory that are free, or whose chunk may be given up."""
    primary = manager.primary_tier
    return int(primary._get_num_free_chunks() + primary._num_evictable_cache_chunks)
