# SPDX-License-Identifier: Apache-2.0
"""Random histories: a key that is reported as a hit loads the very bytes that were stored."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.tiers.test_redis_store import Server
from tests.vllm_tiers.harness import Tiers, data_of, key

KEYS = [key(number, group) for number in range(4) for group in range(3)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)


class Histories(RuleBasedStateMachine):
    """One engine after another over the same folder, which is damaged now and then.

    The oracle knows which pages the folder has whole, and which keys host memory may have.
    """

    @initialize(rows=st.sampled_from([8, 16, 64]))
    def begin(self, rows):
        self.folder, self.rows = Path(tempfile.mkdtemp(prefix="mimo-")), rows
        self.tiers, self.clock_s = self._started(), 0.0
        self.host = set()

    def _started(self):
        settings_ = {"store": "file", "path": str(self.folder), "capacity_gib": 1.0}
        return Tiers(settings_, rows=self.rows)

    def path(self, k):
        (store,) = self.tiers.tier.store.stores.values()
        return store._store._path(self.tiers.tier.texts([k])[0])

    def whole(self, k):
        """Is the page of a key in the folder, as it was written?"""
        path = self.path(k)
        return path.exists() and path.read_bytes()[32:] == data_of(k)

    @rule(keys=some_keys)
    def store(self, keys):
        self.tiers.store(keys, [data_of(k) for k in keys])
        self.host.update(keys)

    @rule()
    def settle(self):
        self.tiers.settle()

    @rule(keys=some_keys)
    def load(self, keys):
        self.tiers.settle()
        there = {k for k in keys if self.whole(k)}
        found = self.tiers.load(keys)
        for k, data in zip(keys, found, strict=True):
            assert data in (None, data_of(k))
            if data is not None:
                assert k in there or k in self.host
                self.host.add(k)
        if self.rows == 64:  # room for all: what the folder has is found
            assert all(data is not None for k, data in zip(keys, found, strict=True) if k in there)

    @rule()
    def forget_host(self):
        self.tiers.forget_host()
        self.host = set()

    @rule(k=st.sampled_from(KEYS), seed=st.integers(0, 1 << 16))
    def damage(self, k, seed):
        path, chance = self.path(k), random.Random(seed)
        if path.exists():
            data = bytearray(path.read_bytes())
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
            path.write_bytes(data if chance.random() < 0.7 else data[:at])

    @rule(k=st.sampled_from(KEYS))
    def remove(self, k):
        self.path(k).unlink(missing_ok=True)

    @rule(keys=some_keys, wait_s=st.sampled_from([0.0, 40.0]))
    def keep_alive(self, keys, wait_s):
        self.tiers.now_s += wait_s
        self.tiers.keep_alive(keys)

    @rule()
    def touched_and_settled_is_whole(self):
        """What host memory has is in the folder, once it was touched."""
        self.tiers.settle()
        if self.rows < 64:
            return
        self.tiers.now_s += 40
        context = self.tiers.request()
        ready = [k for k in KEYS if self.tiers.primary.lookup(k, context).name == "HIT"]
        self.tiers.finish(context)
        self.tiers.keep_alive(ready)
        self.tiers.settle()
        assert all(self.path(k).exists() for k in ready)

    @rule()
    def restart(self):
        self.tiers.close()
        self.tiers = self._started()
        self.host = set()

    @invariant()
    def nothing_is_pinned_for_ever(self):
        if not self.tiers.manager._jobs:
            waiting = self.tiers.tier._waiting_rows
            assert waiting == 0 and not self.tiers.tier._being_written

    def teardown(self):
        if hasattr(self, "tiers"):
            self.tiers.close()
            shutil.rmtree(self.folder)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=20)


# --- Redis ---------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server of its own, which ends with the test."""
    pytest.importorskip("redis", reason="no Redis client here; pip install 'mimo-plugin[tiers]'")
    # A socket's path may have 107 characters only.
    folder = tempfile.mkdtemp(prefix="mimo-")
    made = Server(Path(folder))
    yield made
    if made.process.poll() is None:
        made.kill()
    shutil.rmtree(folder)


def redis(server):
    return {"store": "redis", "path": server.url}


def test_redis_gives_back_what_host_memory_lost(start, server):
    data = [data_of(k) for k in KEYS]
    first = start(redis(server))
    first.store(KEYS, data)
    first.settle()
    first.forget_host()
    assert first.load(KEYS) == data
    first.close()
    second = start(redis(server))
    assert second.load([*KEYS, key(9)]) == [*data, None]


def test_a_server_killed_midway_costs_hits_and_nothing_else(start, server):
    """kill -9 at random points: no exception, no wrong byte, and it is used again when it is back.

    The breaker leaves a server that fails alone for some time; here that time is over at once.
    """
    tiers, chance, hits, killed = start(redis(server), rows=16), random.Random(3), 0, 0
    (breaker,) = tiers.tier.store.stores.values()
    breaker._clock_s = lambda: tiers.now_s
    for _ in range(200):
        tiers.now_s += 40.0
        draw = chance.random()
        if draw < 0.05:
            server.kill()
            killed += 1
        elif server.process.poll() is not None and draw < 0.3:
            server.start()
        keys = chance.sample(KEYS, chance.randrange(1, 6))
        if chance.random() < 0.5:
            tiers.store(keys, [data_of(k) for k in keys])
        tiers.keep_alive(keys)
        if chance.random() < 0.3:
            tiers.forget_host()
        for k, found in zip(keys, tiers.load(keys), strict=True):
            assert found in (None, data_of(k))
            hits += found is not None
    assert killed >= 3 and hits > 100
    if server.process.poll() is not None:
        server.start()
    tiers.now_s += 40.0
    tiers.settle()
    data = [data_of(k) for k in KEYS[:4]]
    tiers.forget_host()
    tiers.store(KEYS[:4], data)
    tiers.settle()
    tiers.forget_host()
    assert tiers.load(KEYS[:4]) == data
    assert tiers.manager._metrics.assert_idle() is None


def test_a_server_that_comes_back_empty_is_filled_again(start, server):
    data = [data_of(k) for k in KEYS]
    tiers = start(redis(server))
    tiers.store(KEYS, data)
    tiers.settle()
    server.kill()
    server.start()
    tiers.now_s += 40
    for _ in range(2):
        tiers.keep_alive(KEYS)
        tiers.settle()
    assert tiers.tier.stats().pages_put == 2 * len(KEYS)
    tiers.forget_host()
    assert tiers.load(KEYS) == data
