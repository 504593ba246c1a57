# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of the KV feature on SGLang: hits, trimmed tokens, windows, evictions."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from mimo_plugin.core.segments import Segment
from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.metrics import MetricsBuffer

NO_CHECKPOINT = "no_checkpoint"
"""Reason of every trimmed hit: SGLang's tree doesn't tell whether a checkpoint was there before."""

#: metrics that this adapter writes
NAMES = frozenset(
    {
        "full_hit_tokens",
        "window_safe_hit_tokens",
        "prompt_lookup_tokens",
        "trimmed_tokens",
        "evicted_blocks",
        "checkpoints_created",
        "cached_blocks",
        "hit_length_tokens",
        "metrics_dropped",
    }
)


class Accounting:
    """Collects counters; :meth:`flush` writes them, if metrics are on.

    Args:
        sink: where they go; None: nowhere.
        page_tokens: tokens in a page, which is what ``blocks`` means on SGLang.
    """

    def __init__(self, sink: PrometheusSink | None, page_tokens: int) -> None:
        self.sink = sink
        self.page_tokens = page_tokens
        self.buffer = MetricsBuffer()
        self._full_tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def matched(self, req: Any, full_tokens: int) -> None:
        """A waiting request was looked up; the last look-up before its admission counts."""
        self._full_tokens[req] = full_tokens

    def admitted(self, req: Any, hit_tokens: int) -> bool:
        """A request hands over KV; the first time its hit is counted. True then."""
        full_tokens = self._full_tokens.pop(req, None)
        if full_tokens is None:
            return False
        buffer = self.buffer
        buffer.inc("prompt_lookup_tokens", len(req.origin_input_ids) + len(req.output_ids))
        buffer.inc("full_hit_tokens", max(full_tokens, hit_tokens))
        buffer.inc("window_safe_hit_tokens", hit_tokens)
        buffer.observe("hit_length_tokens", hit_tokens)
        if full_tokens > hit_tokens:
            buffer.inc("trimmed_tokens", full_tokens - hit_tokens, reason=NO_CHECKPOINT)
        return True

    def kept(self, segment: Segment) -> None:
        """A window was kept at the end of ``segment``."""
        self.buffer.inc("checkpoints_created", cls=segment.cls)

    def evicted(self, result: Any) -> None:
        """SGLang gave up cached KV."""
        for kind, tokens in (
            ("full", result.num_tokens_evicted),
            ("swa", result.swa_num_tokens_evicted),
        ):
            if tokens:
                self.buffer.inc("evicted_blocks", tokens / self.page_tokens, kind=kind, cls="none")

    def flush(self, cache: Any) -> None:
        """Write what was counted, and how much is cached now."""
        if self.sink is None:
            self.buffer.drain()
            return
        for kind, tokens in (
            ("full", cache.full_evictable_size() + cache.full_protected_size()),
            ("swa", cache.swa_evictable_size() + cache.swa_protected_size()),
        ):
            self.buffer.set("cached_blocks", tokens / self.page_tokens, kind=kind, cls="none")
        payload = self.buffer.drain()
        if payload is not None:
            self.sink.apply(payload, 0)
