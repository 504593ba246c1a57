# SPDX-License-Identifier: Apache-2.0
"""Which workers hold a block: one integer of worker bits for each hash.

* :class:`Copies` counts physical copies in one KV cache group: a worker has a block until the last
  of its copies is removed.
* :class:`Windows` joins the groups of one sliding-window geometry: the workers that have a block in
  all of them.
* :class:`Chains` does so for full attention, and knows which block follows which, so that it can
  say which workers have a block *and all before it*. Along a prompt these workers only get fewer,
  and so a look-up may bisect.

Memory is bounded by what is resident: a hash that no worker holds is in no table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.window import GroupGeometry

_COUNT_BITS = 32  # of one worker's number of further copies


class Copies:
    """Blocks of one group: the workers that have them, and how many copies."""

    __slots__ = ("_further", "masks")

    def __init__(self) -> None:
        self.masks: dict[Hash, int] = {}
        # Further copies are few. One packed integer costs a fraction of a table for each worker.
        self._further: dict[Hash, int] = {}

    def add(self, block: Hash, slot: int) -> bool:
        """Count a copy; True when it is the worker's first."""
        mask = self.masks.get(block, 0)
        if mask >> slot & 1:
            self._further[block] = self._further.get(block, 0) + (1 << slot * _COUNT_BITS)
            return False
        self.masks[block] = mask | 1 << slot
        return True

    def remove(self, block: Hash, slot: int) -> bool | None:
        """Take a copy away; True when it was the worker's last, None when it had none."""
        mask = self.masks.get(block, 0)
        if not mask >> slot & 1:
            return None
        if self.further(block, slot):
            left = self._further[block] - (1 << slot * _COUNT_BITS)
            self._set_further(block, left)
            return False
        self._set_mask(block, mask & ~(1 << slot))
        return True

    def further(self, block: Hash, slot: int) -> int:
        """Copies beside the first one."""
        packed = self._further.get(block, 0)
        return packed >> slot * _COUNT_BITS & ((1 << _COUNT_BITS) - 1)

    def of(self, slot: int) -> Iterator[tuple[Hash, int]]:
        """Every block of a worker, with its number of copies."""
        for block, mask in self.masks.items():
            if mask >> slot & 1:
                yield block, 1 + self.further(block, slot)

    def clear(self, slot: int) -> None:
        """The worker has nothing."""
        bit, counts = 1 << slot, ((1 << _COUNT_BITS) - 1) << slot * _COUNT_BITS
        for block in [block for block, packed in self._further.items() if packed & counts]:
            self._set_further(block, self._further[block] & ~counts)
        for block in [block for block, mask in self.masks.items() if mask & bit]:
            self._set_mask(block, self.masks[block] & ~bit)

    def _set_mask(self, block: Hash, mask: int) -> None:
        if mask:
            self.masks[block] = mask
        else:
            del self.masks[block]

    def _set_further(self, block: Hash, packed: int) -> None:
        if packed:
            self._further[block] = packed
        else:
            del self._further[block]


class Windows:
    """Groups of one sliding-window geometry."""

    __slots__ = ("geometry", "masks", "members")

    def __init__(self, geometry: GroupGeometry) -> None:
        self.geometry = geometry
        self.members: list[Copies] = []
        self.masks: dict[Hash, int] = {}

    def join(self, copies: Copies) -> None:
        """One more group of this geometry; so far no worker has anything in it."""
        self.members.append(copies)
        self.masks.clear()

    def gained(self, block: Hash, slot: int) -> None:
        """The worker got the block in one of the groups."""
        if all(member.masks.get(block, 0) >> slot & 1 for member in self.members):
            self.masks[block] = self.masks.get(block, 0) | 1 << slot

    def lost(self, block: Hash, slot: int) -> None:
        """The worker lost the block in one of the groups."""
        mask = self.masks.get(block, 0) & ~(1 << slot)
        if mask:
            self.masks[block] = mask
        else:
            self.masks.pop(block, None)

    def clear(self, slot: int) -> None:
        """The worker has nothing."""
        for block in [block for block, mask in self.masks.items() if mask >> slot & 1]:
            self.lost(block, slot)


