# SPDX-License-Identifier: Apache-2.0
"""SGLang's waiting queue in affinity order, pass by pass.

SGLang keeps its waiting queue as a plain list, which its policy sorts before each prefill batch. So
the line of ``core/affinity.py`` lives beside the list: what is new in the list enters the line,
what has gone leaves it, and the list is rewritten in the order of the line.

With tensor parallelism every rank sorts a list of its own, and all must come out equal. Everything
here therefore follows from what all ranks share: the requests and their order of arrival, the radix
tree, and the count of prefill tokens. A clock they do not share; see ``Clock``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from mimo_plugin.core.affinity import NORMAL, PREEMPTED, AffinityLine, AffinityRule, Cost, Waiting

LookUp = Callable[[Any], int]
"""Look a request up in the radix tree: tokens that it would not have to compute."""


@dataclass(frozen=True)
class Clock:
    """What the longest wait is measured by.

    Attributes:
        unit: ``s``: this process' clock, where one process schedules; ``tokens``: prefill tokens,
            which all ranks count alike.
        now: the time in that unit, from the number of prefill tokens so far.
        max_wait: in that unit.
    """

    unit: str
    now: Callable[[int], float]
    max_wait: float

    @classmethod
    def seconds(cls, max_wait_s: float, now_s: Callable[[], float] = time.monotonic) -> Clock:
        """For a scheduler that is alone."""
        return cls("s", lambda tokens: now_s(), max_wait_s)

    @classmethod
    def tokens(cls, max_wait_tokens: float) -> Clock:
        """For schedulers that must agree."""
        return cls("tokens", float, max_wait_tokens)


class AffinityOrder:
    """Sorts the waiting list of one scheduler.

    Args:
        rule: how the line is ordered; its ``max_wait_s`` is in the unit of the clock.
        cost: prefill cost of the model.
        look_up: in the radix tree; moves what it finds to the young end.
        clock: what the longest wait is measured by.
        look_ups_per_pass: requests that are looked up again in a pass. New ones come first, then
            the head of the line, then the others in turn.
        priority_sign: 1 where a smaller priority goes first, -1 where a larger does.
    """

    def __init__(
        self,
        rule: AffinityRule,
        cost: Cost,
        look_up: LookUp,
        clock: Clock,
        *,
        look_ups_per_pass: int,
        priority_sign: int = 1,
    ) -> None:
        self.line = AffinityLine(rule, cost)
        self.clock = clock
        self._look_up = look_up
        self._look_ups_per_pass = look_ups_per_pass
        self._sign = priority_sign
        self._entries: dict[str, Waiting] = {}
        self._since_s: dict[str, float] = {}
        self._unseen: deque[Waiting] = deque()
        self._turn: deque[Waiting] = deque()
        self._arrivals = count()
        self._preemptions = count(-1, -1)

    def sort(self, waiting: list[Any], processed_tokens: int) -> None:
        """Bring the waiting list into the order in which requests should start.

        Args:
            waiting: the engine's list; the same requests are in it afterwards.
            processed_tokens: prefill tokens that the engine has computed so far.
        """
        now = self.clock.now(processed_tokens)
        self._admit(waiting, now, processed_tokens)
        self.line.advance(now, processed_tokens)
        self._refresh()
        waiting[:] = [entry.item for entry in self.line.ready()]

    def entry_of(self, request: Any) -> Waiting | None:
        """What is known of a request that waits."""
        entry = self._entries.get(request.rid)
        return entry if entry is not None and entry.item is request else None

    def started(self, request: Any) -> tuple[Waiting, float] | None:
        """A request has joined a batch: it leaves the line, and what is known of it is returned,
        with the seconds that it was in line. None for one that did not wait here."""
        entry = self.entry_of(request)
        if entry is None:
            return None
        waited_s = time.monotonic() - self._since_s[request.rid]
        self._drop(entry)
        return entry, waited_s

    def __len__(self) -> int:
        return len(self._entries)

    # -- the list ------------------------------------------------------------------------------

    def _admit(self, waiting: Sequence[Any], now: float, processed_tokens: int) -> None:
        present = set()
        for request in waiting:
            present.add(request.rid)
            known = self._entries.get(request.rid)
            if known is not None:
                if known.item is request and known.num_tokens == length_of(request):
                    continue
                self._drop(known)  # it ran and was retracted between two passes
            self._add(request, now, processed_tokens)
        if len(present) < len(self._entries):
            for rid in self._entries.keys() - present:
                self._drop(self._entries[rid])

    def _add(self, request: Any, now: float, processed_tokens: int) -> None:
        preempted = bool(request.is_retracted)
        entry = Waiting(
            item=request,
            order=next(self._preemptions if preempted else self._arrivals),
            arrived_s=now,
            arrived_tokens=processed_tokens,
            num_tokens=length_of(request),
            priority=self._sign * (request.priority or 0),
            group=PREEMPTED if preempted else NORMAL,
        )
        self._entries[request.rid] = entry
        self._since_s[request.rid] = time.monotonic()  # for the operator; decides nothing
        self.line.add(entry, 0)
        self._unseen.append(entry)

    def _drop(self, entry: Waiting) -> None:
        del self._entries[entry.item.rid]
        del self._since_s[entry.item.rid]
        self.line.remove(entry)

    # -- hits ----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Look up what a pass may; the first of the line last, so that its hit is the youngest."""
        budget = self._look_ups_per_pass
        chosen: set[Waiting] = set()
        while self._unseen and len(chosen) < budget:
            entry = self._unseen.popleft()
            if entry.queued:
                chosen.add(entry)
                self._turn.append(entry)
        rest = budget - len(chosen)
        chosen.update(islice(self.line.ready(), (rest + 1) // 2))
        for _ in range(min(rest // 2, len(self._turn))):
            entry = self._turn.popleft()
            if entry.queued:
                chosen.add(entry)
                self._turn.append(entry)
        for entry in reversed([entry for entry in self.line.ready() if entry in chosen]):
            hit_tokens = self._look_up(entry.item)
            if hit_tokens != entry.hit_tokens:
                self.line.rescore(entry, hit_tokens)


def length_of(request: Any) -> int:
    """Tokens that a request has to compute or find in the tree."""
    return len(request.origin_input_ids) + len(request.output_ids)
