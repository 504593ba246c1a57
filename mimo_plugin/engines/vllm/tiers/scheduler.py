# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector: what is a hit, what is loaded, stored and kept alive.

Attached to vLLM's own object, whose bookkeeping of jobs and device blocks stays as it is:

* a hit may lie on the device, in host memory and below it, in any mixture (``core/joint.py``);
* only what it needs is fetched from below, and only what the device lacks is loaded;
* windows are stored where the retention rule keeps a point (``core/store_plan.py``);
* a hit in any tier keeps what it needed alive in the tiers below.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import lcm
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadPolicy

from mimo_plugin.core.joint import Place
from mimo_plugin.core.retention import BOUNDARY, RetentionRule, find_message_starts
from mimo_plugin.core.store_plan import StorePlan, waiting_blocks
from mimo_plugin.core.window import blocks_for_hit
from mimo_plugin.engines.vllm.tiers.joint import DeviceBlocks
from mimo_plugin.engines.vllm.tiers.lookups import RequestView, TieredLookups, geometry_of
from mimo_plugin.engines.vllm.tiers.stored import take_over


class TieredScheduler(TieredLookups):
    """``OffloadingConnectorScheduler``; an instance of it becomes one of these by :meth:`adopt`."""

    rule: RetentionRule
    message_start_token_ids: frozenset[int]
    #: newest chunks of each group that wait for the end of the turn
    _waiting_chunks: list[int]
    #: how far behind a block the points lie at most that need it
    _reach_tokens: int
    #: of the connector's groups, by vLLM's number
    _positions: dict[int, int]
    _storing: Any
    _early_jobs: dict[int, Any]

    @classmethod
    def adopt(
        cls,
        scheduler: Any,
        rule: RetentionRule,
        message_start_token_ids: frozenset[int],
    ) -> TieredScheduler:
        """Take over vLLM's own object, which has served no request yet.

        Args:
            scheduler: vLLM's object.
            rule: where windows are stored.
            message_start_token_ids: that open a chat message.
        """
        scheduler.__class__ = cls
        scheduler.geometry = geometry_of(scheduler.config.kv_group_configs)
        scheduler.unit_tokens = lcm(*(g.block_size_tokens for g in scheduler.geometry))
        scheduler.rule = rule
        groups = scheduler.geometry
        scheduler._waiting_chunks = [waiting_blocks(group, rule) for group in groups]
        scheduler._reach_tokens = max(
            (g.window_blocks + g.lookahead_blocks) * g.block_size_tokens
            for g in groups
            if not g.is_full
        )
        scheduler._positions = {
            config.group_idx: at for at, config in enumerate(scheduler.config.kv_group_configs)
        }
        scheduler.message_start_token_ids = message_start_token_ids
        scheduler.device_blocks = None
        scheduler._requests = {}
        scheduler._storing = None
        scheduler._early_jobs = {}
        adopted: TieredScheduler = scheduler
        return adopted

    def bind(self, kv_cache_manager: Any) -> None:
        """The device's cache is known: what it still has is not loaded."""
        group_ids = tuple(config.group_idx for config in self.config.kv_group_configs)
        self.device_blocks = DeviceBlocks(kv_cache_manager, group_ids)

    def on_new_request(self, request: Any) -> None:
        """As upstream."""
        super().on_new_request(request)
        self._requests[request.request_id] = RequestView(StorePlan(self.geometry, self.rule))
        take_over(self._req_status[request.request_id], self._waiting_chunks)

    # -- loading -------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: keep its hit alive, and load what the device lacks."""
        acquire = getattr(self, "_acquire_step", None)  # from vLLM 0.33 on
        if acquire is not None:
            acquire()
        status = self._req_status[request.request_id]
        ours = self._requests[request.request_id]
        hit, ours.hit = ours.hit, None
        local = status.num_locally_computed_tokens
        self._keep_alive(status, local + num_external_tokens)
        if not num_external_tokens:
            return
        assert hit is not None and hit.tokens == local + num_external_tokens
        keys: list[Any] = []
        block_ids: list[int] = []
        sizes: list[int] = []
        starts: list[int] = []
        status.load_key_ranges.clear()
        for group, config in enumerate(self.config.kv_group_configs):
            table, state = blocks.blocks[config.group_idx], status.group_states[group]
            chunk_tokens = self.geometry[group].block_size_tokens
            self._current_batch_allocated_block_ids.update(
                block.block_id for block in table if not block.is_null
            )
            wanted = [
                index
                for index in sorted(hit.places[group])
                if (index + 1) * chunk_tokens <= hit.tokens
                and not table[index].is_null
                and table[index].block_hash is None
            ]
            for index in wanted:
                key = state.offload_keys[index]
                keys.append(key)
                block_ids.append(table[index].block_id)
                status.load_key_ranges.append(
                    (index * chunk_tokens, (index + 1) * chunk_tokens, key)
                )
            sizes.append(len(wanted))
            starts.append(wanted[0] if wanted else 0)
            if status.offloading_context.policy == OffloadPolicy.CHUNK_LEVEL:
                state.next_stored_chunk_idx = hit.tokens // chunk_tokens
        self.manager.adopted(
            self.config.kv_group_configs[group].group_idx
            for group, block in hit.at(Place.DEVICE)
            if (block + 1) * self.geometry[group].block_size_tokens <= hit.tokens
        )
        self._submit_load(status, keys, GPULoadStoreSpec(block_ids, sizes, starts))

    def _submit_load(self, status: Any, keys: list[Any], target: Any) -> None:
        source = self.manager.prepare_load(keys, status.req_context)
        job_id = self._generate_job_id()
        request_id = status.req.request_id
        self._current_batch_load_jobs[job_id] = TransferJob(
            req_id=request_id, src_spec=source, dst_spec=target
        )
        assert not status.transfer_jobs, "a load starts when nothing else moves"
        status.transfer_jobs.add(job_id)
        self._jobs[job_id] = TransferJobStatus(
            req_id=request_id,
            pending_count=self.config.num_workers,
            keys=set(keys),
            is_store=False,
        )
        if self._chunks_being_loaded is not None:
            self._chunks_being_loaded.update(keys)

    def _keep_alive(self, status: Any, hit_tokens: int) -> None:
        """Touch what a hit needed, from the head on: what is touched last is the first to die."""
        hit_tokens = self.aligned(hit_tokens)
        if not hit_tokens:
            return
        keys: list[tuple[int, Any]] = []
        for group, state in zip(self.geometry, status.group_states, strict=True):
            size, known = group.block_size_tokens, state.offload_keys
            keys += [
                ((block + 1) * size, known[block])
                for block in blocks_for_hit(group, hit_tokens)
                if block < len(known)
            ]
        keys.sort(key=lambda pair: pair[0])
        self.manager.keep_alive([key for _, key in keys], status.req_context)

    # -- storing -------------------------------------------------------------------------------

    def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
        """As upstream; it is what vLLM calls first when it looks for chunks of a request."""
        self._storing = req_status
        tokens: int = super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
        return tokens

    def _reachable_store_block_mask(
        self, group_config: Any, start_chunk_idx: int, end_chunk_idx: int, *args: Any, **kwargs: Any
    ) -> list[bool] | None:
        """Which chunks of a group of the request at hand are stored; None: all."""
        group = self._positions[group_config.group_idx]
        geometry = self.geometry[group]
        if geometry.is_full:
            return None
        status = self._storing
        ours = self._requests[status.req.request_id]
        self._extend_plan(ours, status.req, end_chunk_idx * geometry.block_size_tokens)
        if status.req.is_finished():
            ours.plan.finish(end_chunk_idx * geometry.block_size_tokens)
        return [ours.plan.wanted(group, chunk) for chunk in range(start_chunk_idx, end_chunk_idx)]

    def _final_swa_alignment_blocks(self, group_config: Any) -> int | None:
        """None: upstream's own rule for the end of a request is not asked."""
        return None

    def _extend_plan(self, ours: RequestView, request: Any, stored_tokens: int) -> None:
        """Decide the points that windows up to ``stored_tokens`` may belong to."""
        prompt = request.num_prompt_tokens
        upto = max(prompt, stored_tokens + self._reach_tokens)
        if upto - upto % self.unit_tokens <= ours.plan.planned_tokens:
            return
        starts: list[int] = []
        if self.message_start_token_ids and BOUNDARY in self.rule.classes:
            found = find_message_starts(
                request.all_token_ids, self.message_start_token_ids, ours.scanned_tokens, prompt
            )
            starts = self.rule.thin_boundaries(found, 0) if found else []
            ours.scanned_tokens = prompt
        junction = getattr(request, "shared_prefix_boundary", 0)
        ours.plan.extend(upto, prompt, [junction] if junction else [], starts)

    # -- the end -------------------------------------------------------------------------------

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """As upstream, and offer the end of the turn before the request's blocks are free.

        In the step after, when vLLM offers it, new requests may have been given its blocks: those
        without a hash go first. A transfer that is registered by now is waited for in that case.
        """
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        if request.request_id in self._req_status and request.request_id in self._requests:
            ended = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=[request.request_id])
            with self._manager_held():
                self._early_jobs.update(self._build_store_jobs(ended))
        return result

    def _manager_held(self) -> AbstractContextManager[None]:
        """Between steps: what excludes vLLM's own threads from its manager, from 0.33 on."""
        locked = getattr(self, "_manager_locked", None)
        if locked is None or self._step_region is not None:
            return nullcontext()
        held: AbstractContextManager[None] = locked()
        return held

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As upstream; requests that vLLM's half has let go of are let go of here."""
        meta = super().build_connector_meta(self._without_reloaded(scheduler_output))
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id not in scheduler_output.num_scheduled_tokens:
                self._forget_blocks(request_id)
        meta.store_jobs.update(self._early_jobs)
        self._early_jobs = {}
        for request_id in scheduler_output.finished_req_ids or ():
            self._requests.pop(request_id, None)
            if self.device_blocks is not None:
                self.device_blocks.forget(request_id)
        return meta

    def _forget_blocks(self, request_id: str) -> None:
        """A preempted request has no blocks, though a step in flight may still end it."""
        status = self._req_status.get(request_id)
        for state in status.group_states if status is not None else ():
            state.block_ids.clear()

    def _without_reloaded(self, scheduler_output: Any) -> Any:
        """Preempted requests that load already have nothing to flush, and vLLM trips over them.

        A reset of the prefix cache preempts before the step, which may admit them again.
        """
        preempted = scheduler_output.preempted_req_ids
        loading = {job.req_id for job in self._current_batch_load_jobs.values()}
        if not preempted or loading.isdisjoint(preempted):
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=set(preempted) - loading)

    def reset_cache(self) -> None:
        """As upstream, with what could go wrong afterwards taken out.

        Stores that no worker has heard of are forgotten: nothing may wait for them. Blocks that may
        have been given to others since they were offered are not offered again.
        """
        for job_id in self._early_jobs:
            self._jobs.pop(job_id, None)
        self._early_jobs = {}
        offered = {
            request_id: [state.next_stored_chunk_idx for state in status.group_states]
            for request_id, status in self._req_status.items()
        }
        super().reset_cache()
        for request_id, status in self._req_status.items():
            for group, chunks in enumerate(offered[request_id]):
                if not self.geometry[group].is_full:
                    block_ids = status.group_states[group].block_ids
                    gone = min(chunks, len(block_ids))
                    block_ids[:gone] = [0] * gone
