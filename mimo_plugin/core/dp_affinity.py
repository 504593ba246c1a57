# SPDX-License-Identifier: Apache-2.0
"""Which data-parallel rank gets a request, when several processes choose without talking.

Each chat has an order of all ranks, drawn from its key (rendezvous hashing), and a *home* among
them. Its requests go there while that rank ties with the least loaded one, else to the next rank of
the order that does. All of it follows from the key and from counts that every process gets.

* Of several processes each knows a part of the chats, so the home is the first of the order:
  anything else they would not agree on. Chats then spread over ranks as chance has it: with ``n`` a
  rank, give or take ``1 / sqrt(n)`` of that; what is active at a time is levelled by load.
* A process that is alone knows all chats. A new one's home is the first rank of the order that ties
  and has not yet ``spread`` times its share of the chats; and the home follows a chat that had to
  go elsewhere, for then the new rank has the longest prefix.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from math import ceil, floor
from typing import NamedTuple

NEW, STAYED, MOVED = "new", "stayed", "moved"
OUTCOMES = (NEW, STAYED, MOVED)
"""A chat's first request in this process; a later one; both at its home, or else moved."""

WAITING_WEIGHT = 4.0
"""A waiting request, in running ones."""


class Choice(NamedTuple):
    """Where a request goes, and why: one of ``OUTCOMES``."""

    rank: int
    outcome: str


def rank_load(waiting: float, running: float, kv_usage: float, in_flight: int) -> float:
    """Load of a rank, in running requests.

    The coordinator's counts are up to 100 ms old; what this process has there itself is exact. One
    that waits will be a prefill in front of the next, so it weighs ``WAITING_WEIGHT``, and more
    where KV memory is over half full, as in vLLM's own rule.

    Args:
        waiting: requests, by the coordinator.
        running: requests, by the coordinator.
        kv_usage: part of the KV memory in use, 0 to 1.
        in_flight: requests of this process that have not finished.
    """
    pressure = waiting * 6.0 * max(0.0, kv_usage - 0.5)
    return max(float(in_flight), WAITING_WEIGHT * waiting + running) + pressure


def rank_order(key: int, num_ranks: int) -> list[int]:
    """All ranks, the one that ``key`` prefers first; a rank more or less leaves the others' order.

    Args:
        key: >= 0, below 2**64.
        num_ranks: >= 1.
    """
    data = key.to_bytes(8, "big")

    def draw(rank: int) -> bytes:
        return hashlib.blake2b(data, digest_size=8, salt=rank.to_bytes(16, "big")).digest()

    return sorted(range(num_ranks), key=draw, reverse=True)


class DpAffinity:
    """Chooses, and remembers the homes of the chats it has seen lately.

    Args:
        alone: no other process sends requests to these ranks.
        slack_requests: a rank ties with the least loaded one if it has at most so much load more,
            >= 0,
        slack_share: or as many more as this part of what that one has, >= 0.
        spread: most chats of a rank as a multiple of an even share, >= 1.
        session_ttl_s: how long a chat without requests counts for its rank, > 0.
        max_sessions: chats remembered, >= 1; the ones silent for longest are forgotten.
    """

    def __init__(
        self,
        *,
        alone: bool,
        slack_requests: int,
        slack_share: float,
        spread: float,
        session_ttl_s: float,
        max_sessions: int,
    ) -> None:
        assert slack_requests >= 0 and slack_share >= 0 and spread >= 1
        assert session_ttl_s > 0 and max_sessions >= 1
        self._alone = alone
        self._slack_requests, self._slack_share = slack_requests, slack_share
        self._spread = spread
        self._ttl_s, self._max_sessions = session_ttl_s, max_sessions
        #: key -> home and time of the last request; the longest silent first
        self._homes: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._chats: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._homes)

    def chats(self, rank: int) -> int:
        """Remembered chats whose home is ``rank``."""
        return self._chats[rank]

    def choose(self, key: int, loads: Sequence[float], now_s: float) -> Choice:
        """The rank of a request of the chat ``key``.

        Args:
            key: of the chat, >= 0, below 2**64.
            loads: of every rank, by :func:`rank_load`; at least one.
            now_s: monotonic seconds, not before those of an earlier call.
        """
        self._forget_silent(now_s)
        num_ranks = len(loads)
        home = self._take(key)
        order = rank_order(key, num_ranks)
        lowest = min(loads)
        highest = lowest + max(self._slack_requests, self._slack_share * lowest)
        tied = [rank for rank in order if loads[rank] <= highest]
        known = home is not None and home < num_ranks  # elastic scaling takes ranks away
        if home is None or not known:
            home = self._new_home(order, tied) if self._alone else order[0]
        chosen = home if home in tied else tied[0]
        outcome = MOVED if chosen != home else STAYED if known else NEW
        self._put(key, chosen if self._alone else home, now_s)
        return Choice(chosen, outcome)

    def part(self, keys: Sequence[int], parent: int, now_s: float) -> None:
        """Chats that were one, ``parent``, are chats of their own from now on, where it was."""
        own = [key for key in keys if key not in self._homes]
        home = self._take(parent) if own else None
        if home is not None:
            for key in own:
                self._put(key, home, now_s)

    def _new_home(self, order: Sequence[int], tied: Sequence[int]) -> int:
        """The first tied rank with room for a chat; the one with the fewest where none has."""
        total = sum(self._chats[rank] for rank in order) + 1
        share = total / len(order)
        most = max(ceil(share), floor(self._spread * share))
        for rank in tied:
            if self._chats[rank] < most:
                return rank
        return min(tied, key=lambda rank: self._chats[rank])

    def _take(self, key: int) -> int | None:
        entry = self._homes.pop(key, None)
        if entry is None:
            return None
        self._chats[entry[0]] -= 1
        return entry[0]

    def _put(self, key: int, home: int, now_s: float) -> None:
        self._homes[key] = home, now_s
        self._chats[home] += 1
        while len(self._homes) > self._max_sessions:
            self._take(next(iter(self._homes)))

    def _forget_silent(self, now_s: float) -> None:
        while self._homes:
            oldest, (_, seen_s) = next(iter(self._homes.items()))
            if seen_s > now_s - self._ttl_s:
                break
            self._take(oldest)
