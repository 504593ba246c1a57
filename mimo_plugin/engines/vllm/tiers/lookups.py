# SPDX-License-Identifier: Apache-2.0
"""What a request hits on the device, in host memory and below it together (``core/joint.py``).

Only what the hit needs is fetched into host memory from below; the request asks again until all is
there. A tier that does not answer in time, or host memory that others fill meanwhile, costs a part
of the hit and never the request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from mimo_plugin.core.joint import JointHit, Place, joint_hit
from mimo_plugin.core.store_plan import StorePlan
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.engines.vllm.tiers.joint import Adoption, DeviceBlocks
from mimo_plugin.engines.vllm.tiers.peek import fetch, free_rows, peek

ANSWER_WITHIN_S = 5.0
"""A request does not wait longer for tiers below host memory; then it takes what there is."""

MOST_FETCHES = 4
"""Times that a request has its hit fetched into host memory: others may push it out meanwhile."""


@dataclass(slots=True)
class Asked:
    """What the look-ups of one waiting request have led to."""

    since_s: float
    fetches: int = 0


@dataclass(slots=True)
class RequestView:
    """What is known of one request beside vLLM's own state.

    Attributes:
        plan: which of its windows are stored.
        scanned_tokens: prompt tokens that were searched for message starts.
        asked: its look-ups while it waits.
        hit: the hit that it is to get, until it is given blocks.
    """

    plan: StorePlan
    scanned_tokens: int = 0
    asked: Asked | None = None
    hit: JointHit | None = field(default=None)


def geometry_of(group_configs: Any) -> tuple[GroupGeometry, ...]:
    """Window geometry of each of the connector's groups; one block is one chunk."""
    return tuple(
        GroupGeometry(
            block_size_tokens=config.tokens_per_chunk,
            window_tokens=(
                config.kv_cache_spec.sliding_window + config.kv_cache_spec.extra_retained_tokens
                if isinstance(config.kv_cache_spec, SlidingWindowSpec)
                else None
            ),
            lookahead_blocks=int(config.is_eagle_group),
        )
        for config in group_configs
    )


