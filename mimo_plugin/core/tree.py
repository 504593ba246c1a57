# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tree: which cached blocks belong together, and which prefix each one serves.

Positions are those of the full-attention blocks. Where a draft model's full group needs a
look-ahead block, a checkpoint for a hit of ``h`` tokens sits at the node that ends one such block
later: the look-ahead is part of the prefix that the hit is valid for.

A node covers the full-attention blocks between its parent's end and its own, and may own a
checkpoint (one window of SWA blocks in every SWA group) at its end. The chain from the root to a
node is a cached prefix; its checkpoint is what makes that prefix usable. Blocks are plain ids; the
tree never touches KV. Keeping spans instead of single blocks keeps the cost per token near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mimo_plugin.core import retention
from mimo_plugin.core.window import GroupGeometry


class Node:
    """One span of a cached prefix. Token positions are absolute, ``tokens`` is the node's end."""

    __slots__ = (
        "children",
        "clock",
        "cls",
        "created_s",
        "dead",
        "doomed_full",
        "free_full",
        "free_swa",
        "full",
        "had_checkpoint",
        "lasting",
        "parent",
        "stamp",
        "superseded",
        "swa",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: int, num_full_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: set[Node] = set()
        #: block ids per full group, in position order
        self.full: list[list[int]] = [[] for _ in range(num_full_groups)]
        #: blocks of the checkpoint at this node's end; None: no (complete) checkpoint
        self.swa: list[int] | None = None
        self.free_full: dict[int, None] = {}
        self.free_swa: dict[int, None] = {}
        self.cls = retention.NONE
        self.superseded = False
        #: not replaced by later turns: a junction, or the first message boundary of its chain
        self.lasting = False
        self.had_checkpoint = False
        self.dead = False
        #: some of the full blocks may be waiting for death instead of in free_full
        self.doomed_full = False
        self.clock = 0
        self.stamp = 0
        self.created_s = 0.0

    @property
    def start_tokens(self) -> int:
        """Where the node's span begins: its parent's end."""
        return self.parent.tokens if self.parent is not None else 0

    def ancestors(self) -> Iterator[Node]:
        """The node's parents, nearest first, the root left out."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Path:
    """Where a request stands in the tree.

    ``node`` is the deepest node the request's prefix is known to lie in, ``tokens`` the position
    within it; ``open`` is the request's own growing node below that, if it has cached any block.
    """

    node: Node
    tokens: int
    open: Node | None = None


class CheckpointTree:
    """Structure only: grow, split, seal, look up. :mod:`mimo_plugin.core.eviction` orders death."""

    def __init__(self, num_blocks: int, full_groups: Sequence[GroupGeometry]) -> None:
        self.full_groups = tuple(full_groups)
        self.num_blocks = num_blocks
        #: called with (upper, lower) after a split
        self.on_split: Callable[[Node, Node], None] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything (prefix cache reset)."""
        self.root = Node(None, 0, len(self.full_groups))
        #: owner of each cached block's place in the order of death
        self.owner: list[Node | None] = [None] * self.num_blocks
        #: other nodes whose checkpoint also contains this SWA block
        self.sharers: dict[int, list[Node]] = {}

    # -- positions ---------------------------------------------------------------------------

    def full_end(self, group: int, tokens: int) -> int:
        """First block index of full group ``group`` past a prefix of ``tokens``."""
        return tokens // self.full_groups[group].block_size_tokens

    def locate(self, path: Path) -> Node:
        """Follow splits that happened above the path's position since it was last used."""
        node = path.node
        while node.parent is not None and path.tokens <= node.parent.tokens:
            node = node.parent
        path.node = node
        return node

    # -- growth ------------------------------------------------------------------------------

    def untracked(self) -> Path:
        """Path of a request whose prefix has no place in the tree: nothing of it is kept."""
        node = Node(self.root, 0, len(self.full_groups))
        node.dead = True
        return Path(node, 0)

    def owned_full(self, node: Node) -> int:
        """Full blocks that ``node`` still owns (some may have been evicted or given away)."""
        owner = self.owner
        return sum(owner[block_id] is node for ids in node.full for block_id in ids)

    def start(self, hit_node: Node | None, hit_tokens: int) -> Path:
        """Path of a request that was admitted with a hit of ``hit_tokens`` ending in a node."""
        return Path(hit_node if hit_node is not None and hit_tokens else self.root, hit_tokens)

    def grow(self, path: Path, group: int, block_ids: Sequence[int], end_tokens: int) -> Node:
        """Append newly cached full blocks of ``group``, which end at ``end_tokens``."""
        node = self._open(path, end_tokens)
        node.full[group].extend(block_ids)
        owner = self.owner
        for block_id in block_ids:
            owner[block_id] = node
        return node

    def _open(self, path: Path, end_tokens: int) -> Node:
        node = path.open
        if node is None or node.children or node.swa is not None or node.dead:
            parent = node if node is not None else self.locate(path)
            if parent is not path.open and path.tokens < parent.tokens:
                parent = self.split(parent, path.tokens)
            node = Node(parent, parent.tokens, len(self.full_groups))
            node.dead = parent.dead
            if not node.dead:
                parent.children.add(node)
            path.node, path.open = parent, node
        node.tokens = max(node.tokens, end_tokens)
        path.tokens = node.tokens
        return node

    def follow(self, path: Path, block_id: int, end_tokens: int) -> bool:
        """Advance along a block that is cached already, instead of caching a second copy.

        Returns False when the resident block does not continue this path (its own chain is broken
        or belongs elsewhere); the caller then caches its own copy.
        """
        if path.open is not None and path.open.full[0]:
            return False
        node = self.owner[block_id]
        if node is None or node.dead:
            return False
        here = self.locate(path)
        if node is not here and not (node.parent is here and path.tokens == here.tokens):
            return False
        path.node, path.open, path.tokens = node, None, end_tokens
        return True

    def split(self, node: Node, at_tokens: int) -> Node:
        """Cut ``node`` at ``at_tokens``; returns the new upper part, ``node`` keeps the lower."""
        parent = node.parent
        assert parent is not None and parent.tokens < at_tokens < node.tokens
        upper = Node(parent, at_tokens, len(self.full_groups))
        upper.clock, upper.dead = node.clock, node.dead
        upper.created_s = node.created_s
        for group, ids in enumerate(node.full):
            cut = self.full_end(group, at_tokens) - self.full_end(group, parent.tokens)
            upper.full[group] = ids[:cut]
            del ids[:cut]
            for block_id in upper.full[group]:
                if self.owner[block_id] is node:
                    self.owner[block_id] = upper
                if block_id in node.free_full:
                    del node.free_full[block_id]
                    upper.free_full[block_id] = None
        parent.children.discard(node)
        if not node.dead:
            parent.children.add(upper)
        upper.children.add(node)
        node.parent = upper
        if self.on_split is not None:
            self.on_split(upper, node)
        return upper

    def close(self, path: Path, tokens: int) -> Node | None:
        """The node that ends exactly at ``tokens`` on this path (split if needed), or None."""
        if path.open is not None and path.open.tokens == tokens:
            node = path.open
            path.node, path.open, path.tokens = node, None, tokens
            return node
        if path.open is not None and path.open.start_tokens < tokens < path.open.tokens:
            path.node = self.split(path.open, tokens)
            return path.node
        if path.tokens < tokens:
            return None
        # The open node's parent may be newer than path.node: another path may have split it.
        node = self.locate(path)
        if path.open is not None and path.open.parent is not None:
            node = path.open.parent
        while node.parent is not None and tokens <= node.parent.tokens:
            node = node.parent
        if node.parent is None:
            return None
        return node if node.tokens == tokens else self.split(node, tokens)

    # -- look-up -----------------------------------------------------------------------------

    def node_at(self, block_id: int) -> Node | None:
        """The live node that owns a resident block."""
        node = self.owner[block_id]
        return node if node is not None and not node.dead else None

    def subtree(self, node: Node) -> Iterator[Node]:
        """All nodes below ``node``."""
        stack = list(node.children)
        while stack:
            child = stack.pop()
            yield child
            stack.extend(child.children)
