# SPDX-License-Identifier: Apache-2.0
"""Blocks and bytes of a KV pool, for a model's geometry.

``plan_pool`` follows vLLM's rule for hybrid models: every block of the one pool has the same
bytes, so layers with a smaller page get longer blocks (or padding), and layers of a kind are
split into groups of equal size.  That holds for layouts that keep each layer's blocks together,
the default; with a block-outermost layout (some KV connectors ask for one) vLLM packs layers of
unequal pages instead of lengthening blocks.  ``split_pools`` sizes two pools as SGLang has them.
Units: tokens, blocks, bytes on one tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mimo_plugin.core.geometry import GeometryError, Kind, LayerKv, ModelGeometry
from mimo_plugin.core.window import GroupGeometry

GIB = 1 << 30

# vLLM pads all groups to the larger bucket when the buckets are nearly equal.
_NEARLY_EQUAL = 1.5


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Layers that share one block table.

    Attributes:
        kind: of all its layers.
        layers: real layers in it (the rest of the block is padding).
        block_tokens: tokens that one block holds.
        payload_bytes: bytes of a block that hold KV.
        window_tokens: None for full attention.
        draft_layers: how many of the layers belong to a draft model.
        lookahead_blocks: blocks that a hit needs past its end: 1 where groups of this shape hold
            layers of a draft model, else 0.
    """

    kind: Kind
    layers: int
    block_tokens: int
    payload_bytes: int
    window_tokens: int | None
    draft_layers: int = 0
    lookahead_blocks: int = 0

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of one checkpoint: a window that ends on a block edge, and what a draft model
        looks ahead; 0 for full attention."""
        if self.window_tokens is None:
            return 0
        window = GroupGeometry(self.block_tokens, self.window_tokens).window_blocks
        return window + self.lookahead_blocks

    def request_blocks(self, length_tokens: int, in_flight_tokens: int) -> int:
        """Most blocks that a running request of this length holds at once."""
        whole = -(-length_tokens // self.block_tokens)
        if self.window_tokens is None:
            return whole
        held = min(self.window_tokens - 1 + in_flight_tokens, length_tokens)
        return min(whole, -(-held // self.block_tokens) + 1)


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """How one physical pool is divided.

    Attributes:
        groups: full-attention groups first.
        block_bytes: bytes of every block, padding included.
    """

    groups: tuple[PoolGroup, ...]
    block_bytes: int

    def of_kind(self, kind: Kind) -> tuple[PoolGroup, ...]:
        """Groups of one kind."""
        return tuple(group for group in self.groups if group.kind == kind)

    @property
    def alignment_tokens(self) -> int:
        """A hit's length is a multiple of this."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def full_bytes_per_token(self) -> float:
        """Bytes that one cached token costs in the full-attention groups."""
        return self._bytes_per_token("full")

    @property
    def dense_swa_bytes_per_token(self) -> float:
        """Bytes that one token costs when all sliding-window blocks are kept."""
        return self._bytes_per_token("swa")

    def _bytes_per_token(self, kind: Kind) -> float:
        return sum(self.block_bytes / group.block_tokens for group in self.of_kind(kind))

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of one checkpoint: one window in every sliding-window group."""
        return sum(group.checkpoint_blocks for group in self.groups)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.checkpoint_blocks * self.block_bytes

    @property
    def checkpoint_full_tokens(self) -> float:
        """Tokens of full-attention KV that cost as much as one checkpoint."""
        full = self.full_bytes_per_token
        return self.checkpoint_bytes / full if full else 0.0

    @property
    def padding(self) -> float:
        """Share of the pool's bytes that never holds KV, when every group is used alike."""
        used = sum(group.payload_bytes for group in self.groups)
        return 1.0 - used / (self.block_bytes * len(self.groups))

    def blocks(self, pool_bytes: int) -> int:
        """Blocks that fit into ``pool_bytes``."""
        return pool_bytes // self.block_bytes

    def request_blocks(self, length_tokens: int, in_flight_tokens: int = 0) -> int:
        """Most blocks that a running request holds at once, over all groups."""
        return sum(group.request_blocks(length_tokens, in_flight_tokens) for group in self.groups)

    def cached_tokens(self, pool_blocks: int, tokens_per_checkpoint: float) -> int:
        """Reusable tokens that a pool holds with one checkpoint for so many tokens.

        Sliding-window KV counts only through checkpoints: a token is reusable when its full KV is
        resident and a checkpoint ends at or after it.
        """
        if tokens_per_checkpoint <= 0:
            raise ValueError(f"tokens_per_checkpoint must be > 0, got {tokens_per_checkpoint}")
        full = sum(1 / group.block_tokens for group in self.of_kind("full"))
        dense = sum(1 / group.block_tokens for group in self.of_kind("swa"))
        sparse = self.checkpoint_blocks / tokens_per_checkpoint
        return int(pool_blocks / (full + min(dense, sparse)))


