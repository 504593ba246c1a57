# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager without a scheduler or a model, for any group geometry.

``KvHarness`` builds the stock manager, or ours through ``kv_feature``, and plays the scheduler's
part: look-up, allocation in chunks, decode steps with drafts, end, abort, preemption, external
loads. While it does, it keeps a shadow of what each block *contains*, so a test can tell a hit on
the right KV from a hit on stale KV. Nothing here reads the plugin's own idea of what is cached.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import lcm
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: E402
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from mimo_plugin.engines.vllm.kv.bind import kv_feature  # noqa: E402
from mimo_plugin.engines.vllm.kv.settings import KvSettings  # noqa: E402

_HASH = get_hash_fn_by_name("sha256")
init_none_hash(_HASH)


@dataclass(frozen=True)
class Group:
    """One KV cache group; ``window_tokens`` None is full attention."""

    block_tokens: int
    window_tokens: int | None = None
    draft: bool = False
    layers: int = 1


def full(block_tokens: int, **kwargs: Any) -> Group:
    """A full-attention group."""
    return Group(block_tokens, None, **kwargs)


def swa(block_tokens: int, window_tokens: int, **kwargs: Any) -> Group:
    """A sliding-window group."""
    return Group(block_tokens, window_tokens, **kwargs)


def group_specs(groups: Sequence[Group]) -> list[Any]:
    """vLLM's ``KVCacheGroupSpec`` list for ``groups``."""
    out = []
    for index, group in enumerate(groups):
        common = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        spec: Any = (
            FullAttentionSpec(block_size=group.block_tokens, **common)
            if group.window_tokens is None
            else SlidingWindowSpec(
                block_size=group.block_tokens, sliding_window=group.window_tokens, **common
            )
        )
        names = [f"g{index}.l{layer}" for layer in range(group.layers)]
        out.append(KVCacheGroupSpec(names, spec, is_eagle_group=group.draft))
    return out


#: (group, index of the block in its sequence, hash of all tokens before it, its own tokens)
Content = tuple[int, int, Any, tuple[int, ...]]


class StaleKV(AssertionError):
    """A block table points at KV that is not this request's."""


