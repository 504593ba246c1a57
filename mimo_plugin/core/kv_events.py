# SPDX-License-Identifier: Apache-2.0
"""What an engine says about its blocks, and in which order that may be believed.

The events carry the names that vLLM gives them. Hashes are opaque keys; each stands for a block
*and* for all that lies before it (vLLM chains them), so one hash has one place in one prompt.

An event that was lost may have been a removal. So batches of one worker are applied in the order
of their sequence numbers and without a gap; :class:`BatchOrder` says what to do with each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

Hash: TypeAlias = bytes | int

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that one group has from now on, one physical copy each.

    Args:
        block_hashes: in the order of the prompt. With sliding windows only the kept blocks: fewer
            than ``num_tokens`` would fill, at places that the event does not tell.
        parent_block_hash: of the block before the first one of the *range*, which ``num_tokens``
            tells the length of; None where the range starts with the prompt.
        num_tokens: tokens of the range.
        block_size: tokens in one block of the group.
        group_idx: KV cache group; None is the only one.
        kv_cache_spec_kind: as vLLM calls it; None is full attention.
        kv_cache_spec_sliding_window: window in tokens, for the kinds that have one.
        medium: where the copy lies, ``"GPU"`` for the device's memory; None is unspecified.
    """

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    num_tokens: int
    block_size: int
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    medium: str | None = "GPU"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical copy of each of these blocks is gone from the group."""

    block_hashes: Sequence[Hash]
    group_idx: int | None = None
    medium: str | None = "GPU"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No group has any block."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
Batch = TypeVar("Batch")


class Step(Enum):
    """What became of a batch."""

    APPLY = "apply"
    """In order: the returned batches are next."""
    SEEN = "seen"
    """Applied before (a replay brings it again)."""
    GAP = "gap"
    """Batches before it are missing: ask for them from ``next_seq`` on, or ``skip_gap``."""
    RESTART = "restart"
    """The publisher counts from the start again, so the engine's blocks are all gone."""


class BatchOrder(Generic[Batch]):
    """Sequence numbers of one worker's publisher.

    Args:
        max_held: batches kept while a replay is awaited; beyond it the oldest ones are dropped,
            and the gap grows by them.
    """

    __slots__ = ("_held", "_last_live", "max_held", "next_seq")

    def __init__(self, max_held: int = 10_000) -> None:
        self.next_seq: int | None = None
        self.max_held = max_held
        self._held: dict[int, Batch] = {}
        self._last_live = -1

    @property
    def waiting(self) -> bool:
        """True from a gap until it is filled or skipped: what was applied may be out of date."""
        return bool(self._held)

    def offer(self, seq: int, batch: Batch, *, replayed: bool = False) -> tuple[Step, list[Batch]]:
        """Take a batch.

        Args:
            seq: its number, >= 0; a publisher starts with 0.
            batch: what it holds.
            replayed: it came as the answer to a request for old batches. Live ones come in
                order, so a live number below the next one means another publisher.

        Returns:
            What it was, and the batches to apply now, in order. After ``RESTART`` all that is
            known of the worker must be dropped before the batches are applied.
        """
        if seq < 0:
            raise ValueError(f"seq: found {seq}; allowed: a number >= 0")
        if self.next_seq is None:
            # What was stored before we listened is not known; that is no harm, it only counts less.
            self.next_seq = seq
        if not replayed:
            restarted, self._last_live = seq <= self._last_live, seq
            if restarted:
                # Without its first batches the new stream is that of a worker met late.
                self._held.clear()
                self.next_seq = seq + 1
                return Step.RESTART, [batch]
        if seq < self.next_seq:
            return Step.SEEN, []
        self._held[seq] = batch
        ready = self._take_ready()
        if ready:
            return Step.APPLY, ready
        while len(self._held) > self.max_held:
            del self._held[min(self._held)]
        return Step.GAP, []

    def skip_gap(self) -> list[Batch]:
        """Give up on what is missing: all that was applied must be dropped, then apply these."""
        if not self._held:
            return []
        # The youngest unbroken run; what lies before another gap is as good as lost too.
        first = max(self._held)
        while first - 1 in self._held:
            first -= 1
        self._held = {seq: batch for seq, batch in self._held.items() if seq >= first}
        self.next_seq = first
        return self._take_ready()

    def forget(self) -> None:
        """Start as with a worker never heard of (its connection was lost, say)."""
        self._held.clear()
        self._last_live = -1
        self.next_seq = None

    def _take_ready(self) -> list[Batch]:
        ready = []
        assert self.next_seq is not None
        while self.next_seq in self._held:
            ready.append(self._held.pop(self.next_seq))
            self.next_seq += 1
        return ready
