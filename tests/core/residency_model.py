# SPDX-License-Identifier: Apache-2.0
"""Workers with real blocks, and what they report: the truth that the index is held against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from mimo_plugin.core.window import GroupGeometry, longest_valid_hit

UNIT = 16  # tokens of one hash


def chain(tokens) -> list[int]:
    """Hashes of a prompt given as one number for each unit: each stands for all before it too."""
    found, so_far = [], 0
    for token in tokens:
        so_far = hash((so_far, token))
        found.append(so_far)
    return found


def block_hash(geometry: GroupGeometry, hashes, block: int) -> int | None:
    """Hash of a block of a group, None past the prompt's end."""
    at = (block + 1) * (geometry.block_size_tokens // UNIT) - 1
    return hashes[at] if at < len(hashes) else None


@dataclass
class Engine:
    """One worker's blocks, and the batches that it published."""

    groups: tuple[GroupGeometry, ...]
    copies: list[Counter] = field(default_factory=list)
    batches: list[list[KvEvent]] = field(default_factory=list)

    def __post_init__(self):
        self.copies = [Counter() for _ in self.groups]

    def hello(self):
        """As engines do, name every group before anything is a hit."""
        self.batches.append([self._event(group, [], None, 0) for group in range(len(self.groups))])

    def _event(self, group, hashes, parent, tokens):
        geometry = self.groups[group]
        return BlockStored(
            hashes,
            parent,
            tokens,
            geometry.block_size_tokens,
            group,
            "full_attention" if geometry.is_full else "sliding_window",
            geometry.window_tokens,
        )

    def store(self, group, hashes, first, last, keep=lambda block: True):
        """Blocks [first, last) of a prompt, those that ``keep`` names."""
        geometry = self.groups[group]
        blocks = [b for b in range(first, last) if keep(b)]
        stored = [block_hash(geometry, hashes, b) for b in blocks]
        assert None not in stored
        self.copies[group].update(stored)
        parent = block_hash(geometry, hashes, first - 1) if first else None
        tokens = (last - first) * geometry.block_size_tokens
        self.batches.append([self._event(group, stored, parent, tokens)])

    def remove(self, group, block):
        """One copy, if there is any."""
        if self.copies[group][block]:
            self.copies[group][block] -= 1
            self.batches.append([BlockRemoved([block], group)])

    def clear(self):
        """All of it."""
        self.copies = [Counter() for _ in self.groups]
        self.batches.append([AllBlocksCleared()])

    def resident(self, hashes):
        """The rule's question for one prompt."""

        def has(group, block):
            return self.copies[group][block_hash(self.groups[group], hashes, block)] > 0

        return has

    def hit(self, hashes, aligned, limit):
        """By the definition."""
        return longest_valid_hit(self.groups, aligned, limit, self.resident(hashes))

    def full_hit(self, hashes, aligned, limit):
        """The same without sliding windows."""
        full = [i for i, g in enumerate(self.groups) if g.is_full]
        has = self.resident(hashes)
        return longest_valid_hit(
            [self.groups[i] for i in full], aligned, limit, lambda i, block: has(full[i], block)
        )