class Link:
    """A block of a chain: who has it, and who has everything up to it."""

    __slots__ = ("known", "mask", "parent", "reach")

    def __init__(self, parent: Hash | None, known: bool) -> None:
        self.parent = parent
        #: False when it is not known which block comes before this one
        self.known = known
        self.mask = 0
        self.reach = 0


class Chains:
    """Full-attention groups of one geometry, with the order of their blocks."""

    __slots__ = ("_next", "geometry", "links", "members")

    def __init__(self, geometry: GroupGeometry) -> None:
        self.geometry = geometry
        self.members: list[Copies] = []
        self.links: dict[Hash, Link] = {}
        # By the hash of a parent, which itself may be held by nobody.
        self._next: dict[Hash, Hash | set[Hash]] = {}

    def join(self, copies: Copies) -> None:
        """One more group of this geometry; so far no worker has anything in it."""
        self.members.append(copies)
        self.links.clear()
        self._next.clear()

    def reach(self, block: Hash) -> int:
        """Workers that have this block and all before it."""
        link = self.links.get(block)
        return link.reach if link is not None else 0

    def gained(self, block: Hash, slot: int, parent: Hash | None, known: bool) -> None:
        """The worker got the block in one of the groups; ``parent`` None starts a prompt."""
        if not all(member.masks.get(block, 0) >> slot & 1 for member in self.members):
            return
        link = self.links.get(block)
        if link is None:
            link = self.links[block] = Link(parent, known)
            if known and parent is not None:
                self._follow(parent, block)
        elif known and not link.known:
            link.parent, link.known = parent, True
            if parent is not None:
                self._follow(parent, block)
            self._spread(block, self._before(link) & link.mask)
        elif known and link.parent != parent:
            # Two different blocks before the same one: the hash is not what it should be.
            self._unlink(block, link)
            link.known = False
            self._cut(block, link.reach)
        link.mask |= 1 << slot
        if self._before(link) >> slot & 1:
            self._spread(block, 1 << slot)

    def lost(self, block: Hash, slot: int) -> None:
        """The worker lost the block in one of the groups."""
        link = self.links.get(block)
        if link is None or not link.mask >> slot & 1:
            return
        self._cut(block, 1 << slot)
        link.mask &= ~(1 << slot)
        if not link.mask:
            self._unlink(block, link)
            del self.links[block]

    def clear(self, slot: int) -> None:
        """The worker has nothing."""
        bit = 1 << slot
        for block, link in list(self.links.items()):
            link.mask &= ~bit
            link.reach &= ~bit
            if not link.mask:
                self._unlink(block, link)
                del self.links[block]

    def _before(self, link: Link) -> int:
        if not link.known:
            return 0
        return -1 if link.parent is None else self.reach(link.parent)

    def _children(self, block: Hash) -> Iterator[Hash]:
        found = self._next.get(block)
        if isinstance(found, set):
            yield from found
        elif found is not None:
            yield found

    def _follow(self, parent: Hash, block: Hash) -> None:
        found = self._next.get(parent)
        if found is None:
            self._next[parent] = block
        elif isinstance(found, set):
            found.add(block)
        else:
            self._next[parent] = {found, block}

    def _unlink(self, block: Hash, link: Link) -> None:
        if not link.known or link.parent is None:
            return
        found = self._next[link.parent]
        if isinstance(found, set) and len(found) > 1:
            found.discard(block)
        else:
            del self._next[link.parent]

    def _spread(self, block: Hash, bits: int) -> None:
        """These workers have all before ``block``; and what follows it, as far as they have it."""
        todo = [(block, bits)]
        while todo:
            block, bits = todo.pop()
            link = self.links[block]
            bits &= link.mask & ~link.reach
            if bits:
                link.reach |= bits
                todo.extend((child, bits) for child in self._children(block))

    def _cut(self, block: Hash, bits: int) -> None:
        """These workers lack ``block`` or one before it."""
        todo = [(block, bits)]
        while todo:
            block, bits = todo.pop()
            link = self.links[block]
            bits &= link.reach
            if bits:
                link.reach &= ~bits
                todo.extend((child, bits) for child in self._children(block))


def parents(event_hashes: Sequence[Hash], first: Hash | None) -> Iterator[Hash | None]:
    """The block before each of the blocks of an event that leaves none out."""
    yield first
    yield from event_hashes[:-1]
