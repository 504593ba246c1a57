# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, and what a decode step costs.

Positions count from 0: position j is the j-th token of a draft. A *round* is one draft of one
request and its verification; a position is *reached* when all before it were accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

START_RATE = 0.7
"""Conditional acceptance taken for granted until something was measured. Optimistic on purpose: a
draft that is tried in vain tells something, one that isn't tried tells nothing."""

START_WEIGHT = 8.0
"""Reached positions that ``START_RATE`` counts as."""

ENGINE_MEMORY = 1024
"""A reached position's weight in the engine's estimate falls to 1/e after so many later ones."""

PRIOR_WEIGHT = 4.0
"""Reached positions that the engine's estimate counts as in a request's estimate."""

REQUEST_KEEP = 0.97
"""A request's own counts of a position keep this share when it is reached again: some 33 rounds
count, which follows a change of the text (prose to code) within a few hundred tokens."""

UNSEEN_KEEP = 0.99
"""What they keep in a round that doesn't reach the position: a request with a poor record comes
back to the engine's estimate, and so to another try, within some hundred rounds."""


class EngineAcceptance:
    """Conditional acceptance of each position over all requests."""

    __slots__ = ("accepted", "reached")

    def __init__(self, num_positions: int) -> None:
        self.reached = [START_WEIGHT] * num_positions
        self.accepted = [START_WEIGHT * START_RATE] * num_positions

    def rate(self, position: int) -> float:
        """P(``position`` accepted | all before it accepted)."""
        return self.accepted[position] / self.reached[position]

    def observe(self, drafted: int, accepted: int) -> None:
        """One round: ``accepted`` of ``drafted`` tokens."""
        keep = 1 - 1 / ENGINE_MEMORY
        for j in range(min(drafted, accepted + 1)):
            self.reached[j] = self.reached[j] * keep + 1
            self.accepted[j] = self.accepted[j] * keep + (j < accepted)


class RequestAcceptance:
    """The same for one request, drawn towards the engine's estimate while it has few rounds."""

    __slots__ = ("_accepted", "_engine", "_reached")

    def __init__(self, engine: EngineAcceptance) -> None:
        self._engine = engine
        self._reached = [0.0] * len(engine.reached)
        self._accepted = [0.0] * len(engine.reached)

    def observe(self, drafted: int, accepted: int) -> None:
        """One round of this request; the engine's estimate learns from it too.

        Raises:
            ValueError: not 0 <= accepted <= drafted <= positions.
        """
        reached, hits = self._reached, self._accepted
        if not 0 <= accepted <= drafted <= len(reached):
            raise ValueError(f"{accepted} of {drafted} accepted with {len(reached)} positions")
        self._engine.observe(drafted, accepted)
        seen = min(drafted, accepted + 1)
        for j in range(seen):
            reached[j] = reached[j] * REQUEST_KEEP + 1
            hits[j] = hits[j] * REQUEST_KEEP + (j < accepted)
        for j in range(seen, len(reached)):
            reached[j] *= UNSEEN_KEEP
            hits[j] *= UNSEEN_KEEP

    def rate(self, position: int) -> float:
        """P(``position`` accepted | all before it accepted)."""
        prior = self._engine.rate(position) * PRIOR_WEIGHT
        return (self._accepted[position] + prior) / (self._reached[position] + PRIOR_WEIGHT)

    def chances(self, most: int) -> list[float]:
        """P(at least 1, 2, ... ``most`` tokens accepted); never rises."""
        out, chance = [], 1.0
        for j in range(most):
            chance *= self.rate(j)
            out.append(chance)
        return out


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a decode step: ``(fixed_s + per_token_s * tokens) * factor of its shape``.

    A step's shape is the draft length that all its requests share, or None when they differ. The
    factors hold what the line doesn't: an engine may have captured graphs for some shapes only.

    Attributes:
        fixed_s: seconds of a step without tokens, >= 0.
        per_token_s: seconds per verified token, >= 0; the two are not both 0.
        factors: of the lengths 0, 1, ... and, last, of steps with mixed lengths; empty for all 1.
    """

    fixed_s: float
    per_token_s: float
    factors: tuple[float, ...] = ()

    def time_s(self, tokens: float, shape: int | None) -> float:
        """Seconds of a step that verifies ``tokens`` tokens, one per request and the drafts."""
        factor = 1.0
        if self.factors:
            factor = self.factors[-1 if shape is None else shape]
        return (self.fixed_s + self.per_token_s * tokens) * factor


START_STEPS = 32
"""Steps that are fitted together first, so that slow first ones stand out."""

MEMORY_STEPS = 512
"""A step's weight falls to 1/e after so many later ones."""

MIN_SPREAD = 0.02
"""Smallest standard deviation of the steps' tokens, relative to their mean, that tells what a token
costs."""

