# SPDX-License-Identifier: Apache-2.0
"""Does the feature ``tiers`` fit this model and these engine settings?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_plugin.config_tiers import parse_tiers
from mimo_plugin.engines.vllm.kv import fit as kv_fit
from mimo_plugin.engines.vllm.tiers.configure import WHERE, settings_from
from mimo_plugin.engines.vllm.tiers.names import CONNECTOR, TIER
from mimo_plugin.tiers.open import require_store
from mimo_plugin.tiers.shared_memory import why_no_room

_LEAVE_OUT = "leave tiers out of --plugin mimo:…"


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Raises:
        ConfigError: a setting is out of range, or contradicts others.
        StoreError: a folder of the store can't be used.
        RedisUnavailable: no client library for the store's servers.
        MooncakeUnavailable: no client library, or no master.
    """
    transfer = vllm_config.kv_transfer_config
    found = getattr(transfer, "kv_connector", None)
    if found != CONNECTOR:
        return f"the KV connector is {found}, {CONNECTOR} is needed; drop --kv-transfer-config"
    extra = transfer.kv_connector_extra_config
    for name in ("block_size", "blocks_per_chunk"):
        if extra.get(name) is not None:
            return f"kv_connector_extra_config has {name}, chunks are single blocks; remove it"
    for name in ("canonical_layout", "sync_load_budget_bytes"):
        if extra.get(name):
            return f"kv_connector_extra_config has {name}, which is not supported; remove it"
    reason = kv_fit.why_not(vllm_config)
    if reason is not None:
        return reason.replace("leave kv out", "leave tiers out")
    parallel = vllm_config.parallel_config
    for name, what in (
        ("pipeline_parallel_size", "pipeline"),
        ("prefill_context_parallel_size", "prefill context"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{what} parallel size is {size}, which is not supported; {_LEAVE_OUT}"
    if parallel.nnodes_within_dp > 1:
        return f"ranks on several nodes share no host memory; use one node, or {_LEAVE_OUT}"
    settings_from(extra)
    engines = max(1, getattr(parallel, "data_parallel_size_local", 1))
    reason = why_no_room(engines * int(extra.get("cpu_bytes_to_use") or 0))
    if reason is None:
        _require_stores(extra)
    return reason


def _require_stores(extra: Mapping[str, Any]) -> None:
    """Refuse places that no store can be made of, before the model is loaded."""
    for tier in extra.get("secondary_tiers") or ():
        if isinstance(tier, Mapping) and tier.get("type") == TIER:
            require_store(parse_tiers(WHERE, tier.get("settings", {})), where=WHERE)
