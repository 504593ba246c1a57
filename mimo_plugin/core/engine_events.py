# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events as they are published, and the KV cache groups that they tell of.

``BlockRemoved`` and ``AllBlocksCleared`` are those of :mod:`mimo_plugin.core.kv_events`; here their
hashes are the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mimo_plugin.core.kv_events import (
    FULL_KINDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hash,
)
from mimo_plugin.core.sparse_places import WindowRule
from mimo_plugin.core.window import GroupGeometry


@dataclass(slots=True)
class EngineStored:
    """Blocks stored. Fields as in vLLM's ``BlockStored``; ``extra_keys``: of the listed blocks."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    medium: str | None = "GPU"

    @property
    def group(self) -> int:
        """KV cache group."""
        return self.group_idx or 0

    @property
    def is_full(self) -> bool:
        """Whether the group is one of full attention."""
        return (self.kv_cache_spec_kind or "full_attention") in FULL_KINDS

    @property
    def is_whole(self) -> bool:
        """Whether no block of the range was left out."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_size

    def kind_only(self) -> BlockStored:
        """For the index to see which kinds of groups there are, no more."""
        return BlockStored(
            (),
            None,
            0,
            self.block_size,
            self.group,
            self.kv_cache_spec_kind,
            self.kv_cache_spec_sliding_window,
        )


EngineEvent: TypeAlias = EngineStored | BlockRemoved | AllBlocksCleared


def in_device(event: EngineStored | BlockRemoved) -> bool:
    """Whether the event is about copies in the device's memory; others don't count."""
    return event.medium is None or event.medium == "GPU"


@dataclass(slots=True)
class Groups:
    """KV cache groups of the engines that serve one model, as their events tell of them.

    vLLM also names the end of a prompt that lies inside a full-attention block, by an event with
    the size of one hash: the first such event must not be taken for the group's block size.

    Args:
        hash_tokens: tokens of one canonical hash.
        lookahead_blocks: as in :class:`mimo_plugin.core.residency.ResidencyIndex`.
        geometry: of the groups met so far.
        full: those of full attention.
    """

    hash_tokens: int
    lookahead_blocks: Mapping[int, int] = field(default_factory=dict)
    geometry: dict[int, GroupGeometry] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)

    def learn(self, event: EngineStored) -> None:
        """See whether the event tells of a new group."""
        group, size = event.group, event.block_size
        if group in self.geometry or size <= 0 or size % self.hash_tokens:
            return
        ahead = self.lookahead_blocks.get(group, 0)
        if event.is_full:
            if size > self.hash_tokens or len(event.block_hashes) > 1:
                self.add(group, GroupGeometry(size, None, ahead))
        elif event.kv_cache_spec_sliding_window:
            self.add(group, GroupGeometry(size, event.kv_cache_spec_sliding_window, ahead))

    def add(self, group: int, geometry: GroupGeometry) -> None:
        """Meet a group."""
        self.geometry[group] = geometry
        if geometry.is_full:
            self.full.add(group)

    @property
    def full_tokens(self) -> int:
        """Tokens of the largest full-attention block; of one hash while there is none."""
        sizes = [self.geometry[group].block_size_tokens for group in self.full]
        return max(sizes, default=self.hash_tokens)

    def rule(self, group: int) -> WindowRule:
        """How the group's windows lie among the full-attention blocks."""
        geometry = self.geometry[group]
        size = geometry.block_size_tokens
        step = self.full_tokens // size if self.full_tokens % size == 0 else 1
        return WindowRule.of(geometry.window_blocks, geometry.lookahead_blocks, step)