class KvHarness:
    """One KV cache manager over ``num_blocks`` blocks (block 0 is vLLM's null block).

    ``plugin=None`` is stock vLLM. ``use_eagle`` is what the scheduler passes when a draft model is
    configured: without a group marked ``draft`` every group then drops its last block.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        *,
        plugin: KvSettings | None = None,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        retention_interval: int | None = 0,
        max_model_len: int = 1 << 20,
        max_in_flight_tokens: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.alignment_tokens = lcm(*(g.block_tokens for g in groups))
        self.hash_tokens = min(g.block_tokens for g in groups)
        assert all(g.block_tokens % self.hash_tokens == 0 for g in groups)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=group_specs(groups),
            prefix_cache_retention_interval=retention_interval,
        )
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
        with kv_feature(plugin) if plugin is not None else nullcontext():
            self.manager = scheduler.KVCacheManager(
                kv_cache_config=config,
                max_model_len=max_model_len,
                scheduler_block_size=self.alignment_tokens,
                hash_block_size=self.hash_tokens,
                max_in_flight_tokens=max_in_flight_tokens,
                enable_caching=True,
                use_eagle=use_eagle,
                num_prefill_lookahead=num_prefill_lookahead,
                log_stats=True,
            )
        self.plugin = plugin
        self.coordinator = self.manager.coordinator
        self.pool = self.manager.block_pool
        # Groups whose specs are equal are looked up together: one draft group among them makes
        # all of them look ahead, in stock as here.
        managers = self.coordinator.single_type_managers
        self.lookahead_groups = frozenset(i for i, m in enumerate(managers) if m.use_eagle)
        self._hasher = get_request_block_hasher(self.hash_tokens, _HASH)
        self._count = 0
        #: block id -> what was last written into it
        self.shadow: dict[int, Content] = {}

    # -- requests ----------------------------------------------------------------------------

    def request(self, tokens: Sequence[int], max_tokens: int = 1 << 16) -> Request:
        """A waiting request with real block hashes."""
        self._count += 1
        return Request(
            request_id=f"r{self._count}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def look_up(self, request: Request) -> tuple[Any, int, int]:
        """``(blocks, hit tokens, junction)`` as the scheduler asks for it."""
        result = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = result[2]
        return result

    def admit(
        self,
        request: Request,
        chunk_tokens: int | None = None,
        *,
        external_tokens: int = 0,
        must_fit: bool = True,
        draft_tokens: int = 0,
    ) -> int | None:
        """Look up and start ``request``; its hit in tokens, or None when the pool has no room."""
        blocks, hit, _ = self.look_up(request)
        external = min(external_tokens, max(0, request.num_tokens - 1 - hit))
        start = hit + external
        count = request.num_tokens - start
        if chunk_tokens is not None:
            count = min(count, chunk_tokens)
        got = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            num_lookahead_tokens=draft_tokens,
            full_sequence_must_fit=must_fit,
        )
        if got is None:
            return None
        self.manager.record_prefix_cache_stats(request, hit)
        request.status = RequestStatus.RUNNING
        if external:
            self._write(request, hit, start, external=True)
        self._compute(request, start, start + count)
        request.num_computed_tokens = start + count
        return hit

    def step(
        self, request: Request, chunk_tokens: int | None = None, *, draft_tokens: int = 0
    ) -> bool:
        """Compute the next chunk of a running request; False when the pool has no room."""
        start = request.num_computed_tokens
        count = request.num_tokens - start
        if count <= 0:
            return True
        if chunk_tokens is not None:
            count = min(count, chunk_tokens)
        drafts = draft_tokens if start + count == request.num_tokens else 0
        got = self.manager.allocate_slots(
            request, count + drafts, num_lookahead_tokens=draft_tokens
        )
        if got is None:
            return False
        self._compute(request, start, start + count)
        request.num_computed_tokens = start + count
        return True

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Sampled (or accepted) tokens; their KV is computed by the next :meth:`step`."""
        request.append_output_token_ids(list(tokens))

    def finish(self, request: Request) -> None:
        """End or abort of a running request."""
        self.manager.free(request)
        request.status = RequestStatus.FINISHED_STOPPED

    def preempt(self, request: Request) -> None:
        """As the scheduler preempts: blocks are freed, the request waits again."""
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def run(
        self, prompt: Sequence[int], output: Sequence[int] = (), chunk_tokens: int | None = None
    ) -> int:
        """Serve one request alone, one output token a step; its hit in tokens."""
        request = self.request(prompt)
        hit = self.admit(request, chunk_tokens)
        assert hit is not None, "the pool has no room"
        while request.num_computed_tokens < request.num_tokens:
            assert self.step(request, chunk_tokens)
        for token in output:
            self.append(request, [token])
            if token is not output[-1]:
                assert self.step(request)
        self.finish(request)
        return hit

    # -- what blocks contain -----------------------------------------------------------------

    def _compute(self, request: Request, start: int, stop: int) -> None:
        """What the model does in a step: read the KV each token attends to, write the new KV."""
        self._read(request, start)
        self._write(request, start, stop)

    def _read(self, request: Request, start: int) -> None:
        tables = self.coordinator.get_blocks(request.request_id)
        for gid, group in enumerate(self.groups):
            size = group.block_tokens
            low = 0 if group.window_tokens is None else max(0, start - group.window_tokens + 1)
            for index in range(low // size, -(-start // size)):
                block = tables[gid][index]
                if block.is_null:
                    raise StaleKV(f"group {gid}: block {index} is gone, token {start} reads it")
                end = min(start, (index + 1) * size)
                have = self.shadow.get(block.block_id)
                want = self._content(request, gid, index, end)
                if have != want:
                    raise StaleKV(f"token {start}, block {block.block_id}: {have} is not {want}")

    def _content(self, request: Request, gid: int, index: int, end: int) -> Content:
        """What a block holds after tokens up to ``end`` were written into it."""
        first = index * self.groups[gid].block_tokens
        before = request.block_hashes[first // self.hash_tokens - 1] if first else None
        return gid, index, before, tuple(request.all_token_ids[first:end])

    def _write(self, request: Request, start: int, stop: int, *, external: bool = False) -> None:
        tables = self.coordinator.get_blocks(request.request_id)
        for gid, group in enumerate(self.groups):
            size = group.block_tokens
            for index in range(start // size, -(-stop // size)):
                if index >= len(tables[gid]):
                    raise StaleKV(f"group {gid}: no block for tokens {index * size}..{stop}")
                block = tables[gid][index]
                if block.is_null:
                    if external:
                        continue  # outside the window of what was loaded
                    # Within one chunk the window may already have passed the block's tokens.
                    raise StaleKV(f"group {gid}: block {index} is written but gone")
                if block.ref_cnt != 1:
                    raise StaleKV(f"group {gid}: block {index} is written while shared")
                end = min(stop, (index + 1) * size)
                self.shadow[block.block_id] = self._content(request, gid, index, end)

    def check_contents(self, request: Request, blocks: Any, hit: int) -> None:
        """Every block that a hit of ``hit`` tokens hands out holds this request's KV."""
        for gid, group in enumerate(self.groups):
            size = group.block_tokens
            low = 0
            if group.window_tokens is not None:
                low = max(0, hit - group.window_tokens + 1) // size
            for index in range(low, hit // size):
                block = blocks.blocks[gid][index]
                want = self._content(request, gid, index, (index + 1) * size)
                have = self.shadow.get(block.block_id)
                if block.is_null or have != want:
                    raise StaleKV(f"hit {hit}, group {gid}, block {index}: {have} is not {want}")

    # -- brute force -------------------------------------------------------------------------

    def resident(self, request: Request, gid: int, index: int) -> bool:
        """Is block ``index`` of ``request``'s tokens cached in group ``gid``?"""
        scale = self.groups[gid].block_tokens // self.hash_tokens
        at = (index + 1) * scale - 1
        if at >= len(request.block_hashes):
            return False
        key = make_block_hash_with_group_id(request.block_hashes[at], gid)
        return self.pool.cached_block_hash_to_block.get_one_block(key) is not None

    def is_valid(self, request: Request, hit: int) -> bool:
        """The promise, from its words: full KV below, the last W-1 tokens' SWA, look-ahead."""
        if hit == 0:
            return True
        for gid, group in enumerate(self.groups):
            size = group.block_tokens
            first = 0
            if group.window_tokens is not None:
                first = max(0, hit - (group.window_tokens - 1)) // size
            stop = hit // size + (1 if gid in self.lookahead_groups else 0)
            if not all(self.resident(request, gid, i) for i in range(first, stop)):
                return False
        return True

    def longest_valid(self, request: Request) -> int:
        """Longest aligned valid hit short of the last token, by trying each."""
        step = self.alignment_tokens
        top = (request.num_tokens - 1) // step * step
        return next((h for h in range(top, 0, -step) if self.is_valid(request, h)), 0)

    def full_hit(self, request: Request) -> int:
        """Aligned tokens with resident full-attention KV, short of the last token."""
        out = (request.num_tokens - 1) // self.alignment_tokens * self.alignment_tokens
        for gid, group in enumerate(self.groups):
            if group.window_tokens is None:
                count = 0
                while self.resident(request, gid, count):
                    count += 1
                out = min(out, count * group.block_tokens)
        return out // self.alignment_tokens * self.alignment_tokens

    def stock_hit(self, request: Request) -> int:
        """What stock's own coordinator finds in the pool as it is now."""
        coordinator = self.coordinator
        ours = coordinator.attention_groups
        try:
            coordinator.attention_groups = [
                g._replace(
                    manager_cls=(
                        FullAttentionManager
                        if isinstance(g.spec, FullAttentionSpec)
                        else SlidingWindowManager
                    )
                )
                for g in ours
            ]
            found = HybridKVCacheCoordinator.find_longest_cache_hit(
                coordinator, request.block_hashes, request.num_tokens - 1
            )
        finally:
            coordinator.attention_groups = ours
        return int(found[1])

    # -- pool --------------------------------------------------------------------------------

    def free_by_reference(self) -> set[int]:
        """Ids of the blocks that no request references."""
        return {b.block_id for b in self.pool.blocks if b.ref_cnt == 0 and not b.is_null}

    def hashed(self) -> list[int]:
        """Ids of the blocks that carry a hash, in id order."""
        return [b.block_id for b in self.pool.blocks if b.block_hash is not None]

    def cached_by_group(self) -> dict[int, int]:
        """Hashed blocks per group."""
        out = dict.fromkeys(range(len(self.groups)), 0)
        for block in self.pool.blocks:
            if block.block_hash is not None:
                out[int.from_bytes(block.block_hash[-4:], "big", signed=False)] += 1
        return out


def unique_tokens(start: int, count: int) -> list[int]:
    """``count`` token ids that occur nowhere else."""
    return list(range(start, start + count))


def ids_of(blocks: Iterable[Any]) -> list[int]:
    """Block ids, in order."""
    return [b.block_id for b in blocks]
