# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified radix cache, with checkpoints where the retention rule wants them.

Upstream hands a request's KV to the tree once per prefill chunk and once at the end, each time
with one cursor: sliding-window KV before it is gone, behind it one window is live. Here the same
call is made several times, once per checkpoint, with the cursor moved in between: the tree gets
nodes that hold exactly one window each, and what lies between them is given back. Nothing else
changes, so the nodes are upstream's: evictable unless a running request needs them, split, matched
and freed as ever, by whichever tree core is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from mimo_plugin.core import retention
from mimo_plugin.core.checkpoints import CheckpointOrder
from mimo_plugin.core.retention import RetentionRule, find_message_starts
from mimo_plugin.core.segments import Segment, cut
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.engines.sglang.kv.accounting import Accounting

#: Choosing costs a little for each checkpoint there is, so more than what is needed dies at a time:
#: up to these parts of the pool, of any checkpoints, and of those that were passed or replaced.
EVICT_ANY, EVICT_CHEAP = 32, 8

#: checkpoints on record at which dead ones are looked for; later at twice as many as were alive
SWEEP_AT = 1024


class SegmentedSWAComponent(SWAComponent):  # type: ignore[misc]
    """``SWAComponent`` that leaves it to the cache where a request's KV is cut."""

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """As upstream, but a junction is one of the cache's ends and doesn't shorten the insert."""
        if not self.cache.cutting:
            found: int | None = super().prepare_for_caching_req(
                req, insert_params, token_ids_len, is_finished
            )
            return found
        insert_params.set_evicted_seqlen(
            self.component_type, req.kv.get_evicted_seqlen(self.component_type)
        )
        return None

    def free_out_of_window_slots(self, req: Any, pre_len: int, insert_params: Any) -> None:
        """As upstream, unless the cache has freed what it wants to be free."""
        if not self.cache.cutting:
            super().free_out_of_window_slots(req, pre_len, insert_params)


class MimoRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """``UnifiedRadixCache`` with the plugin's SWA retention; see :meth:`configure`."""

    #: asked by the optional patch that gives the stock cache a retention of its own
    retains_swa_by_length = False

    def __init__(self, params: Any) -> None:
        #: True while a request's KV is handed over segment by segment
        self.cutting = False
        super().__init__(params)
        # Upstream picks the class from a registry; naming another there costs the Rust tree core.
        # Ours adds no state, so the instance just becomes one of it.
        self.components[ComponentType.SWA].__class__ = SegmentedSWAComponent

    def configure(
        self,
        *,
        rule: RetentionRule,
        group: GroupGeometry,
        start_ids: frozenset[int],
        accounting: Accounting,
    ) -> None:
        """Take the retention rule and what it needs; must follow construction.

        Args:
            rule: where checkpoints are kept.
            group: geometry of the sliding-window layers.
            start_ids: tokens that open a chat message.
            accounting: counts what an operator sees.
        """
        self.rule = rule
        self.group = group
        self.start_ids = start_ids
        self.accounting = accounting
        self._sweep_at = SWEEP_AT
        self.order: CheckpointOrder[int] = CheckpointOrder(group.block_size_tokens)

    def _reset_full(self) -> None:
        super()._reset_full()
        if hasattr(self, "order"):
            self.order.clear()

    # -- look-up -----------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """As upstream, and remember how much full-attention KV was there."""
        result = super().match_prefix(params)
        if params.req is not None:
            self.accounting.matched(params.req, result.full_kv_hit_length)
        return result

    # -- eviction ----------------------------------------------------------------------------

    def _evict(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; of the sliding-window KV, the checkpoints that are first to die go first."""
        joint = kwargs.get("allocation_reclaim_satisfied") is not None
        if self.disable or joint or params.swa_num_tokens <= 0:
            result = super()._evict(params, *args, **kwargs)
            self.accounting.evicted(result)
            return result
        full, swa = params.num_tokens, params.swa_num_tokens
        total = EvictResult()

        def took(part: Any) -> None:
            total.num_tokens_evicted += part.num_tokens_evicted
            total.swa_num_tokens_evicted += part.swa_num_tokens_evicted

        if full > 0:  # what is too old for that pool takes its windows along
            took(super()._evict(EvictParams(num_tokens=full), *args, **kwargs))
        left = swa - total.swa_num_tokens_evicted
        if left > 0:
            took(self._evict_checkpoints(left))
        rest = EvictParams(
            num_tokens=max(0, full - total.num_tokens_evicted),
            swa_num_tokens=max(0, swa - total.swa_num_tokens_evicted),
        )
        if rest.num_tokens or rest.swa_num_tokens:
            took(super()._evict(rest, *args, **kwargs))
        self.accounting.evicted(total)
        return total

    def _evict_checkpoints(self, tokens: int) -> Any:
        """Have upstream evict what the plugin's order says, by holding everything else."""
        held = {
            node_id: self.lock(node_id, skip_lock_components=(ComponentType.FULL,))
            for node_id in self.order.ids()
            if self._window_tokens(node_id)
        }
        victims: list[int] = []
        pool_tokens = self.token_to_kv_pool_allocator.size_swa
        tokens = max(tokens, pool_tokens // EVICT_ANY)
        ahead = max(tokens, pool_tokens // EVICT_CHEAP)
        try:
            while (free := self.swa_evictable_size()) < ahead:
                node_id = self.order.victim(cheap=free >= tokens)
                if node_id is None:
                    break
                victims.append(node_id)
                self.unlock(held.pop(node_id, None))
            return super()._evict(EvictParams(swa_num_tokens=min(free, ahead)))
        finally:
            for lock in held.values():
                self.unlock(lock)
            for node_id in victims:
                if self._window_tokens(node_id):
                    self.order.spared(node_id)

    def _window_tokens(self, node_id: int) -> int:
        """Sliding-window KV that a node holds itself; 0: its checkpoint is gone."""
        try:
            value = self.tree_core.get_component_device_value(node_id, ComponentType.SWA)
        except KeyError:  # so is the node
            value = None
        if value is None:
            self.order.gone(node_id)
            return 0
        return len(value)

    # -- hand-over ---------------------------------------------------------------------------

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """As upstream, in one segment per checkpoint."""
        if self.disable:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            return
        kv = req.kv
        cached = kv.cache_protected_len
        anchor = self._anchor(req, cached)
        if self.accounting.admitted(req, cached) and anchor is not None:
            self.order.used(anchor)
        # A bigram key (EAGLE) is one shorter than the tokens it spans.
        extra = int(self.tree_core.is_eagle)
        last = self.rule.align(up_to - extra)
        segments = self._segments(req, last)
        with self._cutting():
            for segment in segments:
                self._release(req, segment)
                until = up_to if segment.end == last else segment.end + extra
                super().checkpoint_into_tree(req, up_to=until, **kwargs)
                self.accounting.kept(segment)
                pages = (segment.end - segment.start) // self.page_size
                self.order.add(req.last_node, anchor, segment.end, pages, segment.cls)
                anchor = req.last_node
            if len(self.order) > self._sweep_at:
                self._sweep()
            if not segments:
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if req.swa_branching_seqlen is not None and req.swa_branching_seqlen <= last:
            req.swa_branching_seqlen = None
        self.accounting.flush(self)

    def _sweep(self) -> None:
        """Forget checkpoints that went with full KV, of which nobody is told."""
        for node_id in self.order.ids():
            self._window_tokens(node_id)
        self._sweep_at = max(SWEEP_AT, 2 * len(self.order))

    def _anchor(self, req: Any, cached: int) -> int | None:
        """The checkpoint that ``req`` goes on from; where it parted from others, it is one now."""
        if cached == 0:
            return None
        node_id: int = req.last_node
        if node_id not in self.order:
            ((*path, last),) = self.tree_core.collect_path_info([node_id])
            if last.path_end != cached:
                return self.order.nearest([node.node_id for node in path])
            before = self.order.nearest([node.node_id for node in path])
            pages = (last.path_end - last.path_start) // self.page_size
            cls = retention.JUNCTION if last.num_children else retention.TURN_END
            self.order.add(node_id, before, cached, pages, cls)
        return node_id

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        self.cutting = True
        try:
            yield
        finally:
            self.cutting = False

    def _segments(self, req: Any, last: int) -> list[Segment]:
        """Where to cut what ``req`` has computed from the tree's end of it up to ``last``."""
        kv = req.kv
        cached = kv.cache_protected_len
        if last <= cached:
            return []
        plan = dict(self._plan(req, cached, last))
        if req.finished() and retention.TURN_END in self.rule.classes:
            plan[last] = retention.TURN_END
            before = last - self.rule.alignment_tokens
            if retention.TAIL in self.rule.classes and before > cached:
                plan.setdefault(before, retention.TAIL)
        plan.setdefault(last, retention.NONE)
        # Not below the floor under which the request may not give back anything itself.
        released = max(kv.get_evicted_seqlen(ComponentType.SWA), kv.swa_dead_lo(self.page_size))
        return cut(sorted(plan.items()), self.group, cached, released)

    def _plan(self, req: Any, cached: int, last: int) -> list[tuple[int, str]]:
        prompt_tokens = len(req.origin_input_ids)
        branch = req.swa_branching_seqlen
        starts: list[int] = []
        if self.start_ids and retention.BOUNDARY in self.rule.classes:
            stop = min(last + self.rule.alignment_tokens, prompt_tokens)
            if stop > cached:
                found = find_message_starts(req.origin_input_ids, self.start_ids, cached, stop)
                starts = self.rule.thin_boundaries(found, cached)
        return self.rule.plan(
            cached, last, prompt_tokens, [branch] if branch is not None else [], starts
        )

    def _release(self, req: Any, segment: Segment) -> None:
        """Give back the sliding-window KV before the segment's window."""
        if segment.start > segment.release_from:
            row = self.req_to_token_pool.req_to_token[
                req.kv.req_pool_idx, segment.release_from : segment.start
            ]
            self.token_to_kv_pool_allocator.free_swa_segment(row, start_pos=segment.release_from)
        if segment.start > req.kv.get_evicted_seqlen(ComponentType.SWA):
            req.kv.set_evicted_seqlen(ComponentType.SWA, segment.start)
