# SPDX-License-Identifier: Apache-2.0
"""Per-group managers: leaner look-ups with the same results, and windows held at a turn's end."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager


class LeanFullAttentionManager(FullAttentionManager):  # type: ignore[misc]
    """Full attention: one pass over the hashes without a list per block."""

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
        group_id = kv_cache_group_ids[0]
        get_block = block_pool.cached_block_hash_to_block.get_one_block
        found: list[Any] = []
        append = found.append
        stop = max_length // block_size
        for block_hash in hashes[:stop]:
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


class HoldingSlidingWindowManager(SlidingWindowManager):  # type: ignore[misc]
    """Sliding window: misses are skipped a window at a time; a turn's last window is held."""

    #: set by the coordinator: tokens of a request's prefix whose window must stay, or None
    hold: Any = None

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

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what left the window, but keep the window of the last boundary to checkpoint."""
        if self.hold is not None:
            processed_computed_tokens = self.hold(request_id, processed_computed_tokens)
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)
