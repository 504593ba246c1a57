# SPDX-License-Identifier: Apache-2.0
"""Parts of vLLM's offloading on their own; print as JSON.

- ``arc``: chunks that ARC holds as ``frequent`` after one request has touched, stored and
  finished, and how often it moved its target for one that it had evicted (``target_steps``);
- ``opted_in``: which of the ``known`` connectors answer for themselves whether they skip cached
  blocks; ``says``: the answers of one that loads between steps and of one that loads within them;
- ``retained``: groups that keep a longer hit when a KV-cache manager is asked to, by kind of model.
"""

from __future__ import annotations

import json
from typing import Any

from common import hybrid_manager
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


def arc() -> dict[str, Any]:
    """Evict one of four chunks, then let a request hit it, and another one, on the device."""
    manager = CPUOffloadingManager(num_chunks=4, cache_policy="arc")
    names = ("evicted", "hit", "cold", "colder", "new")
    keys = {name: make_offload_key(name.encode(), 0) for name in names}

    def store(request: str, *chunks: str) -> None:
        context = ReqContext(req_id=request)
        manager.on_new_request(context)
        for name in chunks:
            manager.prepare_store([keys[name]], context)
            manager.complete_store([keys[name]], context)
        manager.on_request_finished(context)

    for name in names:
        store(name, name)
    policy: Any = manager._policy
    assert keys["evicted"] in policy.b1 and not policy.t2
    targets = [policy.target_t1_size]
    context = ReqContext(req_id="again")
    manager.on_new_request(context)
    manager.touch([keys["evicted"], keys["hit"]], context)
    targets.append(policy.target_t1_size)
    manager.prepare_store([keys["evicted"], keys["hit"]], context)
    targets.append(policy.target_t1_size)
    manager.complete_store([keys["evicted"]], context)
    manager.on_request_finished(context)
    return {
        "frequent": [name for name in names if keys[name] in policy.t2],
        "target_steps": sum(a != b for a, b in zip(targets, targets[1:], strict=False)),
    }


def opted_in() -> dict[str, Any]:
    """Ask every connector that vLLM knows."""
    base = KVConnectorBase_V1.skips_cached_blocks
    found, unknown = [], 0
    for name, load in KVConnectorFactory._registry.items():
        try:
            connector = load()
        except Exception:
            unknown += 1
            continue
        if getattr(connector, "skips_cached_blocks", base) is not base:
            found.append(name)
    one = object.__new__(OffloadingConnector)
    says = []
    for extra in ({}, {"sync_load_budget_bytes": 1 << 20}):
        one._kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        says.append(one.skips_cached_blocks)
    return {"opted_in": found, "known": len(KVConnectorFactory._registry) - unknown, "says": says}


def retained() -> dict[str, list[int]]:
    """Ask managers of three kinds."""
    sizes = {"full_block_tokens": 32, "swa_block_tokens": 32, "window_tokens": 64}
    hybrid = hybrid_manager(**sizes, swa_groups=2)
    partial = hybrid_manager(**sizes)
    partial.coordinator.enable_partial_hash_hits = True
    managers = {
        "hybrid": hybrid,
        "partial hits": partial,
        "one group": hybrid_manager(**sizes, swa_groups=0),
    }
    for manager in managers.values():
        manager.retain_full_attention_hits()
    return {name: list(manager.retained_hit_group_ids) for name, manager in managers.items()}


def main() -> None:
    """Everything that the tree has."""
    result = {"arc": arc()}
    if hasattr(KVConnectorBase_V1, "skips_cached_blocks"):
        result |= opted_in() | {"retained": retained()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
