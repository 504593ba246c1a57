# SPDX-License-Identifier: Apache-2.0
"""Per-group managers: the same results as upstream's for less CPU time."""

from __future__ import annotations

from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from mimo_plugin.engines.vllm.kv.lookup import HitBlocks


class LeanFullAttentionManager(FullAttentionManager):  # type: ignore[misc]
    """Full attention: one pass over the hashes without a list per block."""

    @classmethod
    def _get_num_evictable_blocks(cls, blocks: Any) -> int:
        """As upstream; a long remembered hit counts by span."""
        if isinstance(blocks, HitBlocks):
            return blocks.num_evictable()
        count: int = super()._get_num_evictable_blocks(blocks)
        return count

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """As upstream: ``(blocks per group, hit length in tokens)``."""
        block_size = kv_cache_spec.block_size * dcp_world_size
        if len(kv_cache_group_ids) != 1 or alignment_tokens < block_size:
            result: tuple[tuple[list[Any], ...], int] = super().find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
            return result
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        scale = block_size // block_pool.hash_block_size
        raw = hashes if scale == 1 else hashes.block_hashes
        group_id = kv_cache_group_ids[0]
        get_block = block_pool.cached_block_hash_to_block.get_one_block
        found: list[Any] = []
        append = found.append
        stop = max_length // block_size
        # A larger block's hash is the hash at its end: step over the rest without a view.
        for block_hash in islice(raw, scale - 1, stop * scale, scale):
            block = get_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                break
            append(block)
        hit = len(found) * block_size
        if drop_eagle_block and hit:
            hit -= block_size
        hit -= hit % alignment_tokens
        del found[-(-hit // block_size) :]
        return (found,), hit


class LeanSlidingWindowManager(SlidingWindowManager):  # type: ignore[misc]
    """Sliding window: a miss skips a window of candidates at a time."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """As upstream: the rightmost aligned run of resident blocks that covers a window.

        A run needs ``need`` blocks ending on a boundary (plus the look-ahead block with EAGLE).
        The leftmost block of a candidate run is probed first: if it is missing, no run that
        contains it can be complete, so the search jumps to runs that end before it.
        """
        block_size = kv_cache_spec.block_size
        need = cls._contiguous_blocks_for_hit(
            kv_cache_spec.sliding_window, block_size, drop_eagle_block
        )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        per_unit = max(1, alignment_tokens // block_size)
        lookahead = 1 if drop_eagle_block else 0
        if alignment_tokens % block_size or not need:
            result: tuple[tuple[list[Any], ...], int] = super().find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
            return result
        get_blocks = block_pool.get_cached_block
        max_blocks = max_length // block_size
        # ``end`` is the exclusive end of the run, look-ahead block included.
        end = (max_blocks - lookahead) // per_unit * per_unit + lookahead
        while end > lookahead:
            first = max(0, end - need)
            run: list[Any] = []
            for index in range(first, end):
                blocks = get_blocks(hashes[index], kv_cache_group_ids)
                if blocks is None:
                    break
                run.append(blocks)
            else:
                keep = end - lookahead - first
                null = [block_pool.null_block] * first
                groups = range(len(kv_cache_group_ids))
                hit = tuple(null + [blocks[g] for blocks in run[:keep]] for g in groups)
                return hit, (end - lookahead) * block_size
            # No complete run contains the missing block, so the next one ends before it.
            end = (first + len(run) - lookahead) // per_unit * per_unit + lookahead
        return tuple([] for _ in kv_cache_group_ids), 0

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """As upstream, comparing blocks by identity (their ``==`` compares every field)."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        null = self._null_block
        stop = first = min(last_block, len(blocks))
        while first > first_block and blocks[first - 1] is not null:
            first -= 1
        if first < stop:
            freed = blocks[first:stop]
            blocks[first:stop] = [null] * (stop - first)
            freed.reverse()
            self.block_pool.free_blocks(freed)
