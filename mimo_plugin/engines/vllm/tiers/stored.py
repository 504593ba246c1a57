# SPDX-License-Identifier: Apache-2.0
"""What of a running request is offered to the lower tiers, and when.

vLLM offers each chunk once, in the step that completes it. That is right for whatever is known to
be kept by then. The window at the end of a turn is not: so in sliding-window groups the newest
chunks stay on offer until the request ends or they fall behind every window that may be kept. While
they do, vLLM watches whether their device blocks are given to somebody else, and then drops them.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestGroupState,
    RequestOffloadState,
)


class WaitingGroupState(RequestGroupState):  # type: ignore[misc]
    """A sliding-window group of one request, whose newest chunks stay on offer.

    Attributes:
        waiting_chunks: how many.
        seen_chunks: chunks that were complete when chunks were last offered.
        ended: the request has; nothing waits any more.
    """

    waiting_chunks = 0
    seen_chunks = 0
    ended = False
    _next = 0

    @property
    def next_stored_chunk_idx(self) -> int:
        """First chunk that is still on offer."""
        return self._next

    @next_stored_chunk_idx.setter
    def next_stored_chunk_idx(self, chunks: int) -> None:
        if not chunks:  # all tiers were emptied: from the beginning
            self._next = self.seen_chunks = 0
        self.seen_chunks = max(self.seen_chunks, chunks)
        waiting = 0 if self.ended else self.waiting_chunks
        self._next = max(self._next, chunks - waiting)


class TieredRequestState(RequestOffloadState):  # type: ignore[misc]
    """``RequestOffloadState`` that offers again only when a chunk was completed."""

    __slots__ = ()

    def storable_chunks(
        self, group_config: Any, group_state: Any, num_offloadable_tokens: int
    ) -> int:
        """As upstream: number of leading chunks that can be stored."""
        chunks: int = super().storable_chunks(group_config, group_state, num_offloadable_tokens)
        if isinstance(group_state, WaitingGroupState):
            if self.req.is_finished():
                group_state.ended = True
            elif chunks == group_state.seen_chunks:
                return group_state.next_stored_chunk_idx
        return chunks


def take_over(status: Any, waiting_chunks: list[int]) -> None:
    """Make a new request's state one of ours.

    Args:
        status: vLLM's state of the request, from which nothing was offered yet.
        waiting_chunks: of each group; 0: nothing waits (full attention).
    """
    status.__class__ = TieredRequestState
    states = []
    for state, waiting in zip(status.group_states, waiting_chunks, strict=True):
        if waiting:
            state.__dict__.pop("next_stored_chunk_idx", None)
            state.__class__ = WaitingGroupState
            state.waiting_chunks = waiting
        states.append(state)
    status.group_states = tuple(states)
