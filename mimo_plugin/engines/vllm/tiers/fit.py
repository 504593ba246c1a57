# SPDX-License-Identifier: Apache-2.0
"""Does the feature ``tiers`` fit this model and these engine settings?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.engines.vllm.kv import fit as kv_fit
from mimo_plugin.engines.vllm.tiers.names import CONNECTOR

_LEAVE_OUT = "leave tiers out of --plugin mimo:…"


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    transfer = vllm_config.kv_transfer_config
    found = getattr(transfer, "kv_connector", None)
    if found != CONNECTOR:
        return f"the KV connector is {found}, {CONNECTOR} is needed; drop --kv-transfer-config"
    extra = transfer.kv_connector_extra_config
    for name in ("block_size", "blocks_per_chunk"):
        if extra.get(name) is not None:
            return f"kv_connector_extra_config has {name}, chunks are single blocks; remove it"
    if extra.get("canonical_layout"):
        return "kv_connector_extra_config has canonical_layout, which is not supported; remove it"
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
    return None
