# SPDX-License-Identifier: Apache-2.0
"""Several stores as one: each page lies in the one that its key belongs to (``core/ring.py``).

Nothing is kept about where pages are, and nothing is moved when stores join or leave: pages that
belong elsewhere from then on are misses, and written again. A batch is split by store, and the
stores work at the same time.

A store that is left alone because it failed counts as one that left, for as long: its pages are
misses, and what is written meanwhile goes to the next one. A page in its place would be lost, and
with it all that comes after it in its prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields

from mimo_plugin.core.ring import EQUAL_POINTS, HashRing
from mimo_plugin.tiers.store import PageStore, Parts, StoreStats

THREADS_PER_STORE = 4
"""Batches that one store works on at a time; each store has its own threads, so that a slow one
does not hold up the others."""

_Work = Callable[[PageStore, list[int]], list[bool]]


class RingStore:
    """See the module.

    Args:
        stores: by name, at least one. Names decide where pages lie: all who share the stores must
            use the same. Each must answer or give up in bounded time (``tiers/breaker.py``).
        points: of each store, by name, >= 1; None: all alike.
    """

    def __init__(
        self, stores: Mapping[str, PageStore], points: Mapping[str, int] | None = None
    ) -> None:
        self.stores = dict(stores)
        self.ring = HashRing(points or dict.fromkeys(self.stores, EQUAL_POINTS))
        self._pools = {
            name: ThreadPoolExecutor(THREADS_PER_STORE, f"mimo-tiers-{number}")
            for number, name in enumerate(self.stores)
        }

    def __str__(self) -> str:
        return ", ".join(self.stores)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there."""
        return self._spread(keys, lambda store, at: store.exists([keys[i] for i in at]))

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages."""

        def work(store: PageStore, at: list[int]) -> list[bool]:
            return store.get([keys[i] for i in at], [pages[i] for i in at])

        return self._spread(keys, work)

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages."""

        def work(store: PageStore, at: list[int]) -> list[bool]:
            return store.put([keys[i] for i in at], [pages[i] for i in at])

        return self._spread(keys, work)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Keep pages alive."""
        return self._spread(keys, lambda store, at: store.touch([keys[i] for i in at]))

    def share(self, memory: memoryview, file: int) -> bool:
        """Have pages in this memory moved in place, where stores can; see ``tiers/open.py``."""
        shares = [getattr(store, "share", None) for store in self.stores.values()]
        return any([share is not None and share(memory, file) for share in shares])

    def stats(self) -> StoreStats:
        """Sums over all stores; the bytes are not known where one does not tell."""
        found = [store.stats() for store in self.stores.values()]
        sums = {
            field.name: sum(getattr(stats, field.name) for stats in found)
            for field in fields(StoreStats)
            if field.name != "bytes_held"
        }
        held = [stats.bytes_held for stats in found if stats.bytes_held is not None]
        return StoreStats(bytes_held=sum(held) if len(held) == len(found) else None, **sums)

    def close(self) -> None:
        """Let go of all stores."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        for store in self.stores.values():
            store.close()

    def _away(self) -> frozenset[str]:
        """Stores that would answer nothing; none where that holds for all."""
        away = {name for name, store in self.stores.items() if getattr(store, "resting", False)}
        return frozenset(away) if len(away) < len(self.stores) else frozenset()

    def _spread(self, keys: Sequence[str], work: _Work) -> list[bool]:
        """Have each store do its part; the answers in the order of ``keys``.

        It returns when all have answered: until then they may use the caller's memory.
        """
        parts = self.ring.split(keys, self._away())
        waiting: dict[str, Future[list[bool]]] = {}
        answers: dict[str, list[bool]] = {}
        for name in list(parts)[1:]:
            # A pool takes nothing when it is closed, or the process can't have more threads.
            with contextlib.suppress(RuntimeError):
                waiting[name] = self._pools[name].submit(work, self.stores[name], parts[name])
        try:
            for name in parts.keys() - waiting.keys():
                answers[name] = work(self.stores[name], parts[name])
        finally:
            for future in waiting.values():
                future.exception()
        answers.update((name, future.result()) for name, future in waiting.items())
        found = [False] * len(keys)
        for name, at in parts.items():
            for index, well in zip(at, answers[name], strict=True):
                found[index] = well
        return found
