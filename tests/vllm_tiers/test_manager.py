# SPDX-License-Identifier: Apache-2.0
"""What is used stays alive in all tiers, and what a store has lost is written again, once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from mimo_plugin.engines.vllm.tiers import store_tier
from mimo_plugin.engines.vllm.tiers.store_tier import WAITING_PART
from mimo_plugin.tiers.breaker import Breaker
from mimo_plugin.tiers.ring import RingStore
from tests.tiers.stores import Fault, MemoryStore
from tests.vllm_tiers.harness import LAYOUT, Tiers, data_of, key

KEYS = [key(number, group) for number in range(4) for group in range(3)]
DATA = [data_of(k) for k in KEYS]


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def tiers(start, files, store, monkeypatch):
    """Tiers of which host memory and the store have the keys."""
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: RingStore({"it": store}))
    made = start(files)
    made.store(KEYS, DATA)
    made.settle()
    made.counts()
    store.calls.clear()
    return made


def calls(store, name):
    return [keys for called, keys in store.calls if called == name]


def lose(tiers, store, keys):
    for text in tiers.tier.texts(keys):
        del store.pages[text]


def test_keys_are_touched_once_in_an_interval(tiers, store):
    for _ in range(5):
        tiers.keep_alive(KEYS)
        tiers.settle()
    tiers.now_s += 29
    tiers.keep_alive(KEYS)
    tiers.settle()
    assert sorted(sum(calls(store, "touch"), [])) == sorted(tiers.tier.texts(KEYS))
    tiers.now_s += 1
    tiers.keep_alive(KEYS[:3])
    tiers.settle()
    assert sorted(calls(store, "touch")[-1]) == sorted(tiers.tier.texts(KEYS[:3]))
    assert not calls(store, "put") and not calls(store, "get")


def test_what_the_store_has_lost_is_written_again_once(tiers, store):
    lost = [KEYS[1], KEYS[5], KEYS[9]]
    lose(tiers, store, lost)
    for _ in range(3):
        tiers.keep_alive(KEYS)
        tiers.settle()
    assert sorted(sum(calls(store, "put"), [])) == sorted(tiers.tier.texts(lost))
    counts = tiers.counts()
    assert counts["tier_pages", "repaired"] == 3
    assert counts["tier_bytes", "written", "swa"] == 200
    assert counts["tier_bytes", "written", "draft"] == 10
    assert counts["tier_bytes", "written", "full"] == 600
    tiers.forget_host()
    assert tiers.load(KEYS) == DATA


def test_a_repair_leaves_the_request_s_state_alone(tiers, store):
    """vLLM's manager keeps state for each request; a repair belongs to none."""
    lose(tiers, store, KEYS)
    context = tiers.request()
    tiers.manager.keep_alive(KEYS, context)
    tiers.settle()
    assert list(tiers.manager._req_state) == [context.req_id]
    assert list(tiers.manager._metrics._request_states) == [context.req_id]
    tiers.manager._metrics.assert_idle()
    tiers.finish(context)
    assert not tiers.manager._req_state and not tiers.manager._jobs
    evictable = tiers.primary._num_evictable_cache_chunks
    assert evictable == len(KEYS), "rows stay pinned"
    stats = tiers.manager.get_stats()
    assert stats is not None


def test_what_host_memory_does_not_have_is_forgotten(tiers, store):
    lose(tiers, store, KEYS)
    tiers.forget_host()
    tiers.keep_alive(KEYS)
    tiers.settle()
    assert not calls(store, "put") and not tiers.manager.has_pending_work()
    # The next request computes, and its store writes.
    tiers.store(KEYS, DATA)
    tiers.settle()
    assert len(store.pages) == len(KEYS)
    assert ("tier_pages", "repaired") not in tiers.counts()


