# SPDX-License-Identifier: Apache-2.0
"""Which keys are to be touched again: each at most once in an interval, with bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Touches(Generic[Key]):
    """Remembers when keys were last due.

    What goes over ``most_keys`` is forgotten, the longest ago first, and is due again sooner than
    it would be.

    Args:
        interval_s: in which a key is due once, >= 0.
        most_keys: that are remembered, >= 1.
    """

    def __init__(self, interval_s: float, most_keys: int) -> None:
        assert interval_s >= 0 and most_keys >= 1
        self.interval_s = interval_s
        self.most_keys = most_keys
        #: ascending by the time, so that what is forgotten is always the first
        self._due_at_s: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due_at_s)

    def due(self, keys: Iterable[Key], now_s: float) -> list[Key]:
        """Those of ``keys``, each once and in their order, that were not due within the interval.

        They are taken to be touched now.

        Args:
            keys: any number.
            now_s: monotonic seconds, not before those of an earlier call.
        """
        before = now_s - self.interval_s
        found: dict[Key, None] = {}
        for key in keys:
            last = self._due_at_s.get(key)
            if (last is None or last <= before) and key not in found:
                found[key] = None
        for key in found:
            self._due_at_s[key] = now_s
            self._due_at_s.move_to_end(key)
        while len(self._due_at_s) > self.most_keys:
            self._due_at_s.popitem(last=False)
        return list(found)
