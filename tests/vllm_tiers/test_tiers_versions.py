# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.33 asks for and 0.32 has not: its lock, its fence, files of host memory."""

from contextlib import contextmanager
from types import SimpleNamespace as Fake

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from mimo_plugin.engines.vllm.tiers import copy_worker, spec
from mimo_plugin.engines.vllm.tiers.scheduler import TieredScheduler


@pytest.fixture
def scheduler(monkeypatch):
    """One with a request that has ended; it notes what happens in which order."""
    made = TieredScheduler.__new__(TieredScheduler)
    made.seen = []
    made._early_jobs = {}
    made._jobs = {}
    made._req_status = made._requests = {"r": object()}
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "request_finished", lambda self, request: (False, None)
    )
    monkeypatch.setattr(
        TieredScheduler,
        "_build_store_jobs",
        lambda self, step: self.seen.append(tuple(step.finished_req_ids)) or {7: "job"},
    )
    return made


def locked(scheduler, monkeypatch):
    """The scheduler with 0.33's lock."""

    @contextmanager
    def held(self):
        self.seen.append("lock")
        yield
        self.seen.append("unlock")

    monkeypatch.setattr(TieredScheduler, "_manager_locked", held, raising=False)
    scheduler._step_region = None


def test_the_end_of_a_turn_without_a_lock(scheduler):
    assert scheduler.request_finished(Fake(request_id="r")) == (False, None)
    assert scheduler.seen == [("r",)]
    assert scheduler._early_jobs == {7: "job"}


def test_the_end_of_a_turn_holds_the_lock(scheduler, monkeypatch):
    locked(scheduler, monkeypatch)
    scheduler.request_finished(Fake(request_id="r"))
    assert scheduler.seen == ["lock", ("r",), "unlock"]


def test_within_a_step_it_is_held_already(scheduler, monkeypatch):
    locked(scheduler, monkeypatch)
    scheduler._step_region = object()
    scheduler.request_finished(Fake(request_id="r"))
    assert scheduler.seen == [("r",)]


def test_a_reset_waits_for_no_store_that_was_never_sent(scheduler, monkeypatch):
    scheduler._jobs = {3: "sent", 7: "early"}
    scheduler._early_jobs = {7: "job"}
    scheduler._req_status = {}
    fenced = []
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "reset_cache", lambda self: fenced.extend(self._jobs)
    )
    scheduler.reset_cache()
    assert fenced == [3]
    assert scheduler._early_jobs == {}


def test_a_request_that_gets_blocks_holds_the_lock(scheduler, monkeypatch):
    monkeypatch.setattr(
        TieredScheduler,
        "_acquire_step",
        lambda self: self.seen.append("acquired"),
        raising=False,
    )
    monkeypatch.setattr(
        TieredScheduler, "_keep_alive", lambda self, status, tokens: self.seen.append(tokens)
    )
    scheduler._req_status = {"r": Fake(num_locally_computed_tokens=32)}
    scheduler._requests = {"r": Fake(hit=None)}
    scheduler.update_state_after_alloc(Fake(request_id="r"), None, 0)
    assert scheduler.seen == ["acquired", 32]


def test_an_urgent_load_is_a_load(monkeypatch):
    monkeypatch.setattr(
        copy_worker.HostCopyWorker,
        "_copy",
        lambda self, job_id, device, rows, *, to_host: (job_id, device, rows, to_host),
    )
    worker = copy_worker.HostCopyWorker.__new__(copy_worker.HostCopyWorker)
    rows = torch.tensor([1])
    source, target = Fake(block_ids=rows), Fake()
    assert worker.submit_load(4, source, target, expedited=True) == (4, target, rows, False)


@pytest.mark.parametrize(
    ("segments", "shared"), [(None, [9]), ([("file", 0, 1)], [9]), ([1, 2], [])]
)
def test_host_memory_of_several_files_is_not_shared_as_one(monkeypatch, segments, shared):
    told, stopped = [], []

    class Tier:
        share_memory = staticmethod(told.append)

    region = Fake(fd=9, _creator=True)
    if segments is not None:
        region._segments = segments
    stock = Fake(primary_tier=Fake(_mmap_region=region), secondary_tiers=[Tier()])
    if segments is not None:
        stock._stop_tier_poll_thread = lambda: stopped.append(True)
    monkeypatch.setattr(TieringOffloadingSpec, "get_manager", lambda self: stock)
    monkeypatch.setattr(spec, "StoreTier", Tier)
    monkeypatch.setattr(spec, "MimoTieringManager", Fake)
    made = spec.MimoTieringSpec.__new__(spec.MimoTieringSpec)
    made._manager, made.settings = None, Fake(touch_interval_s=30.0)
    manager = made.get_manager()
    assert manager.secondary_tiers == stock.secondary_tiers
    assert told == shared
    assert bool(stopped) is (segments is not None)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_preempted_request_has_no_blocks_to_offer(scheduler, monkeypatch, scheduled):
    """A step in flight may end it before it has new blocks; the old ones are others' by now."""
    monkeypatch.setattr(
        OffloadingConnectorScheduler,
        "build_connector_meta",
        lambda self, output: Fake(store_jobs={}),
    )
    state = Fake(block_ids=[4, 5, 6])
    scheduler._req_status = {"r": Fake(group_states=(state,))}
    scheduler._current_batch_load_jobs = {}
    scheduler._early_jobs = {}
    output = Fake(
        preempted_req_ids={"r"},
        num_scheduled_tokens={"r": 8} if scheduled else {},
        finished_req_ids=set(),
    )
    scheduler.build_connector_meta(output)
    assert state.block_ids == ([4, 5, 6] if scheduled else [])
