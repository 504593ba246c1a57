# SPDX-License-Identifier: Apache-2.0
"""The order in which cached blocks die.

1. blocks without a hash, last freed first;
2. doomed blocks: their checkpoint was chosen to die;
3. the checkpoint or leaf span with the greatest weighted age, which is then doomed as a whole;
4. only if nothing else is left: blocks in the middle of a prefix, deepest span first.

Full blocks that no live checkpoint makes reachable are dropped at once: they become blocks without
a hash.

Age is the number of cache events since the last use. A checkpoint that a later one of the same
chat replaces ages faster than the end of a chat (only an edit would want it), and checkpoints that
merely bound a loss age faster still. A span's full blocks never die before its checkpoint, and a
checkpoint never before the spans below it, so what survives is always a usable prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from mimo_plugin.core import retention
from mimo_plugin.core.candidates import Candidates, Policy
from mimo_plugin.core.tree import CheckpointTree, Node
from mimo_plugin.core.window import GroupGeometry

FULL = "full"
SWA = "swa"
#: what a cached block holds; a draft model's SWA blocks are SWA blocks with a budget of their own
_NO_KIND, _FULL, _SWA, _DRAFT = 0, 1, 2, 3


class DeathOrder:
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
        self.tree = CheckpointTree(num_blocks, full_groups)
        self.tree.on_split = self._was_split
        self.policy = policy
        self.on_evict = on_evict
        #: called with blocks that must lose their hash now; they are free and hold nothing
        self.on_drop: Callable[[list[int]], None] | None = None
        self.now = now
        self._kind = bytearray(num_blocks)
        self._swa_cls: dict[int, str] = {}
        self._empty: list[int] = []
        self._doomed: dict[int, None] = {}
        self._candidates = Candidates(policy)
        self._clock = 0
        self.num_free_blocks = 0
        self.cached: dict[tuple[str, str], int] = {}
        self._live_swa = self._live_full = self._live_draft = 0
        #: blocks that were evicted, dropped or invalidated so far
        self.num_evicted = 0

    # -- free list ---------------------------------------------------------------------------

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
            if kind[block_id] == _FULL:
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
            free = node.free_full if self._kind[block_id] == _FULL else node.free_swa
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
                free = node.free_full if kind[block_id] == _FULL else node.free_swa
                if block_id in free:
                    del free[block_id]
                    taken += 1
                    continue
            self.remove(block_id)
        self.num_free_blocks -= taken

    def _live(self, block_id: int, change: int) -> None:
        if self._kind[block_id] == _FULL:
            self._live_full += change
        elif self._kind[block_id] >= _SWA:
            self._live_swa += change
            if self._kind[block_id] == _DRAFT:
                self._live_draft += change

    def _doom_swa(self, node: Node) -> None:
        """All free SWA blocks of ``node`` are to be reused next."""
        for block_id in node.free_swa:
            self._doomed[block_id] = None
            self._live(block_id, -1)
        node.free_swa.clear()

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
        out = list(reversed(self._empty)) + list(self._doomed)
        nodes = sorted(self.tree.subtree(self.tree.root), key=lambda n: (n.clock, -n.tokens))
        for node in nodes:
            out.extend(node.free_swa)
            out.extend(node.free_full)
        return out

    def clear(self) -> None:
        """Prefix cache reset: every hash is gone; free blocks stay free."""
        free = self.free_ids()
        self.tree.clear()
        self._kind = bytearray(len(self._kind))
        self._doomed.clear()
        self._swa_cls.clear()
        self._empty = free[::-1]
        self._candidates.clear()
        self.cached.clear()
        self._live_swa = self._live_full = self._live_draft = 0

    # -- registration ------------------------------------------------------------------------

    def grew(self, node: Node, block_ids: Sequence[int]) -> None:
        """Full blocks were hashed and given to ``node`` (after ``tree.grow``)."""
        if not node.created_s:
            node.created_s = self.now()
        kind = self._kind
        for block_id in block_ids:
            kind[block_id] = _FULL
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
        node.lasting = node.lasting or self._lasts(node, cls)
        node.created_s = self.now()
        node.clock = self._stamp()
        for block_id in new_ids:
            kind[block_id] = _DRAFT if block_id in new_draft_ids else _SWA
            tree.owner[block_id] = node
            self._label_swa(block_id, node.cls)
            self._live(block_id, 1)
        if len(new_ids) != len(swa_ids):
            fresh = set(new_ids)
            for block_id in swa_ids:
                if block_id not in fresh:
                    self._share(block_id, node)
        self._reprieve(node)

    def _share(self, block_id: int, node: Node) -> None:
        """A block that another checkpoint holds becomes part of ``node``'s too."""
        tree = self.tree
        home = tree.owner[block_id]
        if home is node:
            return
        sharers = tree.sharers.setdefault(block_id, [])
        if home is None:
            tree.owner[block_id] = node
            self._kind[block_id] = _SWA
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

    def used(self, node: Node) -> None:
        """A request resumed from ``node``'s checkpoint: it and all below it were useful now."""
        stamp = self._stamp()
        node.used += 1
        node.clock = stamp
        self._classify(node)
        for ancestor in node.ancestors():
            ancestor.clock = stamp

    def touched(self, node: Node) -> None:
        """A request resumed from within ``node``'s span, not from its checkpoint."""
        stamp = self._stamp()
        for ancestor in node.ancestors():
            ancestor.clock = stamp

    def num_free_full(self, node: Node) -> int:
        """How many of the node's full blocks are free (waiting for death included)."""
        last = node.full[0][-1:] if node.full else []
        if last and last[0] in self._doomed:
            return len(node.free_full) + sum(b in self._doomed for b in node.full[0])
        return len(node.free_full)

    def disown(self, block_id: int) -> None:
        """A referenced, resident block leaves its span (its new span is registered next)."""
        node = self.tree.owner[block_id]
        if node is not None:
            if self._kind[block_id] == _FULL:
                self._count(FULL, node.cls, -1)
            else:
                self._label_swa(block_id, None)
            self._live(block_id, -1)
            self.tree.owner[block_id] = None
            self._kind[block_id] = _NO_KIND

    def supersede(self, node: Node) -> None:
        """A later turn of the same chat has its own checkpoint: demote the ones before it."""
        for ancestor in node.ancestors():
            if ancestor.superseded:
                break
            if ancestor.swa is not None and not self._keeps_rank(ancestor):
                ancestor.superseded = True
                self._classify(ancestor)

    @staticmethod
    def _lasts(node: Node, cls: str) -> bool:
        if cls == retention.JUNCTION:
            return True
        # The first boundary ends the system prompt, which every chat on it shares.
        return cls == retention.BOUNDARY and all(
            a.cls != retention.BOUNDARY for a in node.ancestors()
        )

    @staticmethod
    def _keeps_rank(node: Node) -> bool:
        return node.lasting or len(node.children) > 1

    # -- death -------------------------------------------------------------------------------

    def forget(self, block_id: int, *, evicted: bool = False) -> None:
        """A cached block lost its hash (evicted, or invalidated by a connector)."""
        node = self.tree.owner[block_id]
        kind = self._kind[block_id]
        if not evicted and node is not None:
            self._live(block_id, -1)
        self.tree.owner[block_id] = None
        self._kind[block_id] = _NO_KIND
        sharers = self.tree.sharers.pop(block_id, ())
        self.num_evicted += 1
        if node is None:
            return
        name, cls = (FULL, node.cls) if kind == _FULL else (SWA, self._swa_cls[block_id])
        if kind == _FULL:
            self._count(FULL, cls, -1)
        else:
            self._label_swa(block_id, None)
        if evicted and self.on_evict is not None:
            self.on_evict(name, cls, self.now() - node.created_s)
        if kind == _FULL:
            self._kill(node)
        else:
            self._drop_checkpoint(node)
            for sharer in sharers:
                self._drop_checkpoint(sharer)

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
            self._kind[block_id] = _NO_KIND
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
            self._live_full -= len(node.free_full)
            node.free_full.clear()

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

    # -- choice ------------------------------------------------------------------------------

    def _stamp(self) -> int:
        self._clock += 1
        return self._clock

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
        if node.dead or (not node.children and node.swa is None):
            return self._abandon(node)
        if node.free_swa or (not node.children and node.free_full):
            self._candidates.push(node)
        return None

    def _doom_oldest(self, *, leaves_only: bool = False, with_swa: bool = False) -> bool:
        node = self._candidates.take_oldest(self._clock, leaves_only=leaves_only, with_swa=with_swa)
        if node is None:
            return False
        self._doom(node)
        return True

    def _force_deepest(self) -> None:
        """Nothing can be spared: break a prefix at its deepest free span."""
        nodes = [n for n in self.tree.subtree(self.tree.root) if n.free_full or n.free_swa]
        node = min(nodes, key=lambda n: (n.clock, -n.tokens))
        self._doom(node)
        self._doom_full(node)

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


def sorted_by_position(node: Node) -> list[int]:
    """Free full blocks of ``node``, deepest first."""
    if len(node.full) == 1:
        return [b for b in reversed(node.full[0]) if b in node.free_full]
    return [b for ids in node.full for b in reversed(ids) if b in node.free_full]
