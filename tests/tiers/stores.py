# SPDX-License-Identifier: Apache-2.0
"""Stores in memory for tests: one that works, and one that can be made to fail or hang."""

from __future__ import annotations

import threading

from mimo_plugin.tiers.store import StoreStats

PAGE_BYTES = 1000


def page(seed, sizes=(300, 700)):
    """The parts of a page with bytes of its own."""
    return [memoryview(bytearray((seed * 7 + i) % 256 for i in range(size))) for size in sizes]


def empty(sizes=(300, 700)):
    return [memoryview(bytearray(size)) for size in sizes]


class MemoryStore:
    """Pages in a dictionary.

    ``before`` is called at the start of every call, on the thread that makes it.
    """

    def __init__(self, before=lambda: None):
        self.pages, self.calls, self.before = {}, [], before
        self.closed = threading.Event()
        self.got = self.put_pages = self.touched = self.missed = 0

    def _call(self, name, keys):
        self.calls.append((name, list(keys)))
        self.before()

    def exists(self, keys):
        self._call("exists", keys)
        return [key in self.pages for key in keys]

    def get(self, keys, pages):
        self._call("get", keys)
        return [self._get(key, parts) for key, parts in zip(keys, pages, strict=True)]

    def _get(self, key, parts):
        data = self.pages.get(key)
        if data is None:
            self.missed += 1
            return False
        start = 0
        for part in parts:
            part[:] = data[start : start + part.nbytes]
            start += part.nbytes
        self.got += 1
        return True

    def put(self, keys, pages):
        self._call("put", keys)
        for key, parts in zip(keys, pages, strict=True):
            self.pages[key] = b"".join(parts)
        self.put_pages += len(keys)
        return [True] * len(keys)

    def touch(self, keys):
        self._call("touch", keys)
        self.touched += len(keys)
        return [key in self.pages for key in keys]

    def stats(self):
        return StoreStats(
            bytes_held=sum(map(len, self.pages.values())),
            pages_put=self.put_pages,
            pages_got=self.got,
            pages_missed=self.missed,
            pages_damaged=0,
            pages_touched=self.touched,
            pages_dropped=0,
            pages_evicted=0,
        )

    def close(self):
        self.closed.set()


class Fault:
    """What befalls a store: nothing, errors, or that it hangs until it is let go."""

    def __init__(self):
        self.error = None
        self.hangs = False
        self._go = threading.Event()
        self._entered = threading.Semaphore(0)

    def __call__(self):
        if self.error is not None:
            raise self.error
        if self.hangs:
            self._entered.release()
            assert self._go.wait(60)

    def wait_for(self, calls):
        """Until so many more calls hang."""
        for _ in range(calls):
            assert self._entered.acquire(timeout=60)

    def let_go(self):
        """What hangs goes on; nothing hangs from now on."""
        self.hangs = False
        self._go.set()
