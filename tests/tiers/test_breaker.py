# SPDX-License-Identifier: Apache-2.0
"""A store that dies or hangs costs hits: no error, no request, no memory of the engine."""

from __future__ import annotations

import threading

import pytest

from mimo_plugin.core.circuit import CLOSED, OPEN, CircuitRule
from mimo_plugin.errors import MimoError
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from tests.tiers.stores import PAGE_BYTES, Fault, MemoryStore, empty, page

#: more than any test takes, and so little that what hangs is soon given up
PATIENT_S, IMPATIENT_S = 60.0, 0.02
CALLS = {
    "exists": lambda target, keys: target.exists(keys),
    "touch": lambda target, keys: target.touch(keys),
    "get": lambda target, keys: target.get(keys, [empty() for _ in keys]),
    "put": lambda target, keys: target.put(keys, [page(0) for _ in keys]),
}


class Guarded:
    """A breaker over a store in memory, its fault and its clock."""

    def __init__(self, timeout_s=PATIENT_S, bounded=False, **limits):
        self.fault, self.now_s = Fault(), 0.0
        self.inner = MemoryStore(self.fault)
        rule = CircuitRule(failures=3, period_s=30.0, jitter=0.0)
        self.target = Breaker(
            self.inner,
            "inner",
            limits=BreakerLimits(timeout_s=timeout_s, rule=rule, **limits),
            bounded=bounded,
            clock_s=lambda: self.now_s,
        )

    def patience(self, timeout_s):
        object.__setattr__(self.target.limits, "timeout_s", timeout_s)

    def break_it(self):
        for _ in range(3):
            assert self.target.exists(["a"]) == [False]
        assert self.target.state == OPEN


def test_a_store_that_works_is_the_same_through_it():
    guarded = Guarded()
    keys, pages = ["a", "b", "c"], [page(1), page(2, (0, 5)), page(3, ())]
    assert guarded.target.put(keys, pages) == [True] * 3
    found = [empty(), empty((2, 0, 3)), empty(())]
    assert guarded.target.get([*keys, "d"], [*found, empty()]) == [True] * 3 + [False]
    assert found[0] == page(1) and b"".join(found[1]) == b"".join(page(2, (0, 5)))
    assert guarded.target.exists(["d", "a"]) == guarded.target.touch(["d", "a"]) == [False, True]
    stats = guarded.target.stats()
    assert (stats.pages_put, stats.pages_got, stats.pages_missed) == (3, 3, 1)
    assert (stats.calls_failed, stats.stores_down, stats.bytes_held) == (0, 0, PAGE_BYTES + 5)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [OSError(5, "I/O error"), RuntimeError("bug"), None])
def test_every_call_survives_errors_and_hanging(call, error):
    guarded = Guarded(PATIENT_S if error else IMPATIENT_S)
    guarded.inner.pages["a"] = bytes(PAGE_BYTES)
    guarded.fault.error, guarded.fault.hangs = error, error is None
    for _ in range(5):
        assert CALLS[call](guarded.target, ["a", "b"]) == [False, False]
    stats = guarded.target.stats()
    assert guarded.target.state == OPEN
    assert (stats.calls_failed, stats.stores_down) == (3, 1)
    lost = {"get": (10, 0), "put": (0, 10), "touch": (0, 10), "exists": (0, 0)}[call]
    assert (stats.pages_missed, stats.pages_dropped) == lost
    guarded.fault.wait_for(0 if error else 3)
    assert len(guarded.inner.calls) == 3, "left alone once it is open"
    guarded.fault.let_go()


def test_it_comes_back_after_a_period():
    guarded = Guarded()
    guarded.target.put(["a"], [page(1)])
    guarded.fault.error = OSError(5, "I/O error")
    guarded.break_it()
    guarded.now_s = 30
    guarded.target.exists(["a"])
    assert guarded.target.state == OPEN, "the attempt failed"
    guarded.fault.error = None
    guarded.now_s = 59.9
    assert guarded.target.exists(["a"]) == [False]
    guarded.now_s = 60
    assert guarded.target.exists(["a"]) == [True]
    assert guarded.target.state == CLOSED and guarded.target.stats().stores_down == 0


def test_it_comes_back_after_hanging():
    guarded = Guarded(IMPATIENT_S)
    guarded.inner.pages["a"] = bytes(PAGE_BYTES)
    guarded.fault.hangs = True
    guarded.break_it()
    guarded.fault.let_go()
    guarded.patience(PATIENT_S)
    guarded.now_s = 30
    assert guarded.target.exists(["a"]) == [True]
    assert guarded.target.state == CLOSED


def test_threads_that_hang_are_bounded_and_their_places_come_back():
    guarded = Guarded(IMPATIENT_S, threads=2)
    guarded.fault.hangs = True
    for number in range(20):
        guarded.now_s = 31.0 * number
        guarded.target.exists(["a"])
    guarded.fault.wait_for(2)
    assert len(guarded.inner.calls) == 2
    guarded.fault.let_go()
    guarded.patience(PATIENT_S)
    guarded.now_s += 31
    assert guarded.target.touch(["a"]) == [False]
    assert guarded.target.state == CLOSED and len(guarded.inner.calls) == 3


def test_what_is_read_too_late_does_not_reach_the_engine():
    guarded = Guarded(IMPATIENT_S)
    guarded.inner.pages["a"] = bytes([7]) * PAGE_BYTES
    guarded.fault.hangs = True
    memory = page(1)
    assert guarded.target.get(["a"], [memory]) == [False]
    guarded.fault.let_go()
    guarded.patience(PATIENT_S)
    # A call behind it on the same store: the late one has ended when its page is counted.
    while guarded.inner.got < 1:
        guarded.target.exists(["a"])
    assert memory == page(1)


