# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of the KV feature: hits, why they were trimmed, what is cached or died."""

from __future__ import annotations

import logging
from typing import Any

from mimo_plugin.core.tree import Node
from mimo_plugin.engines.vllm.kv.lookup import spine_hashes
from mimo_plugin.metrics import MetricsBuffer

logger = logging.getLogger("vllm.mimo_plugin")

#: requests whose hit was trimmed, one after another, before it is worth a line in the log
TRIMMED_WARNING = 256

NO_CHECKPOINT = "no_checkpoint"
CHECKPOINT_EVICTED = "checkpoint_evicted"
BELOW_BLOCK = "below_block"
DIVERGED = "diverged"
DRAFT_LOOKAHEAD = "draft_lookahead"


class Accounting:
    """Collects counters in the engine process; :meth:`drain` hands them to the API process."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator
        self.buffer = MetricsBuffer()
        self._trimmed_in_a_row = 0
        self._last_gauges: dict[tuple[str, str], int] = {}
        coordinator.order.on_evict = self._evicted
        self.buffer.set("pool_blocks", coordinator.block_pool.num_gpu_blocks)
        self.buffer.set("swa_share", coordinator.settings.swa_share)

    def looked_up(self, *, memo: bool) -> None:
        """One prefix look-up was answered from a memo, or in full."""
        self.buffer.inc("lookups", kind="memo" if memo else "full")

    def admitted(self, request: Any, hit_tokens: int, full_tokens: int) -> None:
        """A request was admitted with ``hit_tokens`` of a possible ``full_tokens``."""
        buffer = self.buffer
        buffer.inc("prompt_lookup_tokens", request.num_tokens)
        buffer.inc("full_hit_tokens", full_tokens)
        buffer.inc("window_safe_hit_tokens", hit_tokens)
        buffer.observe("hit_length_tokens", hit_tokens)
        if full_tokens > hit_tokens:
            reason = self.trim_reason(request, hit_tokens, full_tokens)
            buffer.inc("trimmed_tokens", full_tokens - hit_tokens, reason=reason)
            if reason not in (DRAFT_LOOKAHEAD, BELOW_BLOCK):
                self._warn_when_nothing_hits(reason)
        elif hit_tokens:
            self._trimmed_in_a_row = 0

    def _warn_when_nothing_hits(self, reason: str) -> None:
        """Say it once when prefixes are cached but no request can use any of them."""
        self._trimmed_in_a_row += 1
        if self._trimmed_in_a_row == TRIMMED_WARNING:
            logger.warning(
                "mimo kv: %d requests in a row found cached prefixes that no checkpoint makes "
                "usable in full (last reason: %s); see mimo:trimmed_tokens and docs/metrics.md",
                TRIMMED_WARNING,
                reason,
            )

    def trim_reason(self, request: Any, hit_tokens: int, full_tokens: int) -> str:
        """Why the hit is shorter than the full-attention prefix that is resident."""
        coordinator = self.coordinator
        lost = full_tokens - hit_tokens
        if coordinator.rule.lookahead_tokens and lost <= coordinator.scheduler_block_size:
            return DRAFT_LOOKAHEAD
        if lost < coordinator.scheduler_block_size:
            return BELOW_BLOCK
        node = self._node_at(request, full_tokens)
        if node is None:
            return NO_CHECKPOINT
        between = [
            n
            for n in (node, *node.ancestors())
            if hit_tokens < n.tokens <= full_tokens and n.had_checkpoint
        ]
        if between:
            return CHECKPOINT_EVICTED
        if node.tokens > full_tokens and (
            node.swa is not None
            or any(n.swa is not None for n in coordinator.order.tree.subtree(node))
        ):
            return DIVERGED
        return NO_CHECKPOINT

    def _node_at(self, request: Any, tokens: int) -> Node | None:
        coordinator = self.coordinator
        block = coordinator.resident_spine_block(spine_hashes(coordinator, request), tokens)
        node: Node | None = (
            coordinator.order.tree.node_at(block.block_id) if block is not None else None
        )
        return node

    def _evicted(self, kind: str, cls: str, residence_s: float) -> None:
        self.buffer.inc("evicted_blocks", kind=kind, cls=cls)
        if kind == "swa":
            self.buffer.observe("residence_s", residence_s, cls=cls)

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, in the payload format of ``metrics.py``."""
        coordinator, buffer = self.coordinator, self.buffer
        for name, counts in (
            ("checkpoints_created", coordinator.created),
            ("checkpoints_refused", coordinator.refused),
        ):
            for cls, count in counts.items():
                buffer.inc(name, count, cls=cls)
            counts.clear()
        if coordinator.deduplicated_blocks:
            buffer.inc("deduplicated_blocks", coordinator.deduplicated_blocks)
            coordinator.deduplicated_blocks = 0
        cached = coordinator.order.cached
        for key, count in cached.items():
            if self._last_gauges.get(key) != count:
                self._last_gauges[key] = count
                buffer.set("cached_blocks", count, kind=key[0], cls=key[1])
        for key in self._last_gauges.keys() - cached.keys():
            if self._last_gauges[key]:
                self._last_gauges[key] = 0
                buffer.set("cached_blocks", 0, kind=key[0], cls=key[1])
        return buffer.drain()
