# SPDX-License-Identifier: Apache-2.0
"""What waiting requests hit becomes the youngest part of the cache: it is known to be wanted.

Otherwise the requests that start before them evict it first, if it has not been used for a while.
Nothing is held: when no other block is left, these are evicted too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from mimo_plugin.core.affinity import Waiting
from mimo_plugin.core.window import blocks_for_hit
from mimo_plugin.engines.vllm.sched.hits import HitIndex

#: rounds of work for which a prefix counts as protected
_ROUNDS = 8
#: prefixes that are remembered as protected
_REMEMBERED = 4096


class Protection:
    """Moves hits to the young end of the free queue, a few blocks at a time.

    A long hit has tens of thousands of blocks, so what an arrival asks for is done over the
    following steps, from the end of the prefix to its start, which so becomes the youngest.
    """

    def __init__(self, hits: HitIndex) -> None:
        self._hits = hits
        self._todo: deque[tuple[Waiting, Iterator[int]]] = deque()
        self._done: dict[bytes, int] = {}
        self._round = 0

    def ask(self, entry: Waiting, hit_tokens: int) -> None:
        """``entry`` waits and hits ``hit_tokens``."""
        hits = self._hits
        used = getattr(hits.manager, "used_by_waiting", None)
        if used is not None:
            used(entry.item)  # the plugin's own manager keeps ages by prefix, not by block
            return
        if not hits.understands_groups or entry.item.num_computed_tokens > 0:
            return
        end = hits.full_key(entry.item, hit_tokens)
        if end is None or self._round - self._done.get(end, -_ROUNDS) < _ROUNDS:
            return
        if len(self._done) >= _REMEMBERED:
            del self._done[next(iter(self._done))]
        self._done[end] = self._round
        self._todo.append((entry, self._move(entry.item, hit_tokens)))

    def work(self, most_blocks: int) -> None:
        """Go on with what was asked for, at most about ``most_blocks`` blocks."""
        self._round += 1
        while most_blocks > 0 and self._todo:
            entry, moving = self._todo[0]
            count = next(moving, None) if entry.queued else None
            if count is None:
                self._todo.popleft()
            else:
                most_blocks -= count

    def _move(self, request: Any, hit_tokens: int) -> Iterator[int]:
        """Move the hit's idle blocks, 64 at a time; yields how many were looked at."""
        hits = self._hits
        hashes, free_queue = hits.hashes_of(request), hits.pool.free_block_queue
        # Full attention before windows: what is moved last dies last.
        order = sorted(range(len(hits.geometry)), key=lambda g: not hits.geometry[g].is_full)
        for group in order:
            of_group = hashes[group]
            blocks = blocks_for_hit(hits.geometry[group], hit_tokens)
            for stop in range(blocks.stop, blocks.start, -64):
                indices = range(max(blocks.start, stop - 64), stop)
                idle = []
                for index in reversed(indices):
                    key = make_block_hash_with_group_id(of_group[index], group)
                    block = hits.block_of(key)
                    if block is not None and block.ref_cnt == 0:
                        idle.append(block)
                for block in idle:
                    free_queue.remove(block)
                free_queue.append_n(idle)
                yield len(indices)