def plan_pool(
    geometry: ModelGeometry,
    *,
    block_tokens: int = 16,
    tp: int = 1,
    element_bytes: int | None = None,
    hybrid: bool = True,
) -> PoolPlan:
    """Group a model's layers and size its blocks as vLLM does.

    Args:
        geometry: the model (``with_draft_layers`` for draft layers).
        block_tokens: the engine's ``--block-size``.
        tp: tensor parallel size.
        element_bytes: of one stored number; None means the model's dtype (1 for an fp8 cache).
        hybrid: False when the engine's hybrid KV cache manager is off, so that sliding-window
            layers are sized as full attention.

    Raises:
        GeometryError: ``tp`` does not divide the KV heads.
    """
    if block_tokens <= 0:
        raise GeometryError(f"block size: found {block_tokens}; allowed: a number > 0")
    size = geometry.element_bytes if element_bytes is None else element_bytes
    pages = {
        layer: layer.bytes_per_token(tp=tp, element_bytes=size) * block_tokens
        for layer in set(geometry.layers)
    }
    kinds = {(layer.kind, layer.window_tokens) for layer in geometry.layers}
    if not hybrid or len(kinds) == 1:
        return _one_group(geometry, pages, block_tokens, hybrid)
    largest = max(pages.values())
    buckets: dict[tuple[object, ...], list[LayerKv]] = {}
    for layer in geometry.layers:
        shape = (
            layer.kind,
            layer.window_tokens,
            layer.heads_per_rank(tp),
            layer.k_dim,
            layer.v_dim,
        )
        buckets.setdefault(shape, []).append(layer)
    per_group = _group_layers(len(layers) for layers in buckets.values())
    groups: list[PoolGroup] = []
    for layers in buckets.values():
        page = pages[layers[0]]
        longer = largest // page if largest % page == 0 else 1
        count = -(-len(layers) // per_group)
        drafts = any(layer.draft for layer in layers)
        for index in range(count):
            members = layers[index::count]
            groups.append(
                PoolGroup(
                    kind=members[0].kind,
                    layers=len(members),
                    block_tokens=block_tokens * longer,
                    payload_bytes=page * longer * len(members),
                    window_tokens=members[0].window_tokens,
                    draft_layers=sum(layer.draft for layer in members),
                    lookahead_blocks=int(drafts),
                )
            )
    groups.sort(key=lambda group: group.kind != "full")
    return PoolPlan(groups=tuple(groups), block_bytes=largest * per_group)


def _one_group(
    geometry: ModelGeometry, pages: dict[LayerKv, int], block_tokens: int, hybrid: bool
) -> PoolPlan:
    payload = sum(pages[layer] for layer in geometry.layers)
    first = geometry.layers[0]
    group = PoolGroup(
        kind=first.kind if hybrid else "full",
        layers=len(geometry.layers),
        block_tokens=block_tokens,
        payload_bytes=payload,
        window_tokens=first.window_tokens if hybrid else None,
        draft_layers=sum(layer.draft for layer in geometry.layers),
    )
    return PoolPlan(groups=(group,), block_bytes=payload)


def _group_layers(sizes: Iterable[int]) -> int:
    counts = list(sizes)
    smallest, biggest = min(counts), max(counts)
    return biggest if biggest < smallest * _NEARLY_EQUAL else smallest


@dataclass(frozen=True, kw_only=True)
class TwoPools:
    """Sizes of a full-attention and a sliding-window pool."""

    full_tokens: int
    swa_tokens: int
    full_bytes: int
    swa_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of both."""
        return self.full_bytes + self.swa_bytes


def split_pools(
    geometry: ModelGeometry,
    budget_bytes: int,
    *,
    swa_per_full: float,
    page_tokens: int = 1,
    tp: int = 1,
    element_bytes: int | None = None,
) -> TwoPools:
    """Divide a budget between two pools of whole pages.

    Each layer is counted once, keys and values by their own dimensions and each kind by its own
    heads.  What rounding leaves is given to the sliding-window pool, so that less than one of its
    pages stays unused.

    Args:
        swa_per_full: wanted sliding-window tokens for each full-attention token, > 0.

    Raises:
        GeometryError: the model isn't hybrid, or the budget is smaller than a page of each.
    """
    if not geometry.is_hybrid:
        raise GeometryError("two pools need a model with full-attention and sliding-window layers")
    if swa_per_full <= 0:
        raise GeometryError(f"swa_per_full: found {swa_per_full}; allowed: a number > 0")
    full_page = page_tokens * geometry.bytes_per_token("full", tp=tp, element_bytes=element_bytes)
    swa_page = page_tokens * geometry.bytes_per_token("swa", tp=tp, element_bytes=element_bytes)
    full_pages = int(budget_bytes / (full_page + swa_per_full * swa_page))
    swa_pages = (budget_bytes - full_pages * full_page) // swa_page
    if full_pages < 1 or swa_pages < 1:
        raise GeometryError(
            f"budget: found {budget_bytes} bytes; allowed: at least {full_page + swa_page}"
        )
    return TwoPools(
        full_tokens=full_pages * page_tokens,
        swa_tokens=swa_pages * page_tokens,
        full_bytes=full_pages * full_page,
        swa_bytes=swa_pages * swa_page,
    )


def swa_tokens_of_request(
    length_tokens: int, window_tokens: int, chunk_tokens: int, page_tokens: int = 1
) -> int:
    """Sliding-window tokens to reserve for a running request, whatever its length.

    A window plus the chunk in flight, and one page because the window may start inside a page.
    """
    return min(length_tokens, window_tokens + chunk_tokens) + page_tokens
