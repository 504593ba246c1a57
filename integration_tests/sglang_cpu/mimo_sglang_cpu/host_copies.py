# SPDX-License-Identifier: Apache-2.0
"""Copies between the device's and the host's KV pool in plain PyTorch, for HiCache.

The device's buffers hold one layer each, token by token; the host's buffers hold pages, each with
all layers (``--hicache-mem-layout page_first_direct``). Slots come page by page, so one slot in
``page_size`` names a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host to device, one layer of every page."""
    pages = list(_pages(src_indices, page_size))
    starts = dst_indices[::page_size].tolist()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for page, start in zip(pages, starts, strict=True):
            rows = target[start : start + page_size]
            rows.copy_(source[page, layer_id].reshape(rows.shape))


def store_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Device to host, all layers of every page."""
    layers = len(src_ptrs) // len(dst_ptrs)
    starts = src_indices[::page_size].tolist()
    pages = list(_pages(dst_indices, page_size))
    for number, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[number * layers + layer]
            for start, page in zip(starts, pages, strict=True):
                place = target[page, layer]
                place.copy_(source[start : start + page_size].reshape(place.shape))


def _pages(indices: torch.Tensor, page_size: int) -> Iterator[int]:
    return iter((indices[::page_size] // page_size).tolist())


def _allocate(
    dims: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Memory of the host pool; there is no device that it could be pinned for."""
    memory: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return memory


def install() -> None:
    """Put these in the place of the GPU kernels that the host pool calls."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    mha.transfer_kv_per_layer_direct_pf_lf = load_layer
    mha.transfer_kv_all_layer_direct_lf_pf = store_layers
    ALLOC_MEMORY_FUNCS["cpu"] = _allocate
