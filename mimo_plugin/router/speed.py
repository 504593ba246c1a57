# SPDX-License-Identifier: Apache-2.0
"""How fast workers prefill, from the first tokens of requests that found nothing before them.

Such a request took ``fixed + cost / rate`` seconds, with the cost in equivalent tokens
(:mod:`mimo_plugin.core.cost`). Both are fitted by medians (Theil and Sen), so that a few odd
values change nothing.

Costs that differ decide where a request goes, and noise must not: workers count as equally fast,
at the median of all, unless one is clearly slower or faster. That takes four of five of its
requests: one that seems fast by chance gets all, and the others nothing to show the mistake by.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from mimo_plugin.core.load import Speed

_SAMPLES = 48
_FIRST = 8  # samples before the first fit
_EVERY = 8  # samples between two fits
_CLEARLY = 1.5
_ENOUGH = 32  # samples before a target may differ
_SLOWEST, _FASTEST = 10.0, 1e7  # equivalent tokens per second
_LONGEST_FIXED_S = 5.0


class Speeds:
    """Of all targets.

    Args:
        start: counts until there is something better.
        fixed: nothing is measured: ``start`` is what the user said.
    """

    def __init__(self, start: Speed, *, fixed: bool = False) -> None:
        self.start, self.fixed = start, fixed
        self._samples: dict[str, deque[tuple[float, float]]] = {}
        self._fits: dict[str, tuple[float, float]] = {}  # rate, fixed seconds
        self._seen: dict[str, int] = {}

    def observe(
        self, target: str, cached_tokens: int, prompt_tokens: int, first_token_s: float
    ) -> bool:
        """Note a request that was alone until its first token came.

        Returns:
            True when speeds have changed: ask for all of them again.
        """
        if self.fixed or first_token_s <= 0 or prompt_tokens < 1:
            return False
        cost = self.start.cost.cost(cached_tokens, max(1, prompt_tokens - cached_tokens))
        samples = self._samples.setdefault(target, deque(maxlen=_SAMPLES))
        samples.append((cost, first_token_s))
        seen = self._seen[target] = self._seen.get(target, 0) + 1
        if seen < _FIRST or seen % _EVERY:
            return False
        self._fits[target] = fit(list(samples), self.start.fixed_s)
        return True

    def forget(self, target: str) -> None:
        """It is gone."""
        for table in (self._samples, self._fits, self._seen):
            table.pop(target, None)

    def of(self, target: str) -> Speed:
        """What the target's speed is thought to be."""
        if not self._fits:
            return self.start
        rate = median(rate for rate, _ in self._fits.values())
        fixed_s = median(fixed for _, fixed in self._fits.values())
        own = self._fits.get(target)
        if own is not None and self._differs(target, rate, fixed_s):
            rate = own[0]
        return replace(self.start, tokens_per_s=rate, fixed_s=fixed_s)

    def _differs(self, target: str, rate: float, fixed_s: float) -> bool:
        """Most of its requests took clearly more or less time than the median of all says."""
        samples = self._samples[target]
        if len(samples) < _ENOUGH:
            return False
        ratios = sorted(seconds / (fixed_s + cost / rate) for cost, seconds in samples)
        fifth = len(ratios) // 5
        return ratios[fifth] > _CLEARLY or ratios[-1 - fifth] < 1 / _CLEARLY


def fit(samples: list[tuple[float, float]], usual_fixed_s: float) -> tuple[float, float]:
    """Rate in tokens per second and fixed seconds of pairs of cost and seconds."""
    costs = sorted(cost for cost, _ in samples)
    low, high = costs[len(costs) // 8], costs[-1 - len(costs) // 8]
    if high >= 2 * low:
        slopes = [
            (s2 - s1) / (c2 - c1)
            for i, (c1, s1) in enumerate(samples)
            for c2, s2 in samples[i + 1 :]
            if abs(c2 - c1) > 0.25 * low
        ]
        slope = median(slopes) if slopes else 0.0
        if slope > 0:
            fixed = median(s - slope * c for c, s in samples)
            if fixed >= 0:
                return _bounded(1 / slope), min(fixed, _LONGEST_FIXED_S)
    # All about as long, or no growth to be seen: the usual share is not the tokens'.
    fixed = min(usual_fixed_s, median(s for _, s in samples) / 2)
    return _bounded(median(c / max(1e-6, s - fixed) for c, s in samples)), fixed


def _bounded(rate: float) -> float:
    return min(_FASTEST, max(_SLOWEST, rate))
