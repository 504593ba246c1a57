# SPDX-License-Identifier: Apache-2.0
"""SGLang's device pools, host pools and file storage in one process, without a model.

Real: the radix cache, all pools and allocators, the controller with its threads, the file backend.
The reference platform of ``integration_tests/sglang_cpu`` supplies the copies between the pools.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from mimo_sglang_cpu.host_copies import install

from benchmarks.sglang_pools import Pools
from benchmarks.sglang_sim import SglangSimulator

PAGE_TOKENS, K_DIM = 16, 6
SETTLE_S = 60.0


def wait_until(done: Any, poll: Any) -> None:
    """Call ``poll`` until ``done`` says so."""
    deadline = time.monotonic() + SETTLE_S
    while not done():
        assert time.monotonic() < deadline, "the storage does not come to rest"
        poll()
        time.sleep(0.005)


class Chain(SglangSimulator):
    """One engine whose KV goes through the host to ``folder``.

    Args:
        folder: of the file backend.
        v_dim: width of a value; a key has ``K_DIM``.
        max_bytes: what the file backend may hold.
    """

    def __init__(self, folder: Path, v_dim: int, max_bytes: int) -> None:
        self.folder, self.v_dim, self.max_bytes = folder, v_dim, max_bytes
        pools = Pools(full_tokens=8192, swa_tokens=4096, max_running=2, chunk_tokens=512)
        super().__init__(pools, None)

    def _make_cache(self, settings: Any, store: Any) -> Any:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        install()
        extra = {
            "file_storage_path": str(self.folder),
            "max_size": self.max_bytes,
            "eviction_ratio": 1.0,
            "prefetch_threshold": PAGE_TOKENS,
        }
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name="tiny",
            page_size=PAGE_TOKENS,
            device="cpu",
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct",
            hicache_write_policy="write_through",
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )
        set_global_server_args_for_scheduler(arguments)
        get_parallel().override_permanently(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0, attn_dcp_size=1
        )
        pools = self.pools
        sizes = {
            "size": pools.full_tokens,
            "size_swa": pools.swa_tokens,
            "page_size": PAGE_TOKENS,
            "dtype": torch.float32,
            "device": "cpu",
        }
        self.kv = SWAKVPool(
            **sizes,
            head_num=2,
            head_dim=K_DIM,
            v_head_dim=self.v_dim,
            swa_head_dim=K_DIM,
            swa_v_head_dim=self.v_dim,
            swa_attention_layer_ids=[1, 2],
            full_attention_layer_ids=[0],
        )
        for buffer in self.buffers():
            buffer.normal_()
        rows = ReqToTokenPool(
            size=pools.max_running + 1,
            max_context_len=pools.full_tokens,
            device="cpu",
            enable_memory_saver=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=SWATokenToKVPoolAllocator(
                **sizes, kvcache=self.kv, need_sort=False
            ),
            page_size=PAGE_TOKENS,
            sliding_window_size=pools.window_tokens,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
        )
        cache = UnifiedRadixCache(params)
        cache.init_hicache(arguments, params)
        for entry in cache.host_pool_group.entries:
            entry.host_pool.pin_memory = False  # there is no device to pin memory for
        return cache

    def buffers(self) -> list[Any]:
        """K and V of every layer, the full-attention layer first."""
        full, swa = self.kv.full_kv_pool, self.kv.swa_kv_pool
        return [*full.k_buffer, *full.v_buffer, *swa.k_buffer, *swa.v_buffer]

    def serve(self, prompt: list[int]) -> int:
        """Compute a prompt with one token of output and wait for the storage; returns the hit."""
        self.submit(0, prompt, [1])
        ended: list[Any] = []
        while not ended:
            ended = self.step()
        self._settle()
        hit = ended[0].hit
        assert hit is not None
        return int(hit)

    def _settle(self) -> None:
        cache, controller = self.cache, self.cache.cache_controller

        def idle() -> bool:
            waits = (controller.write_queue, controller.ack_write_queue)
            ongoing = (cache.ongoing_write_through, cache.ongoing_backup, cache.ongoing_prefetch)
            return not any(waits) and not any(ongoing)

        wait_until(idle, cache.check_hicache_events)
        touches = getattr(controller, "touch_queue", None)
        if touches is not None:
            wait_until(touches.empty, lambda: None)
            time.sleep(0.05)  # the last one is out of the queue, not done yet

    def _request(self, prompt: list[int]) -> Any:
        self.submit(0, prompt, [1])
        req = self.waiting.pop().req
        req.init_next_round_input(self.cache)
        return req

    def restore(self, prompt: list[int]) -> tuple[int, list[Any]]:
        """Bring a prompt back from the folder into the device's pools.

        Returns:
            Tokens of the hit, and their KV: full attention's, then the last window's.
        """
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams

        cache = self.cache
        req = self._request(prompt)
        handle = CacheRequestHandle(req.rid, 0)
        cache.prefetch_from_storage(handle, req.last_host_node, req.origin_input_ids[:-1])

        def poll() -> None:
            cache.check_hicache_events()
            cache.check_prefetch_progress(handle)

        wait_until(lambda: handle not in cache.ongoing_prefetch, poll)
        req.init_next_round_input(cache)
        loaded, node = cache.init_load_back(
            InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
        )
        cache.ready_to_load_host_cache()
        wait_until(lambda: not cache.ongoing_load_back, cache.check_hicache_events)
        return loaded, self.kv_of(cache.path_device_indices(node) if loaded else torch.tensor([]))

    def cached(self, prompt: list[int]) -> tuple[int, list[Any]]:
        """A prompt's hit in the device's pools, and its KV as in :meth:`restore`."""
        req = self._request(prompt)
        return req.prefix_len, self.kv_of(self.cache.path_device_indices(req.last_node))

    def kv_of(self, slots: Any) -> list[Any]:
        """KV of consecutive tokens."""
        slots = slots.long()
        window = self.allocator.full_to_swa_index_mapping[slots[-self.pools.window_tokens :]]
        parts = self.buffers()
        return [parts[i][slots if i < 2 else window].clone() for i in range(len(parts))]

    def stored(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the folder can give back, by its own account."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        key = prompt[: (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS]
        hashes = get_storage_hash_str(key, None, page_size=PAGE_TOKENS)
        window = PoolTransfer(
            name=PoolName.SWA,
            keys=hashes[-(self.pools.window_tokens // PAGE_TOKENS) :],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        backend = self.cache.cache_controller.storage_backend
        return int(backend.batch_exists_v2(hashes, [window]).kv_hit_pages) * PAGE_TOKENS

    def close(self) -> None:
        """Stop the controller's threads."""
        self.cache.cache_controller.detach_storage_backend()
