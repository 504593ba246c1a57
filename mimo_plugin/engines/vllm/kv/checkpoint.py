# SPDX-License-Identifier: Apache-2.0
"""The SWA blocks of one checkpoint: which are cached already, which are still to be hashed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

from mimo_plugin.core.window import blocks_for_hit


@dataclass(slots=True)
class WindowBlocks:
    """Blocks of a checkpoint in every SWA group, as ids.

    ``runs`` says, per group with something to hash: group id, block indices, mask of the new ones.
    """

    all_ids: list[int] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)
    new_draft_ids: set[int] = field(default_factory=set)
    runs: list[tuple[int, range, list[bool]]] = field(default_factory=list)


def collect_window(coordinator: Any, request: Any, tokens: int) -> WindowBlocks | None:
    """The window that a hit of ``tokens`` needs, from the cache or from the request's own blocks.

    None when a block of it is in neither: it left the window before it was worth keeping.
    """
    pool = coordinator.block_pool
    get_block = pool.cached_block_hash_to_block.get_one_block
    window = WindowBlocks()
    for gid in coordinator.swa_ids:
        manager = coordinator.single_type_managers[gid]
        table = manager.req_to_blocks[request.request_id]
        hashes = resolve_block_hashes(
            request.block_hashes, pool.hash_block_size, manager.block_size
        )
        run = blocks_for_hit(coordinator.geometry[gid], tokens)
        mask: list[bool] = []
        for index in run:
            block = get_block(make_block_hash_with_group_id(hashes[index], gid))
            mask.append(block is None)
            if block is None:
                block = table[index] if index < len(table) else None
                if block is None or block.is_null or block.block_hash is not None:
                    return None
                window.new_ids.append(block.block_id)
                if gid in coordinator.draft_ids:
                    window.new_draft_ids.add(block.block_id)
            window.all_ids.append(block.block_id)
        if any(mask):
            window.runs.append((gid, run, mask))
    return window


def hash_window(coordinator: Any, request: Any, window: WindowBlocks) -> None:
    """Hash the new blocks of ``window``."""
    for gid, run, mask in window.runs:
        manager = coordinator.single_type_managers[gid]
        table = manager.req_to_blocks[request.request_id]
        coordinator.block_pool.hash_blocks(
            request, table, run.start, run.stop, manager.block_size, gid, mask
        )


def first_new_end(coordinator: Any, window: WindowBlocks) -> int | None:
    """End, in tokens, of the first block that ``window`` adds to the cache, or None."""
    return min(
        (
            (run.start + mask.index(True) + 1) * coordinator.single_type_managers[gid].block_size
            for gid, run, mask in window.runs
        ),
        default=None,
    )
