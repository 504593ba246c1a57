# SPDX-License-Identifier: Apache-2.0
"""Waiting requests that are parked until a running prefill has computed what they share with it."""

from __future__ import annotations

from typing import Any

from mimo_plugin.core.affinity import AffinityLine, Waiting
from mimo_plugin.core.leaders import awaited_tokens, common_blocks
from mimo_plugin.engines.vllm.sched.hits import HitIndex
from mimo_plugin.engines.vllm.sched.stops import Stops


class Followers:
    """Who waits for whom.

    Args:
        line: the waiting requests.
        hits: their hits; a parked request is called dirty when its leader gets where it should.
    """

    def __init__(self, line: AffinityLine, hits: HitIndex) -> None:
        self._line = line
        self._hits = hits
        self._stops = Stops(hits)
        #: leader's id -> its followers, and the tokens that they wait for
        self._of: dict[str, dict[Waiting, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def awaited(self, entry: Waiting, leader: Any) -> int:
        """Tokens of ``entry`` that ``leader`` is going to leave behind for it; 0 for none."""
        request, hits = entry.item, self._hits
        if not hits.understands_groups or request.skip_reading_prefix_cache:
            return 0
        mine, theirs = request.block_hashes, leader.block_hashes
        unit = hits.hash_tokens
        next_block = entry.hit_tokens // unit
        if (
            next_block >= len(mine)
            or next_block >= len(theirs)
            or mine[next_block] != theirs[next_block]
        ):
            return 0
        shared = min(common_blocks(mine, theirs) * unit, request.num_tokens - 1)
        tokens = awaited_tokens(
            entry.hit_tokens,
            shared,
            leader.num_computed_tokens,
            lambda after, upto: self._stops.last(leader, after, upto),
        )
        key = hits.full_key(request, tokens) if tokens else None
        # Hashed already: the leader gets there in this very step.
        return 0 if key is None or hits.is_cached(key) else tokens

    def park(self, entry: Waiting, leader: Any, tokens: int) -> None:
        """Take ``entry`` out of the line until ``leader`` has computed ``tokens``."""
        key = self._hits.full_key(entry.item, tokens)
        assert key is not None, "there is nothing to wait for"
        self._hits.watch(entry, (key,))
        self._line.park(entry)
        entry.leader = leader.request_id
        self._of.setdefault(leader.request_id, {})[entry] = tokens

    def release(self, entry: Waiting) -> None:
        """``entry`` waits for nobody any more; back into the line if it was parked."""
        leader_id, entry.leader = entry.leader, None
        followers = self._of.get(leader_id) if leader_id is not None else None
        if followers is None:
            return
        followers.pop(entry, None)
        if not followers:
            del self._of[leader_id]
        if self._line.is_parked(entry):
            self._line.unpark(entry)

    def passed(self, at_work: dict[str, int]) -> list[Waiting]:
        """Followers with nothing left to wait for.

        Args:
            at_work: computed tokens of each running prefill, by request id. A leader that is not
                among them has ended, or was aborted or preempted.
        """
        out = []
        for leader_id, followers in self._of.items():
            computed = at_work.get(leader_id)
            out += [e for e, tokens in followers.items() if computed is None or computed >= tokens]
        return out

    def everyone(self) -> list[Waiting]:
        """All followers."""
        return [entry for followers in self._of.values() for entry in followers]
