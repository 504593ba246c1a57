# SPDX-License-Identifier: Apache-2.0
"""The checkpoint tree keeps every prefix whole through growth, splits and closes."""

from __future__ import annotations

import random

import pytest

from mimo_plugin.core.tree import CheckpointTree, Node, Path
from mimo_plugin.core.window import GroupGeometry

BLOCK = 4


def make(num_blocks: int = 400, groups: int = 1) -> CheckpointTree:
    return CheckpointTree(num_blocks, [GroupGeometry(BLOCK) for _ in range(groups)])


def blocks_of(node: Node, group: int = 0) -> list[int]:
    """Blocks from the root to the node's end."""
    chain = [*reversed(list(node.ancestors())), node]
    return [b for part in chain for b in part.full[group]]


def check(tree: CheckpointTree) -> None:
    owned: dict[int, Node] = {}
    for node in tree.subtree(tree.root):
        assert node.parent is not None
        assert node in node.parent.children
        assert node.start_tokens == node.parent.tokens < node.tokens
        for ids in node.full:
            assert len(ids) * BLOCK == node.tokens - node.start_tokens
            for block in ids:
                assert block not in owned
                owned[block] = node
    for block, owner in enumerate(tree.owner):
        assert owner is owned.get(block)


@pytest.mark.parametrize("earlier", [False, True])
def test_prefixes_stay_whole(earlier: bool) -> None:
    for seed in range(60):
        grow_at_random(random.Random(seed), earlier=earlier)


def grow_at_random(rng: random.Random, *, earlier: bool) -> None:
    """Requests on one tree; with ``earlier`` they also close again where they closed before."""
    tree = make()
    fresh = iter(range(400))
    ends: list[tuple[Node, list[int]]] = []
    for _ in range(25):
        # A request resumes at the end of a known prefix, or inside one after a split there.
        if ends and rng.random() < 0.8:
            node, blocks = rng.choice(ends)
            keep = rng.randrange(1, len(blocks) + 1)
            assert blocks_of(node)[: len(blocks)] == blocks
            hit = tree.node_at(blocks[keep - 1])
            assert hit is not None
            path, mine = tree.start(hit, keep * BLOCK), blocks[:keep]
        else:
            path, mine = tree.start(None, 0), []
        low = 1 if earlier else len(mine) + 1
        for _ in range(rng.randrange(1, 4)):
            new = [next(fresh) for _ in range(rng.randrange(1, 4))]
            mine = mine + new
            tree.grow(path, 0, new, len(mine) * BLOCK)
            check(tree)
            if rng.random() < 0.5 and low <= len(mine):
                at = rng.randrange(low, len(mine) + 1)
                low = low if earlier else at + 1
                closed = tree.close(path, at * BLOCK)
                assert closed is not None
                assert closed.tokens == at * BLOCK
                assert blocks_of(closed) == mine[:at]
                check(tree)
        end = tree.close(path, len(mine) * BLOCK)
        assert end is not None
        assert blocks_of(end) == mine
        ends.append((end, mine))
    check(tree)


def test_the_same_checkpoint_twice_inside_the_open_span() -> None:
    tree = make()
    path = tree.start(None, 0)
    tree.grow(path, 0, [0, 1, 2, 3], 16)
    first = tree.close(path, 8)
    assert first is not None
    assert tree.close(path, 8) is first


def test_close_past_what_is_cached_is_none() -> None:
    tree = make()
    path = tree.start(None, 0)
    tree.grow(path, 0, [0, 1], 8)
    assert tree.close(path, 12) is None
    assert tree.close(path, 0) is None


def test_split_keeps_free_blocks_with_their_part() -> None:
    tree = make()
    path = tree.start(None, 0)
    node = tree.grow(path, 0, [0, 1, 2, 3], 16)
    node.free_full = dict.fromkeys([3, 1])
    upper = tree.split(node, 8)
    assert (list(upper.free_full), list(node.free_full)) == ([1], [3])
    assert (upper.full, node.full) == ([[0, 1]], [[2, 3]])
    assert tree.node_at(1) is upper


def test_follow_refuses_a_block_of_another_prefix() -> None:
    tree = make()
    one, other = tree.start(None, 0), tree.start(None, 0)
    tree.grow(one, 0, [0, 1], 8)
    tree.grow(other, 0, [2, 3], 8)
    reader = Path(tree.root, 0)
    assert tree.follow(reader, 0, 4)
    assert tree.follow(reader, 1, 8)
    stranger = Path(tree.root, 0)
    assert tree.follow(stranger, 0, 4)
    assert not tree.follow(stranger, 3, 8)


def test_clear_forgets_every_owner() -> None:
    tree = make()
    tree.grow(tree.start(None, 0), 0, [0, 1], 8)
    tree.clear()
    assert not list(tree.subtree(tree.root))
    assert tree.node_at(0) is None


def test_splitting_a_dead_span_leaves_reused_blocks_alone() -> None:
    tree = make()
    path = tree.start(None, 0)
    old = tree.grow(path, 0, [0, 1, 2], 12)
    # The span dies and block 0 is reused for another prefix.
    old.dead = True
    tree.root.children.discard(old)
    tree.owner[0] = None
    new = tree.grow(tree.start(None, 0), 0, [0], 4)
    tree.close(path, 8)
    assert tree.owner[0] is new
