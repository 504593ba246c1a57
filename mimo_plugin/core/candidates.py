# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint or span is the next to die: candidates by rank, oldest weighted age first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mimo_plugin.core import retention
from mimo_plugin.core.tree import Node

RANKS = ("leaf", "inner", "replaced", "bound")

#: How fast a checkpoint ages against the end of a chat, by rank. Found with
#: benchmarks/retention.py; flat around these values.
AGEING = {
    "leaf": 1.0,
    "inner": 1.0,
    "replaced": float(__import__("os").environ.get("AA", "8")),
    "bound": float(__import__("os").environ.get("BB", "64")),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the order of death needs to know.

    Args:
        swa_limit_blocks: most SWA blocks that live checkpoints may hold.
        full_limit_blocks: most full blocks that may be cached, or None (no strict split).
        ageing: weight of a candidate's age, by rank (see :func:`rank_of`).
    """

    swa_limit_blocks: int
    full_limit_blocks: int | None = None
    ageing: Mapping[str, float] = field(default_factory=lambda: AGEING)


#: clock at last use, sequence, node, the node's stamp when pushed (stale if it moved on)
_Entry = tuple[int, int, Node, int]


def rank_of(node: Node) -> str:
    """Which queue of candidates ``node`` is in.

    ``leaf``: the end of a chat; ``inner``: a checkpoint that several continuations share, or
    that nothing has replaced; ``replaced``: one that a later checkpoint of the same chat
    replaces; ``bound``: tail, ladder and prompt-end checkpoints that have been passed.
    """
    if not node.children:
        return "leaf"
    if node.lasting or len(node.children) > 1:
        return "inner"
    if node.cls in (retention.TAIL, retention.LADDER, retention.PROMPT_END):
        return "bound"
    return "replaced" if node.superseded else "inner"


class Candidates:
    """Nodes that can be chosen to die, one heap per rank, entries dropped lazily."""

    def __init__(self, ageing: Mapping[str, float]) -> None:
        self._ageing = ageing
        self._heaps: dict[str, list[_Entry]] = {rank: [] for rank in RANKS}
        self._sequence = 0

    def clear(self) -> None:
        """Forget all candidates."""
        for heap in self._heaps.values():
            heap.clear()

    def push(self, node: Node) -> None:
        """``node`` can be chosen from now on, at its present clock and rank."""
        heap = self._heaps[rank_of(node)]
        self._sequence += 1
        heapq.heappush(heap, (node.clock, self._sequence, node, node.stamp))
        if len(heap) > 256 and self._sequence % len(heap) == 0:
            # Amortised: stale entries are dropped once per as many pushes as there are entries.
            heap[:] = [e for e in heap if e[3] == e[2].stamp]
            heapq.heapify(heap)

    def take_oldest(
        self, clock: int, ranks: Sequence[str] = RANKS, *, with_swa: bool = False
    ) -> Node | None:
        """The candidate of greatest weighted age among ``ranks``, taken out; None if none.

        ``with_swa`` passes over ranks whose oldest candidate has no SWA block to give.
        """
        best: tuple[float, int] | None = None
        chosen: list[_Entry] | None = None
        for rank in ranks:
            heap = self._heaps[rank]
            while heap and heap[0][3] != heap[0][2].stamp:
                heapq.heappop(heap)
            if not heap or (with_swa and not heap[0][2].free_swa):
                continue
            used, sequence = heap[0][:2]
            age = ((clock - used + 1) * self._ageing[rank], -sequence)
            if best is None or age > best:
                best, chosen = age, heap
        return heapq.heappop(chosen)[2] if chosen is not None else None
