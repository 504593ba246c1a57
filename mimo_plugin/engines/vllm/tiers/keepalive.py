# SPDX-License-Identifier: Apache-2.0
"""Touches what higher tiers answer with in the store, and finds out what the store has lost.

Pages of a store die by age, and only reading renews them: a prefix that is hot on the device or in
host memory would grow old there and be gone after a restart. Touching happens on a thread, for all
that waits together, each key once. What is not there any more is kept for who can write it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from mimo_plugin.errors import one_line

logger = logging.getLogger("vllm.mimo_plugin")

Key = TypeVar("Key", bound=bytes)

MOST_KEYS = 1 << 16
"""That wait, and that are known to be missing; further ones are dropped: they come again."""

BATCH_KEYS = 1024


class KeepAlive(Generic[Key]):
    """See the module.

    Args:
        touch: asks the store; which of the keys are there, or None where it can't be told.
    """

    def __init__(self, touch: Callable[[Sequence[Key]], list[bool] | None]) -> None:
        self._touch = touch
        self._waiting: dict[Key, None] = {}
        self._missing: dict[Key, None] = {}
        self._asked: set[Key] = set()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        #: keys that were not touched because too many waited
        self.dropped = 0

    def add(self, keys: Iterable[Key]) -> None:
        """Touch keys, soon."""
        with self._wake:
            if self._closed:
                return
            for key in keys:
                if key in self._waiting:
                    continue
                if len(self._waiting) >= MOST_KEYS:
                    self.dropped += 1
                    continue
                self._waiting[key] = None
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mimo-touch", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def written(self, keys: Iterable[Key]) -> None:
        """Keys are in the store: whatever it answers that it was asked before does not count."""
        with self._wake:
            for key in keys:
                self._missing.pop(key, None)
                self._asked.discard(key)

    def take_missing(self) -> list[Key]:
        """Keys that were found missing since the last call, in the order of their touches."""
        with self._wake:
            found = list(self._missing)
            self._missing.clear()
        return found

    @property
    def busy(self) -> bool:
        """Whether something waits, or is missing."""
        with self._wake:
            return bool(self._waiting or self._asked or self._missing)

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                keys = list(self._waiting)[:BATCH_KEYS]
                for key in keys:
                    del self._waiting[key]
                self._asked = set(keys)
            try:
                found = self._touch(keys)
            except Exception as error:  # a store that fails must not end the thread
                logger.warning("mimo tiers: keeping pages alive failed: %s", one_line(repr(error)))
                found = None
            with self._wake:
                for key, there in zip(keys, found or (), strict=False):
                    if not there and key in self._asked and len(self._missing) < MOST_KEYS:
                        self._missing[key] = None
                self._asked = set()
