# SPDX-License-Identifier: Apache-2.0
"""SGLang's radix cache, pools and allocators, driven by seeded workloads without a model.

Real: the unified radix cache with its tree core in Rust, the two pools and their allocators, the
prefill budget, the hand-over of a request's KV and its release. Made here: the order of steps (one
prefill batch or one decode batch, first come first served, one prompt in chunks at a time) and
retraction (the request with the shortest output goes back to the queue). Nothing is computed.

Needs the environment of SGLang: ``.venv-sglang/bin/python -m benchmarks.sglang_sim``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.workloads import LONG, MIX, Mix, Session, sessions

MIXES: dict[str, Mix] = {"mix": MIX, "long": LONG}
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


@dataclass(frozen=True)
class Pools:
    """Sizes in tokens; a page belongs to one pool."""

    full_tokens: int = 200_000
    swa_tokens: int = 40_000
    page_tokens: int = 16
    window_tokens: int = 128
    chunk_tokens: int = 2048
    max_running: int = 16
    #: tokens that a running request grows by in one decode step; many at once only saves time
    decode_tokens: int = 16


@dataclass
class _Running:
    req: Any
    session: int
    output: list[int]
    reserved: int = 0
    hit: int | None = None
    done: int = field(default=0)


class SglangSimulator:
    """One engine. ``settings`` is the plugin's section ``kv``; None is stock."""

    def __init__(self, pools: Pools, settings: dict[str, Any] | None, check: bool = False) -> None:
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(
            ServerArgs(model_path="dummy", page_size=pools.page_tokens, device="cpu")
        )
        self.pools = pools
        self.check = check
        self.totals = Totals()
        self.cache = self._make_cache(settings)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.rows = self.cache.req_to_token_pool
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.chunked: _Running | None = None
        self.seen: set[int] = set()
        self._serial = 0
        self._contents = Contents(self) if check else None

    def _make_cache(self, settings: dict[str, Any] | None) -> Any:
        import torch
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        pools = self.pools
        kv = SWAKVPool(
            size=pools.full_tokens,
            size_swa=pools.swa_tokens,
            page_size=pools.page_tokens,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=1,
            swa_attention_layer_ids=[1],
            full_attention_layer_ids=[0],
            device="cpu",
        )
        allocator = SWATokenToKVPoolAllocator(
            size=pools.full_tokens,
            size_swa=pools.swa_tokens,
            page_size=pools.page_tokens,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=kv,
            need_sort=False,
        )
        rows = ReqToTokenPool(
            size=pools.max_running + 1,
            max_context_len=pools.full_tokens,
            device="cpu",
            enable_memory_saver=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=pools.page_tokens,
            sliding_window_size=pools.window_tokens,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
        )
        if settings is None:
            return UnifiedRadixCache(params)
        from mimo_plugin.config import parse_config
        from mimo_plugin.engines.sglang.kv.accounting import Accounting
        from mimo_plugin.engines.sglang.kv.cache import MimoRadixCache
        from mimo_plugin.engines.sglang.kv.settings import (
            message_start_ids,
            retention_rule,
            swa_group,
        )

        config = parse_config({"kv": settings}, environ={}, engine="sglang")
        assert config is not None
        cache = MimoRadixCache(params)
        group = swa_group(cache.sliding_window_size, cache.page_size)
        cache.configure(
            rule=retention_rule(config.kv, group),
            group=group,
            start_ids=message_start_ids(config.kv, lambda: None),
            accounting=Accounting(None, cache.page_size),
        )
        return cache

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

    # -- steps -------------------------------------------------------------------------------

    def step(self) -> list[_Running]:
        """One prefill or decode batch; returns the requests that ended."""
        self.totals.steps += 1
        batch = self._admit()
        ended = self._prefill(batch) if batch else self._decode()
        if self.check:
            self._check_pools()
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

    def _check_pools(self) -> None:
        """Every slot is free, in the tree, or a running request's own: none lost, none twice."""
        from sglang.srt.managers.scheduler_components.pool_stats_observer import (
            kv_private_swa_tokens,
            kv_private_tokens,
        )

        page = self.pools.page_tokens
        owners = [item.req.kv for item in self.running]
        if self.chunked is not None:
            owners.append(self.chunked.req.kv)
        full = sum(kv_private_tokens(kv, page) for kv in owners)
        swa = sum(kv_private_swa_tokens(kv, page) for kv in owners)
        cache, allocator = self.cache, self.allocator
        full += cache.full_evictable_size() + cache.full_protected_size()
        swa += cache.swa_evictable_size() + cache.swa_protected_size()
        assert full + allocator.full_available_size() == self.pools.full_tokens
        assert swa + allocator.swa_available_size() == self.pools.swa_tokens

    def finish(self) -> None:
        """Check the tree and the pools once nothing runs."""
        assert not (self.waiting or self.running or self.chunked)
        self.check = True
        self._check_pools()
        self.cache.sanity_check()


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


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", choices=sorted(MIXES), default="mix")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--full", type=int, default=150_000)
    parser.add_argument("--swa", type=int, default=19_200)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--kv", default="{}", help="the plugin's section kv")
    parser.add_argument("--only", choices=("stock", "plugin"))
    arguments = parser.parse_args(argv)
    os.environ.setdefault("SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK", "1")
    for seed in range(arguments.seeds):
        for name in ("stock", "plugin"):
            if arguments.only not in (None, name):
                continue
            settings = json.loads(arguments.kv) if name == "plugin" else None
            if settings is not None:
                settings.setdefault("message_start_token_ids", [1])
            pools = Pools(full_tokens=arguments.full, swa_tokens=arguments.swa)
            simulator = SglangSimulator(pools, settings)
            totals = play(
                simulator,
                sessions(MIXES[arguments.mix], seed),
                together=arguments.together,
                seed=seed,
            )
            row = asdict(totals) | {"recomputed_tokens": totals.recomputed_tokens}
            print(json.dumps({"policy": name, "seed": seed, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
