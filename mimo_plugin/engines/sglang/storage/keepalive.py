# SPDX-License-Identifier: Apache-2.0
"""A prefix that the device or the host answers with stays alive in the store.

Pages of the store die by age, and only reading renews them. A prefix that is hot in the device's
pool is never read from the store, so there it grows old and dies, and after a restart, or on
another server, it is gone. So the first time that a request's KV goes into the tree, the pages of
the prefix it had found are touched: all of full attention, and the last window of the others.

Touching happens on a thread, for all prefixes that wait together: what they share is touched once.
When it can't keep up, what waits longest is dropped: a page is touched again with the next request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mimo_plugin.core.touches import Touches

logger = logging.getLogger("sglang.mimo_plugin")

INTERVAL_S = 30.0
"""A prefix is not touched again sooner."""

MAX_WAITING = 256
MAX_REMEMBERED = 8192

Touch = Callable[[Mapping[str, Sequence[str]]], object]
"""Takes the hashes of pages of each pool."""


class KeepAlive:
    """Touches prefixes, each at most every ``INTERVAL_S`` seconds.

    Args:
        touch: of the store.
        clock_s: monotonic seconds.
    """

    def __init__(self, touch: Touch, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._touch = touch
        self._clock_s = clock_s
        self._recent: Touches[str] = Touches(INTERVAL_S, MAX_REMEMBERED)
        self._waiting: deque[Mapping[str, Sequence[str]]] = deque(maxlen=MAX_WAITING)
        self._wake = threading.Condition()
        self._closed = False
        #: pages handed to the store
        self.pages = 0
        #: prefixes that were not touched because too many waited
        self.dropped = 0
        self._thread: threading.Thread | None = None

    def due(self, last_hash: str) -> bool:
        """Whether the prefix that ends with this page is to be touched; notes that it is."""
        return bool(self._recent.due([last_hash], self._clock_s()))

    def add(self, pages: Mapping[str, Sequence[str]]) -> None:
        """Touch a prefix, soon.

        Args:
            pages: hashes of the pages that it needs of each pool.
        """
        with self._wake:
            if self._closed:
                return
            self.dropped += len(self._waiting) == MAX_WAITING
            self._waiting.append(pages)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mimo-touch", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                pages = merged(self._waiting)
                self._waiting.clear()
            try:
                self._touch(pages)
                self.pages += sum(map(len, pages.values()))
            except Exception as error:  # a store that fails must not end the thread
                logger.warning("mimo storage: keeping pages alive failed: %s", error)


def pages_of(
    hashes: Sequence[str], whole: Sequence[str], ends: Sequence[str], window_pages: int
) -> dict[str, Sequence[str]]:
    """What a prefix needs of each pool.

    Args:
        hashes: of the prefix' pages, from the first on.
        whole: pools of which it needs all.
        ends: pools of which it needs the end.
        window_pages: how much of the end.
    """
    tail = hashes[max(0, len(hashes) - window_pages) :]
    return {**dict.fromkeys(whole, hashes), **dict.fromkeys(ends, tail)}


def merged(waiting: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The pages of several prefixes, each once."""
    found: dict[str, dict[str, None]] = {}
    for pages in waiting:
        for name, hashes in pages.items():
            found.setdefault(name, {}).update(dict.fromkeys(hashes))
    return {name: list(hashes) for name, hashes in found.items()}


def prefix_hashes(tree_core: Any, node: Any) -> list[str]:
    """Hashes of all pages from the root to a node of SGLang's tree; empty for the root."""
    own = tree_core.get_hash_values(node)
    return [*tree_core.get_prefix_hash_values(node), *own] if own else []
