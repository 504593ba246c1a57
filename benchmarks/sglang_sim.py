# SPDX-License-Identifier: Apache-2.0
"""SGLang's radix cache, pools and allocators, driven by seeded workloads without a model.

Real: the unified radix cache with its tree core in Rust, the two pools and their allocators, the
prefill budget, the hand-over of a request's KV and its release. Made here: the order of steps (one
prefill batch or one decode batch, first come first served, one prompt in chunks at a time) and
retraction (the request with the shortest output goes back to the queue). Nothing is computed.

Needs the environment of SGLang, ``.venv-sglang``.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sglang_check import Contents, check_pools
from benchmarks.sglang_pools import Pools, Store, make_cache
from benchmarks.workloads import Session

#: share of a running request's remaining output that admission keeps free
_NEW_TOKEN_RATIO = 0.4


@dataclass
class Totals:
    """What a run did, in tokens and requests."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_tokens: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    steps: int = 0

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens computed though they had been computed before."""
        return self.possible_tokens - self.hit_tokens


@dataclass
class _Running:
    req: Any
    session: int
    output: list[int]
    reserved: int = 0
    hit: int | None = None
    done: int = field(default=0)


class SglangSimulator:
    """One engine.

    Args:
        pools: sizes.
        settings: the plugin's section ``kv``; None is stock.
        check: after each step account for every slot, and before each read for what is in it.
        store: L3 below the cache, None: device only.
    """

    def __init__(
        self,
        pools: Pools,
        settings: dict[str, Any] | None,
        check: bool = False,
        store: Store | None = None,
    ) -> None:
        self.pools = pools
        self.check = check
        self.totals = Totals()
        self.cache = self._make_cache(settings, store)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.rows = self.cache.req_to_token_pool
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.chunked: _Running | None = None
        self.seen: set[int] = set()
        self._serial = 0
        self._contents = Contents(self) if check else None

    def _make_cache(self, settings: dict[str, Any] | None, store: Store | None) -> Any:
        return make_cache(self.pools, settings, store)

    # -- requests ----------------------------------------------------------------------------

    def submit(self, session: int, prompt: list[int], output: list[int]) -> None:
        """Queue a request that will answer with ``output``."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._serial += 1
        req = Req(
            rid=str(self._serial),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(max_new_tokens=len(output)),
        )
        if self._contents is not None:
            self._contents.plan(req, output)
        self.waiting.append(_Running(req, session, output))

    def _pages(self, tokens: list[int]) -> Iterable[int]:
        page, chain = self.pools.page_tokens, 0
        for at in range(0, len(tokens) - page + 1, page):
            chain = hash((chain, *tokens[at : at + page]))
            yield chain

    def _possible(self, tokens: list[int]) -> int:
        """What a cache that never evicts would reuse of a prompt."""
        hit = 0
        for chain in self._pages(tokens[:-1]):
            if chain not in self.seen:
                break
            hit += self.pools.page_tokens
        return hit

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self.waiting or self.running or self.chunked)

    # -- steps -------------------------------------------------------------------------------

    def step(self) -> list[_Running]:
        """One prefill or decode batch; returns the requests that ended."""
        self.totals.steps += 1
        batch = self._admit()
        ended = self._prefill(batch) if batch else self._decode()
        if self.check:
            check_pools(self)
        return ended

    def _admit(self) -> list[_Running]:
        budget = self.allocator.create_prefill_budget(self.cache)
        for item in self.running:
            left = int((len(item.output) - item.done) * _NEW_TOKEN_RATIO)
            budget.total_offset += left
            budget.swa_offset += min(left, self.pools.window_tokens)
        room = self.pools.chunk_tokens
        batch: list[_Running] = []
        if self.chunked is not None:
            item = self.chunked
            room = budget.available_chunk_tokens(room) or 0
            if room < self.pools.page_tokens:
                return []  # running requests go on until there is room
            self._extend_to(item, room)
            budget.reserve(item.req.extend_end - item.req.prefix_len, len(item.output))
            room -= item.req.extend_end - item.req.prefix_len
            batch.append(item)
        while self.waiting and room >= self.pools.page_tokens and self.chunked is None:
            item = self.waiting[0]
            if len(self.running) + len(batch) >= self.pools.max_running:
                break
            req = item.req
            req.init_next_round_input(self.cache)
            left = len(req.full_untruncated_fill_ids) - req.prefix_len
            lock = self.cache.lock(req.last_node)
            new = len(item.output) - item.done
            fits, _ = budget.check_prefill(
                extend_input_len=left,
                total_tokens=left + new + self.pools.page_tokens,
                max_new_tokens=new,
                input_tokens=left,
                swa_host_hit_length=0,
                chunk_limit=room,
            )
            if not fits:
                self.cache.unlock(lock)
                break
            self.waiting.popleft()
            req.lock = lock
            self._start(item)
            self._extend_to(item, room)
            budget.reserve(req.extend_end - req.prefix_len, new, chunk_limit=room)
            room -= req.extend_end - req.prefix_len
            batch.append(item)
            if req.extend_end < len(req.full_untruncated_fill_ids):
                self.chunked = item
        return batch

    def _start(self, item: _Running) -> None:
        req = item.req
        hit = req.prefix_len
        if item.hit is None:
            item.hit = hit
            tokens = list(req.full_untruncated_fill_ids)
            self.totals.requests += 1
            self.totals.prompt_tokens += len(tokens)
            self.totals.hit_tokens += hit
            self.totals.possible_tokens += self._possible(tokens)
        (row,) = self.rows.alloc([req])
        assert row == req.kv.req_pool_idx
        if hit:
            self.rows.write((row, slice(0, hit)), self.cache.prefix_device_indices(req).int())

    def _extend_to(self, item: _Running, room: int) -> None:
        req = item.req
        end = len(req.full_untruncated_fill_ids)
        if end - req.prefix_len > room:
            end = req.prefix_len + room // self.pools.page_tokens * self.pools.page_tokens
        req.extend_end = end

    def _prefill(self, batch: list[_Running]) -> list[_Running]:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache

        page = self.pools.page_tokens
        for item in batch:
            req = item.req
            start, end = req.prefix_len, req.extend_end
            evict_from_tree_cache(self.cache, end - start + page)
            self._allocate(req, start, end)
            self.totals.computed_tokens += end - start
        ended = []
        for item in batch:
            req = item.req
            if req.extend_end < len(req.full_untruncated_fill_ids):
                checkpoint_kv_cache(req, self.cache)
                continue
            if self.chunked is item:
                self.chunked = None
            self.seen.update(self._pages(list(req.full_untruncated_fill_ids)))
            self._emit(item)
            if req.finished():
                ended.append(self._end(item))
            else:
                checkpoint_kv_cache(req, self.cache)
                self.running.append(item)
        return ended

    def _allocate(self, req: Any, start: int, end: int) -> None:
        import torch

        row = self.rows.req_to_token[req.kv.req_pool_idx]
        last = row[start - 1 : start].long() if start else torch.tensor([-1])
        before, after = torch.tensor([start]), torch.tensor([end])
        slots = self.allocator.alloc_extend(before, before, after, after, last, end - start)
        assert slots is not None, "admission let in what does not fit"
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.int())
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        if self._contents is not None:
            self._contents.check(req, start)
            self._contents.write(req, start, slots)

    def _emit(self, item: _Running) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        item.req.output_ids.append(item.output[item.done])
        item.done += 1
        if item.done == len(item.output):
            item.req.finished_reason = FINISH_LENGTH(length=item.done)
            item.req.finished_len = item.done

    def _end(self, item: _Running) -> _Running:
        from sglang.srt.mem_cache.common import release_kv_cache

        req = item.req
        self.seen.update(self._pages([*req.origin_input_ids, *req.output_ids][:-1]))
        release_kv_cache(req, self.cache, checkpoint=True)
        return item

    def _decode(self) -> list[_Running]:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        page = self.pools.page_tokens
        for item in self.running:
            req = item.req
            if req.decode_batch_idx >= 1:
                self.cache.evict_sliding_windows(req, req.seqlen - 1, eviction_interval=128)
        while self.running:
            need = sum(self._new_pages(item) for item in self.running) * page
            evict_from_tree_cache(self.cache, need)
            if self.allocator.available_size() >= need:
                break
            self._retract()
        ended = []
        for item in list(self.running):
            req = item.req
            count = self._growth(item)
            self._allocate(req, req.kv.kv_allocated_len, req.kv.kv_allocated_len + count)
            req.decode_batch_idx += count
            for _ in range(count):
                self._emit(item)
            if req.finished():
                self.running.remove(item)
                ended.append(self._end(item))
        return ended

    def _growth(self, item: _Running) -> int:
        return min(self.pools.decode_tokens, len(item.output) - item.done)

    def _new_pages(self, item: _Running) -> int:
        page, held = self.pools.page_tokens, item.req.kv.kv_allocated_len
        pages: int = -(-(held + self._growth(item)) // page) - -(-held // page)
        return pages

    def _retract(self) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        item = min(self.running, key=lambda one: one.done)
        self.running.remove(item)
        release_kv_cache(item.req, self.cache, checkpoint=False)
        item.req.reset_for_retract()
        self.waiting.appendleft(item)
        self.totals.retractions += 1

    # -- checks ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the tree and the pools once nothing runs."""
        assert not self.busy
        self.check = True
        check_pools(self)
        self.cache.sanity_check()


def play(
    simulator: SglangSimulator, chats: list[Session], *, together: int = 4, seed: int = 0
) -> Totals:
    """Run sessions to their end; when a slot is free a random idle session goes on."""
    rng = random.Random(seed + 77)
    answers = random.Random(seed + 10_000)
    turns = {index: next(chat) for index, chat in enumerate(chats)}
    idle = sorted(turns)
    active = 0
    while idle or active:
        while idle and active < together:
            index = idle.pop(rng.randrange(len(idle)))
            prompt, count = turns[index]
            simulator.submit(index, prompt, [answers.randrange(2, 150_000) for _ in range(count)])
            active += 1
        for item in simulator.step():
            active -= 1
            try:
                turns[item.session] = chats[item.session].send(item.output)
            except StopIteration:
                continue
            idle.append(item.session)
    simulator.finish()
    return simulator.totals
