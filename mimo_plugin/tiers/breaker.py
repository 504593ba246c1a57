# SPDX-License-Identifier: Apache-2.0
"""A store that may die or hang, so that it costs hits and never requests.

Each call goes through in steps of bounded size, on a thread of its own, and is given up after a
time. A thread that hangs can't be stopped: it keeps its place among a bounded number until the
store answers, and it never touches the engine's memory, because pages go through memory of the
step's own in both directions. Without that copy, a read that ends late would overwrite whatever
the engine has put there since, and a late write would store that under the page's key. A store
that ends its calls in time by itself, and leaves memory alone from then on, needs neither.

After some failures in a row the store is left alone (``core/circuit.py``): nothing is there, pages
to be written are dropped, until one call finds that it works again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mimo_plugin.core.circuit import CLOSED, Circuit, CircuitRule
from mimo_plugin.errors import MimoError, one_line
from mimo_plugin.tiers.framing import scatter, size_of
from mimo_plugin.tiers.store import PageStore, Parts, StoreStats

logger = logging.getLogger("mimo_plugin.tiers")


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """What one store may cost.

    Attributes:
        timeout_s: longest time that a step may take, > 0; a call ends with its first step that
            fails, so it waits for this long at most once.
        threads: calls that may be in the store at a time, those that hang included, >= 1.
        step_bytes: of the pages of one step, if it has more than one, > 0; few, so that copies stay
            in the processor's caches.
        step_keys: of one step, >= 1.
        rule: when the store is left alone, and for how long.
    """

    timeout_s: float = 2.0
    threads: int = 4
    step_bytes: int = 2 << 20
    step_keys: int = 256
    rule: CircuitRule = field(default_factory=CircuitRule)


_THREADS = "mimo-tiers-guarded"

_Step = Callable[[int, int, int], "list[bool] | None"]
"""Ticket, first and last index (exclusive) of pages to their answers; None when it failed."""


class _Attempt:
    """What a thread leaves behind."""

    __slots__ = ("answer", "done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: list[bool] = []
        self.error: Exception | None = None


class Breaker:
    """See the module.

    Args:
        store: guarded from now on: nobody else may use it. It may raise where it fails.
        name: in messages.
        limits: what it may cost.
        bounded: the store ends its calls by itself within the limits, and touches no page once a
            call has ended; calls are made on the caller's thread, and pages are not copied.
        clock_s: monotonic seconds.
        draw: numbers by chance, 0 <= x < 1.
    """

    def __init__(
        self,
        store: PageStore,
        name: str,
        *,
        limits: BreakerLimits | None = None,
        bounded: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.limits = limits or BreakerLimits()
        self._store = store
        self._bounded = bounded
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._circuit = Circuit(self.limits.rule, draw)
        self._places = threading.BoundedSemaphore(self.limits.threads)
        self._counts = dict.fromkeys(("missed", "dropped", "failed"), 0)
        self._closed = False

    @property
    def state(self) -> str:
        """``closed`` where calls go through, ``open`` or ``half_open`` where they don't."""
        with self._lock:
            return self._circuit.state

    @property
    def resting(self) -> bool:
        """Whether the store is left alone now: nothing would reach it."""
        with self._lock:
            return self._circuit.rests(self._clock_s())

    # -- the protocol --------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there; none where the store fails."""
        return self._by_keys(self._store.exists, keys, lost=None)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Keep pages alive; where the store fails they are dropped."""
        return self._by_keys(self._store.touch, keys, lost="dropped")

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages; the memory of one that is missed stays as it was."""

        def step(ticket: int, start: int, end: int) -> list[bool] | None:
            if self._bounded:
                in_place = partial(self._store.get, keys[start:end], pages[start:end])
                return self._try(ticket, in_place, end - start)
            space = [memoryview(bytearray(size_of(page))) for page in pages[start:end]]
            read = partial(self._store.get, keys[start:end], [[whole] for whole in space])
            found = self._try(ticket, read, end - start)
            for page, whole, well in zip(pages[start:end], space, found or (), strict=False):
                if well:
                    scatter(whole, page)
            return found

        return self._in_steps(self._by_size(pages), step, len(keys), lost="missed")

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages; where the store fails they are dropped."""

        def step(ticket: int, start: int, end: int) -> list[bool] | None:
            given = pages[start:end]
            if not self._bounded:
                given = [[_gathered(page)] for page in given]
            return self._try(ticket, partial(self._store.put, keys[start:end], given), end - start)

        return self._in_steps(self._by_size(pages), step, len(keys), lost="dropped")

    def share(self, memory: memoryview, file: int) -> bool:
        """Have pages in this memory moved in place, where the store can; see ``tiers/open.py``."""
        share = getattr(self._store, "share", None)
        return bool(self._bounded and share and share(memory, file))

    def stats(self) -> StoreStats:
        """The store's counters, and what was lost by its failures."""
        found = self._store.stats()
        with self._lock:
            return replace(
                found,
                pages_missed=found.pages_missed + self._counts["missed"],
                pages_dropped=found.pages_dropped + self._counts["dropped"],
                calls_failed=found.calls_failed + self._counts["failed"],
                stores_down=int(self._circuit.state != CLOSED),
            )

    def close(self) -> None:
        """Let go of the store; from now on nothing is there."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            threading.Thread(target=self._store.close, name=_THREADS, daemon=True).start()

    # -- steps ---------------------------------------------------------------------------------

    def _by_keys(
        self, call: Callable[[list[str]], list[bool]], keys: Sequence[str], *, lost: str | None
    ) -> list[bool]:
        def step(ticket: int, start: int, end: int) -> list[bool] | None:
            return self._try(ticket, partial(call, list(keys[start:end])), end - start)

        most = self.limits.step_keys
        bounds = ((start, min(start + most, len(keys))) for start in range(0, len(keys), most))
        return self._in_steps(bounds, step, len(keys), lost=lost)

    def _by_size(self, pages: Sequence[Parts]) -> Iterator[tuple[int, int]]:
        """First and last index (exclusive) of each step."""
        start = size = 0
        for index, page in enumerate(pages):
            more = size_of(page)
            full = size + more > self.limits.step_bytes or index - start >= self.limits.step_keys
            if index > start and full:
                yield start, index
                start, size = index, 0
            size += more
        if start < len(pages):
            yield start, len(pages)

    def _in_steps(
        self, bounds: Iterable[tuple[int, int]], step: _Step, pages: int, *, lost: str | None
    ) -> list[bool]:
        """The answers of all steps up to the first that fails, then False."""
        found: list[bool] = []
        for start, end in bounds:
            ticket = self._admit()
            answer = None if ticket is None else step(ticket, start, end)
            if answer is None:
                break
            found.extend(answer)
        left = pages - len(found)
        if left and lost:
            with self._lock:
                self._counts[lost] += left
        return found + [False] * left

    # -- one step ------------------------------------------------------------------------------

    def _admit(self) -> int | None:
        with self._lock:
            return None if self._closed else self._circuit.admit(self._clock_s())

    def _try(self, ticket: int, call: Callable[[], list[bool]], pages: int) -> list[bool] | None:
        """The answer for so many pages; None when the store failed."""
        attempt = _Attempt()
        problem = self._wait_for(attempt, call)
        if not problem and len(attempt.answer) != pages:
            problem = f"{len(attempt.answer)} answers for {pages} pages"
        with self._lock:
            before = self._circuit.state
            if problem:
                self._counts["failed"] += 1
                self._circuit.failed(ticket, self._clock_s())
            else:
                self._circuit.succeeded(ticket)
            after = self._circuit.state
        if before != after and CLOSED in (before, after):
            self._say(problem)
        return None if problem else attempt.answer

    def _wait_for(self, attempt: _Attempt, call: Callable[[], list[bool]]) -> str:
        """Have a thread make the call; in words what went wrong, or nothing."""
        if self._bounded:
            try:
                attempt.answer = call()
            except Exception as error:
                return one_line(error if isinstance(error, MimoError) else repr(error))
            return ""
        limit_s = self.limits.timeout_s
        late = f"no answer in {limit_s:g} s"
        end_s = time.monotonic() + limit_s
        if not self._places.acquire(timeout=limit_s):
            return late
        try:
            threading.Thread(
                target=self._work, args=(attempt, call), name=_THREADS, daemon=True
            ).start()
        except RuntimeError as error:  # no more threads in this process
            self._places.release()
            return one_line(error)
        if not attempt.done.wait(max(0.0, end_s - time.monotonic())):
            return late
        return one_line(repr(attempt.error)) if attempt.error else ""

    def _work(self, attempt: _Attempt, call: Callable[[], list[bool]]) -> None:
        try:
            attempt.answer = call()
        except Exception as error:
            attempt.error = error
        finally:
            self._places.release()
            attempt.done.set()

    def _say(self, problem: str) -> None:
        if problem:
            logger.warning(
                "mimo tiers: store %s fails (%s); its pages are misses, tried again within %g s",
                self.name,
                problem,
                self.limits.rule.period_s,
            )
        else:
            logger.info("mimo tiers: store %s works again", self.name)


# --- bytes -----------------------------------------------------------------------------------


def _gathered(page: Parts) -> memoryview:
    """A copy of a page, as one run."""
    return memoryview(b"".join(page))
