# SPDX-License-Identifier: Apache-2.0
"""What SGLang does not tell or ask a storage backend: wrapped, once a process.

- **Keep-alive.** When a request's KV first goes into the tree, the backend is told of the prefix
  that the request had found there.
- **Cut hits.** Where host memory has room for a part of a stored prefix only, SGLang takes what
  fits. A length at which no window ends can't be restored, and the whole hit would be lost; so it
  is cut down to the longest that can.
- **One window.** Of sliding-window layers SGLang loads, from host memory, the nodes of its tree
  that cover the last window. The first of them is split where the window begins, so that the
  window is all that is loaded.
- **Host memory.** SGLang splits it among full-attention and sliding-window layers as on the
  device; a setting says otherwise.

Wrappers act for backends that offer ``keep_alive`` and ``cut``, which are the plugin's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

from mimo_plugin.engines.sglang.storage.pages import longest_end
from mimo_plugin.engines.wrapping import wrap_once

_KEPT = "mimo_kept_alive"
"""Mark of a request whose prefix has been kept alive."""

GB = 1e9
"""SGLang's unit for sizes of host memory."""


def install() -> None:
    """Wrap what tells the backend of hits and takes its answer; again changes nothing."""
    wrap_once(UnifiedRadixCache, "checkpoint_into_tree", _keeping_alive)
    wrap_once(UnifiedRadixCache, "load_back", _loading_one_window)
    wrap_once(HybridCacheController, "_sync_prefetch_hit_query", _agreeing)
    wrap_once(HybridCacheController, "allocate_storage_hit", _cutting)


def install_host_share(swa_share: float) -> None:
    """Give sliding-window layers this part of host memory.

    Args:
        swa_share: 0 < x < 1.
    """
    wrap_once(assembler, "build_hybrid_swa_group", _sharing(swa_share))


def _keeping_alive(stock: Any) -> Any:
    def checkpoint_into_tree(self: Any, req: Any, *, up_to: int, **kwargs: Any) -> Any:
        if not getattr(req, _KEPT, False):
            setattr(req, _KEPT, True)
            storage = _ours(self)
            if storage is not None and req.kv.cache_protected_len:
                storage.keep_alive(self, req.last_node)
        return stock(self, req, up_to=up_to, **kwargs)

    return checkpoint_into_tree


def _ours(cache: Any) -> Any:
    """The cache's storage backend; None where it is not the plugin's."""
    storage = getattr(cache.cache_controller, "storage_backend", None)
    return storage if hasattr(storage, "keep_alive") else None


def _loading_one_window(stock: Any) -> Any:
    def load_back(self: Any, node_id: Any, mem_quota: Any = None, req: Any = None) -> Any:
        if req is not None and _ours(self) is not None:
            split_at_window(self, node_id, req)
        return stock(self, node_id, mem_quota, req)

    return load_back


def split_at_window(cache: Any, node_id: Any, req: Any) -> None:
    """Let a node begin where the last window of a prefix begins, if the host alone has it.

    Args:
        cache: SGLang's radix cache.
        node_id: where the prefix ends; keeps its end.
        req: a request whose tokens begin with the prefix.
    """
    if ComponentType.SWA not in cache.components:
        return
    core = cache.tree_core
    (path,) = core.collect_path_info([node_id])
    window_pages = -(-cache.sliding_window_size // cache.page_size)
    start = path[-1].path_end - window_pages * cache.page_size if path else 0
    for node in path:
        if node.path_start < start < node.path_end:
            if core.component_has_host_value_only(node.node_id, ComponentType.SWA):
                # A look-up that ends inside a node splits it.
                key = RadixKey(
                    req.full_untruncated_fill_ids,
                    req.extra_key,
                    is_bigram=core.is_eagle,
                    limit=start + int(core.is_eagle),
                    cache_salt=req.cache_salt,
                )
                found = core.match_prefix(MatchPrefixParams(key=key))
                cache._apply_cache_actions(found.cache_actions)
            return


def _agreeing(stock: Any) -> Any:
    """The ranks agree on the hit; here also on the shorter lengths that all can restore."""

    def sync_prefetch_hit_query(self: Any, operation: Any, storage_hit_count: int) -> int:
        agreed: int = stock(self, operation, storage_hit_count)
        if hasattr(self.storage_backend, "cut") and _has_window(operation):
            result = operation.pool_storage_result
            flags = torch.zeros(len(operation.token_ids) // self.page_size + 1, dtype=torch.int)
            for end in result.restorable_prefix_pages or ():
                flags[end] = 1
            self._all_reduce(flags, torch.distributed.ReduceOp.MIN, self.prefetch_hits_sync_groups)
            result.restorable_prefix_pages = flags.nonzero().flatten().tolist()
        return agreed

    return sync_prefetch_hit_query


def _cutting(stock: Any) -> Any:
    def allocate_storage_hit(
        self: Any,
        operation: Any,
        hit_tokens: int,
        *,
        allow_partial: bool,
        min_tokens: int,
        **kwargs: Any,
    ) -> tuple[Any, int]:
        indices, tokens = stock(
            self,
            operation,
            hit_tokens,
            allow_partial=allow_partial,
            min_tokens=min_tokens,
            **kwargs,
        )
        cut = getattr(self.storage_backend, "cut", None)
        fits = indices is not None and tokens >= hit_tokens
        if cut is None or fits or not allow_partial:  # all or nothing: SGLang tries again
            return indices, tokens
        kept = 0 if indices is None else tokens
        if kept and _has_window(operation):
            ends = operation.pool_storage_result.restorable_prefix_pages or ()
            kept = longest_end(ends, tokens // self.page_size) * self.page_size
            if kept < min_tokens:
                kept = 0
            self.mem_pool_host.free(indices[kept:])
            indices, tokens = (indices[:kept] if kept else None), kept
        cut(hit_tokens - kept)
        return indices, tokens

    return allocate_storage_hit


def _has_window(operation: Any) -> bool:
    return any(
        transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        for transfer in operation.pool_transfers or ()
    )


def _sharing(swa_share: float) -> Callable[[Any], Any]:
    def make(stock: Any) -> Any:
        def build_hybrid_swa_group(
            *, full_kv_pool: Any, swa_kv_pool: Any, kv_host_size: Any = None, **kwargs: Any
        ) -> Any:
            memory = get_memory()
            total_gb = memory.hicache_size or memory.hicache_ratio * sum(
                pool_bytes(pool) / GB for pool in (full_kv_pool, swa_kv_pool)
            )
            return stock(
                full_kv_pool=full_kv_pool,
                swa_kv_pool=swa_kv_pool,
                **{
                    **kwargs,
                    "kv_host_size": (1 - swa_share) * total_gb,
                    "swa_host_size": swa_share * total_gb,
                },
            )

        return build_hybrid_swa_group

    return make


def pool_bytes(pool: Any) -> int:
    """Bytes of a device pool, keys and values."""
    found = pool.get_kv_size_bytes()
    return int(sum(found)) if isinstance(found, tuple) else int(found)
