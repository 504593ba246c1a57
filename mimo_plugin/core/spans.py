# SPDX-License-Identifier: Apache-2.0
"""What the death of a block means for the prefixes it was part of.

A checkpoint that loses a block is gone; blocks that only it needed follow. A span that loses a
full block takes everything below it along. Full blocks that no checkpoint makes reachable are
dropped at once, or are the next to die where a window may come from a tier below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo_plugin.core import retention
from mimo_plugin.core.candidates import Candidates, Policy
from mimo_plugin.core.ledger import FULL, FULL_KIND, NO_KIND, SWA, SWA_KIND, BlockLedger
from mimo_plugin.core.tree import Node
from mimo_plugin.core.window import GroupGeometry


class SpanLedger(BlockLedger):
    """Keeps spans and checkpoints consistent as blocks come and go."""

    def __init__(
        self, num_blocks: int, full_groups: Sequence[GroupGeometry], policy: Policy, **kwargs: Any
    ) -> None:
        super().__init__(num_blocks, full_groups, **kwargs)
        self.policy = policy
        #: free blocks that hold nothing; the last one is reused first
        self._empty: list[int] = []
        self._candidates = Candidates(policy)

    def forget(self, block_id: int, *, evicted: bool = False) -> None:
        """A cached block lost its hash (evicted, or invalidated by a connector)."""
        node = self.tree.owner[block_id]
        kind = self._kind[block_id]
        if not evicted and node is not None:
            self._live(block_id, -1)
        self.tree.owner[block_id] = None
        self._kind[block_id] = NO_KIND
        sharers = self.tree.sharers.pop(block_id, ())
        self.num_evicted += 1
        if node is None:
            return
        name, cls = (FULL, node.cls) if kind == FULL_KIND else (SWA, self._swa_cls[block_id])
        if kind == FULL_KIND:
            self._count(FULL, cls, -1)
        else:
            self._label_swa(block_id, None)
        if evicted and self.on_evict is not None:
            self.on_evict(name, cls, self.now() - node.created_s)
        if kind == FULL_KIND:
            self._kill(node)
        else:
            self._drop_checkpoint(node)
            for sharer in sharers:
                self._drop_checkpoint(sharer)

    def _share(self, block_id: int, node: Node) -> None:
        """A block that another checkpoint holds becomes part of ``node``'s too."""
        tree = self.tree
        home = tree.owner[block_id]
        if home is node:
            return
        sharers = tree.sharers.setdefault(block_id, [])
        if home is None:
            tree.owner[block_id] = node
            self._kind[block_id] = SWA_KIND
            self._label_swa(block_id, node.cls)
            self._live(block_id, 1)
        elif home.swa is None or self._outlives(node, home):
            if home.swa is not None and home not in sharers:
                sharers.append(home)
            self._rehome(block_id, home, node)
        elif node not in sharers:
            sharers.append(node)
        if not sharers:
            del tree.sharers[block_id]

    @staticmethod
    def _outlives(a: Node, b: Node) -> bool:
        if a.superseded != b.superseded:
            return b.superseded
        return retention.STRENGTH[a.cls] >= retention.STRENGTH[b.cls]

    def _rehome(self, block_id: int, old: Node, new: Node) -> None:
        self.tree.owner[block_id] = new
        self._label_swa(block_id, new.cls)
        if block_id in old.free_swa:
            del old.free_swa[block_id]
            new.free_swa[block_id] = None
            self._classify(new)
        elif block_id in self._doomed:
            del self._doomed[block_id]
            self._live(block_id, 1)
            new.free_swa[block_id] = None
            self._classify(new)

    def _drop_checkpoint(self, node: Node) -> None:
        """``node``'s checkpoint is incomplete now; blocks it alone needs are doomed."""
        ids, node.swa = node.swa, None
        if ids is None:
            return
        tree = self.tree
        for block_id in ids:
            sharers = tree.sharers.get(block_id)
            if tree.owner[block_id] is not node:
                if sharers is not None and node in sharers:
                    sharers.remove(node)
                    if not sharers:
                        del tree.sharers[block_id]
                continue
            alive = [s for s in sharers or () if s.swa is not None and not s.dead]
            if alive:
                heir = max(alive, key=lambda s: (not s.superseded, retention.STRENGTH[s.cls]))
                assert sharers is not None
                sharers.remove(heir)
                if not sharers:
                    del tree.sharers[block_id]
                self._rehome(block_id, node, heir)
            elif block_id in node.free_swa:
                del node.free_swa[block_id]
                self._doomed[block_id] = None
                self._live(block_id, -1)
        self._classify(node)

    def _kill(self, node: Node) -> None:
        """``node`` lost a full block: it and everything below it can no longer be reached."""
        if node.dead:
            return
        node.dead = True
        parent = node.parent
        if parent is not None:
            parent.children.discard(node)
        below = list(self.tree.subtree(node))
        for dead in (node, *below):
            dead.dead = True
        for dead in (node, *below):
            self._drop_checkpoint(dead)
            self._classify(dead)
        if parent is not None:
            self._classify(parent)

    def _abandon(self, node: Node) -> Node | None:
        """Drop ``node``'s full blocks, which no checkpoint makes reachable any more.

        They lose their hash at once instead of waiting their turn: look-ups end where use ends, and
        whoever follows the cache events is told. Returns the parent if it has lost its last child.
        """
        owner, doomed = self.tree.owner, self._doomed
        owned = [b for ids in node.full for b in ids if owner[b] is node]
        unused = [b for b in owned if b in node.free_full or b in doomed]
        if not node.dead and len(unused) != len(owned):
            # Running requests still stand on this span and may yet checkpoint it.
            self._doom_full(node)
            return None
        self._live_full -= len(node.free_full)
        node.free_full.clear()
        residence_s = self.now() - node.created_s if unused else 0.0
        for block_id in unused:
            doomed.pop(block_id, None)
            owner[block_id] = None
            self._kind[block_id] = NO_KIND
            if self.on_evict is not None:
                self.on_evict(FULL, node.cls, residence_s)
        self._count(FULL, node.cls, -len(unused))
        self.num_evicted += len(unused)
        self._empty.extend(unused)
        if unused and self.on_drop is not None:
            self.on_drop(unused)
        if node.dead or node.parent is None:
            return None
        node.dead = True
        node.parent.children.discard(node)
        return node.parent

    def _doom_full(self, node: Node) -> None:
        if node.free_full:
            # The deepest block first, so that what is left of the span stays a prefix.
            for block_id in sorted_by_position(node):
                self._doomed[block_id] = None
            node.doomed_full = True
            self._live_full -= len(node.free_full)
            node.free_full.clear()

    def _doom_swa(self, node: Node) -> None:
        """All free SWA blocks of ``node`` are to be reused next."""
        for block_id in node.free_swa:
            self._doomed[block_id] = None
            self._live(block_id, -1)
        node.free_swa.clear()

    def _doom(self, node: Node) -> None:
        """Choose ``node`` to die: its checkpoint, and its span when nothing lies below."""
        node.stamp += 1
        leaf = not node.children
        if node.free_swa:
            tree = self.tree
            for block_id in list(node.free_swa):
                heirs = [s for s in tree.sharers.get(block_id, ()) if s.swa is not None]
                if heirs:
                    # Another checkpoint holds it: this one dies, the block lives on.
                    self._drop_checkpoint(node)
                    break
            self._doom_swa(node)
        if leaf:
            self._doom_full(node)

    def _reprieve(self, node: Node) -> None:
        """Blocks of ``node`` that wait for death are wanted again."""
        doomed = self._doomed
        if not doomed:
            self._classify(node)
            return
        owner = self.tree.owner
        back = [b for ids in node.full for b in ids if b in doomed and owner[b] is node]
        for block_id in back:
            del doomed[block_id]
            node.free_full[block_id] = None
        node.doomed_full = False
        self._live_full += len(back)
        for block_id in node.swa or ():
            if block_id in doomed and owner[block_id] is node:
                del doomed[block_id]
                node.free_swa[block_id] = None
                self._live(block_id, 1)
        for ancestor in node.ancestors():
            if any(b in doomed and owner[b] is ancestor for ids in ancestor.full for b in ids[-1:]):
                self._reprieve(ancestor)
                break
        self._classify(node)

    def _classify(self, node: Node) -> None:
        """(Re-)enter ``node`` where it can be chosen; older heap entries become stale."""
        at: Node | None = node
        while at is not None:
            at = self._classify_one(at)

    def _classify_one(self, node: Node) -> Node | None:
        """Returns the parent when ``node`` was given up and the parent's place may have changed."""
        node.stamp += 1
        if node.parent is None:
            return None
        if node.free_swa and (node.dead or node.swa is None):
            self._doom_swa(node)
        unreachable = not node.children and node.swa is None
        if unreachable and self.policy.keep_unreachable and not node.dead:
            self._doom_full(node)
            return None
        if node.dead or unreachable:
            return self._abandon(node)
        if node.free_swa or (not node.children and node.free_full):
            self._candidates.push(node)
        return None


def sorted_by_position(node: Node) -> list[int]:
    """Free full blocks of ``node``, deepest first."""
    if len(node.full) == 1:
        return [b for b in reversed(node.full[0]) if b in node.free_full]
    return [b for ids in node.full for b in reversed(ids) if b in node.free_full]
