# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests start.

A request is placed by

    (user priority, preempted < overdue < the others, score, order of arrival)

With mode ``cost``, in equivalent prefill tokens (``core/cost.py``):

    score = T(uncached) - hit_weight * T(hit) - age_credit * rate * tokens processed since arrival

* ``T(uncached)``: short work first, which is what makes the mean wait short.
* ``T(hit)``: what is lost if the cached prefix is evicted before the request starts. Warm requests
  go first, so the prefixes of a full cache are used before they make room for others.
* ``age_credit``: what waits moves ahead with every token that the engine processes.
* ``rate``: 1 for prefills of up to ``long_tokens`` uncached tokens; above, it grows with the length
  to the power of ``long_growth``, up to ``MAX_RATE``. Where all wait long because work piles up,
  waits settle in inverse proportion to the rates, so long prefills are not left to the end
  (proportional delay differentiation, Dovrolis et al., SIGCOMM 1999).
* overdue: a request that has waited ``max_wait_s`` goes before everything but preempted requests
  and those that were overdue before it, and nothing passes it any more.

Requests of one rate keep their order as time goes by, so each rate has a sorted line of its own in
which nothing is sorted again, and only the heads of the lines are compared.

The rule follows the scheduler of Xiaomi's MiMo-V2.5 report (requests with a high hit and few
uncached tokens first, with a waiting-time penalty, and length buckets).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, merge
from math import inf, log2
from typing import Any, Protocol

from mimo_plugin.core.lanes import Lane, lane_of

COST = "cost"
LONGEST_HIT = "longest-hit"
HRRN = "hrrn"
FCFS = "fcfs"
MODES = (COST, LONGEST_HIT, HRRN, FCFS)

PREEMPTED, OVERDUE, NORMAL = 0, 1, 2

#: the line of preempted and overdue requests, and of all requests in mode ``fcfs``
FRONT = (-1, 0)
#: long prefills age at most this many times as fast as short ones
MAX_RATE = 4.0
#: lines per doubling of the rate
_LINES_PER_DOUBLING = 4

_Key = tuple[Any, ...]


