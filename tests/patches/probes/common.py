# SPDX-License-Identifier: Apache-2.0
"""Build vLLM's KV-cache managers without a model.

The probes run in a process of their own, whose first ``PYTHONPATH`` entry
decides which source tree ``vllm`` is: the installed one or a patched overlay.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request


def digest(value: object) -> bytes:
    """Hash function for block hashes; stable across processes."""
    return hashlib.sha256(repr(value).encode()).digest()


init_none_hash(digest)


def swa_spec(block_tokens: int, window_tokens: int) -> Any:
    """Sliding-window spec with MiMo-V2's head geometry."""
    return SlidingWindowSpec(
        block_size=block_tokens,
        num_kv_heads=8,
        head_size=192,
        head_size_v=128,
        dtype=torch.bfloat16,
        sliding_window=window_tokens,
    )


def hybrid_manager(
    *,
    full_block_tokens: int,
    swa_block_tokens: int,
    window_tokens: int,
    swa_groups: int = 1,
    pool_blocks: int = 1024,
    retention_tokens: int | None = 0,
    eagle: bool = False,
) -> Any:
    """Manager for one full-attention group and ``swa_groups`` SWA groups."""
    full = FullAttentionSpec(
        block_size=full_block_tokens,
        num_kv_heads=4,
        head_size=192,
        head_size_v=128,
        dtype=torch.bfloat16,
    )
    swa = swa_spec(swa_block_tokens, window_tokens)
    groups = [KVCacheGroupSpec(["full"], full)]
    groups += [KVCacheGroupSpec([f"swa{i}"], swa) for i in range(swa_groups)]
    config = KVCacheConfig(
        num_blocks=pool_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention_tokens,
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 21,
        scheduler_block_size=max(full_block_tokens, swa_block_tokens),
        hash_block_size=min(full_block_tokens, swa_block_tokens),
        max_in_flight_tokens=8192,
        enable_caching=True,
        use_eagle=eagle,
    )


def request(name: str, tokens: list[int], hash_block_tokens: int) -> Any:
    """Request with block hashes of its prompt."""
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_tokens, digest),
    )


def serve(manager: Any, name: str, tokens: list[int], hash_block_tokens: int, chunk: int) -> int:
    """Prefill ``tokens`` in chunks and free the request; returns its hit in tokens."""
    req = request(name, tokens, hash_block_tokens)
    blocks, hit, *_ = manager.get_computed_blocks(req)
    done = hit
    while done < len(tokens):
        step = min(chunk, len(tokens) - done)
        first = done == hit
        new = (
            manager.allocate_slots(req, step, hit, blocks)
            if first
            else manager.allocate_slots(req, step)
        )
        assert new is not None, "the pool is too small for this probe"
        done += step
        req.num_computed_tokens = done
    manager.free(req)
    return int(hit)
