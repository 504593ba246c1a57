# SPDX-License-Identifier: Apache-2.0
"""A small engine over :class:`DeathOrder`: one full group and one SWA group, blocks of one symbol.

It keeps its own books (references, hashes) and never looks into the order's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from mimo_plugin.core.candidates import Policy
from mimo_plugin.core.eviction import DeathOrder
from mimo_plugin.core.retention import STRENGTH
from mimo_plugin.core.tree import Node, Path
from mimo_plugin.core.window import GroupGeometry

BLOCK_TOKENS = 4
Key = tuple[str, tuple[int, ...]]


@dataclass
class Running:
    """A request: its symbols, how many are computed, its blocks and its place in the tree."""

    symbols: tuple[int, ...]
    path: Path
    computed: int
    full: list[int]
    swa: list[int | None]
    sealed: int = 0
    caching: bool = True
    skipped: set[int] = field(default_factory=set)


class EngineModel:
    """Requests, a pool with references, a prefix cache; eviction is the order's."""

    def __init__(self, blocks: int, seed: int, window_blocks: int = 2, **policy: Any) -> None:
        self.rng = random.Random(seed)
        self.window = window_blocks
        self.blocks = blocks
        self.evicted: list[tuple[str, str]] = []
        self.order = DeathOrder(
            blocks,
            [GroupGeometry(BLOCK_TOKENS)],
            Policy(**{"swa_limit_blocks": blocks // 2, **policy}),
            on_evict=lambda kind, cls, _: self.evicted.append((kind, cls)),
            now=lambda: 0.0,
        )
        self.references = [0] * blocks
        self.key_of: dict[int, Key] = {}
        self.resident: dict[Key, int] = {}
        self.running: list[Running] = []
        self.known: list[tuple[int, ...]] = [()]
        self._symbol = 0
        #: (block, its key or None, was it of use) in the order of reuse
        self.watch: Any = None
        self.order.on_drop = self._drop
        self.order.add_empty(range(blocks))

    def _drop(self, blocks: list[int]) -> None:
        """Blocks that nothing makes reachable lose their hash at once."""
        for block in blocks:
            assert self.references[block] == 0, "a referenced block lost its hash"
            assert self.resident.pop(self.key_of.pop(block)) == block

    # -- pool --------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Blocks to be written; what they cached is forgotten."""
        out: list[int] = []
        for _ in range(count):  # one at a time, so that the order of death can be watched
            before = self.watch() if self.watch is not None else None
            empty, evicted = self.order.pop(1)
            (block,) = empty + evicted
            assert (block in self.key_of) == bool(evicted), "a block's hash is not what it says"
            assert self.references[block] == 0, "a referenced block was handed out"
            if before is not None:
                before(block)
            key = self.key_of.pop(block, None)
            if key is not None:
                assert self.resident.pop(key) == block
            self.references[block] = 1
            out.append(block)
        return out

    def _adopt(self, block: int) -> None:
        if self.references[block] == 0:
            self.order.remove(block)
        self.references[block] += 1

    def _release(self, blocks: list[int]) -> None:
        gone = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                gone.append(block)
        cached = [b for b in gone if b in self.key_of]
        empty = [b for b in gone if b not in self.key_of]
        self.order.add_cached(cached)
        self.order.add_empty(empty)

    def _hash(self, block: int, key: Key) -> None:
        self.key_of[block] = key
        self.resident[key] = block

    # -- requests ----------------------------------------------------------------------------

    def hit_of(self, symbols: tuple[int, ...]) -> int:
        """Longest valid hit in blocks, by brute force."""
        top = 0
        while top < len(symbols) and ("f", symbols[: top + 1]) in self.resident:
            top += 1
        for hit in range(top, 0, -1):
            window = range(max(0, hit - self.window), hit)
            if all(("s", symbols[: i + 1]) in self.resident for i in window):
                return hit
        return 0

    def start(self, symbols: tuple[int, ...]) -> Running:
        """Admit a request with its hit."""
        tree = self.order.tree
        hit = self.hit_of(symbols[:-1])
        full = [self.resident["f", symbols[: i + 1]] for i in range(hit)]
        swa: list[int | None] = [None] * hit
        for i in range(max(0, hit - self.window), hit):
            swa[i] = self.resident["s", symbols[: i + 1]]
        for block in [*full, *(b for b in swa if b is not None)]:
            self._adopt(block)
        node = tree.node_at(full[-1]) if hit else None
        path = tree.start(node, hit * BLOCK_TOKENS if node is not None else 0)
        request = Running(symbols, path, hit, full, swa, hit)
        if hit and node is None:
            request.caching = False
        elif node is not None:
            if node.tokens == hit * BLOCK_TOKENS:
                self.order.used(node)
            else:
                self.order.touched(node)
        self.running.append(request)
        return request

    def advance(self, request: Running, blocks: int) -> bool:
        """Compute up to ``blocks`` more symbols; False when the pool has no room."""
        blocks = min(blocks, len(request.symbols) - request.computed)
        if blocks <= 0 or 2 * blocks > self.order.num_free_blocks:
            return False
        taken = self.take(2 * blocks)
        request.full += taken[:blocks]
        request.swa += taken[blocks:]
        for index in range(request.computed, request.computed + blocks):
            self._cache_full(request, index)
        request.computed += blocks
        return True

    def _cache_full(self, request: Running, index: int) -> None:
        tree = self.order.tree
        key: Key = ("f", request.symbols[: index + 1])
        end = (index + 1) * BLOCK_TOKENS
        if not request.caching:
            return
        block = self.resident.get(key)
        if block is not None:
            request.caching = tree.follow(request.path, block, end)
            return
        if self._lost(request):
            request.caching = False
            return
        self._hash(request.full[index], key)
        node = tree.grow(request.path, 0, [request.full[index]], end)
        self.order.grew(node, [request.full[index]])

    @staticmethod
    def _lost(request: Running) -> bool:
        """The span that the request grew from, or its own, has died."""
        path = request.path
        return path.node.dead or (path.open is not None and path.open.dead)

    def slide(self, request: Running) -> None:
        """Free the SWA blocks that left the window."""
        gone = []
        for index in range(max(0, request.computed - self.window)):
            block = request.swa[index]
            if block is not None:
                gone.append(block)
                request.swa[index] = None
        self._release(gone)

    def seal(self, request: Running, cls: str) -> Node | None:
        """Checkpoint at the request's end."""
        order, hit = self.order, request.computed
        if not request.caching or not hit or self._lost(request):
            return None
        node = order.tree.close(request.path, hit * BLOCK_TOKENS)
        if node is None or node.dead:
            return None
        if node.swa is not None:
            order.seal(node, cls, node.swa, ())
            return node
        ids, new = [], []
        for i in range(max(0, hit - self.window), hit):
            block = self.resident.get(("s", request.symbols[: i + 1]))
            if block is None:
                block = request.swa[i]
                if block is None or block in self.key_of:
                    return None
                new.append(block)
            ids.append(block)
        if not order.admit_checkpoint(len(new)):
            return None
        for i in range(max(0, hit - self.window), hit):
            if ("s", request.symbols[: i + 1]) not in self.resident:
                block = request.swa[i]
                assert block is not None
                self._hash(block, ("s", request.symbols[: i + 1]))
        order.seal(node, cls, ids, new)
        order.supersede(node)
        return node

    def stop(self, request: Running) -> None:
        """End or abort."""
        self.running.remove(request)
        self.known.append(request.symbols[: request.computed])
        del self.known[:-12]
        self._release([b for b in reversed(request.swa) if b is not None])
        self._release(list(reversed(request.full)))

    def invalidate(self, block: int) -> None:
        """A connector says that a cached block holds nothing."""
        assert self.resident.pop(self.key_of.pop(block)) == block
        self.order.invalidate(block)

    def reset(self) -> None:
        """Prefix cache reset, with no request running."""
        for request in list(self.running):
            self.stop(request)
        self.key_of.clear()
        self.resident.clear()
        self.order.clear()

    # -- one random step ---------------------------------------------------------------------

    def random_step(self, *, invalidate: bool = True) -> str:
        """One operation; returns its name."""
        rng = self.rng
        names = ["start", "advance", "advance", "advance", "seal", "slide", "stop"]
        name = rng.choice(names)
        if rng.random() < 0.01 and invalidate:
            name = "invalidate" if self.key_of else "start"
        if rng.random() < 0.001:
            name = "reset"
        if name == "start" and len(self.running) < 4:
            base = rng.choice(self.known)
            base = base[: rng.randrange(len(base) + 1)]
            count = rng.randrange(1, 8)
            fresh = tuple(range(self._symbol, self._symbol + count))
            self._symbol += count
            self.start(base + fresh)
        elif name == "invalidate":
            self.invalidate(rng.choice(sorted(self.key_of)))
        elif name == "reset":
            self.reset()
        elif self.running and name in ("advance", "seal", "slide", "stop"):
            request = rng.choice(self.running)
            if name == "advance":
                if not self.advance(request, rng.randrange(1, 4)) and rng.random() < 0.5:
                    self.stop(request)
            elif name == "seal":
                self.seal(request, rng.choice([c for c in STRENGTH if c != "none"]))
            elif name == "slide":
                self.slide(request)
            else:
                if rng.random() < 0.7:
                    self.seal(request, "turn_end")
                self.stop(request)
        return name
