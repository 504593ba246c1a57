# SPDX-License-Identifier: Apache-2.0
"""Prefixes that higher tiers answer with are touched in the store, seldom and beside the work."""

from __future__ import annotations

import threading
import time

from mimo_plugin.engines.sglang.storage.keepalive import (
    INTERVAL_S,
    MAX_REMEMBERED,
    MAX_WAITING,
    KeepAlive,
    pages_of,
    prefix_hashes,
)

WAIT_S = 20.0


class Store:
    """Records what is touched; can be held up, and can fail."""

    def __init__(self):
        self.touched, self.fail = [], False
        self.gate, self.done = threading.Event(), threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.gate.set()

    def touch(self, pages):
        self.begun.release()
        self.gate.wait(WAIT_S)
        self.touched.append({name: list(hashes) for name, hashes in pages.items()})
        self.done.release()
        if self.fail:
            raise OSError("no store")

    def wait(self, count=1):
        for _ in range(count):
            assert self.done.acquire(timeout=WAIT_S)


def keep_alive(store, clock=lambda: 0.0):
    return KeepAlive(store.touch, clock)


def test_all_of_full_attention_and_the_last_window_of_the_others():
    hashes = [f"h{i}" for i in range(10)]
    assert pages_of(hashes, ["kv", "index"], ["swa", "draft"], 3) == {
        "kv": hashes,
        "index": hashes,
        "swa": ["h7", "h8", "h9"],
        "draft": ["h7", "h8", "h9"],
    }
    assert pages_of(hashes[:2], ["kv"], ["swa"], 3) == {"kv": ["h0", "h1"], "swa": ["h0", "h1"]}


def test_prefixes_that_wait_together_are_touched_together_and_once():
    store = Store()
    store.gate.clear()
    target = keep_alive(store)
    target.add({"kv": ["first"]})
    while target._waiting:  # the thread has it, and is held up with it
        time.sleep(0.001)
    target.add({"kv": ["a", "b"], "swa": ["b"]})
    target.add({"kv": ["a", "c"], "swa": ["c"]})
    store.gate.set()
    store.wait(2)
    target.close()
    assert store.touched == [{"kv": ["first"]}, {"kv": ["a", "b", "c"], "swa": ["b", "c"]}]
    assert target.pages == 1 + 5


def test_a_prefix_is_touched_once_in_a_while():
    now = [0.0]
    target = keep_alive(Store(), lambda: now[0])
    assert target.due("a") and target.due("b") and not target.due("a")
    now[0] = INTERVAL_S - 1
    assert not target.due("a")
    now[0] = INTERVAL_S
    assert target.due("a") and not target.due("a")


def test_what_is_remembered_is_bounded():
    target = keep_alive(Store())
    for number in range(MAX_REMEMBERED + 10):
        assert target.due(f"{number}")
    assert len(target._recent) == MAX_REMEMBERED
    assert target.due("0") and not target.due(f"{MAX_REMEMBERED}")


def test_a_slow_store_drops_instead_of_growing():
    store = Store()
    store.gate.clear()
    target = keep_alive(store)
    target.add({"kv": ["0"]})
    assert store.begun.acquire(timeout=WAIT_S)
    for number in range(1, MAX_WAITING + 20):
        target.add({"kv": [f"{number}"]})
    assert target.dropped == 19 and len(target._waiting) <= MAX_WAITING
    store.gate.set()
    store.wait()
    while target._waiting:
        store.wait()
    target.close()
    assert store.touched[-1]["kv"][-1] == f"{MAX_WAITING + 19}"


def test_a_failing_store_does_not_end_it():
    store = Store()
    store.fail = True
    target = keep_alive(store)
    target.add({"kv": ["a"]})
    store.wait()
    store.fail = False
    target.add({"kv": ["b"]})
    store.wait()
    target.close()
    assert [pages["kv"] for pages in store.touched] == [["a"], ["b"]]


def test_nothing_is_taken_after_the_end():
    store = Store()
    target = keep_alive(store)
    target.close()
    target.add({"kv": ["a"]})
    assert not store.touched and not target._waiting


def test_hashes_from_the_root_to_a_node():
    class Core:
        def get_hash_values(self, node):
            return {0: [], 2: ["c", "d"]}[node]

        def get_prefix_hash_values(self, node):
            return {2: ["a", "b"]}[node]

    assert prefix_hashes(Core(), 2) == ["a", "b", "c", "d"]
    assert prefix_hashes(Core(), 0) == []
