# SPDX-License-Identifier: Apache-2.0
"""When something that fails is left alone, and when it is tried again (a circuit breaker).

Closed: everything is let through; so many failures in a row open the circuit. Open: nothing is, for
a period. Then it is half open: one attempt is let through, and its outcome closes the circuit or
opens it for another period. Each period is shortened by chance, so that engines that lost the same
store at the same moment don't all come back to it at the same moment.

Calls overlap, so an outcome may arrive after the circuit has changed. Such a late outcome says
nothing about now and doesn't count. An attempt of which no outcome comes is followed by another one
after a period.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


@dataclass(frozen=True, kw_only=True)
class CircuitRule:
    """When a circuit opens and how long it stays so.

    Attributes:
        failures: in a row, that open it, >= 1.
        period_s: longest time that it stays open before an attempt, > 0.
        jitter: part of the period by which chance may shorten it, 0 <= x < 1.
    """

    failures: int = 3
    period_s: float = 30.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        assert self.failures >= 1 and self.period_s > 0 and 0 <= self.jitter < 1


class Circuit:
    """See the module. Not thread-safe.

    Args:
        rule: when it opens.
        draw: numbers by chance, 0 <= x < 1.
    """

    __slots__ = ("_draw", "_failures", "_retry_at_s", "_rule", "_turn", "state")

    def __init__(self, rule: CircuitRule, draw: Callable[[], float]) -> None:
        self._rule = rule
        self._draw = draw
        self.state = CLOSED
        self._failures = 0
        self._retry_at_s = 0.0
        #: grows with every change of the state: outcomes of an earlier turn are late
        self._turn = 0

    def admit(self, now_s: float) -> int | None:
        """May a call go through? If so, the ticket that its outcome is told with.

        Args:
            now_s: monotonic seconds.
        """
        if self.state != CLOSED:
            if now_s < self._retry_at_s:
                return None
            self._change(HALF_OPEN)
            self._retry_at_s = now_s + self._rule.period_s
        return self._turn

    def rests(self, now_s: float) -> bool:
        """Whether no call would go through."""
        return self.state != CLOSED and now_s < self._retry_at_s

    def succeeded(self, ticket: int) -> None:
        """The call with this ticket went well."""
        if ticket == self._turn:
            self._failures = 0
            if self.state == HALF_OPEN:
                self._change(CLOSED)

    def failed(self, ticket: int, now_s: float) -> None:
        """The call with this ticket failed."""
        if ticket != self._turn:
            return
        self._failures += 1
        if self.state == HALF_OPEN or self._failures >= self._rule.failures:
            self._change(OPEN)
            period_s = self._rule.period_s * (1 - self._rule.jitter * self._draw())
            self._retry_at_s = now_s + period_s

    def _change(self, state: str) -> None:
        self.state = state
        self._turn += 1
        self._failures = 0
