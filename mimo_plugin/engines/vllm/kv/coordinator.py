# SPDX-License-Identifier: Apache-2.0
"""Hybrid coordinator: decides per request which blocks are cached, through one plan for all groups.

Upstream lets every group mask its own blocks. Here a checkpoint is one thing: its blocks in all
SWA groups are hashed together or not at all, and the full blocks of a prefix that is cached
already are not cached twice.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from mimo_plugin.core import retention
from mimo_plugin.core.eviction import DeathOrder
from mimo_plugin.core.retention import RetentionRule, find_message_starts
from mimo_plugin.core.tree import Node, Path
from mimo_plugin.core.window import draft_swa_groups, last_safe_boundary
from mimo_plugin.engines.vllm.kv.checkpoint import collect_window, first_new_end, hash_window
from mimo_plugin.engines.vllm.kv.state import RequestState, group_geometry


class MimoCoordinator(HybridKVCacheCoordinator):  # type: ignore[misc]
    """``HybridKVCacheCoordinator`` whose retention and order of death are the plugin's.

    :meth:`configure` must run right after construction (see ``bind.py``).
    """

    def configure(self, rule: RetentionRule, order: DeathOrder, settings: Any) -> None:
        """Take the retention rule, the order of death and the feature's settings."""
        self.rule = rule
        self.order = order
        self.settings = settings
        self.states: dict[str, RequestState] = {}
        self.full_ids = tuple(
            i
            for i, m in enumerate(self.single_type_managers)
            if isinstance(m.kv_cache_spec, FullAttentionSpec)
        )
        self.swa_ids = tuple(
            i
            for i, m in enumerate(self.single_type_managers)
            if isinstance(m.kv_cache_spec, SlidingWindowSpec)
        )
        self.geometry = group_geometry(self)
        #: SWA groups of a draft model (none when every group merely looks ahead)
        self.draft_ids = frozenset(draft_swa_groups(self.geometry))
        self.spine = self.full_ids[0]
        self.spine_block_tokens = self.single_type_managers[self.spine].block_size
        #: checkpoints made, newest last: end and hash of the first SWA block that each one hashed;
        #: look-up memos read it
        self.sealed: deque[tuple[int, bytes]] = deque(maxlen=4096)
        self.num_sealed = 0
        self.created: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.deduplicated_blocks = 0
        self._hold_back = self.scheduler_block_size if retention.TAIL in rule.classes else 0
        #: tokens of full attention that a hit needs past its own end (draft models)
        self.full_lookahead_tokens = max(
            self.geometry[i].lookahead_blocks * self.geometry[i].block_size_tokens
            for i in self.full_ids
        )
        self._unit = min(m.block_size for m in self.single_type_managers)

    # -- admission ---------------------------------------------------------------------------

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[Any], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> None:
        """As upstream, and remember where in the tree the request's hit ends."""
        is_new = request_id not in self.states
        super().allocate_new_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
            skip_zeroing_group_ids,
        )
        if is_new:
            self._admit(request_id, new_computed_blocks, num_local_computed_tokens)
            if num_external_computed_tokens:
                self.states[request_id].loaded_tokens = (
                    num_local_computed_tokens + num_external_computed_tokens
                )

    def _admit(
        self, request_id: str, hit_blocks: tuple[Sequence[Any], ...], hit_tokens: int
    ) -> RequestState:
        tree = self.order.tree
        spine_blocks = hit_blocks[self.spine] if hit_blocks else ()
        num_hit_blocks = hit_tokens // self.spine_block_tokens
        node = tree.node_at(spine_blocks[num_hit_blocks - 1].block_id) if num_hit_blocks else None
        path = tree.start(node, hit_tokens if node is not None else 0)
        if num_hit_blocks and node is None:
            path = self._adopt(hit_blocks, hit_tokens)
        elif node is not None:
            if self.full_lookahead_tokens == 0 and node.tokens == hit_tokens:
                self.order.used(node)
            else:
                self.order.touched(node)
        state = RequestState(None, path, hit_tokens, hit_tokens, hit_tokens, hit_tokens, hit_tokens)
        self.states[request_id] = state
        return state

    def _adopt(self, hit_blocks: tuple[Sequence[Any], ...], hit_tokens: int) -> Path:
        """A hit that ends in a span which was given up: what is left of it gets a span of its own.

        The blocks are resident and referenced by now, so the hit stands; only their place in the
        tree is gone.
        """
        tree, order = self.order.tree, self.order
        path = Path(tree.root, 0)
        if len(self.full_ids) > 1:
            return tree.untracked()
        ids = [b.block_id for b in hit_blocks[self.spine][: hit_tokens // self.spine_block_tokens]]
        at = 0
        while at < len(ids) and tree.follow(path, ids[at], (at + 1) * self.spine_block_tokens):
            at += 1
        if any(tree.node_at(block_id) is not None for block_id in ids[at:]):
            return tree.untracked()
        for block_id in ids[at:]:
            order.disown(block_id)
        order.grew(tree.grow(path, 0, ids[at:], hit_tokens), ids[at:])
        return path

    # -- caching -----------------------------------------------------------------------------

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Hash what is worth keeping of ``request``'s first ``num_computed_tokens`` tokens."""
        request_id = request.request_id
        state = self.states.get(request_id)
        if state is None:
            state = self._admit(request_id, (), 0)
        if state.request is None:
            state.request = request
        if num_computed_tokens < state.wake_tokens:
            return
        cacheable = max(0, num_computed_tokens - self.num_reprefillable_tokens)
        cacheable = min(cacheable, len(request.block_hashes) * self.hash_block_size)
        if cacheable <= state.cached_tokens:
            return
        state.cached_tokens, state.computed_tokens = cacheable, num_computed_tokens
        safe = last_safe_boundary(self.geometry, self.scheduler_block_size, cacheable)
        self._repair(state)
        if safe > state.planned_tokens:
            for tokens, cls in self._plan(state, safe):
                self._extend(state, tokens)
                self._seal(state, tokens, cls)
            state.planned_tokens = safe
        self._extend(state, None)
        # Nothing can happen before the next full block is full (a checkpoint's look-ahead too).
        state.wake_tokens = (
            self.num_reprefillable_tokens + (cacheable // self._unit + 1) * self._unit
        )

    def _plan(self, state: RequestState, safe_tokens: int) -> list[tuple[int, str]]:
        request = state.request
        junctions = [request.shared_prefix_boundary] if request.shared_prefix_boundary else []
        plan = self.rule.plan(
            state.planned_tokens,
            safe_tokens,
            request.num_prompt_tokens,
            junctions,
            self._message_starts(state, safe_tokens),
        )
        loaded = self.rule.align(state.loaded_tokens)
        if state.planned_tokens < loaded <= safe_tokens and all(t != loaded for t, _ in plan):
            plan.append((loaded, retention.PROMPT_END))
            plan.sort()
        return plan

    def _message_starts(self, state: RequestState, safe_tokens: int) -> list[int]:
        start_ids = self.settings.message_start_token_ids
        if not start_ids or retention.BOUNDARY not in self.rule.classes:
            return []
        request = state.request
        stop = min(safe_tokens + self.scheduler_block_size, request.num_prompt_tokens)
        if stop <= state.scanned_tokens:
            return []
        found = find_message_starts(request.all_token_ids, start_ids, state.scanned_tokens, stop)
        state.scanned_tokens = stop
        return self.rule.thin_boundaries(found, state.hit_tokens)

    def _extend(self, state: RequestState, upto_tokens: int | None) -> None:
        """Hash full blocks up to what a hit of ``upto_tokens`` needs (None: all that is full)."""
        request = state.request
        for index, gid in enumerate(self.full_ids):
            manager = self.single_type_managers[gid]
            start = manager.num_cached_block.get(request.request_id, 0)
            tokens = min(
                self.get_num_cacheable_tokens(state.computed_tokens, gid), state.cached_tokens
            )
            stop = tokens // manager.block_size
            if upto_tokens is not None:
                end = upto_tokens + self.full_lookahead_tokens
                stop = min(stop, self.order.tree.full_end(index, end))
            if start < stop:
                self._hash_full(state, index, gid, start, stop)
                manager.num_cached_block[request.request_id] = stop
        for gid in self.swa_ids:
            manager = self.single_type_managers[gid]
            stop = state.cached_tokens // manager.block_size
            if stop > manager.num_cached_block.get(request.request_id, 0):
                manager.num_cached_block[request.request_id] = stop

    def _hash_full(self, state: RequestState, index: int, gid: int, start: int, stop: int) -> None:
        request, pool, tree = state.request, self.block_pool, self.order.tree
        manager = self.single_type_managers[gid]
        block_size = manager.block_size
        table = manager.req_to_blocks[request.request_id]
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
        get_block = pool.cached_block_hash_to_block.get_one_block
        if len(self.full_ids) == 1:
            at = start
            while at < stop:
                block = get_block(make_block_hash_with_group_id(hashes[at], gid))
                if block is None or not tree.follow(
                    state.path, block.block_id, (at + 1) * block_size
                ):
                    break
                at += 1
            if at > start:
                reached = state.path.node
                if reached.tokens == state.hit_tokens + self.full_lookahead_tokens:
                    self.order.used(reached)
                state.skipped.append(range(start, at))
                self.deduplicated_blocks += at - start
                start = at
        if start >= stop:
            return
        # What a hit of lower tiers took over from the device is hashed; its span died.
        bare = [block.block_hash is None for block in table[start:stop]]
        for block, is_bare in zip(table[start:stop], bare, strict=True):
            if not is_bare:
                self.order.disown(block.block_id)
        mask = None if all(bare) else bare
        pool.hash_blocks(request, table, start, stop, block_size, gid, mask)
        ids = [b.block_id for b in table[start:stop] if not b.is_null]
        node = tree.grow(state.path, index, ids, stop * block_size)
        self.order.grew(node, ids)

    def _seal(self, state: RequestState, tokens: int, cls: str) -> Node | None:
        """Make the checkpoint at ``tokens``, if its window is there and it is worth its blocks."""
        order, request = self.order, state.request
        node = order.tree.close(state.path, tokens + self.full_lookahead_tokens)
        if node is None or node.dead:
            return None
        if node.swa is not None:
            order.seal(node, cls, node.swa, ())
            order.supersede(node)
            return node
        window = collect_window(self, request, tokens)
        if window is None:
            return None
        evicted_before = order.num_evicted
        if not order.admit_checkpoint(len(window.new_ids), len(window.new_draft_ids)):
            self.refused[cls] = self.refused.get(cls, 0) + 1
            return None
        if order.num_evicted != evicted_before:
            # Making room may have taken blocks that this window would have shared.
            window = collect_window(self, request, tokens)
            if window is None or node.dead:
                return None
        hash_window(self, request, window)
        order.seal(node, cls, window.all_ids, window.new_ids, window.new_draft_ids)
        order.supersede(node)
        self.created[cls] = self.created.get(cls, 0) + 1
        # Hashes chain, so a prefix that holds any of the new blocks holds the first of them.
        first = first_new_end(self, window)
        if first is not None:
            self.num_sealed += 1
            self.sealed.append((first, request.block_hashes[first // self.hash_block_size - 1]))
        return node

    def resident_spine_block(self, hashes: Any, tokens: int) -> Any | None:
        """The resident full-attention block that ends at ``tokens`` of a prefix, or None."""
        index = tokens // self.spine_block_tokens - 1
        if not 0 <= index < len(hashes):
            return None
        key = make_block_hash_with_group_id(hashes[index], self.spine)
        return self.block_pool.cached_block_hash_to_block.get_one_block(key)

    # -- end of a request --------------------------------------------------------------------

    def finish(self, request: Any) -> None:
        """Keep the window at the end of what ``request`` computed, before its blocks are freed."""
        state = self.states.pop(request.request_id, None)
        if state is not None and state.request is not None:
            self._forget_uncomputed(state)
            self._seal_end(state)

    def _forget_uncomputed(self, state: RequestState) -> None:
        """Take back what was hashed ahead of a step that will not run.

        Blocks are hashed when they are allocated. A request that is preempted in the very step it
        was scheduled in (priority scheduling) has hashed blocks whose KV is never computed.
        """
        request, pool = state.request, self.block_pool
        computed = request.num_computed_tokens
        if state.cached_tokens <= computed:
            return
        state.cached_tokens = state.planned_tokens = computed
        stale = {
            block.block_id
            for gid in (*self.full_ids, *self.swa_ids)
            for block in self._own_blocks(request, gid, computed)
            if block.block_hash is not None and block.ref_cnt == 1
        }
        for gid in (*self.full_ids, *self.swa_ids):
            manager = self.single_type_managers[gid]
            cached = manager.num_cached_block.get(request.request_id, 0)
            manager.num_cached_block[request.request_id] = min(
                cached, computed // manager.block_size
            )
        pool.evict_blocks(stale)

    def _own_blocks(self, request: Any, gid: int, from_tokens: int) -> list[Any]:
        manager = self.single_type_managers[gid]
        table = manager.req_to_blocks.get(request.request_id, [])
        return [b for b in table[from_tokens // manager.block_size :] if not b.is_null]

    def _seal_end(self, state: RequestState) -> None:
        if not state.cached_tokens:
            return
        end = last_safe_boundary(self.geometry, self.scheduler_block_size, state.cached_tokens)
        self._repair(state)
        if end <= 0:
            return
        if retention.TAIL in self.rule.classes:
            before = end - self.scheduler_block_size
            if before > state.hit_tokens:
                self._seal(state, before, retention.TAIL)
        if retention.TURN_END in self.rule.classes and end > state.hit_tokens:
            self._seal(state, end, retention.TURN_END)

    def _repair(self, state: RequestState) -> None:
        """Blocks left to an equal resident copy that has died since: hash this request's own.

        Only blocks that were skipped for that reason are hashed: any other block without a hash
        lost it because its content is not to be trusted (a connector's failed load).
        """
        path = state.path
        if not state.skipped or not (path.node.dead or (path.open is not None and path.open.dead)):
            return
        request, pool, tree = state.request, self.block_pool, self.order.tree
        manager = self.single_type_managers[self.spine]
        block_size = manager.block_size
        table = manager.req_to_blocks.get(request.request_id, [])
        stop = min(manager.num_cached_block.get(request.request_id, 0), len(table))
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
        get_block = pool.cached_block_hash_to_block.get_one_block
        state.path = Path(tree.root, 0)
        following = True
        for i in range(stop):
            block, tokens = table[i], (i + 1) * block_size
            resident = get_block(make_block_hash_with_group_id(hashes[i], self.spine))
            if (
                following
                and resident is not None
                and tree.follow(state.path, resident.block_id, tokens)
            ):
                continue
            following = False
            if block.block_hash is None:
                if block.is_null or not any(i in part for part in state.skipped):
                    return
                if resident is None:
                    pool.hash_blocks(request, table, i, i + 1, block_size, self.spine)
                else:
                    block = resident
                    if block.ref_cnt > 0:
                        return
                    # An equal block that waits for death: drop it, this request's copy replaces it.
                    pool.evict_blocks({block.block_id})
                    pool.hash_blocks(request, table, i, i + 1, block_size, self.spine)
                    block = table[i]
            else:
                self.order.disown(block.block_id)
            node = tree.grow(state.path, 0, [block.block_id], tokens)
            self.order.grew(node, [block.block_id])

    def distrust(self) -> None:
        """A connector reported blocks with bad content: no skipped copy may stand in any more."""
        for state in self.states.values():
            state.skipped.clear()

    def release_hold(self, request_id: str) -> bool:
        """Free what ``request_id`` holds beyond its window; True when it held anything.

        It holds again from the next boundary on, when a whole window is at hand anew.
        """
        state = self.states.get(request_id)
        if state is None or state.request is None or not state.holds:
            return False
        if state.request.is_finished():
            return False  # a connector may still be reading its blocks
        state.holds = False
        state.resume_hold_tokens = max(state.released_tokens, state.computed_tokens) + 1
        request = state.request
        processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        self.remove_skipped_blocks(request_id, processed, request.num_prompt_tokens)
        return True

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """As upstream, but the window of the last boundary to checkpoint is held back.

        Full-attention groups never skip blocks, and SWA groups only when that boundary moved.
        """
        state = self.states.get(request_id)
        tokens = processed_computed_tokens
        if state is not None:
            unit = self.scheduler_block_size
            if not state.holds and tokens // unit * unit >= state.resume_hold_tokens:
                state.holds = True
            if state.holds and state.request is not None and state.request.is_finished():
                # A connector is about to be given the block table: it must be stock's.
                self._seal_end(state)
                state.holds = False
                state.resume_hold_tokens = sys.maxsize
            if state.holds:
                lookahead = self.rule.lookahead_tokens
                cacheable = tokens - self.num_reprefillable_tokens - lookahead
                tokens = max(0, min(tokens, cacheable // unit * unit - self._hold_back))
            if tokens <= state.released_tokens:
                return
            state.released_tokens = tokens
        for gid in self.swa_ids:
            self.single_type_managers[gid].remove_skipped_blocks(
                request_id, tokens, num_prompt_tokens
            )

    def reset_prefix_cache(self) -> bool:
        """As upstream; memos of earlier look-ups become void."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.states.clear()
        return done
