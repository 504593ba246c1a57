# SPDX-License-Identifier: Apache-2.0
"""Which layer drafts which token, and how many tokens are drafted.

Steps and positions count from 0. ``k`` is the largest draft length (``num_speculative_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_plugin.core.acceptance import (
    DecodeTimes,
    EngineAcceptance,
    RequestAcceptance,
    StepCost,
)

OUTPUT_BINS = ("0-127", "128-255", "256+")
"""Where in its output a request is, as metrics tell it: indices of output tokens."""

UNIFORM_MARGIN = 0.05
"""Gain from which on requests get lengths of their own: steps whose requests share one length can
run as one captured graph, others often can't."""

HYSTERESIS = 0.02
"""Gain from which on the shared length changes; smaller ones are noise."""

PROBE_STEPS = 64
"""One step in so many runs at another length, to learn what that is worth: 1.6 % of them."""


def layer_of_step(step: int, num_layers: int) -> int:
    """The layer that drafts the token of ``step``: the layer with the same number.

    Raises:
        ValueError: there is no such layer; none is ever used twice.
    """
    if not 0 <= step < num_layers:
        raise ValueError(f"draft step {step} has no layer: the checkpoint has {num_layers}")
    return step


def check_steps(k: int, num_layers: int) -> None:
    """Refuse a draft length that the layers can't serve.

    Raises:
        ValueError: one line with what was found, what is needed and the fix.
    """
    if 1 <= k <= num_layers:
        return
    if num_layers < 1:
        raise ValueError(
            f"num_speculative_tokens is {k}; found no draft layer in the checkpoint, needed: one "
            "per drafted token; fix: use a checkpoint with MTP layers or drop the speculative "
            "config"
        )
    raise ValueError(
        f"num_speculative_tokens: found {k}; needed: 1 to {num_layers}, as the checkpoint has "
        f"{num_layers} draft layers and each drafts one token; fix: set num_speculative_tokens to "
        f"{num_layers if k > num_layers else 1}"
    )


def draft_room(num_tokens: int, k: int, limit_tokens: int | None) -> int:
    """How many of ``k`` tokens may be drafted behind ``num_tokens`` known ones.

    The j-th drafted token stands at position ``num_tokens + j``, which must stay below
    ``limit_tokens``, the positions that the draft layers have (None: no limit).
    """
    if limit_tokens is None:
        return k
    return max(0, min(k, limit_tokens - num_tokens))


def output_bin(index: int) -> str:
    """The member of ``OUTPUT_BINS`` for the output token number ``index``."""
    return OUTPUT_BINS[bin_of(index)]