class Cost(Protocol):
    """Prefill cost in equivalent tokens; ``core.cost.PrefillCost`` is one."""

    def cost(self, cached_tokens: float, uncached_tokens: float) -> float:
        """Cost of computing ``uncached_tokens`` on top of ``cached_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class AffinityRule:
    """How the line is ordered.

    Args:
        mode: ``cost`` (the rule above), ``longest-hit`` (longest hit first, aged the same way),
            ``hrrn`` (highest ratio of wait plus cost to cost first), ``fcfs`` (as the engine).
        age_credit: equivalent tokens of credit per token processed while waiting, >= 0.
        long_tokens: uncached tokens above which a prefill ages faster, >= 1.
        long_growth: how much faster: with the length to this power, >= 0.
        hit_weight: how much more a token that would have to be computed again counts than one
            that has to be computed anyway, >= 0.
        max_wait_s: waiting time after which a request is overdue, > 0.
        by_priority: the engine runs with priority scheduling: priority outranks all else.
        lanes: ascending by ``over_tokens``; requests of one lane can be left out of the line
            together.
    """

    mode: str = COST
    age_credit: float = 0.25
    long_tokens: int = 12_288
    long_growth: float = 0.25
    hit_weight: float = 1.0
    max_wait_s: float = 300.0
    by_priority: bool = False
    lanes: tuple[Lane, ...] = ()

    @classmethod
    def of(cls, settings: Any, lanes: tuple[Lane, ...], *, by_priority: bool) -> AffinityRule:
        """The rule that the settings of the feature ask for.

        Args:
            settings: has the fields of ``config.SchedulerConfig``.
            lanes: its lanes, as the rule takes them.
            by_priority: the engine runs with priority scheduling.
        """
        return cls(
            mode=settings.mode,
            age_credit=settings.age_credit,
            long_tokens=settings.long_tokens,
            long_growth=settings.long_growth,
            hit_weight=settings.hit_weight,
            max_wait_s=settings.max_wait_s,
            by_priority=by_priority,
            lanes=lanes,
        )

    def rate_index(self, uncached_tokens: int) -> int:
        """Which rate a prefill of this length ages at; 0 is the plain one."""
        if self.mode != COST or uncached_tokens <= self.long_tokens:
            return 0
        doublings = self.long_growth * log2(uncached_tokens / self.long_tokens)
        return int(min(doublings, log2(MAX_RATE)) * _LINES_PER_DOUBLING)

    def rate(self, index: int) -> float:
        """How fast requests with this :meth:`rate_index` age, 1 being the plain rate."""
        return float(2 ** (index / _LINES_PER_DOUBLING))


@dataclass(slots=True, eq=False)
class Waiting:
    """One waiting request.

    Attributes:
        item: the engine's request.
        order: place in the order of arrival; preempted requests count down from -1.
        arrived_s, arrived_tokens: both clocks at arrival.
        stock_key: what the engine's own queue orders by within a priority.
        num_tokens: prompt tokens (and output so far, after a preemption).
        hit_tokens: as last looked up.
        full_tokens: the hit that full attention alone would give, as last looked up.
        uncached_tokens: what it would compute now.
        group: PREEMPTED, OVERDUE or NORMAL.
        line: which line it is in: rate index and lane; FRONT for requests that don't age.
        key: place in the line.
        queued: in the line or parked, as opposed to handed out or gone.
        safe: its hit can't be evicted while it waits.
        leader: whom a parked request waits for.
        stale: its hit may have changed while it was handed out.
        skipped_pass: the last scheduling pass in which the engine skipped it.
        deferred_for: why it was held back so far.
    """

    item: Any
    order: int
    arrived_s: float
    arrived_tokens: float
    num_tokens: int
    priority: int = 0
    stock_key: tuple[Any, ...] = ()
    hit_tokens: int = 0
    full_tokens: int = 0
    uncached_tokens: int = 0
    cost_tokens: float = 0.0
    group: int = NORMAL
    line: tuple[int, int] = FRONT
    key: _Key = ()
    queued: bool = False
    safe: bool = False
    leader: Any = None
    stale: bool = False
    skipped_pass: int = -(1 << 30)
    deferred_for: tuple[str, ...] = ()


class AffinityLine:
    """Waiting requests in the order in which they should start.

    Parked requests wait for something else: they have no place in the line, but still grow overdue,
    which brings them back.
    """

    def __init__(self, rule: AffinityRule, cost: Cost) -> None:
        self.rule = rule
        self.cost = cost
        self._lines: dict[tuple[int, int], list[tuple[_Key, Waiting]]] = {FRONT: []}
        self._parked: dict[Waiting, None] = {}
        self._arrivals: list[tuple[int, int, Waiting]] = []
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._pushed = 0
        self._now_tokens = 0.0
        #: uncached tokens of all that wait
        self.uncached_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values())) + len(self._parked)

    def __iter__(self) -> Iterator[Waiting]:
        """The line in order, then what is parked."""
        yield from list(self.ready())
        yield from list(self._parked)

    @property
    def num_parked(self) -> int:
        """Requests that wait for something else."""
        return len(self._parked)

    def ready(self, upto_tokens: float = inf) -> Iterator[Waiting]:
        """The line in order; the caller stops before it changes the line.

        Args:
            upto_tokens: leave out the lanes over this many tokens and more; the front stays.
        """
        last = lane_of(self.rule.lanes, upto_tokens)
        lines = [line for (_, lane), line in self._lines.items() if line and lane <= last]
        if len(lines) == 1:
            yield from map(_entry, lines[0])
        else:
            yield from map(_entry, merge(*lines, key=self._key_now))

    def add(self, entry: Waiting, hit_tokens: int) -> None:
        """Put a request into the line."""
        assert not entry.queued, "a request waits once"
        entry.queued = True
        self._pushed += 1
        heappush(self._arrivals, (entry.order, self._pushed, entry))
        if entry.group == NORMAL and self.rule.mode != FCFS:
            deadline = entry.arrived_s + self.rule.max_wait_s
            heappush(self._deadlines, (deadline, self._pushed, entry))
        entry.uncached_tokens = 0
        self._score(entry, hit_tokens)
        self._insert(entry)

    def remove(self, entry: Waiting) -> None:
        """Take a request out, wherever it is; no error when it is not there."""
        if not entry.queued:
            return
        entry.queued = False
        self.uncached_tokens -= entry.uncached_tokens
        if entry in self._parked:
            del self._parked[entry]
        else:
            self._take(entry)
        # What is gone leaves the heaps when it comes up; not before, unless it is most of them.
        if max(len(self._arrivals), len(self._deadlines)) > 64 + 4 * len(self):
            self._compact()

    def rescore(self, entry: Waiting, hit_tokens: int) -> None:
        """The hit or the length of a request changed."""
        if entry in self._parked:
            self._score(entry, hit_tokens)
            return
        self._take(entry)
        self._score(entry, hit_tokens)
        self._insert(entry)

    def park(self, entry: Waiting) -> None:
        """Take a request out of the line while it waits for something else."""
        self._take(entry)
        self._parked[entry] = None

    def unpark(self, entry: Waiting) -> None:
        """Back into the line."""
        del self._parked[entry]
        self._insert(entry)

    def is_parked(self, entry: Waiting) -> bool:
        """Whether it is out of the line."""
        return entry in self._parked

    def advance(self, now_s: float, now_tokens: float) -> list[Waiting]:
        """Let time pass; the requests that have become overdue (they are back in the line)."""
        self._now_tokens = now_tokens
        overdue: list[Waiting] = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_s or not deadlines[0][2].queued):
            entry = heappop(deadlines)[2]
            if not entry.queued or entry.group != NORMAL:
                continue
            if entry in self._parked:
                del self._parked[entry]
            else:
                self._take(entry)
            entry.group = OVERDUE
            self._score(entry, entry.hit_tokens)
            self._insert(entry)
            overdue.append(entry)
        if self.rule.mode == HRRN:
            for line, pairs in self._lines.items():
                for _, entry in pairs:
                    entry.key = self._key(entry)
                self._lines[line] = sorted(((e.key, e) for _, e in pairs), key=_first)
        return overdue

    def oldest(self) -> Waiting | None:
        """The request that arrived first (a preempted one before all), parked or not."""
        arrivals = self._arrivals
        while arrivals and not arrivals[0][2].queued:
            heappop(arrivals)
        return arrivals[0][2] if arrivals else None

    # -- keys --------------------------------------------------------------------------------

    def cost_of(self, entry: Waiting, num_tokens: int, hit_tokens: int) -> None:
        """Set the lengths of a request, and what it costs, outside the line."""
        entry.num_tokens = num_tokens
        entry.hit_tokens = min(hit_tokens, max(0, num_tokens - 1))
        entry.uncached_tokens = num_tokens - entry.hit_tokens
        entry.cost_tokens = self.cost.cost(entry.hit_tokens, entry.uncached_tokens)

    def _score(self, entry: Waiting, hit_tokens: int) -> None:
        before = entry.uncached_tokens
        self.cost_of(entry, entry.num_tokens, hit_tokens)
        self.uncached_tokens += entry.uncached_tokens - before
        entry.key = self._key(entry)

    def _key(self, entry: Waiting) -> _Key:
        rule = self.rule
        entry.line = FRONT
        priority = entry.priority if rule.by_priority else 0
        if rule.mode == FCFS:
            return (priority, NORMAL, 0.0, entry.stock_key or (entry.order,), entry.order)
        if entry.group != NORMAL:
            return (priority, entry.group, 0.0, (entry.order,), entry.order)
        lane = lane_of(rule.lanes, entry.uncached_tokens)
        if rule.mode == HRRN:
            entry.line = (0, lane)
            waited = max(0.0, self._now_tokens - entry.arrived_tokens)
            score = -(waited + entry.cost_tokens) / max(1.0, entry.cost_tokens)
            return (priority, NORMAL, score, (entry.order,), entry.order)
        # The credit up to now is the same for all of a line; the rest is the clock at arrival.
        rate = rule.rate_index(entry.uncached_tokens)
        entry.line = (rate, lane)
        score = rule.age_credit * rule.rate(rate) * entry.arrived_tokens
        if rule.mode == LONGEST_HIT:
            score -= entry.hit_tokens
        else:
            at_risk = 0 if entry.safe else entry.hit_tokens
            saved = self.cost.cost(0, at_risk) if at_risk else 0.0
            score += entry.cost_tokens - rule.hit_weight * saved
        return (priority, NORMAL, score, (entry.order,), entry.order)

    def _key_now(self, pair: tuple[_Key, Waiting]) -> _Key:
        """A key that compares across lines, the credit up to now included."""
        key, entry = pair
        if entry.line == FRONT or self.rule.mode == HRRN:
            return key
        credit = self.rule.age_credit * self.rule.rate(entry.line[0]) * self._now_tokens
        return (key[0], key[1], key[2] - credit, *key[3:])

    # -- the sorted list ---------------------------------------------------------------------

    def _insert(self, entry: Waiting) -> None:
        insort(self._lines.setdefault(entry.line, []), (entry.key, entry), key=_first)

    def _take(self, entry: Waiting) -> None:
        line = self._lines[entry.line]
        at = bisect_left(line, entry.key, key=_first)
        # Keys end with the order of arrival, so no two are equal.
        assert line[at][1] is entry, "the line lost a request"
        del line[at]

    def _compact(self) -> None:
        self._arrivals = [item for item in self._arrivals if item[2].queued]
        self._deadlines = [item for item in self._deadlines if item[2].queued]
        heapify(self._arrivals)
        heapify(self._deadlines)


def _first(pair: tuple[_Key, Waiting]) -> _Key:
    return pair[0]


def _entry(pair: tuple[_Key, Waiting]) -> Waiting:
    return pair[1]