class TieredLookups(OffloadingConnectorScheduler):  # type: ignore[misc]
    """The look-up of :class:`TieredScheduler`."""

    geometry: tuple[GroupGeometry, ...]
    unit_tokens: int
    device_blocks: DeviceBlocks | None
    _requests: dict[str, RequestView]

    def _lookup(self, req_status: Any, max_num_new_tokens: int | None = None) -> int | None:
        """Tokens beyond the local hit that can be had; None: ask again in the next step."""
        request = self._requests[req_status.req.request_id]
        request.hit = None
        if self.device_blocks is not None:
            self.device_blocks.plan(req_status.req.request_id, None)
        if request.asked is None:
            request.asked = Asked(time.monotonic())
        hit = self._find(req_status, request.asked, max_num_new_tokens)
        if hit is None:
            return None
        local: int = req_status.num_locally_computed_tokens
        loads = hit.at(Place.HOST)
        if self._chunks_being_loaded:
            keys = req_status.group_states
            if any(keys[g].offload_keys[b] in self._chunks_being_loaded for g, b in loads):
                return None  # another request loads the same
        self._count(req_status, request.asked, hit)
        request.asked = None
        if not loads:
            return 0
        request.hit = hit
        self._plan_adoption(req_status, hit)
        return hit.tokens - local

    def _find(
        self, req_status: Any, asked: Asked, max_num_new_tokens: int | None
    ) -> JointHit | None:
        """The hit with all that it needs in host memory or on the device; None: not yet."""
        local = req_status.num_locally_computed_tokens
        limit = self._limit(req_status, max_num_new_tokens)
        late = time.monotonic() - asked.since_s > ANSWER_WITHIN_S
        near = late or asked.fetches >= MOST_FETCHES
        known: dict[tuple[int, int], Place] = {}
        while True:
            where = partial(self._where, req_status, known, near, {})
            hit = joint_hit(self.geometry, self.unit_tokens, local, limit, where)
            if hit.unsure and not late:
                return None
            below, coming = hit.at(Place.BELOW), hit.at(Place.COMING)
            if coming and not below:
                return None
            if not below:
                return hit
            missing = len(below) - (free_rows(self.manager) - len(hit.at(Place.HOST)))
            if missing <= 0:
                break
            # Host memory can't hold it all at once: as long a hit as it can hold.
            # But not shorter than what is there already.
            here = joint_hit(
                self.geometry,
                self.unit_tokens,
                local,
                hit.tokens - self.unit_tokens,
                partial(self._where, req_status, known, True, {}),
            )
            limit = hit.tokens - max(1, missing // self._rows_per_unit()) * self.unit_tokens
            limit = max(limit, here.tokens)
            if not asked.fetches:
                self.manager.accounting.cut(hit.tokens - max(limit, local))
        self._fetch(req_status, asked, hit, below)
        return None

    def _count(self, req_status: Any, asked: Asked, hit: JointHit) -> None:
        local = req_status.num_locally_computed_tokens
        found = hit.tokens - local
        accounting = self.manager.accounting
        in_host = 0 if asked.fetches else found
        accounting.found_in_host(in_host)
        accounting.looked_up(
            self.aligned(req_status.req.num_tokens - 1) - local - in_host,
            hit.full_tokens - local - in_host,
            found - in_host,
        )

    def aligned(self, tokens: int) -> int:
        """The longest hit of at most ``tokens``."""
        return tokens - tokens % self.unit_tokens

    def _fetch(
        self, req_status: Any, asked: Asked, hit: JointHit, below: list[tuple[int, int]]
    ) -> None:
        """Bring what a hit needs from below host memory; the request asks again."""
        states, context = req_status.group_states, req_status.req_context
        asked.fetches += 1
        # What is there already must not die for what comes.
        here = [states[g].offload_keys[b] for g, b in hit.at(Place.HOST)]
        self.manager.primary_tier.touch(here, context)
        fetch(self.manager, [states[g].offload_keys[b] for g, b in below], context)

    def _limit(self, req_status: Any, max_num_new_tokens: int | None) -> int:
        """Longest hit: the last token is computed, for its logits."""
        local = req_status.num_locally_computed_tokens
        limit: int = req_status.req.num_tokens - 1
        for most in (max_num_new_tokens, req_status.max_load_tokens):
            if most is not None:
                limit = min(limit, local + most)
        return limit

    def _rows_per_unit(self) -> int:
        return sum(self.unit_tokens // g.block_size_tokens for g in self.geometry if g.is_full)

    def _where(
        self,
        req_status: Any,
        known: dict[tuple[int, int], Place],
        near: bool,
        gaps: dict[int, int],
        group: int,
        block: int,
    ) -> Place:
        """Place of a block; with ``near`` what lies below host memory does not count."""
        keys = req_status.group_states[group].offload_keys
        if block >= len(keys):
            return Place.NOWHERE
        found = known.get((group, block))
        if found is None:
            found = self._place(group, keys[block], req_status, gaps)
            if found is not Place.DEVICE:
                gaps.setdefault(group, block)
            known[group, block] = found
        return Place.NOWHERE if near and found in (Place.BELOW, Place.UNSURE) else found

    def _place(self, group: int, key: Any, req_status: Any, gaps: dict[int, int]) -> Place:
        device = self.device_blocks
        # Where full blocks are hashed along a tree, the device has nothing behind a gap.
        usable = device is not None and not (
            device.by_tree and self.geometry[group].is_full and group in gaps
        )
        if usable and device is not None and device.find(group, key) is not None:
            return Place.DEVICE
        return peek(self.manager, key, req_status.req_context)

    def _plan_adoption(self, req_status: Any, hit: JointHit) -> None:
        if self.device_blocks is None:
            return
        size = [g.block_size_tokens for g in self.geometry]
        keys = tuple(
            {
                block: req_status.group_states[group].offload_keys[block]
                for block, place in blocks.items()
                if place is Place.DEVICE and (block + 1) * size[group] <= hit.tokens
            }
            for group, blocks in enumerate(hit.places)
        )
        local = req_status.num_locally_computed_tokens
        self.device_blocks.plan(req_status.req.request_id, Adoption(local, hit.tokens, keys))
