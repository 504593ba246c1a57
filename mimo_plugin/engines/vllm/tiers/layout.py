# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a row of host memory are a group's KV.

vLLM gives one row of host memory to each (block hash, group), as large as the largest group needs:
groups overlay each other on the device, and so do their rows. A group of fewer layers, or with
padding in its pages, fills a part of its row; the rest is whatever lay there before. A store that
keeps whole rows moves and holds those bytes too.

A row is one area for each rank, behind each other; an area is the tensors that the rank's worker
registers, in the order in which their layers come first in the groups; a tensor's part is its pages
of all blocks of the chunk. The worker knows its tensors, the scheduler derives them from the same
``KVCacheConfig``; :func:`check_refs` compares the two where the tensors are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from mimo_plugin.errors import FeatureUnavailable, one_line

Range = tuple[int, int]
"""First and last byte (exclusive)."""

FULL, SWA, DRAFT = "full", "swa", "draft"


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The bytes of a row that each group fills, of all ranks together.

    Attributes:
        row_bytes: of a whole row.
        parts: for each group, by its position among those that are offloaded: ranges of bytes,
            ascending, with gaps between them.
        kinds: of the groups' layers: ``full``, ``swa`` or ``draft``.
        group_ids: of these groups among all, as vLLM counts them.
    """

    row_bytes: int
    parts: tuple[tuple[Range, ...], ...]
    kinds: tuple[str, ...]
    group_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.parts) == len(self.kinds) == len(self.group_ids)
        for ranges in self.parts:
            ends = [0, *(byte for part in ranges for byte in part), self.row_bytes]
            assert ends == sorted(ends), f"ranges {ranges} in a row of {self.row_bytes} bytes"

    def group_bytes(self, group: int) -> int:
        """Bytes of a row that a group fills."""
        return self._sizes[group]

    def position(self, group_id: int) -> int:
        """Of a group, among those that are offloaded."""
        return self._positions[group_id]

    def bytes_by_kind(self, group_ids: Iterable[int]) -> dict[str, int]:
        """Bytes that rows of these groups hold, by kind of their layers."""
        found: dict[str, int] = {}
        for group_id, rows in Counter(group_ids).items():
            group = self.position(group_id)
            kind = self.kinds[group]
            found[kind] = found.get(kind, 0) + rows * self.group_bytes(group)
        return found

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(sum(end - start for start, end in ranges) for ranges in self.parts)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {group_id: index for index, group_id in enumerate(self.group_ids)}


def row_layout(
    kv_cache_config: Any,
    group_ids: Sequence[int],
    *,
    world_size: int,
    worker_row_bytes: int,
    row_bytes: int,
) -> RowLayout:
    """The layout of the rows that vLLM's workers will fill.

    Args:
        kv_cache_config: the scheduler's.
        group_ids: groups that are offloaded, as vLLM counts them.
        world_size: ranks that each fill an area of a row; 1 where all fill the same.
        worker_row_bytes: of one rank's area.
        row_bytes: of a row, ``>= world_size * worker_row_bytes``.

    Raises:
        FeatureUnavailable: pages lie in memory in a way that is not known here.
    """
    groups = [kv_cache_config.kv_cache_groups[group_id] for group_id in group_ids]
    kinds = tuple(map(_kind, groups))
    area = _area(kv_cache_config, groups, worker_row_bytes)
    if area is None:
        whole = ((0, world_size * worker_row_bytes),)
        return RowLayout(
            row_bytes=row_bytes,
            parts=(whole,) * len(groups),
            kinds=kinds,
            group_ids=tuple(group_ids),
        )
    parts = tuple(
        merged(
            (rank * worker_row_bytes + start, rank * worker_row_bytes + end)
            for rank in range(world_size)
            for start, end in ranges
        )
        for ranges in area
    )
    return RowLayout(row_bytes=row_bytes, parts=parts, kinds=kinds, group_ids=tuple(group_ids))


def check_refs(
    layout: RowLayout,
    kv_caches: Any,
    *,
    rank: int,
    worker_row_bytes: int,
    blocks_per_chunk: int,
) -> None:
    """Make sure that a worker fills the bytes of its area that the layout says, and no others.

    Args:
        layout: the scheduler's.
        kv_caches: the worker's ``CanonicalKVCaches``, in the direct layout.
        rank: whose area it fills.
        worker_row_bytes: of one rank's area.
        blocks_per_chunk: blocks in a row.

    Raises:
        FeatureUnavailable: the worker's tensors are not those that the scheduler derived.
    """
    refs = kv_caches.group_data_refs
    if len(refs) != len(layout.parts):
        raise _differs(f"{len(refs)} groups", f"{len(layout.parts)}")
    area = rank * worker_row_bytes
    starts, end = [], area
    for tensor in kv_caches.tensors:
        starts.append(end)
        end += tensor.page_size_bytes * blocks_per_chunk
    if end > area + worker_row_bytes:
        raise _differs(f"{end - area} bytes of a rank in a row", f"{worker_row_bytes}")
    for group, group_refs in enumerate(refs):
        filled: list[Range] = []
        for ref in group_refs:
            stride = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            for block in range(blocks_per_chunk):
                start = starts[ref.tensor_idx] + block * stride
                filled.append((start, start + ref.page_size_bytes))
        derived = merged(
            (max(start, area), min(end, area + worker_row_bytes))
            for start, end in layout.parts[group]
        )
        if merged(filled) != derived:
            raise _differs(f"bytes {merged(filled)} of group {group}", f"{derived}")


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same bytes, as few ranges, ascending; empty ones go."""
    found: list[Range] = []
    for start, end in sorted(part for part in ranges if part[0] < part[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


# --- what the workers will register ----------------------------------------------------------


def _area(
    kv_cache_config: Any, groups: Sequence[Any], worker_row_bytes: int
) -> list[list[Range]] | None:
    """For each group the bytes that it fills of one rank's area; None: all of them."""
    if not kv_cache_config.kv_cache_tensors or not kv_cache_config.num_blocks:
        return None
    block_bytes = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
    if worker_row_bytes % block_bytes:
        raise _unknown(f"{worker_row_bytes} bytes of a rank in a row, {block_bytes} of a block")
    blocks = worker_row_bytes // block_bytes
    places = {
        name: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    #: start in the area, and bytes of a block's page, by the address of a tensor
    tensors: dict[tuple[int, int], tuple[int, int]] = {}
    parts, end = [], 0
    for group in groups:
        ranges: list[Range] = []
        for name in group.layer_names:
            place = places[name]
            page, filled = _page_bytes(group.kv_cache_spec, name, place[1], block_bytes)
            if not page:
                return None  # all layers of a block lie together, and go together
            if place[1] != page:
                raise _unknown(f"layer {name}: pages {place[1]} bytes apart, and room between them")
            if place not in tensors:
                tensors[place] = (end, page)
                end += page * blocks
            start, stride = tensors[place]
            ranges += ((start + i * stride, start + i * stride + filled) for i in range(blocks))
        parts.append(ranges)
    if end > worker_row_bytes:
        raise _unknown(f"{end} bytes of tensors in {worker_row_bytes} of a rank")
    return parts


def _page_bytes(spec: Any, layer: str, block_stride: int, block_bytes: int) -> tuple[int, int]:
    """Bytes of one layer's page, and how many are filled; 0 where layers are not kept apart."""
    several = isinstance(spec, UniformTypeKVCacheSpecs)
    if several:
        spec = spec.kv_cache_specs[layer]
    if not isinstance(spec, AttentionSpec) or not spec.has_layer_views:
        return 0, 0
    if spec.page_size_bytes != block_stride:
        if block_stride == block_bytes:
            return 0, 0
        if not several and not spec.page_size_bytes % spec.get_block_stride_alignment():
            # The scheduler knows but one of the specs of a group that has several.
            return block_stride, block_stride
    return spec.page_size_bytes, spec.unpadded_page_size_bytes


def _kind(group: Any) -> str:
    if group.is_eagle_group:
        return DRAFT
    windowed = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    specs = iter_layer_specs(group.kv_cache_spec)
    return SWA if all(isinstance(spec, windowed) for spec in specs) else FULL


def _unknown(found: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        one_line(
            f"tiers: found {found}; allowed: pages of one layer side by side (KV cache layout "
            "LBHNC), or those of all layers of a block; fix: unset VLLM_KV_CACHE_LAYOUT"
        )
    )


def _differs(found: str, derived: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        one_line(
            f"tiers: found in the worker {found}; allowed: {derived}, as the scheduler derived; "
            "fix: leave out the feature tiers for this model, and report it"
        )
    )
