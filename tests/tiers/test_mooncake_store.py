# SPDX-License-Identifier: Apache-2.0
"""Pages in a real Mooncake: what is read is what was written, and what is dead costs hits."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mimo_plugin.core.circuit import CLOSED, OPEN, CircuitRule
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.folders import open_folders
from mimo_plugin.tiers.framing import HEADER_BYTES
from mimo_plugin.tiers.mooncake_client import LANES, MooncakeUnavailable
from mimo_plugin.tiers.mooncake_store import MooncakeStore, _name, open_mooncake
from mimo_plugin.tiers.mooncake_url import parse_mooncake
from mimo_plugin.tiers.open import share_memory
from tests.tiers.mooncake_cluster import LONG_S, Cluster
from tests.tiers.stores import MemoryStore, empty, page

IMPATIENT_S = 0.5
KEYS = [f"space/{number:x}" for number in range(200)]
MB = 1 << 20


@pytest.fixture(scope="module")
def shared():
    """A cluster that all tests of this file may write to, with keys of their own."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def make():
    """Makes clusters and stores, which end with the test."""
    made = []

    def start(what, *arguments, **options):
        made.append(what(*arguments, **options))
        return made[-1]

    yield start
    for each in reversed(made):
        each.close()


def opened(cluster, timeout_s=LONG_S, **options):
    query = "".join(f"&{name}={value}" for name, value in options.items())
    settings = parse_mooncake("url", f"mooncake://{cluster.address}?protocol=tcp{query}")
    return MooncakeStore(settings, timeout_s=timeout_s)


@pytest.fixture
def store(shared):
    target = opened(shared, buffer_mib=8)
    yield target
    target.close()


def worker(store):
    return store._client._session._process


def written(store, key, value):
    """Write raw bytes, whatever was there."""
    end_s = time.monotonic() + LONG_S
    with store._client.lane(end_s) as lane:
        lane.ask("remove", [_name(key)], (), end_s)
        lane.memory[: len(value)] = value
        assert lane.ask("put", [_name(key)], [[lane.piece(0, len(value))]], end_s) == [0]


def raw(store, key, size):
    end_s = time.monotonic() + LONG_S
    with store._client.lane(end_s) as lane:
        assert lane.ask("get", [_name(key)], [[lane.piece(0, size)]], end_s) == [size]
        return bytes(lane.memory[:size])


# --- what is kept ------------------------------------------------------------------------------


def test_what_is_written_is_read_by_another(shared, store, make):
    keys = ["a", "b", "é/\0", "\udc80", "%ED%B2%80"]
    pages = [page(1), page(2, (0, 5)), page(3, ()), page(4), page(5)]
    assert store.put(keys, pages) == [True] * 5
    other = make(opened, shared)
    found = [empty(), empty((3, 0, 2)), empty(()), empty(), empty(), page(9)]
    assert other.get([*keys, "c"], found) == [True] * 5 + [False]
    assert found[0] == page(1) and b"".join(found[1]) == b"".join(page(2, (0, 5)))
    assert found[3:] == [page(4), page(5), page(9)]
    assert other.exists(["c", "a", "%"]) == [False, True, False]
    assert other.touch(["c", "a"]) == [False, True]
    stats = other.stats()
    assert (stats.pages_got, stats.pages_missed, stats.pages_touched) == (5, 1, 1)
    assert stats.bytes_held is None and store.stats().pages_put == 5
    assert other.get([], []) == other.put([], []) == other.exists([]) == other.touch([]) == []
    # A page that is there is not written again.
    assert store.put(["a", "d"], [page(7), page(8)]) == [True, True]
    assert store.stats().pages_put == 6 and store.stats().pages_touched == 1
    assert other.get(["a"], [found[0]]) == [True] and found[0] == page(1)


@pytest.mark.parametrize("length", ["same", "cut", "longer"])
def test_damage_at_any_byte_is_a_miss(store, length):
    sizes = (20, 0, 30)
    store.put([length], [page(1, sizes)])
    whole = raw(store, length, HEADER_BYTES + 50)
    for at in range(1, len(whole)):
        if length == "same":
            data = bytearray(whole)
            data[at] ^= 0xFF
        else:
            data = whole[:at] if length == "cut" else whole + whole[: at + 1]
        written(store, length, bytes(data))
        memory = page(2, sizes)
        assert store.get([length, "none"], [memory, memory]) == [False, False], at
        assert memory == page(2, sizes) and store.exists([length]) == [False]
    stats = store.stats()
    assert (stats.pages_damaged, stats.pages_missed) == (len(whole) - 1, len(whole) - 1)
    written(store, length, whole)
    assert store.get([length], [empty(sizes)]) == [True]


