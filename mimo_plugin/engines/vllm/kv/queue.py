# SPDX-License-Identifier: Apache-2.0
"""vLLM's free block queue and block pool, with our order of death behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from mimo_plugin.core.eviction import DeathOrder


class OrderedFreeQueue:
    """Stands in for ``FreeKVCacheBlockQueue``: the same methods, but death follows the tree.

    Blocks without a hash are reused first (last freed, first reused), as upstream does.
    """

    def __init__(self, blocks: list[KVCacheBlock], order: DeathOrder) -> None:
        self.blocks = blocks
        self.order = order

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.order.num_free_blocks

    def popleft(self) -> KVCacheBlock:
        """The next block to be reused. Raises ValueError when none is free."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The next ``n`` blocks to be reused. Raises ValueError when fewer are free."""
        blocks = self.blocks
        return [blocks[i] for i in self.order.pop(n)]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a given free block out of the queue."""
        self.order.remove(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        """Free one block."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks whose content may be used again."""
        cached = [b.block_id for b in blocks if b.block_hash is not None]
        self.order.add_cached(cached)
        if len(cached) != len(blocks):
            self.order.add_empty([b.block_id for b in blocks if b.block_hash is None])

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks whose content is of no use."""
        if blocks:
            self.order.add_empty([b.block_id for b in blocks])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, roughly in order of death."""
        return [self.blocks[i] for i in self.order.free_ids()]

    def iter_blocks_after(self, block: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after ``block`` in that order (all when it is None or no longer free)."""
        ids = self.order.free_ids()
        start = 0
        if block is not None and block.block_id in ids:
            start = ids.index(block.block_id) + 1
        return (self.blocks[i] for i in ids[start:])


class OrderedBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's block pool over an :class:`OrderedFreeQueue`.

    ``install_order`` is called once the coordinator knows the groups; until then the pool is stock.
    """

    order: DeathOrder | None = None
    free_block_queue: Any

    def install_order(self, make_order: Callable[[int], DeathOrder]) -> DeathOrder:
        """Swap the free queue for an ordered one, keeping what is free now."""
        free: list[KVCacheBlock] = self.free_block_queue.get_all_free_blocks()
        for block in free:
            block.prev_free_block = block.next_free_block = None
        order = make_order(self.num_gpu_blocks)
        order.add_empty([b.block_id for b in free])
        self.free_block_queue = OrderedFreeQueue(self.blocks, order)
        self.order = order
        return order

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Invalidate cached blocks (a connector failed to load them)."""
        order = self.order
        if order is not None:
            for block_id in block_ids:
                if self.blocks[block_id].block_hash is not None:
                    order.invalidate(block_id)
        super().evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop every hash; False when blocks are still in use (as upstream)."""
        done: Any = super().reset_prefix_cache()
        if done and self.order is not None:
            self.order.clear()
        return bool(done)


def ids_of(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Block ids, in order."""
    return [b.block_id for b in blocks]