_CLIP = 4.0  # an error counts up to so many usual ones
_MIN_NOISE = 0.02  # relative
_NOISE_STEPS = 50
_FACTOR_STEPS = 8
_LEVEL_STEPS = 32
_MIN_FACTOR, _MAX_FACTOR = 0.5, 2.0
_MIN_SECONDS, _MAX_SECONDS = 1e-6, 60.0


class DecodeTimes:
    """Learns a ``StepCost`` from measured steps that only decode.

    A least-squares line with exponential forgetting; an error far outside the usual ones is cut to
    the edge of them. A factor compares its shape with the recent steps of all shapes, so that a
    misfit of the line itself (a larger batch, longer contexts) does not count against one shape.
    One observation takes constant time, some microseconds.
    """

    def __init__(self, num_positions: int) -> None:
        self._start: list[tuple[float, float, int | None]] | None = []
        self._sums = [0.0] * 5  # of 1, t, t*t, s, t*s
        self._factors = [1.0] * (num_positions + 2)
        self._level = 1.0
        self._noise = 5 * _MIN_NOISE

    @property
    def spread(self) -> float:
        """Standard deviation of the steps' tokens relative to their mean; 0 before the start."""
        count, tokens, squares = self._sums[:3]
        if not count:
            return 0.0
        mean = tokens / count
        return math.sqrt(max(0.0, squares / count - mean * mean)) / mean

    def cost(self) -> StepCost | None:
        """What has been learnt; None while that is too little to tell what a token costs."""
        if self._start is not None or self.spread < MIN_SPREAD:
            return None
        fixed, slope = self._line()
        return StepCost(fixed, slope, tuple(self._factors))

    def observe(self, tokens: int, seconds: float, shape: int | None) -> None:
        """One step.

        Args:
            tokens: verified tokens, > 0; other steps are ignored.
            seconds: how long it took; below a microsecond or above a minute it is ignored.
            shape: draft length of all its requests, None when they differ.
        """
        if tokens <= 0 or not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        if self._start is not None:
            self._start.append((float(tokens), seconds, shape))
            if len(self._start) == START_STEPS:
                steps, self._start = self._start, None
                self._fit_start(steps)
            return
        fixed, slope = self._line()
        expected = (fixed + slope * tokens) * self._level * self._factor(shape)
        # Far from the usual number of tokens the line may be wrong, not the step.
        limit = _CLIP * self._noise + abs(tokens * self._sums[0] / self._sums[1] - 1)
        error = max(-limit, min(limit, seconds / expected - 1))
        noise = self._noise + (1.25 * min(abs(error), _CLIP * self._noise) - self._noise) / (
            _NOISE_STEPS
        )
        self._noise = max(_MIN_NOISE, noise)
        self._learn(tokens, max(_MIN_SECONDS, expected * (1 + error)), shape)

    def _fit_start(self, steps: list[tuple[float, float, int | None]]) -> None:
        """A line through the first steps, those far off it left out."""
        kept = steps
        for _ in range(3):
            self._sums = [0.0] * 5
            for tokens, seconds, _shape in kept:
                self._add(tokens, seconds)
            fixed, slope = self._line()
            errors = [abs(s / (fixed + slope * t) - 1) for t, s, _shape in steps]
            limit = _CLIP * max(_MIN_NOISE, median(errors))
            close = [step for step, error in zip(steps, errors, strict=True) if error <= limit]
            if len(close) < START_STEPS // 2:
                break
            kept = close
        self._noise = max(_MIN_NOISE, 1.25 * median(errors))

    def _learn(self, tokens: float, seconds: float, shape: int | None) -> None:
        keep = 1 - 1 / MEMORY_STEPS
        self._sums = [value * keep for value in self._sums]
        self._add(tokens, seconds)
        fixed, slope = self._line()
        ratio = seconds / (fixed + slope * tokens)
        self._level += (ratio - self._level) / _LEVEL_STEPS
        index = self._index(shape)
        factor = self._factors[index]
        factor += (ratio / self._level - factor) / _FACTOR_STEPS
        self._factors[index] = max(_MIN_FACTOR, min(_MAX_FACTOR, factor))

    def _add(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [value + more for value, more in zip(self._sums, new, strict=True)]

    def _line(self) -> tuple[float, float]:
        """Fixed seconds and seconds per token, neither below zero."""
        count, t, tt, s, ts = self._sums
        spread = tt * count - t * t
        if spread <= 1e-9 * tt * count:
            return s / count, 0.0
        slope = (ts * count - t * s) / spread
        if slope <= 0:
            return s / count, 0.0
        fixed = (s - slope * t) / count
        if fixed < 0:
            return 0.0, ts / tt
        return fixed, slope

    def _index(self, shape: int | None) -> int:
        return len(self._factors) - 1 if shape is None else min(shape, len(self._factors) - 2)

    def _factor(self, shape: int | None) -> float:
        return self._factors[self._index(shape)]
