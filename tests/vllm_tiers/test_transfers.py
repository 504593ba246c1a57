# SPDX-License-Identifier: Apache-2.0
"""Threads of a tier: reads go first, what waits is given up, what is under way is waited for."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.engines.vllm.tiers import keepalive
from mimo_plugin.engines.vllm.tiers.keepalive import KeepAlive
from mimo_plugin.engines.vllm.tiers.transfers import Job, Transfers

WAIT_S = 30.0


class Gate:
    """Moves pages when it is let go; notes what was moved, in order."""

    def __init__(self, open_now=False):
        self.go, self.entered = threading.Event(), threading.Semaphore(0)
        self.moved, self._lock = [], threading.Lock()
        if open_now:
            self.go.set()

    def __call__(self, job, start, end):
        with self._lock:
            self.moved.append((job.payload, start, end))
        self.entered.release()
        assert self.go.wait(WAIT_S)
        return [True] * (end - start)

    def wait_for(self, batches):
        for _ in range(batches):
            assert self.entered.acquire(timeout=WAIT_S)


@pytest.fixture
def make():
    made = []

    def start(move, threads=4):
        made.append((Transfers(move, threads), move))
        return made[-1][0]

    yield start
    for transfers, move in made:
        if isinstance(move, Gate):
            move.go.set()
        transfers.close()


def all_of(transfers, jobs):
    end_s, found = time.monotonic() + WAIT_S, []
    while len(found) < jobs:
        assert time.monotonic() < end_s
        found += transfers.finished()
    return found


def pieces(pages, size):
    return [(at, min(at + size, pages)) for at in range(0, pages, size)]


def test_a_job_ends_with_its_last_batch(make):
    transfers = make(lambda job, start, end: [at % 3 > 0 for at in range(start, end)])
    transfers.submit(Job("a", 10, read=True), pieces(10, 4))
    (job,) = all_of(transfers, 1)
    assert job.done == [at % 3 > 0 for at in range(10)] and job.busy_s >= 0
    assert transfers.finished() == []


def test_reads_go_first_and_writes_leave_threads_to_them(make):
    gate = Gate()
    transfers = make(gate)
    for number in range(6):
        transfers.submit(Job(f"w{number}", 1, read=False), [(0, 1)])
    gate.wait_for(2)
    for number in range(6):
        transfers.submit(Job(f"r{number}", 1, read=True), [(0, 1)])
    gate.wait_for(2)
    assert len(gate.moved) == 4
    gate.go.set()
    all_of(transfers, 12)
    order = [name for name, _, _ in gate.moved]
    assert set(order[:2]) == {"w0", "w1"} and all(name[0] == "r" for name in order[2:8])


def test_an_error_fails_the_batch_alone(make):
    def move(job, start, end):
        if start == 2:
            raise OSError("no")
        return [True] * (end - start)

    transfers = make(move)
    transfers.submit(Job("a", 6, read=False), pieces(6, 2))
    (job,) = all_of(transfers, 1)
    assert job.done == [True, True, False, False, True, True]


def test_draining_gives_up_what_waits(make):
    gate = Gate()
    transfers = make(gate, threads=2)
    for number in range(4):
        transfers.submit(Job(number, 4, read=True), pieces(4, 2))
    gate.wait_for(2)
    ended = threading.Event()

    def drain():
        transfers.drain()
        ended.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert not ended.wait(0.1), "a thread still uses the memory"
    gate.go.set()
    thread.join(WAIT_S)
    found = {job.payload: job.done for job in transfers.finished()}
    assert len(found) == 4 and len(gate.moved) == 2
    for name, start, end in gate.moved:
        assert found[name][start:end] == [True, True]
    assert sum(map(sum, found.values())) == 4
    # It goes on afterwards.
    transfers.submit(Job("x", 1, read=True), [(0, 1)])
    assert all_of(transfers, 1)[0].done == [True]


def test_draining_with_patience_ends_what_waits(make):
    transfers = make(lambda job, start, end: [time.sleep(0.01) is None] * (end - start))
    for number in range(10):
        transfers.submit(Job(number, 2, read=False), pieces(2, 1))
    transfers.drain(WAIT_S)
    assert [job.done for job in transfers.finished()] == [[True, True]] * 10


def test_what_comes_after_the_end_fails(make):
    transfers = make(Gate(open_now=True))
    transfers.close()
    transfers.submit(Job("a", 2, read=True), [(0, 2)])
    (job,) = transfers.finished()
    assert job.done == [False, False]


def test_a_job_without_batches_ends_at_once(make):
    transfers = make(Gate())
    transfers.submit(Job("a", 2, read=False), [])
    (job,) = transfers.finished()
    assert job.done == [False, False]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 4)), max_size=12),
    st.integers(2, 5),
)
def test_every_job_ends_once_with_the_answers_of_its_pages(jobs, threads):
    transfers = Transfers(
        lambda job, s, e: [(job.payload + at) % 2 > 0 for at in range(s, e)], threads
    )
    for number, (read, count, size) in enumerate(jobs):
        transfers.submit(Job(number, count, read=read), pieces(count, size))
    found = all_of(transfers, len(jobs))
    transfers.close()
    assert sorted(job.payload for job in found) == list(range(len(jobs)))
    for job in found:
        assert job.done == [(job.payload + at) % 2 > 0 for at in range(job.pages)]
    assert transfers.finished() == []


# --- touches -------------------------------------------------------------------------------------


class Store:
    """Has some keys; is asked on the thread that touches, when it is let go."""

    def __init__(self, keys=(), open_now=True):
        self.keys, self.asked = set(keys), []
        self.go, self.entered = threading.Event(), threading.Semaphore(0)
        if open_now:
            self.go.set()

    def __call__(self, keys):
        self.asked.append(list(keys))
        found = [k in self.keys for k in keys]
        self.entered.release()
        assert self.go.wait(WAIT_S)
        return found


def settle(keeper):
    end_s = time.monotonic() + WAIT_S
    while keeper._waiting or keeper._asked:
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def keep():
    made = []

    def start(touch):
        made.append((KeepAlive(touch), touch))
        return made[-1][0]

    yield start
    for keeper, touch in made:
        if isinstance(touch, Store):
            touch.go.set()
        keeper.close()


def test_what_waits_is_merged(keep):
    store = Store("abc", open_now=False)
    keeper = keep(store)
    keeper.add("a")
    assert store.entered.acquire(timeout=WAIT_S)
    keeper.add("ab")
    keeper.add("bcd")
    store.go.set()
    settle(keeper)
    assert store.asked == [["a"], ["a", "b", "c", "d"]]
    assert keeper.busy and keeper.take_missing() == ["d"] and not keeper.busy
    assert keeper.take_missing() == []


def test_what_is_written_meanwhile_is_not_missing(keep):
    """Before the answer, and after it."""
    store = Store("", open_now=False)
    keeper = keep(store)
    keeper.add("abc")
    assert store.entered.acquire(timeout=WAIT_S)
    keeper.written("b")
    store.go.set()
    settle(keeper)
    keeper.written("c")
    assert keeper.take_missing() == ["a"]


def test_an_answer_that_is_none_says_nothing(keep):
    keeper = keep(lambda keys: None)
    keeper.add("abc")
    settle(keeper)
    assert keeper.take_missing() == []


def test_an_error_says_nothing_and_the_thread_goes_on(keep):
    answers = iter([OSError("no"), [False]])

    def touch(keys):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    keeper = keep(touch)
    keeper.add("a")
    settle(keeper)
    assert keeper.take_missing() == []
    keeper.add("a")
    settle(keeper)
    assert keeper.take_missing() == ["a"]


def test_what_waits_and_what_is_missing_is_bounded(keep, monkeypatch):
    monkeypatch.setattr(keepalive, "MOST_KEYS", 3)
    monkeypatch.setattr(keepalive, "BATCH_KEYS", 2)
    store = Store("", open_now=False)
    keeper = keep(store)
    keeper.add("x")
    assert store.entered.acquire(timeout=WAIT_S)
    keeper.add("abcd")
    assert keeper.dropped == 1
    store.go.set()
    settle(keeper)
    assert store.asked == [["x"], ["a", "b"], ["c"]]
    assert keeper.take_missing() == ["x", "a", "b"]


def test_after_the_end_nothing_is_touched(keep):
    store = Store("a")
    keeper = keep(store)
    keeper.add("a")
    settle(keeper)
    keeper.close()
    keeper.add("b")
    assert store.asked == [["a"]] and not keeper.busy