def test_what_is_written_too_late_is_what_was_given():
    guarded = Guarded(IMPATIENT_S)
    guarded.fault.hangs = True
    memory = page(1)
    assert guarded.target.put(["a"], [memory]) == [False]
    for part in memory:
        part[:] = bytes(part.nbytes)  # the engine puts something else there
    guarded.fault.let_go()
    guarded.patience(PATIENT_S)
    while guarded.inner.put_pages < 1:
        guarded.target.exists(["a"])
    assert guarded.inner.pages["a"] == b"".join(page(1))


def test_a_batch_goes_in_steps_and_ends_with_the_first_that_fails():
    guarded = Guarded(step_bytes=2 * PAGE_BYTES, step_keys=3)
    keys = [f"{number}" for number in range(5)]
    assert guarded.target.put(keys, [page(n) for n in range(5)]) == [True] * 5
    sizes = [len(given) for name, given in guarded.inner.calls if name == "put"]
    assert sizes == [2, 2, 1]
    assert guarded.target.exists(keys) == [True] * 5
    assert [len(given) for name, given in guarded.inner.calls if name == "exists"] == [3, 2]
    # Larger than a step: it goes alone.
    assert guarded.target.put(["x", "y"], [page(1, (5000,)), page(2)]) == [True] * 2

    reads = []

    def second_fails():
        reads.append(1)
        if len(reads) == 2:
            raise OSError(5, "I/O error")

    guarded.inner.before = second_fails
    found = [empty() for _ in keys]
    assert guarded.target.get(keys, found) == [True, True, False, False, False]
    assert found[:2] == [page(0), page(1)] and found[2:] == [empty()] * 3
    assert len(reads) == 2 and guarded.target.stats().pages_missed == 3


def test_an_answer_of_the_wrong_length_is_a_failure():
    guarded = Guarded()
    guarded.inner.exists = lambda keys: [True]
    target = Breaker(guarded.inner, "short")
    assert target.exists(["a", "b"]) == [False, False]
    assert target.stats().calls_failed == 1


def test_a_process_without_threads_left(monkeypatch):
    guarded = Guarded(threads=1)

    def no_more(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        assert guarded.target.exists(["a"]) == [False]
    assert guarded.target.stats().calls_failed == 1
    assert guarded.target.put(["a"], [page(1)]) == [True], "its place is free again"


def test_one_line_says_that_it_fails_and_one_that_it_works(caplog):
    caplog.set_level("INFO", "mimo_plugin.tiers")
    guarded = Guarded()
    guarded.fault.error = OSError(5, "I/O\nerror")
    guarded.break_it()
    for number in range(1, 4):
        guarded.now_s = 30.0 * number
        guarded.target.exists(["a"])
    guarded.fault.error = None
    guarded.now_s = 300
    guarded.target.exists(["a"])
    fails, works = [record.getMessage() for record in caplog.records]
    assert "store inner fails (OSError(5" in fails and "\n" not in fails and "30 s" in fails
    assert works == "mimo tiers: store inner works again"


def test_closing_ends_calls_and_does_not_wait():
    guarded = Guarded()
    guarded.target.put(["a"], [page(1)])
    guarded.target.close()
    guarded.target.close()
    assert guarded.inner.closed.wait(60)
    assert guarded.target.exists(["a"]) == [False]
    assert guarded.target.stats().calls_failed == 0


def test_threads_share_it():
    guarded = Guarded(threads=2, step_bytes=PAGE_BYTES)
    wrong = []

    def work(seed):
        keys = [f"{seed}-{number}" for number in range(20)]
        pages = [page(seed + number) for number in range(20)]
        found = [empty() for _ in keys]
        well = guarded.target.put(keys, pages) == guarded.target.get(keys, found) == [True] * 20
        if not well or found != pages:
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and guarded.target.stats().calls_failed == 0


# --- a store that ends its calls by itself -----------------------------------------------------


def test_a_bounded_store_gets_the_pages_themselves_on_the_callers_thread():
    guarded = Guarded(bounded=True, step_bytes=PAGE_BYTES)
    threads, pages = set(), []
    guarded.inner.before = lambda: threads.add(threading.get_ident())
    for name in ("get", "put"):
        inner = getattr(guarded.inner, name)

        def spy(keys, given, inner=inner):
            pages.extend(given)
            return inner(keys, given)

        setattr(guarded.inner, name, spy)
    own, found = [page(1), page(2)], [empty(), empty(), empty()]
    assert guarded.target.put(["a", "b"], own) == [True, True]
    assert guarded.target.get(["a", "b", "c"], found) == [True, True, False]
    assert found[:2] == own and guarded.target.exists(["a"]) == guarded.target.touch(["a"])
    assert [id(each) for each in pages] == [id(each) for each in (*own, *found)]
    assert threads == {threading.get_ident()}
    assert [len(keys) for name, keys in guarded.inner.calls] == [1] * 7


@pytest.mark.parametrize("call", CALLS)
def test_every_call_survives_errors_of_a_bounded_store(call, caplog):
    guarded = Guarded(bounded=True)
    guarded.inner.pages["a"] = bytes(PAGE_BYTES)
    guarded.fault.error = MimoError("no\nmaster")
    for _ in range(5):
        assert CALLS[call](guarded.target, ["a", "b"]) == [False, False]
    assert guarded.target.state == OPEN and guarded.target.stats().calls_failed == 3
    assert len(guarded.inner.calls) == 3
    assert "store inner fails (no master); its pages" in caplog.text
    guarded.fault.error, guarded.now_s = None, 30
    assert guarded.target.touch(["a"]) == [True]
