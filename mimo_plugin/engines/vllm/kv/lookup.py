# SPDX-License-Identifier: Apache-2.0
"""Memoised look-ups: a request that waits pays for its look-up once.

A memo stays valid while (a) the span its hit ends in is alive and keeps its checkpoint — an
ancestor's death kills the span too, so this one check covers every full block of the hit; (b) the
first block past the longest full-attention prefix is still missing; (c) no SWA block was hashed on
this request's own prefix within that length since.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

from mimo_plugin.core.tree import Node

#: hits shorter than this many blocks are counted block by block; longer ones by span
SPAN_COUNT_BLOCKS = 256


class HitBlocks(list[Any]):
    """Full blocks of a hit that know their spans, so that counting the free ones is cheap."""

    __slots__ = ("nodes", "order")

    def __init__(self, blocks: list[Any], nodes: list[Node], order: Any) -> None:
        super().__init__(blocks)
        self.nodes = nodes
        self.order = order

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.start in (None, 0) and index.stop is None:
            return self
        return super().__getitem__(index)

    def num_evictable(self) -> int:
        """Blocks with no reference: adopting the hit takes them out of the free queue."""
        return sum(self.order.num_free_full(node) for node in self.nodes)


@dataclass(slots=True)
class Lookup:
    """Result of one look-up, and what must still hold for it to be used again."""

    result: tuple[Any, int, int]
    num_tokens: int
    max_hit_tokens: int
    full_tokens: int
    node: Node | None
    swa: list[int] | None
    next_key: bytes | None
    num_sealed: int
    reusable: bool

    def still_valid(self, request: Any, max_hit_tokens: int, coordinator: Any) -> bool:
        """True when a fresh look-up would find the same hit."""
        if (
            not self.reusable
            or request.num_tokens != self.num_tokens
            or max_hit_tokens != self.max_hit_tokens
        ):
            return False
        node = self.node
        if node is not None and (node.dead or node.swa is not self.swa):
            return False
        pool = coordinator.block_pool
        if (
            self.next_key is not None
            and pool.cached_block_hash_to_block.get_one_block(self.next_key) is not None
        ):
            return False
        fresh = coordinator.num_sealed - self.num_sealed
        if fresh:
            if fresh > len(coordinator.sealed):
                return False
            hashes, unit = request.block_hashes, coordinator.hash_block_size
            sealed = coordinator.sealed
            reach = min(self.full_tokens + coordinator.rule.lookahead_tokens, len(hashes) * unit)
            for tokens, block_hash in islice(sealed, len(sealed) - fresh, None):
                if tokens <= reach and hashes[tokens // unit - 1] == block_hash:
                    return False
            self.num_sealed = coordinator.num_sealed
        return True


def spine_hashes(coordinator: Any, request: Any) -> Any:
    """Block hashes of ``request`` at the block size of the first full-attention group."""
    return resolve_block_hashes(
        request.block_hashes,
        coordinator.block_pool.hash_block_size,
        coordinator.spine_block_tokens,
    )


def remember(
    request: Any, result: tuple[Any, int, int], max_hit_tokens: int, coordinator: Any
) -> tuple[Lookup, tuple[list[Any], ...] | None]:
    """Build the memo of a fresh look-up.

    Returns the memo, and replacement block lists when the hit is long enough for counting by span.
    """
    blocks, hit, junction = result
    full_tokens = max(hit, junction)
    order = coordinator.order
    hashes = spine_hashes(coordinator, request)
    index = full_tokens // coordinator.spine_block_tokens
    next_key = (
        make_block_hash_with_group_id(hashes[index], coordinator.spine)
        if index < len(hashes)
        else None
    )
    node: Node | None = None
    reusable = len(coordinator.full_ids) == 1
    nodes: list[Node] = []
    if hit and reusable:
        end = hit + coordinator.full_lookahead_tokens
        last = coordinator.resident_spine_block(hashes, end)
        node, nodes = _chain_of(blocks.blocks[coordinator.spine], last, order.tree)
        reusable = node is not None and node.tokens == end and node.swa is not None
    memo = Lookup(
        result=result,
        num_tokens=request.num_tokens,
        max_hit_tokens=max_hit_tokens,
        full_tokens=full_tokens,
        node=node,
        swa=node.swa if node is not None else None,
        next_key=next_key,
        num_sealed=coordinator.num_sealed,
        reusable=reusable,
    )
    if not reusable or hit // coordinator.spine_block_tokens < SPAN_COUNT_BLOCKS:
        return memo, None
    lists = list(blocks.blocks)
    lists[coordinator.spine] = HitBlocks(lists[coordinator.spine], nodes, order)
    return memo, tuple(lists)


def _chain_of(
    spine_blocks: list[Any], last: Any | None, tree: Any
) -> tuple[Node | None, list[Node]]:
    """The node of ``last`` and its chain; None unless the hit's blocks are what it starts with."""
    node = tree.node_at(last.block_id) if last is not None else None
    if node is None:
        return None, []
    chain = [node, *node.ancestors()]
    ids = [block_id for part in reversed(chain) for block_id in part.full[0]]
    if ids[: len(spine_blocks)] != [block.block_id for block in spine_blocks]:
        return None, []
    return node, chain