def test_without_checksums_the_length_counts(shared, store, make):
    store.put(["plain"], [page(1)])
    size = HEADER_BYTES + sum(part.nbytes for part in page(1))
    whole = raw(store, "plain", size)
    settings = parse_mooncake("url", shared.address)
    target = MooncakeStore(settings, timeout_s=LONG_S, verify=False)
    for data in (whole[:-1], whole + b"x", whole[:HEADER_BYTES], b"x" + whole[1:]):
        written(store, "plain", data)
        memory = page(2)
        assert target.get(["plain"], [memory]) == [False] and memory == page(2)
    written(store, "plain", whole[:-1] + bytes([whole[-1] ^ 1]))
    assert target.get(["plain"], [empty()]) == [True]
    target.close()


def test_batches_larger_than_a_lane_and_pages_larger_than_one(store, caplog):
    lane = store._client.lane_bytes
    assert lane == 8 * MB // LANES
    sizes = [lane // 2, lane // 2, 5, lane - HEADER_BYTES, lane - HEADER_BYTES + 1, 0, lane // 3]
    keys = [f"large/{size}/{index}" for index, size in enumerate(sizes)]
    pages = [page(index, (size,)) for index, size in enumerate(sizes)]
    fits = [size <= lane - HEADER_BYTES for size in sizes]
    assert fits.count(False) == 1
    assert store.put(keys, pages) == store.exists(keys) == fits
    found = [empty((size // 2, size - size // 2)) for size in sizes]
    for _ in range(2):
        assert store.get(keys, found) == fits
    for well, parts, own in zip(fits, found, pages, strict=True):
        assert (b"".join(parts) == bytes(own[0])) is well
    stats = store.stats()
    assert (stats.pages_dropped, stats.pages_missed, stats.pages_damaged) == (1, 2, 0)
    assert caplog.text.count("fix: buffer_mib=9 in its URL") == 1


def test_several_threads_at_once(store):
    def work(number):
        chance, hits = random.Random(number), 0
        for step in range(60):
            keys = chance.sample(KEYS, 5)
            pages = [page(int(key.split("/")[1], 16), (3000, 40)) for key in keys]
            if chance.random() < 0.4:
                assert store.put(keys, pages) == [True] * 5
            found = [empty((3000, 40)) for _ in keys]
            for well, parts, own in zip(store.get(keys, found), found, pages, strict=True):
                assert not well or parts == own, (number, step)
                hits += well
        return hits

    with ThreadPoolExecutor(LANES + 3) as pool:
        assert all(hits > 20 for hits in pool.map(work, range(LANES + 3)))


# --- in the engine's own memory ----------------------------------------------------------------


class Region:
    """Memory of an engine that is a mapping of a file."""

    def __init__(self, store, size=4 * MB):
        file = os.memfd_create("region")
        os.ftruncate(file, size)
        self.memory = memoryview(mmap.mmap(file, size))
        assert share_memory(store, self.memory, file)
        os.close(file)

    def parts(self, start, sizes, gap=64):
        """The parts of a page from there on, with gaps."""
        found = []
        for size in sizes:
            found.append(self.memory[start : start + size])
            start += size + gap
        return found

    def page(self, start, own, gap=64):
        found = self.parts(start, [part.nbytes for part in own], gap)
        for part, wanted in zip(found, own, strict=True):
            part[:] = wanted
        return found


def test_pages_in_shared_memory_are_not_copied(store):
    other, region = Region(store), Region(store)
    sizes = [(300, 700), (5, 0, 9000), (1,), (0,), (2 * MB, 7)]
    own = [page(number, size) for number, size in enumerate(sizes)]
    keys = [f"region/{number}" for number in range(len(own) + 2)]
    pages = [region.page(number * 10_000, parts) for number, parts in enumerate(own)]
    # One that lies elsewhere, and one that lies in both.
    own += [page(8), page(9)]
    pages += [page(8), [own[6][0], other.page(0, own[6])[1]]]
    with store._client.lane(time.monotonic() + LONG_S) as lane:
        lane.memory[:] = bytes(len(lane.memory))
        placed = [lane.in_place(parts) for parts in pages]
    assert [pieces is not None for pieces in placed] == [True] * 5 + [False] * 2
    assert placed[0] == [(2, 0, 300), (2, 364, 700)] and placed[3] == []
    # Larger than a lane, and taken.
    assert store.put(keys, pages) == [True] * 7
    lanes = [store._client._session.lanes.get() for _ in range(LANES)]
    seen = b"".join(bytes(lane.memory) for lane in lanes)
    assert bytes(own[0][1]) not in seen and bytes(own[5][1]) in seen
    for lane in lanes:
        store._client._session.lanes.put(lane)
    region.memory[:] = bytes(len(region.memory))
    back = [region.parts(50 + number * 10_000, size, 3) for number, size in enumerate(sizes)]
    # Read-only memory can't be shared, and one page is read where another one was.
    back += [empty(), other.parts(100, (300, 700))]
    assert store.get(keys, back) == [True] * 7
    for found, wanted in zip(back, own, strict=True):
        assert b"".join(found) == b"".join(wanted)
    read_only = [part.toreadonly() for part in pages[0]]
    assert store.put(["region/read-only"], [read_only]) == [True]


@pytest.mark.parametrize("length", ["same", "cut", "longer"])
def test_damage_in_shared_memory(store, length):
    region, key = Region(store), f"region/{length}"
    store.put([key], [page(1, (20, 30))])
    whole = raw(store, key, HEADER_BYTES + 50)
    memory = region.parts(5, (20, 30))
    for at in range(1, len(whole)):
        if length == "same":
            data = bytearray(whole)
            data[at] ^= 0xFF
        else:
            data = whole[:at] if length == "cut" else whole + whole[: at + 1]
        written(store, key, bytes(data))
        assert store.get([key], [memory]) == [False], at
        assert store.exists([key]) == [False]
    assert store.stats().pages_damaged == len(whole) - 1
    written(store, key, whole)
    assert store.get([key], [memory]) == [True] and memory == page(1, (20, 30))


def test_nothing_moves_in_shared_memory_after_a_call(make):
    cluster = make(Cluster)
    store = make(opened, cluster)
    region = Region(store)
    own = page(3, (2 * MB,))
    assert store.put(["a"], [own]) == [True]
    process, memory = worker(store), region.parts(0, (2 * MB,))
    cluster.holder.stop()
    store._timeout_s = IMPATIENT_S
    with pytest.raises(MooncakeUnavailable, match="in time"):
        store.get(["a"], [memory])
    assert process.returncode == -signal.SIGKILL, "gone, and not only told to go"
    memory[0][:] = b"n" * (2 * MB)
    cluster.holder.go_on()
    time.sleep(0.5)
    assert bytes(memory[0]) == b"n" * (2 * MB)


def test_who_can_share_memory(shared, make, tmp_path):
    settings = BreakerLimits()
    ring = make(open_mooncake, [shared.address], limits=settings)
    region = Region(ring)
    own = page(4)
    assert ring.put(["ring"], [region.page(0, own)]) == [True]
    assert ring.get(["ring"], [region.parts(5000, (300, 700))]) == [True]
    assert region.parts(5000, (300, 700)) == own
    [guarded] = ring.stores.values()
    copying = Breaker(guarded._store, "it", limits=settings)
    folders = make(open_folders, [tmp_path], 1 << 20)
    for store in (copying, folders, MemoryStore()):
        assert not share_memory(store, region.memory, 0)


# --- what goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["touch", "exists", "get", "put", None])
def test_what_is_kept_alive_outlives_the_rest(make, keep):
    """Under pressure of cold pages for several leases."""
    cluster = make(Cluster, lease_ms=400, memory_mb=16)
    store = make(opened, cluster)
    hot, size = KEYS[:4], (MB,)
    pages = [page(number, size) for number in range(4)]
    assert store.put(hot, pages) == [True] * 4
    uses = {
        None: lambda: None,
        "touch": lambda: store.touch(hot),
        "exists": lambda: store.exists(hot),
        "get": lambda: store.get(hot, [empty(size) for _ in hot]),
        "put": lambda: store.put(hot, pages),
    }
    cold, steps = page(9, size), iter(range(200))
    written = 0
    # Twice what there is room for.
    while written < 32:
        uses[keep]()
        written += sum(store.put([f"cold/{next(steps)}"], [cold]))
        time.sleep(0.05)
    found = [empty(size) for _ in hot]
    got = store.get(hot, found)
    assert got == [keep is not None] * 4
    assert keep is None or found == pages


def test_memory_that_is_full_drops_and_does_not_fail(make):
    cluster = make(Cluster, lease_ms=60_000, memory_mb=16)
    store = make(opened, cluster)
    keys, pages = KEYS[:20], [page(number, (MB,)) for number in range(20)]
    done = store.put(keys, pages)
    assert 10 <= sum(done) < 16 and store.stats().pages_dropped == 20 - sum(done)
    found = [empty((MB,)) for _ in keys]
    assert store.get(keys, found) == done == store.exists(keys)
    assert worker(store).poll() is None, "that is no failure"


# --- what dies ---------------------------------------------------------------------------------


class Guarded:
    """A breaker over a store, and its clock."""

    def __init__(self, cluster, timeout_s=LONG_S):
        self.now_s = 0.0
        limits = BreakerLimits(rule=CircuitRule(jitter=0.0))
        self.store = opened(cluster, timeout_s, buffer_mib=8)
        self.store.start()
        self.target = Breaker(
            self.store, "it", limits=limits, bounded=True, clock_s=lambda: self.now_s
        )

    def works_again(self, key="again"):
        """Within a period; for Mooncake's own processes to find each other takes a moment."""
        self.now_s += 30
        self.target.exists(["x"])
        assert self.target.state == CLOSED
        end_s = time.monotonic() + LONG_S
        while self.target.put([key], [page(1)]) != [True]:
            assert time.monotonic() < end_s
            self.now_s += 30
            time.sleep(0.1)
        found = empty()
        assert self.target.get([key], [found]) == [True] and found == page(1)

    def close(self):
        self.target.close()
        self.store.close()


@pytest.fixture
def cluster(make):
    return make(Cluster)


@pytest.mark.parametrize("which", ["master", "holder"])
def test_what_is_killed_costs_hits_and_comes_back(cluster, make, which):
    guarded = make(Guarded, cluster)
    target = guarded.target
    assert target.put(["a"], [page(1)]) == [True]
    getattr(cluster, which).kill()
    memory = page(9)
    for _ in range(4):
        assert target.get(["a"], [memory]) == target.put(["b"], [page(2)]) == [False]
    assert target.state == OPEN and memory == page(9)
    assert target.stats().calls_failed == 3 and target.stats().pages_missed >= 1
    cluster.start()
    guarded.works_again()


@pytest.mark.parametrize("which", ["master", "holder"])
def test_what_hangs_is_given_up(cluster, make, which):
    """And no answer that comes late is taken for another, or reaches the engine's memory."""
    guarded = make(Guarded, cluster, IMPATIENT_S)
    target, store = guarded.target, guarded.store
    assert target.put(["a", "b"], [page(1), page(2)]) == [True, True]
    getattr(cluster, which).stop()
    memory = page(9)
    started_s = time.monotonic()
    for _ in range(4):
        assert target.get(["a"], [memory]) == [False]
    assert target.state == OPEN
    assert time.monotonic() - started_s < 3 * IMPATIENT_S + 5
    getattr(cluster, which).go_on()
    time.sleep(0.5)
    assert memory == page(9)
    store._timeout_s = LONG_S
    if which == "master":
        guarded.now_s += 30
        found = [page(9), page(9)]
        assert target.get(["b", "a"], found) == [True, True]
        assert found == [page(2), page(1)]
    guarded.works_again()


def test_a_write_that_hangs_is_given_up(cluster, make):
    """The memory that it was read from may change at once; what is found later is whole."""
    guarded = make(Guarded, cluster, IMPATIENT_S)
    guarded.target.put(["a"], [page(1)])
    cluster.holder.stop()
    own = page(7, (MB,))
    assert guarded.target.put(["w"], [own]) == [False]
    own[0][:] = bytes(MB)
    cluster.holder.go_on()
    guarded.store._timeout_s = LONG_S
    found = empty((MB,))
    assert guarded.target.get(["w"], [found]) == [False] or found == page(7, (MB,))
    guarded.works_again()


def test_the_process_of_the_library_dies(store):
    assert store.put(["dies"], [page(1)]) == [True]
    first = worker(store)
    first.kill()
    with pytest.raises(MooncakeUnavailable, match="its process ended"):
        store.get(["dies"], [empty()])
    found = empty()
    assert store.get(["dies"], [found]) == [True] and found == page(1)
    assert worker(store).pid != first.pid
    last = worker(store)
    store.close()
    assert last.wait(LONG_S) == -signal.SIGKILL
    with pytest.raises(MooncakeUnavailable, match="closed"):
        store.exists(["dies"])
    store.close()


def test_the_process_of_the_library_hangs(shared, make):
    """It is ended while others wait for it, and they are told."""
    store = make(opened, shared, IMPATIENT_S)
    store._timeout_s = LONG_S
    assert store.put(["hangs"], [page(1)]) == [True]
    worker(store).send_signal(signal.SIGSTOP)
    results = []

    def call():
        try:
            results.append(store.exists(["hangs"]))
        except MooncakeUnavailable as error:
            results.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(LANES + 2)]
    for thread in threads:
        thread.start()
    store._timeout_s = IMPATIENT_S
    with pytest.raises(MooncakeUnavailable, match="in time"):
        store.exists(["hangs"])
    store._client.fail()
    store._timeout_s = LONG_S
    for thread in threads:
        thread.join(LONG_S)
    assert len(results) == LANES + 2
    assert set(map(str, results)) <= {"its process ended", "[True]"}
    assert store.exists(["hangs"]) == [True]


@pytest.mark.parametrize("forked", [False, True])
def test_it_ends_with_the_engines_process(shared, forked):
    """Also where a process that the engine forked keeps the connections open."""
    code = (
        "import os, sys, time\n"
        "from mimo_plugin.tiers.mooncake_store import open_mooncake\n"
        "ring = open_mooncake([sys.argv[1]])\n"
        "[store] = ring.stores.values()\n"
        "print(store._store._client._session._process.pid, flush=True)\n"
        "child = os.fork() if sys.argv[2] == 'True' else 1\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", code, shared.address, str(forked)], stdout=subprocess.PIPE, text=True
    )
    pid, child = int(engine.stdout.readline()), int(engine.stdout.readline())
    assert runs(pid)
    engine.kill()
    engine.wait(LONG_S)
    try:
        gone(pid)
    finally:
        if forked:
            os.kill(child, signal.SIGKILL)
        engine.stdout.close()


def test_it_ends_with_its_connection(store):
    store.start()
    process = worker(store)
    store._client._session._control.close()
    assert process.wait(LONG_S) == 0


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as state:
            return state.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid):
    end_s = time.monotonic() + LONG_S
    while runs(pid):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_kills_at_random_points_fail_nothing(cluster, make):
    """What is found is right, and the store is used again within a period."""
    guarded, chance, hits, kills = make(Guarded, cluster), random.Random(5), 0, 0
    target = guarded.target
    for step in range(200):
        guarded.now_s += 3.0
        if chance.random() < 0.04:
            kills += 1
            point = chance.random() * 0.02
            which = chance.choice(
                [cluster.master.kill, cluster.holder.kill, worker_killer(guarded.store)]
            )
            timer = threading.Timer(point, which)
            timer.start()
            calls(target, chance, step)
            timer.join()
            cluster.start()
            guarded.works_again(f"again/{step}")
        hits += calls(target, chance, step)
    assert kills >= 5 and hits > 20 and target.stats().pages_damaged == 0


def worker_killer(store):
    def kill():
        session = store._client._session
        if session is not None:
            session._process.kill()

    return kill


def calls(target, chance, step):
    number = chance.randrange(20)
    found = empty((50_000, 30))
    own = page(number, (50_000, 30))
    hit = target.get([KEYS[number]], [found]) == [True]
    assert not hit or found == own, step
    target.put([KEYS[number]], [own])
    return hit


def test_losing_one_of_two_stores(make):
    clusters = [make(Cluster) for _ in range(2)]
    limits = BreakerLimits(timeout_s=LONG_S)
    target = make(open_mooncake, [each.address for each in clusters], limits=limits)
    pages = [page(number) for number in range(len(KEYS))]
    assert target.put(KEYS, pages) == [True] * len(KEYS)
    clusters[1].master.kill()
    lost = f"mooncake://{clusters[1].address}"
    elsewhere = [target.ring.store_of(key) != lost for key in KEYS]
    found = [empty() for _ in KEYS]
    assert target.get(KEYS, found) == target.touch(KEYS) == target.exists(KEYS) == elsewhere
    assert all(parts == own for parts, own, w in zip(found, pages, elsewhere, strict=True) if w)
    assert target.stats().stores_down == 1
    # It is left alone now, and the other one takes its part.
    assert target.put(KEYS, pages) == target.exists(KEYS) == [True] * len(KEYS)
