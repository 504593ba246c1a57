# SPDX-License-Identifier: Apache-2.0
"""Routing rules of the simulation: the package's own, and the shape of what others do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from benchmarks.router_nodes import BLOCK, SPEED, Arrival, Node
from mimo_plugin.core.kv_events import BlockStored
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.residency import ResidencyIndex
from mimo_plugin.core.ring import HashRing
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Request, Target

Choose: TypeAlias = Callable[[Arrival], Node]


def others(nodes: Sequence[Node], seed: int) -> dict[str, Choose]:
    """Rules that know queue lengths, and prefixes by what they sent or by full attention alone."""
    rnd = random.Random(seed)
    ring = HashRing({str(node.index): 160 for node in nodes})
    turn = iter(range(1 << 60))

    def least(found: Sequence[Node]) -> Node:
        return min(found, key=lambda node: (node.in_flight, rnd.random()))

    def sent(node: Node, arrival: Arrival) -> int:
        count = 0
        for block in arrival.blocks:
            if block not in node.history:
                break
            count += 1
        return count

    def round_robin(arrival: Arrival) -> Node:
        return nodes[next(turn) % len(nodes)]

    def consistent_hash(arrival: Arrival) -> Node:
        # The first two blocks, and never more than 1.25 times the mean.
        most = 1.25 * (sum(node.in_flight for node in nodes) + 1) / len(nodes)
        key = repr(arrival.blocks[:2])
        for attempt in range(64):
            node = nodes[int(ring.store_of(f"{key}/{attempt}" if attempt else key))]
            if node.in_flight <= most:
                return node
        return least(nodes)

    def sglang_like(absolute: int) -> Choose:
        def choose(arrival: Arrival) -> Node:
            loads = [node.in_flight for node in nodes]
            if max(loads) - min(loads) > absolute and max(loads) > 1.5 * min(loads):
                return least(nodes)
            matches = [sent(node, arrival) for node in nodes]
            best = max(matches)
            if best * BLOCK / arrival.tokens > 0.3:
                return rnd.choice([n for n, m in zip(nodes, matches, strict=True) if m == best])
            return least(nodes)

        return choose

    def dynamo_like(arrival: Arrival) -> Node:
        # Blocks to prefill plus blocks in flight; residency from events, of full attention only.
        def blocks(node: Node) -> tuple[float, float]:
            new = arrival.tokens / BLOCK - node.cache.full(arrival)
            return new + node.queued_tokens / BLOCK, rnd.random()

        return min(nodes, key=blocks)

    return {
        "round-robin": round_robin,
        "least requests": lambda arrival: least(nodes),
        "consistent hash": consistent_hash,
        "sglang-like 64": sglang_like(64),
        "sglang-like 8": sglang_like(8),
        "Dynamo-like": dynamo_like,
    }


class Ours:
    """The package's router over its index, fed with the nodes' events.

    Attributes:
        wrong: requests whose hit on some node was not what the index said.
    """

    def __init__(
        self, nodes: Sequence[Node], seed: int, *, hybrid: bool, queue_weight: float = 1.0
    ) -> None:
        self.wrong = 0
        self._nodes = nodes
        self._index = ResidencyIndex(BLOCK, num_groups=2 if hybrid else 1)
        self._router = Router(
            self._index.lookup,
            Reservations(BLOCK, BLOCK, every_block=not hybrid),
            SPEED,
            random.Random(seed),
            prefixes=self._index.full_prefixes if hybrid else None,
            queue_weight=queue_weight,
            grace_s=0.0,
            # A simulated queue may be minutes long; nothing in it gets lost.
            reservation_s=1e9,
        )
        self._seq = [0] * len(nodes)
        for node in nodes:
            self._router.set_target(Target(str(node.index)))
        if hybrid:
            # As an engine does, name all groups at the start.
            for node in nodes:
                node.cache.events.append(
                    BlockStored([], None, 0, BLOCK, 1, "sliding_window", BLOCK)
                )

    def choose(self, number: int, arrival: Arrival, now_s: float) -> Node:
        """Route, and hold the index against the nodes."""
        for node in self._nodes:
            if node.cache.events:
                self._index.apply(str(node.index), self._seq[node.index], node.cache.events)
                self._seq[node.index] += 1
                node.cache.events = []
        said = self._index.lookup(arrival.blocks, arrival.tokens - 1)
        true = {n.index: n.cache.hit(arrival) * BLOCK for n in self._nodes}
        self.wrong += any(said.get(str(i), 0) != tokens for i, tokens in true.items())
        request = self._request(number, arrival)
        decision = self._router.choose(request, now_s)
        self._router.sent(request, decision, now_s)
        return self._nodes[int(decision.target)]

    def finished(self, number: int, arrival: Arrival, now_s: float) -> None:
        """The first token came."""
        request = self._request(number, arrival)
        self._router.first_token(request, now_s)
        self._router.done(request, now_s)

    def _request(self, number: int, arrival: Arrival) -> Request:
        return Request(str(number), arrival.blocks, arrival.tokens)
