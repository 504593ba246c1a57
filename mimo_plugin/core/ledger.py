# SPDX-License-Identifier: Apache-2.0
"""What every cached block holds, whose it is, and how many there are of each sort."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mimo_plugin.core import retention
from mimo_plugin.core.tree import CheckpointTree, Node
from mimo_plugin.core.window import GroupGeometry

FULL = "full"
SWA = "swa"
#: what a cached block holds; a draft model's SWA blocks are SWA blocks with a budget of their own
NO_KIND, FULL_KIND, SWA_KIND, DRAFT_KIND = 0, 1, 2, 3


class BlockLedger:
    """Kinds, owners and counts of cached blocks. Block ids throughout.

    ``on_evict(kind, cls, residence_s)`` is called per evicted block.
    """

    def __init__(
        self,
        num_blocks: int,
        full_groups: Sequence[GroupGeometry],
        *,
        on_evict: Callable[[str, str, float], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree = CheckpointTree(num_blocks, full_groups)
        self.tree.on_split = self._was_split
        self.on_evict = on_evict
        self.now = now
        #: called with blocks that must lose their hash now; they are free and hold nothing
        self.on_drop: Callable[[list[int]], None] | None = None
        #: cached blocks by (kind, class)
        self.cached: dict[tuple[str, str], int] = {}
        #: blocks that were evicted, dropped or invalidated so far
        self.num_evicted = 0
        self._kind = bytearray(num_blocks)
        self._swa_cls: dict[int, str] = {}
        #: chosen to die: these are reused next, in this order
        self._doomed: dict[int, None] = {}
        self._live_swa = self._live_full = self._live_draft = 0

    def _clear_ledger(self) -> None:
        self.tree.clear()
        self._kind = bytearray(len(self._kind))
        self._swa_cls.clear()
        self._doomed.clear()
        self.cached.clear()
        self._live_swa = self._live_full = self._live_draft = 0

    def _count(self, kind: str, cls: str, change: int) -> None:
        if change:
            key = (kind, cls)
            self.cached[key] = self.cached.get(key, 0) + change

    def _label_swa(self, block_id: int, cls: str | None) -> None:
        """The class under which a cached SWA block is counted; None takes it out."""
        old = self._swa_cls.pop(block_id, None)
        if old is not None:
            self._count(SWA, old, -1)
        if cls is not None:
            self._swa_cls[block_id] = cls
            self._count(SWA, cls, 1)

    def _live(self, block_id: int, change: int) -> None:
        if self._kind[block_id] == FULL_KIND:
            self._live_full += change
        elif self._kind[block_id] >= SWA_KIND:
            self._live_swa += change
            if self._kind[block_id] == DRAFT_KIND:
                self._live_draft += change

    def _was_split(self, upper: Node, lower: Node) -> None:
        blocks = self.tree.owned_full(upper)
        self._count(FULL, lower.cls, -blocks)
        self._count(FULL, upper.cls, blocks)

    def _relabel(self, node: Node, cls: str) -> None:
        if retention.STRENGTH[cls] >= retention.STRENGTH[node.cls]:
            blocks = self.tree.owned_full(node)
            self._count(FULL, node.cls, -blocks)
            self._count(FULL, cls, blocks)
            node.cls = cls
            for block_id in node.swa or ():
                if self.tree.owner[block_id] is node:
                    self._label_swa(block_id, cls)

    def disown(self, block_id: int) -> None:
        """A referenced, resident block leaves its span (its new span is registered next)."""
        node = self.tree.owner[block_id]
        if node is not None:
            if self._kind[block_id] == FULL_KIND:
                self._count(FULL, node.cls, -1)
            else:
                self._label_swa(block_id, None)
            self._live(block_id, -1)
            self.tree.owner[block_id] = None
            self._kind[block_id] = NO_KIND

    def num_free_full(self, node: Node) -> int:
        """How many of the node's full blocks are free (waiting for death included)."""
        if node.doomed_full:
            return len(node.free_full) + sum(b in self._doomed for b in node.full[0])
        return len(node.free_full)
