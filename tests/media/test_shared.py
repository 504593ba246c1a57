# SPDX-License-Identifier: Apache-2.0
"""The cache in shared memory: right content or none, whoever reads, writes or dies meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mimo_plugin.errors import ConfigError
from mimo_plugin.media import shared
from mimo_plugin.media.shared import ALIGNMENT_BYTES, SharedCache

ROOT = Path(__file__).parents[2]


def make(folder, capacity=4096, entries=16, name="embeddings"):
    return SharedCache(name, capacity_bytes=capacity, max_entries=entries, folder=folder)


@pytest.fixture
def cache(tmp_path):
    made = make(tmp_path)
    yield made
    made.close()


def rows(count, seed=0, width=8):
    return np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)


def put(cache, key, count=4, seed=0):
    return cache.put(key, rows(count, seed), (count, 8), "uint8")


def check_table(cache):
    """No two entries share a byte of the arena, and none leaves it."""
    taken = cache._table[cache._table["state"] != shared._FREE]
    taken = taken[np.argsort(taken["offset"])]
    end = 0
    for entry in taken:
        assert entry["offset"] >= end
        end = int(entry["offset"] + entry["length"])
    assert end <= cache.capacity_bytes


# -- one process -----------------------------------------------------------------------------


def test_what_was_stored_is_found_with_its_form(cache):
    data = rows(6, width=16)
    assert cache.put("key", data.view(np.uint16), (6, 2, 4), "bfloat16")
    found = cache.get("key", 6)
    assert (found.shape, found.dtype) == ((6, 2, 4), "bfloat16")
    np.testing.assert_array_equal(found.data, data)
    assert (cache.counts.stored, cache.counts.bytes_written) == (1, 96)
    assert (cache.counts.hits, cache.counts.bytes_read) == (1, 96)


def test_another_length_is_a_miss(cache):
    put(cache, "key", count=4)
    assert cache.get("key", 5) is None
    assert not cache.contains("key", 3)
    assert cache.get("key", 4) is not None and cache.get("key") is not None
    assert (cache.counts.mismatches, cache.counts.misses, cache.counts.hits) == (1, 0, 2)


def test_a_wrong_length_is_replaced_by_the_next_writer(cache):
    put(cache, "key", count=4)
    assert put(cache, "key", count=5, seed=1)
    np.testing.assert_array_equal(cache.get("key", 5).data, rows(5, 1))
    assert cache.entries() == 1


def test_keys_that_agree_in_part_are_different_entries(cache):
    put(cache, "a" * 60 + "0001", seed=1)
    put(cache, "b" * 60 + "0001", seed=2)
    np.testing.assert_array_equal(cache.get("b" * 60 + "0001").data, rows(4, 2))
    assert cache.get("0001") is None


def test_the_least_recently_used_goes_first(tmp_path):
    cache = make(tmp_path, capacity=3 * 64)
    for key in "abc":
        put(cache, key)
    cache.get("a")
    assert put(cache, "d")
    assert [key for key in "abcd" if cache.contains(key)] == ["a", "c", "d"]
    assert cache.counts.evictions == 1
    cache.close()


def test_the_table_may_be_full_before_the_arena(tmp_path):
    cache = make(tmp_path, entries=2)
    for key in "abc":
        assert put(cache, key)
    assert cache.entries() == 2 and not cache.contains("a")
    cache.close()


def test_what_is_read_is_not_evicted(tmp_path):
    cache = make(tmp_path, capacity=2 * 64)
    put(cache, "a", seed=1)
    put(cache, "b", seed=2)
    with cache.hold("a") as held:
        before = held.data.copy()
        assert put(cache, "c")  # takes the place of b, though a is older
        assert cache.contains("a") and not cache.contains("b")
        with cache.hold("c"):
            assert not put(cache, "d")
        np.testing.assert_array_equal(held.data, before)
        assert not held.data.flags.writeable
    assert put(cache, "d") and put(cache, "e")
    assert not cache.contains("a")
    assert cache.counts.refused == 1
    cache.close()


def test_larger_than_the_arena_is_refused_and_evicts_nothing(cache):
    put(cache, "small")
    assert not cache.put("large", rows(1, width=4097), (1, 4097), "uint8")
    assert cache.contains("small")
    assert cache.put("all", rows(1, width=4096), (1, 4096), "uint8")
    assert cache.entries() == 1


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "uint8"), ((1,) * 5, "uint8"), ((1,), ""), ((1,), "x" * 15)]
)
def test_forms_that_do_not_fit_the_table_are_refused(cache, shape, dtype):
    with pytest.raises(ValueError, match="allowed: 1 to 4 axes"):
        cache.put("key", rows(1), shape, dtype)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": ""}, "name"),
        ({"name": "../x"}, "name"),
        ({"capacity": 0}, "capacity_bytes"),
        ({"entries": 0}, "max_entries"),
        ({"capacity": 1 << 60}, "has room for"),
    ],
    ids=str,
)
def test_settings_that_can_not_be_met_are_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        make(tmp_path, **given)
    assert "\n" not in str(caught.value)


def test_users_of_one_name_must_agree(tmp_path):
    first = make(tmp_path)
    with pytest.raises(ConfigError, match=r"\(4096, 16\)"):
        make(tmp_path, capacity=8192)
    first.close()
    make(tmp_path, capacity=8192).close()  # nobody is left: made anew


def test_the_last_user_removes_the_file(tmp_path):
    first, second = make(tmp_path), make(tmp_path)
    put(first, "key", seed=3)
    np.testing.assert_array_equal(second.get("key").data, rows(4, 3))
    first.close()
    assert second.contains("key")
    with second.hold("key") as held:
        second.close()
        assert not list(tmp_path.iterdir())
        np.testing.assert_array_equal(held.data, rows(4, 3))
    second.close()
    with pytest.raises(ValueError, match="closed"):
        second.get("key")


def test_threads_of_a_process_exclude_each_other(tmp_path):
    cache = make(tmp_path, capacity=2048, entries=8)
    wrong = []

    def play(seed):
        chance = np.random.default_rng(seed)
        for _ in range(150):
            number = int(chance.integers(12))
            put(cache, f"k{number}", count=4 + number, seed=number)
            number = int(chance.integers(12))
            with cache.hold(f"k{number}", 4 + number) as held:
                if held is not None and not (held.data == rows(4 + number, number)).all():
                    wrong.append(number)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.counts.hits > 0 and cache.counts.evictions > 0
    check_table(cache)
    cache.close()


# -- several processes -----------------------------------------------------------------------


def script(folder, body, **options):
    head = f"""
        import os, signal, sys, time
        from pathlib import Path
        import numpy as np
        from mimo_plugin.media import shared
        from tests.media.test_shared import make, put, rows
        folder = Path({str(folder)!r})
    """
    text = textwrap.dedent(head) + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_a_dead_writers_entry_is_never_served_and_its_room_comes_back(cache, tmp_path):
    # the process is killed in the middle of copying the data
    body = """
        cache = make(folder)
        class Arena:
            def __setitem__(self, where, data):
                print("writing", flush=True)
                time.sleep(60)
        cache._arena = Arena()
        put(cache, "key", count=500)
    """
    with script(tmp_path, body) as writer:
        assert writer.stdout.readline() == "writing\n"
        assert cache.get("key") is None  # being written
        assert not put(cache, "key", count=500)
        assert cache.used_bytes() == 4000
        writer.kill()
    assert cache.get("key") is None  # nobody finishes it
    assert put(cache, "key", count=500, seed=1)
    np.testing.assert_array_equal(cache.get("key", 500).data, rows(500, 1))
    assert cache.counts.recovered == 1


def test_the_room_of_a_dead_writer_serves_other_keys(cache, tmp_path):
    body = """
        cache = make(folder)
        cache._arena = None  # fails after the entry is reserved
        try:
            put(cache, "key", count=500)
        finally:
            os._exit(0)
    """
    with script(tmp_path, body) as writer:
        writer.wait()
    assert put(cache, "other", count=500)
    assert (cache.counts.recovered, cache.counts.evictions) == (1, 0)


def test_a_dead_readers_hold_ends_with_it(cache, tmp_path):
    put(cache, "key", count=500)
    body = """
        cache = make(folder)
        with cache.hold("key") as held:
            print(held.shape[0], flush=True)
            time.sleep(60)
    """
    with script(tmp_path, body) as reader:
        assert reader.stdout.readline() == "500\n"
        assert not put(cache, "other", count=500)
        reader.kill()
    assert put(cache, "other", count=500)


def test_a_process_killed_with_the_table_locked_blocks_nobody(cache, tmp_path):
    body = """
        cache = make(folder)
        cache._allocate = lambda *a: (print("locked", flush=True), time.sleep(60))
        put(cache, "key")
    """
    with script(tmp_path, body) as holder:
        assert holder.stdout.readline() == "locked\n"
        holder.kill()
    assert put(cache, "key")


def test_a_file_whose_users_were_all_killed_is_made_anew(tmp_path):
    body = """
        cache = make(folder, capacity=1024)
        print(put(cache, "key"), flush=True)
        time.sleep(60)
    """
    with script(tmp_path, body) as user:
        assert user.stdout.readline() == "True\n"
        user.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["embeddings"]
    cache = make(tmp_path)  # other sizes, even
    assert not cache.contains("key") and cache.used_bytes() == 0
    cache.close()
    assert not list(tmp_path.iterdir())


STRESS = """
    cache = make(folder, capacity=16_384, entries=24)
    chance = np.random.default_rng(os.getpid())
    print("go", flush=True)
    end_s, wrong = time.monotonic() + {seconds}, 0
    while time.monotonic() < end_s:
        n = int(chance.integers(40))
        count = 8 + 7 * n
        if chance.random() < 0.5:
            put(cache, f"k{{n}}", count=count, seed=n)
        with cache.hold(f"k{{n}}", count) as held:
            wrong += held is not None and not (held.data == rows(count, n)).all()
    print(wrong, cache.counts.hits, cache.counts.evictions, flush=True)
    cache.close()