def test_what_is_not_ready_in_host_memory_is_not_read(tiers, store):
    """A row that the device is about to fill holds something else until then."""
    lose(tiers, store, KEYS)
    tiers.forget_host()
    context = tiers.request()
    output = tiers.manager.prepare_store(KEYS, context)
    assert len(output.keys_to_store) == len(KEYS)
    tiers.manager.keep_alive(KEYS, context)
    tiers.settle()
    assert not calls(store, "put")
    tiers.manager.complete_store(output.keys_to_store, context, success=False)
    tiers.finish(context)
    assert not any(name[0] == "tier_host_bytes" for name in tiers.counts())


class Held(MemoryStore):
    """Writes wait until they are let go."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def put(self, keys, pages):
        self.fault()
        return super().put(keys, pages)


def test_what_is_about_to_be_written_is_not_written_twice(start, files, monkeypatch):
    fault = Fault()
    fault.hangs = True
    store = Held(fault)
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: RingStore({"it": store}))
    tiers = start(files)
    tiers.store(KEYS, DATA)
    fault.wait_for(1)
    tiers.keep_alive(KEYS)
    while tiers.tier._keep_alive.busy:
        tiers.step()
    assert len(calls(store, "touch")) == 1 and not store.pages
    fault.let_go()
    tiers.settle()
    assert sorted(sum(calls(store, "put"), [])) == sorted(tiers.tier.texts(KEYS))
    assert ("tier_pages", "repaired") not in tiers.counts()


def test_what_was_written_after_it_was_found_missing_is_not_written_again(
    start, files, monkeypatch
):
    fault = Fault()
    fault.hangs = True
    store = Held(fault)
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: RingStore({"it": store}))
    tiers = start(files)
    tiers.store(KEYS, DATA)
    fault.wait_for(1)
    tiers.step()
    tiers.keep_alive(KEYS)
    while not tiers.tier._keep_alive._missing:
        time.sleep(0.001)
    fault.let_go()
    while not tiers.tier._transfers._finished:
        time.sleep(0.001)
    tiers.settle()
    assert sorted(sum(calls(store, "put"), [])) == sorted(tiers.tier.texts(KEYS))


def test_a_store_that_does_not_answer_is_not_repaired(start, files, monkeypatch):
    """That it finds nothing says nothing about what it has."""
    fault = Fault()
    store = MemoryStore(before=fault)
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: Breaker(store, "it"))
    tiers = start(files)
    tiers.store(KEYS, DATA)
    tiers.settle()
    fault.error = ConnectionError("gone")
    tiers.keep_alive(KEYS)
    tiers.settle()
    fault.error = None
    assert len(calls(store, "put")) == 1
    assert ("tier_pages", "repaired") not in tiers.counts()


def test_repairs_are_bounded_by_the_rows_that_may_wait(start, files, monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: RingStore({"it": store}))
    tiers = start(files, rows=40)
    most = int(WAITING_PART * 40)
    keys = [key(number) for number in range(30)]
    for at in range(0, 30, 5):
        tiers.store(keys[at : at + 5], [data_of(k) for k in keys[at : at + 5]])
        tiers.settle()
    tiers.counts()
    lose(tiers, store, keys)
    tiers.keep_alive(keys)
    tiers.settle()
    # The beginning of the prefix comes first.
    assert set(store.pages) == set(tiers.tier.texts(keys[:most]))
    counts = tiers.counts()
    assert counts["tier_pages", "repaired"] == most
    assert counts["tier_pages", "dropped"] == 30 - most
    for _ in range(3):
        tiers.now_s += 30
        tiers.keep_alive(keys)
        tiers.settle()
    assert set(store.pages) == set(tiers.tier.texts(keys))


def test_a_file_that_was_removed_is_written_again(start, files):
    tiers = start(files)
    tiers.store(KEYS, DATA)
    tiers.settle()
    gone = sorted(Path(files["path"]).rglob("*.page"))[::3]
    for path in gone:
        path.unlink()
    before = tiers.tier.stats().pages_put
    tiers.keep_alive(KEYS)
    tiers.settle()
    assert all(path.exists() for path in gone)
    assert tiers.tier.stats().pages_put - before == len(gone)
    tiers.forget_host()
    assert tiers.load(KEYS) == DATA


def test_what_is_kept_alive_is_the_last_to_die_in_host_memory(start):
    """Also when the store below was touched just before, and the end of a prefix dies first."""
    tiers = start(None, rows=12)
    old, hot = [key(n) for n in range(6)], [key(n) for n in range(6, 12)]
    tiers.store(hot, [data_of(k) for k in hot])
    tiers.store(old, [data_of(k) for k in old])
    for _ in range(2):
        tiers.keep_alive(hot)
    new = [key(n) for n in range(100, 108)]
    tiers.store(new, [data_of(k) for k in new])
    left = [tiers.primary.lookup(k, ReqContext("x")) is LookupResult.HIT for k in hot]
    assert left == [True] * 4 + [False] * 2


def test_touch_is_keep_alive(tiers, store):
    context = tiers.request()
    for _ in range(2):
        tiers.manager.touch(KEYS, context)
        tiers.settle()
    tiers.finish(context)
    assert len(calls(store, "touch")) == 1


def test_reset_with_repairs_under_way(start, files, monkeypatch):
    fault = Fault()
    store = Held(fault)
    monkeypatch.setattr(store_tier, "open_store", lambda config, where: Breaker(store, "it"))
    tiers = start(files)
    tiers.store(KEYS, DATA)
    tiers.settle()
    lose(tiers, store, KEYS)
    fault.hangs = True
    tiers.keep_alive(KEYS)
    while not tiers.manager._jobs:
        tiers.step()
    fault.wait_for(1)
    fault.let_go()
    tiers.manager.reset_cache()
    assert not tiers.manager._jobs and tiers.tier.room_rows == int(64 * WAITING_PART)
    tiers.settle()
    assert tiers.load(KEYS) == [
        data if text in store.pages else None
        for text, data in zip(tiers.tier.texts(KEYS), DATA, strict=True)
    ]


def test_bytes_of_host_memory_are_counted_by_kind(tiers):
    tiers.load(KEYS[:4])
    counts = tiers.counts()
    sizes = [LAYOUT.group_bytes(group) for group in range(3)]
    assert counts["tier_host_bytes", "read", "full"] == 2 * sizes[0]
    assert counts["tier_host_bytes", "read", "swa"] == sizes[1]
    assert counts["tier_host_bytes", "read", "draft"] == sizes[2]
    assert not any("written" in name for name in counts)
    more = [key(50, group) for group in (1, 1, 2)][1:]
    tiers.store(more, [data_of(k) for k in more])
    tiers.settle()
    counts = tiers.counts()
    assert counts["tier_host_bytes", "written", "swa"] == sizes[1]
    assert counts["tier_host_bytes", "written", "draft"] == sizes[2]
    assert counts["tier_bytes", "written", "swa"] == sizes[1]
    assert counts["tier_pages", "written"] == 2


def test_other_tiers_below_stay_as_they_are(start, files, tmp_path):
    """vLLM's own tier of files is touched and not repaired."""
    made = Tiers(files)
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

    view = made.primary.get_kv_memoryview()
    other = ExampleSecondaryTierManager(
        offloading_spec=None, primary_kv_view=view, tier_type="example"
    )
    touched = []
    other.touch = lambda keys, context: touched.append(list(keys))
    manager = type(made.manager)(
        primary_tier=made.primary, secondary_tiers=[other, made.tier], touch_interval_s=30.0
    )
    manager.set_layout(LAYOUT)
    made.manager = manager
    made.store(KEYS, DATA)
    made.settle()
    made.keep_alive(KEYS)
    made.settle()
    assert touched == [KEYS]
    assert made.tier.stats().pages_put == made.tier.stats().pages_touched == len(KEYS)
    made.close()
