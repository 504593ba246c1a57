# SPDX-License-Identifier: Apache-2.0
"""Where a running prefill will leave KV that another request can resume from."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from mimo_plugin.core.retention import find_message_starts
from mimo_plugin.engines.vllm.sched.hits import HitIndex

#: leaders whose message starts are remembered
MAX_LEADERS = 64


class Stops:
    """Resume points ahead of a running prefill, for the KV cache manager at hand.

    With full attention alone that is every aligned position. A sliding-window group keeps windows
    at few positions: with the plugin's ``kv`` feature those of its retention rule, in stock vLLM
    (``prefix_cache_retention_interval``) the end of the prompt, a junction learned from a miss, and
    every N tokens where N is set.
    """

    def __init__(self, hits: HitIndex) -> None:
        self._hits = hits
        self._align = hits.alignment_tokens
        coordinator = hits.coordinator
        self._rule = getattr(coordinator, "rule", None)
        self._message_starts = (
            frozenset(coordinator.settings.message_start_token_ids)
            if self._rule is not None
            else frozenset()
        )
        self._interval: int | None = getattr(coordinator, "retention_interval", 0)
        # request id -> where its messages start; a prompt is searched once while it is a leader
        self._starts: dict[str, tuple[int, list[int]]] = {}

    def last(self, request: Any, after: int, upto: int) -> int:
        """The last resume point of ``request`` in ``(after, upto]``, 0 when there is none."""
        hits = self._hits
        if not hits.understands_groups:
            return 0
        upto = (upto - hits.lookahead_tokens) // self._align * self._align
        if upto <= after:
            return 0
        if hits.only_full or (self._rule is None and self._interval is None):
            return upto
        points = self._planned(request, after, upto)
        return max((p for p in points if after < p <= upto), default=0)

    def _starts_of(self, request: Any) -> list[int]:
        known = self._starts.get(request.request_id)
        if known is not None and known[0] == request.num_prompt_tokens:
            return known[1]
        if len(self._starts) >= MAX_LEADERS:
            del self._starts[next(iter(self._starts))]
        found = find_message_starts(
            request.all_token_ids, self._message_starts, 0, request.num_prompt_tokens
        )
        self._starts[request.request_id] = (request.num_prompt_tokens, found)
        return found

    def _planned(self, request: Any, after: int, upto: int) -> list[int]:
        align = self._align
        prompt, junction = request.num_prompt_tokens, request.shared_prefix_boundary
        if self._rule is not None:
            found = self._starts_of(request) if self._message_starts else []
            ahead = found[bisect_left(found, after) : bisect_left(found, upto + align)]
            starts = self._rule.thin_boundaries(ahead, after)
            plan = self._rule.plan(after, upto, prompt, [junction] if junction else [], starts)
            return [tokens for tokens, _ in plan]
        points = [(prompt - 1) // align * align, prompt // align * align]
        if junction:
            points.append(junction // align * align)
        if self._interval:
            points.append(upto // self._interval * self._interval)
        return points