"""


def test_many_processes_and_sudden_deaths_never_give_wrong_content(tmp_path):
    watcher = make(tmp_path, capacity=16_384, entries=24)
    with contextlib.ExitStack() as stack:
        good = [stack.enter_context(script(tmp_path, STRESS.format(seconds=4))) for _ in range(2)]
        for process in good:
            assert process.stdout.readline() == "go\n"
        chance = np.random.default_rng(5)
        deaths = 0
        while any(process.poll() is None for process in good):
            doomed = stack.enter_context(script(tmp_path, STRESS.format(seconds=60)))
            doomed.stdout.readline()
            time.sleep(float(chance.uniform(0.05, 0.3)))
            doomed.send_signal(signal.SIGKILL)
            doomed.wait()
            deaths += 1
        for process in good:
            wrong, hits, evictions = map(int, process.stdout.read().split())
            assert wrong == 0
            assert hits > 20 and evictions > 20
    assert deaths >= 2
    check_table(watcher)
    # all that the dead left behind can be taken back
    assert watcher.put("all", rows(1, width=16_384), (1, 16_384), "uint8")
    assert watcher.entries() == 1
    watcher.close()
    assert not list(tmp_path.iterdir())


# -- against a model -------------------------------------------------------------------------

KEYS = st.sampled_from("abcdef")
COUNTS = st.integers(0, 40)
CAPACITY = 8 * ALIGNMENT_BYTES


class CacheAgainstModel(RuleBasedStateMachine):
    """Two users of one cache; the model knows only what was stored last under each key."""

    @initialize()
    def start(self):
        self.name = f"mimo-test-{os.getpid()}-{id(self)}"
        self.users = [
            SharedCache(self.name, capacity_bytes=CAPACITY, max_entries=5) for _ in range(2)
        ]
        self.stored = {}  # key -> (length, seed) that a hit must show
        self.held = []  # (stack, found, what it must show)
        self.seed = 0

    def teardown(self):
        if hasattr(self, "users"):
            for stack, _, _ in self.held:
                stack.close()
            for user in self.users:
                user.close()
            assert not (shared.DEFAULT_FOLDER / self.name).exists()

    @rule(user=st.integers(0, 1), key=KEYS, count=COUNTS)
    def store(self, user, key, count):
        self.seed += 1
        had = self.users[user].get(key, count)
        if put(self.users[user], key, count, self.seed) and had is None:
            self.stored[key] = (count, self.seed)

    @rule(user=st.integers(0, 1), key=KEYS, count=st.none() | COUNTS)
    def look_up(self, user, key, count):
        found = self.users[user].get(key, count)
        if found is not None:
            length, seed = self.stored[key]
            assert count in (None, length)
            assert found.shape == (length, 8)
            np.testing.assert_array_equal(found.data, rows(length, seed))

    @rule(user=st.integers(0, 1), key=KEYS)
    def take_hold(self, user, key):
        stack = contextlib.ExitStack()
        found = stack.enter_context(self.users[user].hold(key))
        if found is None:
            stack.close()
        else:
            self.held.append((stack, found, (key, *self.stored[key])))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        stack, _, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        stack.close()

    @invariant()
    def what_is_held_stays(self):
        for _, found, (key, length, seed) in getattr(self, "held", ()):
            np.testing.assert_array_equal(found.data, rows(length, seed))
            assert self.users[0].contains(key, length)

    @invariant()
    def the_table_is_sound(self):
        if hasattr(self, "users"):
            check_table(self.users[0])


CacheAgainstModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCacheAgainstModel = CacheAgainstModel.TestCase
