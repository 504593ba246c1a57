# SPDX-License-Identifier: Apache-2.0
"""vLLM's free block queue and block pool, with our order of death behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import dropwhile, islice
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)

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
        fresh, evicted = self.order.pop(n)
        return [blocks[i] for i in fresh + evicted]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a given free block out of the queue."""
        self.order.remove(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        """Free one block."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks whose content may be used again."""
        # Both lists first: freeing may take hashes off blocks that nothing makes reachable.
        cached = [b.block_id for b in blocks if b.block_hash is not None]
        empty = [b.block_id for b in blocks if b.block_hash is None]
        self.order.add_cached(cached)
        self.order.add_empty(empty)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks whose content is of no use."""
        if blocks:
            self.order.add_empty([b.block_id for b in blocks])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, roughly in order of death."""
        return [self.blocks[i] for i in self.order.free_ids()]

    def iter_blocks_after(self, block: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after ``block`` in that order (all when it is None or no longer free)."""
        ids = self.order.iter_free()
        if block is not None and block.ref_cnt == 0 and not block.is_null:
            ids = islice(dropwhile(lambda i: i != block.block_id, ids), 1, None)
        return (self.blocks[i] for i in ids)


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
        order.on_drop = self._drop_hashes
        self.order = order
        return order

    def _drop_hashes(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._maybe_evict_cached_block(self.blocks[block_id])

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As upstream; blocks that hold nothing skip the search for a hash to take off."""
        order = self.order
        if order is None or self.metrics_collector is not None or self._reuse_watchers:
            stock: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
            return stock
        fresh, evicted = order.pop(num_blocks)
        blocks = self.blocks
        for block_id in evicted:
            self._maybe_evict_cached_block(blocks[block_id])
        out = [blocks[i] for i in fresh + evicted]
        for block in out:
            block.ref_cnt = 1
        return out

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As upstream: the first block given is the first to be reused."""
        order = self.order
        if order is None:
            super().free_blocks(ordered_blocks)
            return
        empty: list[int] = []
        cached: list[int] = []
        foreign: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.pool is not self and block.pool is not None:
                foreign.append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (empty if block._block_hash is None else cached).append(block.block_id)
        if empty:
            order.add_empty(empty)
        if cached:
            order.add_cached(cached)
        if foreign:
            super().free_blocks(foreign)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As upstream: reference blocks that a request adopts."""
        order = self.order
        if order is None or self.metrics_collector is not None:
            super().touch(blocks)
            return
        order.remove_many(b.block_id for b in blocks if b.ref_cnt == 0 and not b.is_null)
        for block in blocks:
            if not block.is_null:
                block.ref_cnt += 1

    def hash_blocks(
        self,
        request: Any,
        table: list[KVCacheBlock],
        start: int,
        stop: int,
        block_size: int,
        group_id: int,
        mask: list[bool] | None = None,
    ) -> None:
        """Hash ``table[start:stop]`` (where ``mask`` allows) as cached blocks of ``group_id``.

        The same as upstream's ``cache_full_blocks``, which serves here whenever KV events are on;
        without events there is no need to touch the hashes of the rest of the prompt.
        """
        if self.enable_kv_cache_events:
            self.cache_full_blocks(
                request=request,
                blocks=table,
                num_cached_blocks=start,
                num_full_blocks=stop,
                block_size=block_size,
                kv_cache_group_id=group_id,
                block_mask=mask,
            )
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        insert = self.cached_block_hash_to_block.insert
        for index in range(start, stop):
            block = table[index]
            if block.is_null or (mask is not None and not mask[index - start]):
                continue
            key = make_block_hash_with_group_id(hashes[index], group_id)
            block.set_block_hash(key, num_tokens=(index + 1) * block_size)
            insert(key, block)

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
