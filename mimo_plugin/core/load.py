# SPDX-License-Identifier: Apache-2.0
"""What a worker still has to do, as far as the one who sends it requests can know."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from mimo_plugin.core.cost import PrefillCost


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a worker prefills.

    Attributes:
        cost: of a prefill in equivalent tokens.
        tokens_per_s: equivalent tokens per second.
        fixed_s: of any prefill.
    """

    cost: PrefillCost
    tokens_per_s: float = 20_000.0
    fixed_s: float = 0.02

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0 or not self.fixed_s >= 0:
            raise ValueError(
                f"speed: found {self.tokens_per_s} tokens/s and {self.fixed_s} s; "
                "allowed: > 0 and >= 0"
            )

    def prefill_s(self, cached_tokens: int, prompt_tokens: int) -> float:
        """Seconds for the part of a prompt that is not cached, at least one token."""
        uncached = max(1, prompt_tokens - cached_tokens)
        return self.cost.cost(cached_tokens, uncached) / self.tokens_per_s + self.fixed_s


@dataclass(slots=True)
class Load:
    """One worker's prefills, first come first served, and its decodes.

    Attributes:
        prefills: expected seconds of each request whose first token has not come, in order.
        decodes: context tokens of each request that decodes.
        work_s: prefill seconds that it was given, halved every ``half_life_s``: what it did lately.
    """

    half_life_s: float = 60.0
    prefills: dict[str, float] = field(default_factory=dict)
    decodes: dict[str, int] = field(default_factory=dict)
    work_s: float = 0.0
    _work_at_s: float = 0.0
    _queued_s: float = 0.0  # all of ``prefills``
    _first_ends_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Requests whose first token has not come."""
        return len(self.prefills)

    @property
    def decode_tokens(self) -> int:
        """Context of all that decodes."""
        return sum(self.decodes.values())

    def wait_s(self, now_s: float) -> float:
        """Until a request that comes now is begun."""
        if not self.prefills:
            return 0.0
        behind_s = self._queued_s - next(iter(self.prefills.values()))
        return max(0.0, self._first_ends_s - now_s) + max(0.0, behind_s)

    def recent_work_s(self, now_s: float) -> float:
        """``work_s`` as it is now."""
        age_s = max(0.0, now_s - self._work_at_s)
        return self.work_s * exp(-log(2) * age_s / self.half_life_s)

    def start(self, request: str, prefill_s: float, now_s: float) -> None:
        """A request was sent."""
        self.end(request, now_s)
        if not self.prefills:
            self._first_ends_s = now_s + prefill_s
        self.prefills[request] = prefill_s
        self._queued_s += prefill_s
        self.work_s = self.recent_work_s(now_s) + prefill_s
        self._work_at_s = max(now_s, self._work_at_s)  # another router's may be heard of late

    def prefilled(self, request: str, now_s: float) -> None:
        """Its first token came; if it was the first in the queue, the next one begins now."""
        if request not in self.prefills:
            return
        was_first = next(iter(self.prefills)) == request
        self._queued_s -= self.prefills.pop(request)
        if not self.prefills:
            self._queued_s = 0.0  # no rounding errors are carried on
        elif was_first:
            self._first_ends_s = now_s + next(iter(self.prefills.values()))

    def decode(self, request: str, context_tokens: int) -> None:
        """It decodes here."""
        self.decodes[request] = context_tokens

    def end(self, request: str, now_s: float) -> None:
        """It is over, or has failed."""
        self.prefilled(request, now_s)
        self.decodes.pop(request, None)
