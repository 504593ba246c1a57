# SPDX-License-Identifier: Apache-2.0
"""The order in which cached blocks die.

1. blocks without a hash, last freed first;
2. doomed blocks: their checkpoint was chosen to die;
3. the checkpoint or leaf span with the greatest weighted age, which is then doomed as a whole;
4. only if nothing else is left: blocks in the middle of a prefix, deepest span first.

Full blocks that no live checkpoint makes reachable are dropped at once: they become blocks without
a hash. With ``Policy.keep_unreachable`` they are doomed instead.

Age is the number of cache events since the last use. A checkpoint that a later one of the same
chat replaces ages faster than the end of a chat (only an edit would want it), and checkpoints that
merely bound a loss age faster still. A span's full blocks never die before its checkpoint, and a
checkpoint never before the spans below it, so what survives is always a usable prefix.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from mimo_plugin.core.candidates import Policy, keeps_rank, lasts
from mimo_plugin.core.ledger import DRAFT_KIND, FULL, FULL_KIND, SWA_KIND
from mimo_plugin.core.spans import SpanLedger
from mimo_plugin.core.tree import Node
from mimo_plugin.core.window import GroupGeometry


class DeathOrder(SpanLedger):
    """Free blocks of a pool in the order in which they are to be reused.

    Mirrors the engine's free queue: every block with no reference is in exactly one place here.
    All methods take block ids. ``on_evict(kind, cls, residence_s)`` is called per evicted block.
    """

    def __init__(
        self,
        num_blocks: int,
        full_groups: Sequence[GroupGeometry],
        policy: Policy,
        *,
        on_evict: Callable[[str, str, float], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_blocks, full_groups, policy, on_evict=on_evict, now=now)
        self._clock = 0
        self.num_free_blocks = 0

    def add_empty(self, block_ids: Iterable[int]) -> None:
        """Free blocks that hold nothing; the first one given is reused first."""
        ids = list(block_ids)
        ids.reverse()
        self._empty.extend(ids)
        self.num_free_blocks += len(ids)

    def add_cached(self, block_ids: Iterable[int]) -> None:
        """Free blocks that carry a hash; their place follows from the tree."""
        owner, kind = self.tree.owner, self._kind
        touched: dict[Node, None] = {}
        last: Node | None = None
        count = 0
        for block_id in block_ids:
            count += 1
            node = owner[block_id]
            if node is None:
                self._doomed[block_id] = None
                continue
            if kind[block_id] == FULL_KIND:
                node.free_full[block_id] = None
            else:
                node.free_swa[block_id] = None
            if node is not last:
                touched[node] = None
                last = node
        self.num_free_blocks += count
        for node in touched:
            self._classify(node)

    def remove(self, block_id: int) -> None:
        """Take one free block out: a request adopts it."""
        self.num_free_blocks -= 1
        node = self.tree.owner[block_id]
        if node is not None:
            free = node.free_full if self._kind[block_id] == FULL_KIND else node.free_swa
            if block_id in free:
                del free[block_id]
                return
        if block_id in self._doomed:
            del self._doomed[block_id]
            self._live(block_id, 1)
            if node is not None and not node.dead:
                self._reprieve(node)
            return
        self._empty.remove(block_id)

    def remove_many(self, block_ids: Iterable[int]) -> None:
        """Take cached free blocks out: a request adopts a prefix."""
        owner, kind = self.tree.owner, self._kind
        taken = 0
        for block_id in block_ids:
            node = owner[block_id]
            if node is not None:
                free = node.free_full if kind[block_id] == FULL_KIND else node.free_swa
                if block_id in free:
                    del free[block_id]
                    taken += 1
                    continue
            self.remove(block_id)
        self.num_free_blocks -= taken

    def pop(self, count: int) -> tuple[list[int], list[int]]:
        """The next ``count`` blocks to be reused: those that hold nothing, and evicted ones.

        The caller takes the hashes off the evicted ones.

        Raises:
            ValueError: fewer than ``count`` blocks are free.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"asked for {count} blocks, {self.num_free_blocks} are free")
        self.num_free_blocks -= count
        empty = self._empty
        fresh = empty[: -count - 1 : -1] if count else []
        del empty[len(empty) - len(fresh) :]
        evicted: list[int] = []
        doomed = self._doomed
        while len(fresh) + len(evicted) < count:
            if empty:
                fresh.append(empty.pop())
            elif doomed:
                block_id = next(iter(doomed))
                del doomed[block_id]
                self.forget(block_id, evicted=True)
                evicted.append(block_id)
            elif not self._doom_oldest():
                self._force_deepest()
        return fresh, evicted

    def free_ids(self) -> list[int]:
        """All free blocks, roughly in order of death (not exact past the doomed ones)."""
        return list(self.iter_free())

    def iter_free(self) -> Iterator[int]:
        """:meth:`free_ids`, block by block."""
        yield from reversed(self._empty)
        yield from self._doomed
        for node in sorted(self.tree.subtree(self.tree.root), key=lambda n: (n.clock, -n.tokens)):
            yield from node.free_swa
            yield from node.free_full

    def clear(self) -> None:
        """Prefix cache reset: every hash is gone; free blocks stay free."""
        free = self.free_ids()
        self._clear_ledger()
        self._candidates.clear()
        self._empty = free[::-1]

    def grew(self, node: Node, block_ids: Sequence[int]) -> None:
        """Full blocks were hashed and given to ``node`` (after ``tree.grow``)."""
        if not node.created_s:
            node.created_s = self.now()
        kind = self._kind
        for block_id in block_ids:
            kind[block_id] = FULL_KIND
        node.clock = self._stamp()
        self._count(FULL, node.cls, len(block_ids))
        self._live_full += len(block_ids)
        limit = self.policy.full_limit_blocks
        while limit is not None and self._live_full > limit and self._doom_oldest(leaves_only=True):
            self._evict_doomed()

    def admit_checkpoint(self, new_blocks: int, new_draft_blocks: int = 0) -> bool:
        """Make room in the budgets for a checkpoint's new SWA blocks; False if there can be none.

        Args:
            new_blocks: SWA blocks to be hashed, those of draft groups included.
            new_draft_blocks: how many of them belong to a draft model's groups.
        """
        limit, draft_limit = self.policy.swa_limit_blocks, self.policy.draft_limit_blocks
        if new_blocks > limit or (draft_limit is not None and new_draft_blocks > draft_limit):
            return False
        while self._live_swa + new_blocks > limit or (
            draft_limit is not None and self._live_draft + new_draft_blocks > draft_limit
        ):
            if not self._doom_oldest(with_swa=True):
                return False
            self._evict_doomed()
        return True

    def _evict_doomed(self) -> None:
        """Budgets hold for what is cached, so what was chosen to die over one dies now."""
        ids = list(self._doomed)
        self._doomed.clear()
        for block_id in ids:
            self.forget(block_id, evicted=True)
        self._empty.extend(ids)
        if ids and self.on_drop is not None:
            self.on_drop(ids)

    def seal(
        self,
        node: Node,
        cls: str,
        swa_ids: Sequence[int],
        new_ids: Sequence[int],
        new_draft_ids: Collection[int] = (),
    ) -> None:
        """``swa_ids`` (of which ``new_ids`` were just hashed) are the checkpoint at ``node``.

        ``new_draft_ids`` are those of ``new_ids`` that belong to a draft model's groups.
        """
        tree, kind = self.tree, self._kind
        self._relabel(node, cls)
        node.swa = list(swa_ids)
        node.had_checkpoint = True
        node.superseded = False
        node.lasting = node.lasting or lasts(node, cls)
        node.created_s = self.now()
        node.clock = self._stamp()
        for block_id in new_ids:
            kind[block_id] = DRAFT_KIND if block_id in new_draft_ids else SWA_KIND
            tree.owner[block_id] = node
            self._label_swa(block_id, node.cls)
            self._live(block_id, 1)
        if len(new_ids) != len(swa_ids):
            fresh = set(new_ids)
            for block_id in swa_ids:
                if block_id not in fresh:
                    self._share(block_id, node)
        self._reprieve(node)

    def used(self, node: Node) -> None:
        """A request resumed from ``node``'s checkpoint: it and all below it were useful now."""
        stamp = self._stamp()
        node.clock = stamp
        self._classify(node)
        for ancestor in node.ancestors():
            ancestor.clock = stamp

    def touched(self, node: Node) -> None:
        """A request resumed from within ``node``'s span, not from its checkpoint."""
        stamp = self._stamp()
        for ancestor in node.ancestors():
            ancestor.clock = stamp

    def supersede(self, node: Node) -> None:
        """A later turn of the same chat has its own checkpoint: demote the ones before it."""
        for ancestor in node.ancestors():
            if ancestor.superseded:
                break
            if ancestor.swa is not None and not keeps_rank(ancestor):
                ancestor.superseded = True
                self._classify(ancestor)

    def invalidate(self, block_id: int) -> None:
        """Like :meth:`forget`, for a block that may be free: it becomes an empty one."""
        node = self.tree.owner[block_id]
        free = False
        if node is not None:
            for pool in (node.free_full, node.free_swa):
                if block_id in pool:
                    del pool[block_id]
                    free = True
        if block_id in self._doomed:
            del self._doomed[block_id]
            self._live(block_id, 1)
            free = True
        self.forget(block_id)
        if free:
            self._empty.append(block_id)

    def _stamp(self) -> int:
        self._clock += 1
        return self._clock

    def _doom_oldest(self, *, leaves_only: bool = False, with_swa: bool = False) -> bool:
        node = self._candidates.take_oldest(self._clock, leaves_only=leaves_only, with_swa=with_swa)
        if node is None:
            return False
        self._doom(node)
        return True

    def _force_deepest(self) -> None:
        """Nothing can be spared: break prefixes at their deepest free spans, oldest first."""
        nodes = [n for n in self.tree.subtree(self.tree.root) if n.free_full or n.free_swa]
        # Several at once, since finding them means a walk through the whole tree.
        for node in heapq.nsmallest(64, nodes, key=lambda n: (n.clock, -n.tokens)):
            self._doom(node)
            self._doom_full(node)
