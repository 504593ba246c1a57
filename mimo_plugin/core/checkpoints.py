# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is the next to die, where the engine owns the blocks and the tree.

Keeps the checkpoints of an engine's prefix tree by the engine's own node ids, with the ranks and
ageing of :mod:`mimo_plugin.core.candidates`: those that merely bound a loss and have been passed go
first, then those that a later turn replaced, then by age, where the end of a long chat ages slower.
The engine may drop a checkpoint at any time and tell nobody; whoever asks for victims says
afterwards which of them are gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from mimo_plugin.core import retention
from mimo_plugin.core.candidates import Candidates, Policy, keeps_rank, lasts, rank_of
from mimo_plugin.core.tree import Node

_CHEAP = ("bound", "replaced")

#: Where windows have a pool of their own, one of a long chat keeps more full-attention KV useful
#: than one of a short chat, at the same price; so the end of a chat is worth its length. With 0
#: instead of 1 benchmarks/sglang_retention.py computes up to 2.7 times as many tokens again.
LEAF_EXPONENT = 1.0

Id = TypeVar("Id", bound=Hashable)
"""How the engine names a node of its tree."""


class CheckpointOrder(Generic[Id]):
    """Checkpoints by node id. Positions in tokens, sizes in pages.

    Args:
        page_tokens: tokens in a page.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._policy = Policy(
            swa_limit_blocks=0, block_tokens=page_tokens, leaf_exponent=LEAF_EXPONENT
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything: the engine's cache was reset."""
        self.root = Node(None, 0, 0)
        self._nodes: dict[Id, Node] = {}
        self._ids: dict[Node, Id] = {}
        self._candidates = Candidates(self._policy)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: Id) -> bool:
        return node_id in self._nodes

    def ids(self) -> list[Id]:
        """All checkpoints that are believed to be alive."""
        return [node_id for node_id, node in self._nodes.items() if node.swa is not None]

    def nearest(self, path: Sequence[Id]) -> Id | None:
        """The last of ``path`` (root first) that is known, None if none is."""
        return next((node_id for node_id in reversed(path) if node_id in self._nodes), None)

    def add(self, node_id: Id, parent_id: Id | None, tokens: int, pages: int, cls: str) -> None:
        """A checkpoint was made, or made again, at the engine's node ``node_id``.

        Args:
            node_id: where it is; it ends at ``tokens``.
            parent_id: the checkpoint before it on its path; None: there is none.
            tokens: the position it ends at.
            pages: pages that it alone holds.
            cls: its class; ``none`` counts as a rung.
        """
        cls = retention.LADDER if cls == retention.NONE else cls
        node = self._nodes.get(node_id)
        if node is None:
            parent = self._nodes.get(parent_id, self.root) if parent_id is not None else self.root
            if parent.tokens >= tokens:
                parent = self.root
            node = Node(parent, tokens, 0)
            parent.children.add(node)
            self._nodes[node_id], self._ids[node] = node, node_id
            self._renew(parent)
        if retention.STRENGTH[cls] >= retention.STRENGTH[node.cls]:
            node.cls = cls
        node.swa = [0] * max(1, pages)
        node.superseded = False
        node.lasting = node.lasting or lasts(node, cls)
        node.clock = self._tick()
        self._renew(node)
        for ancestor in node.ancestors():
            if ancestor.superseded:
                break
            if ancestor.swa is not None and not keeps_rank(ancestor):
                ancestor.superseded = True
                self._renew(ancestor)

    def used(self, node_id: Id) -> None:
        """A request resumed from this checkpoint: it and all before it were useful now."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.clock = self._tick()
        self._renew(node)
        for ancestor in node.ancestors():
            ancestor.clock = node.clock
            if keeps_rank(ancestor):
                self._renew(ancestor)

    def gone(self, node_id: Id) -> None:
        """The engine has dropped this checkpoint."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.swa = None
        node.stamp += 1
        # A node without a checkpoint only ties its children to what is before it.
        while node.parent is not None and node.swa is None and not node.children:
            parent = node.parent
            parent.children.discard(node)
            del self._nodes[self._ids.pop(node)]
            node = parent
        self._renew(node)

    def victim(self, *, cheap: bool = False) -> Id | None:
        """The checkpoint that is the first to die; None if there is none.

        It is no candidate any more: whoever asks says :meth:`gone` or :meth:`spared` of it.

        Args:
            cheap: only one that was passed or replaced.
        """
        node = self._candidates.take_oldest(self._clock)
        if node is None:
            return None
        if cheap and rank_of(node) not in _CHEAP:
            self._renew(node)
            return None
        return self._ids[node]

    def spared(self, node_id: Id) -> None:
        """This victim lives on."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._renew(node)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _renew(self, node: Node) -> None:
        """Enter ``node`` at its present rank and age; older entries become void."""
        node.stamp += 1
        if node.parent is not None and node.swa is not None:
            self._candidates.push(node)
