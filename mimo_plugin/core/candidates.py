# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint or span is the next to die: candidates by rank, oldest weighted age first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

from mimo_plugin.core import retention
from mimo_plugin.core.tree import Node

#: Steps per doubling of the ageing weight; finer steps cost a heap each and change nothing.
BUCKETS = 2

#: How fast a checkpoint ages against the end of a chat, by rank. The last two are far enough apart
#: that bounds go before replaced checkpoints, and these before any chat. Gentler values were tried
#: with benchmarks/retention.py (8 to 1024 for ``replaced``): hits fell by up to 1.5 points.
AGEING: Mapping[str, float] = {"leaf": 1.0, "inner": 1.0, "replaced": 2.0**16, "bound": 2.0**23}

#: fewest chats that go on from a checkpoint that is shared; from the end of a chat one does
_CONTINUATIONS = 2


@dataclass(frozen=True, slots=True)
class Policy:
    """What the order of death needs to know.

    Args:
        swa_limit_blocks: most SWA blocks that live checkpoints may hold.
        full_limit_blocks: most full blocks that may be cached, or None (no strict split).
        draft_limit_blocks: most blocks of draft-model SWA groups in live checkpoints, or None.
        block_tokens: tokens in one full-attention block.
        ageing: weight of a candidate's age, by rank (see :func:`rank_of`).
        leaf_exponent: how much slower the end of a long chat ages than that of a short one (see
            :func:`ageing_weight`); 0: not at all.
        keep_unreachable: full blocks that no checkpoint makes reachable keep their hash until their
            memory is needed, because tiers below may hold a window for them.
    """

    swa_limit_blocks: int
    full_limit_blocks: int | None = None
    draft_limit_blocks: int | None = None
    block_tokens: int = 16
    ageing: Mapping[str, float] = field(default_factory=lambda: AGEING)
    leaf_exponent: float = 0.0
    keep_unreachable: bool = False


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


def lasts(node: Node, cls: str) -> bool:
    """Whether later turns don't replace a checkpoint of class ``cls`` at ``node``."""
    if cls == retention.JUNCTION:
        return True
    # The first boundary ends the system prompt, which every chat on it shares.
    return cls == retention.BOUNDARY and all(a.cls != retention.BOUNDARY for a in node.ancestors())


def keeps_rank(node: Node) -> bool:
    """Whether ``node`` is not demoted when a later turn of the same chat has its own checkpoint."""
    return node.lasting or len(node.children) > 1


def lost_tokens(node: Node) -> int:
    """Tokens to compute again if ``node``'s checkpoint is gone and wanted after all."""
    below = next((a.tokens for a in node.ancestors() if a.swa is not None), 0)
    return max(1, node.tokens - below)


def own_tokens(node: Node) -> int:
    """Tokens of ``node`` that no other chat has: those behind the last checkpoint that is shared.

    What lies between is replaced or a bound, and dies before a leaf does.
    """
    shared = (a for a in node.ancestors() if a.swa is not None and keeps_rank(a))
    return max(1, node.tokens - next((a.tokens for a in shared), 0))


def ageing_weight(node: Node, policy: Policy) -> float:
    """How fast ``node`` ages.

    The end of a chat ages at 1 whatever its length: of two idle chats nobody knows which comes
    back, and a longer one is closer to its end. With ``leaf_exponent`` e > 0 it ages by
    ``(_CONTINUATIONS * tokens that it takes / tokens that are its own) ** e`` instead. A checkpoint
    inside a chain ages by its rank, and faster the fewer tokens its blocks save than the same
    number of full blocks would: checkpoints that are close together go first.
    """
    rank = rank_of(node)
    cost_tokens = max(1, len(node.swa or ())) * policy.block_tokens
    if rank == "leaf":
        if not policy.leaf_exponent:
            return policy.ageing[rank]
        worth = own_tokens(node) / _CONTINUATIONS
        return policy.ageing[rank] * float((cost_tokens / worth) ** policy.leaf_exponent)
    return policy.ageing[rank] * cost_tokens / lost_tokens(node)


class Candidates:
    """Nodes that can be chosen to die, bucketed by how fast they age; lazily dropped entries."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        #: (is a leaf, quantised log2 of the ageing weight) -> heap by clock
        self._heaps: dict[tuple[bool, int], list[_Entry]] = {}
        self._sequence = 0

    def clear(self) -> None:
        """Forget all candidates."""
        self._heaps.clear()

    def push(self, node: Node) -> None:
        """``node`` can be chosen from now on, at its present clock and ageing weight."""
        heap = self._heaps.setdefault(self._bucket(node), [])
        self._sequence += 1
        heapq.heappush(heap, (node.clock, self._sequence, node, node.stamp))
        if len(heap) > 256 and self._sequence % len(heap) == 0:
            # Amortised: stale entries are dropped once per as many pushes as there are entries.
            heap[:] = [e for e in heap if e[3] == e[2].stamp]
            heapq.heapify(heap)

    def _bucket(self, node: Node) -> tuple[bool, int]:
        weight = ageing_weight(node, self._policy)
        return not node.children, round(BUCKETS * log2(max(weight, 2**-20)))

    def take_oldest(
        self, clock: int, *, leaves_only: bool = False, with_swa: bool = False
    ) -> Node | None:
        """The candidate of greatest weighted age, taken out; None if there is none.

        ``with_swa`` passes over buckets whose oldest candidate has no SWA block to give.
        """
        best: tuple[float, int] | None = None
        chosen: list[_Entry] | None = None
        for (leaf, bucket), heap in self._heaps.items():
            while heap and heap[0][3] != heap[0][2].stamp:
                heapq.heappop(heap)
            if not heap or (leaves_only and not leaf) or (with_swa and not heap[0][2].free_swa):
                continue
            used, sequence = heap[0][:2]
            age = (log2(clock - used + 1) + bucket / BUCKETS, -sequence)
            if best is None or age > best:
                best, chosen = age, heap
        return heapq.heappop(chosen)[2] if chosen is not None else None
