# SPDX-License-Identifier: Apache-2.0
"""Checks of what the simulator of SGLang does: no slot is lost, and none is read by another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.sglang_sim import SglangSimulator


def check_pools(simulator: SglangSimulator, other_full: int = 0, other_swa: int = 0) -> None:
    """Every slot is free, in the tree, or a running request's own: none lost, none twice.

    Args:
        simulator: between two steps.
        other_full: tokens of full attention that somebody else holds.
        other_swa: of sliding windows.
    """
    from sglang.srt.managers.scheduler_components.pool_stats_observer import (
        kv_private_swa_tokens,
        kv_private_tokens,
    )

    pools, page = simulator.pools, simulator.pools.page_tokens
    owners = [item.req.kv for item in simulator.running]
    if simulator.chunked is not None:
        owners.append(simulator.chunked.req.kv)
    full = other_full + sum(kv_private_tokens(kv, page) for kv in owners)
    swa = other_swa + sum(kv_private_swa_tokens(kv, page) for kv in owners)
    cache, allocator = simulator.cache, simulator.allocator
    full += cache.full_evictable_size() + cache.full_protected_size()
    swa += cache.swa_evictable_size() + cache.swa_protected_size()
    assert full + allocator.full_available_size() == pools.full_tokens
    assert swa + allocator.swa_available_size() == pools.swa_tokens


def check_mapping(simulator: SglangSimulator) -> None:
    """No sliding-window slot belongs to two slots of full attention."""
    import torch

    mapping = simulator.allocator.full_to_swa_index_mapping
    used = mapping[mapping > 0]
    assert len(torch.unique(used)) == len(used), "a sliding-window slot with two owners"


class Contents:
    """What each slot of both pools holds: a number for the tokens up to and with its own.

    Before a request grows, everything it is going to read must be its own.
    """

    def __init__(self, simulator: SglangSimulator) -> None:
        import torch

        pools = simulator.pools
        self.full = torch.zeros(pools.full_tokens + pools.page_tokens, dtype=torch.int64)
        self.swa = torch.zeros(pools.swa_tokens + pools.page_tokens, dtype=torch.int64)
        self.simulator = simulator
        self.mapping = simulator.allocator.full_to_swa_index_mapping
        self.chains: dict[str, list[int]] = {}
        self.checked = 0

    def plan(self, req: Any, output: list[int]) -> None:
        """A request that will answer with ``output``."""
        chain, chains = 1, []
        for token in (*req.origin_input_ids, *output):
            chain = (chain * 1_000_003 + token + 1) % (1 << 61)
            chains.append(chain)
        self.chains[req.rid] = chains

    def write(self, req: Any, start: int, slots: Any) -> None:
        """KV of ``req`` from ``start`` on is computed into ``slots``."""
        import torch

        values = torch.tensor(self.chains[req.rid][start : start + len(slots)])
        self.full[slots] = values
        self.swa[self.mapping[slots]] = values

    def check(self, req: Any, length: int) -> None:
        """All full KV below ``length`` and the window before it are those of ``req``."""
        import torch

        wanted = torch.tensor(self.chains[req.rid][:length], dtype=torch.int64)
        row = self.simulator.rows.req_to_token[req.kv.req_pool_idx, :length].long()
        first = max(0, length - self.simulator.pools.window_tokens)
        assert torch.equal(self.full[row], wanted), f"{req.rid}: full KV of another request"
        window = self.mapping[row[first:]]
        assert bool((window > 0).all()), f"{req.rid}: a hole in the window"
        assert torch.equal(self.swa[window], wanted[first:]), f"{req.rid}: another's window"
        self.checked += 1