def bin_of(index: int) -> int:
    """The number of that member."""
    return min(max(index, 0) // 128, len(OUTPUT_BINS) - 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft lengths of one step's requests.

    Attributes:
        lengths: tokens to draft, one entry per request.
        uniform: the length they share (each within its own limit); None when they differ.
        rate: emitted tokens per second that the plan promises.
    """

    lengths: tuple[int, ...]
    uniform: int | None
    rate: float


def plan_lengths(
    chances: Sequence[Sequence[float]],
    cost: StepCost,
    *,
    other_tokens: int = 0,
    previous: int | None = None,
    uniform_margin: float = UNIFORM_MARGIN,
    hysteresis: float = HYSTERESIS,
) -> Plan:
    """The lengths with which a step emits the most tokens per second.

    A request emits one token for sure and its j-th draft with the chance that all drafts up to
    that one are accepted; a step verifies one token per request and every draft.

    The plan never promises less than no drafts at all, and, but for the hysteresis, not less than
    any length that all share (full length included) nor, but for ``uniform_margin``, than any
    other choice of lengths.

    Args:
        chances: for each request P(>= 1, 2, ... accepted), not rising; as many as it may draft.
        cost: what a step takes.
        other_tokens: tokens of prefills that the step computes besides.
        previous: the shared length of the step before.
        uniform_margin: gain above which lengths may differ between requests.
        hysteresis: gain above which the shared length changes.
    """
    requests = len(chances)
    if not requests:
        return Plan((), previous, 0.0)
    most = max(map(len, chances))
    # Chance and number of the requests that may draft a j-th token, summed over the requests.
    gains = [sum(c[j] for c in chances if j < len(c)) for j in range(most)]
    counts = [sum(j < len(c) for c in chances) for j in range(most)]
    fixed_tokens = requests + other_tokens
    rates, emitted, tokens = [], float(requests), fixed_tokens
    for length in range(most + 1):
        if length:
            emitted += gains[length - 1]
            tokens += counts[length - 1]
        rates.append(emitted / cost.time_s(tokens, length))
    best = max(range(most + 1), key=lambda n: (rates[n], n))
    if previous is not None:
        held = min(previous, most)
        if rates[held] >= rates[0] and rates[best] <= (1 + hysteresis) * rates[held]:
            best = held
    mixed_rate, taken = _best_mix(chances, cost, fixed_tokens)
    if mixed_rate > (1 + uniform_margin) * rates[best]:
        lengths = [0] * requests
        for _, _, request in taken:
            lengths[request] += 1
        return Plan(tuple(lengths), None, mixed_rate)
    return Plan(tuple(min(best, len(c)) for c in chances), best, rates[best])


def _best_mix(
    chances: Sequence[Sequence[float]], cost: StepCost, fixed_tokens: int
) -> tuple[float, list[tuple[float, int, int]]]:
    """The best choice with a length for each request, as the drafts to take.

    For any number of drafts the likeliest ones are the best, and as chances don't rise within a
    request, they are a beginning of each. So one pass over the sorted drafts sees the optimum.
    """
    drafts = sorted((-c, j, r) for r, row in enumerate(chances) for j, c in enumerate(row))
    emitted, tokens = float(len(chances)), fixed_tokens
    best_rate, best = emitted / cost.time_s(tokens, None), 0
    for number, (negative, _, _) in enumerate(drafts, 1):
        emitted -= negative
        tokens += 1
        rate = emitted / cost.time_s(tokens, None)
        if rate > best_rate:
            best_rate, best = rate, number
    return best_rate, drafts[:best]


class LengthPlanner:
    """Chooses lengths step by step and learns from what came of them.

    Until it knows what a step costs it drafts at full length. One step in ``PROBE_STEPS`` runs at
    another shared length: by turns the full one, so that positions that are not drafted any more
    are seen again, and each other one, so that its cost is known.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.acceptance = EngineAcceptance(k)
        self.times = DecodeTimes(k)
        self.uniform: int | None = k
        self._steps = self._probes = 0

    def new_request(self) -> RequestAcceptance:
        """The estimate of a request that starts."""
        return RequestAcceptance(self.acceptance)

    def plan(
        self,
        requests: Sequence[RequestAcceptance],
        limits: Sequence[int],
        other_tokens: int = 0,
    ) -> tuple[int, ...]:
        """Draft lengths of the requests that a step decodes.

        Args:
            requests: their estimates.
            limits: the most tokens each may draft, 0 <= x <= k.
            other_tokens: prefill tokens of the step that will verify the drafts.
        """
        if not requests:
            return ()
        self._steps += 1
        if self._steps % PROBE_STEPS == 0:
            length = self._probe_length()
            return tuple(min(length, limit) for limit in limits)
        cost = self.times.cost()
        if cost is None:
            self.uniform = self.k
            return tuple(limits)
        chances = [r.chances(limit) for r, limit in zip(requests, limits, strict=True)]
        plan = plan_lengths(chances, cost, other_tokens=other_tokens, previous=self.uniform)
        self.uniform = plan.uniform
        return plan.lengths

    def _probe_length(self) -> int:
        self._probes += 1
        if self._probes % 2 and self.uniform != self.k:
            return self.k
        others = [n for n in range(self.k + 1) if n != self.uniform]
        return others[self._probes // 2 % len(others)]
