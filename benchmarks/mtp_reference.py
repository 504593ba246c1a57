# SPDX-License-Identifier: Apache-2.0
"""The MTP benchmark's other side: the same model in plain torch, and how rounds are counted.

A round is counted as vLLM counts it: by the outputs known before it, with all its drafts, also
those past the request's end. So the rounds of the first 6 outputs are the same whether a request
ends there or goes on, which an engine run to 6 outputs checks.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from tools import tiny_trained

DRAFTS = 3
BATCH = 25

Round: TypeAlias = tuple[int, int, int, int]
"""Request, outputs before the round, drafted tokens, accepted tokens."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a set of rounds.

    Attributes:
        rounds: how many.
        length_tokens: mean tokens gained by a round: accepted drafts and the target's own token.
        conditional: by draft position, the share accepted of those whose earlier ones were.
        reached: by draft position, rounds in which it was drafted and all before it accepted.
    """

    rounds: int
    length_tokens: float
    conditional: tuple[float, ...]
    reached: tuple[int, ...]


def acceptance(
    rounds: Sequence[Round], first_output: int = 0, end_output: int = 1 << 30
) -> Acceptance:
    """Acceptance of the rounds that begin at an output in ``first_output … end_output - 1``."""
    chosen = [r for r in rounds if first_output <= r[1] < end_output]
    longest = max((drafted for _, _, drafted, _ in chosen), default=0)
    reached = tuple(sum(r[3] >= j and r[2] > j for r in chosen) for j in range(longest))
    accepted = [sum(r[3] > j for r in chosen) for j in range(longest)]
    return Acceptance(
        rounds=len(chosen),
        length_tokens=1 + sum(accepted) / max(1, len(chosen)),
        conditional=tuple(a / max(1, n) for a, n in zip(accepted, reached, strict=True)),
        reached=reached,
    )


def gain_pct(ours: Sequence[Round], stock: Sequence[Round], end_output: int) -> float:
    """By how many percent our acceptance length over the first outputs exceeds stock's."""
    lengths = [acceptance(rounds, 0, end_output).length_tokens for rounds in (ours, stock)]
    return 100 * (lengths[0] / lengths[1] - 1)


def gain_interval(
    ours: Sequence[Round],
    stock: Sequence[Round],
    end_output: int,
    prompts: int,
    resamples: int = 1000,
) -> tuple[float, float]:
    """Central 90 % of ``gain_pct`` over prompts drawn with replacement, both sides the same."""
    totals = []
    for rounds in (ours, stock):
        by_prompt = [[0, 0] for _ in range(prompts)]
        for request, index, _, accepted in rounds:
            if index < end_output:
                by_prompt[request][0] += 1
                by_prompt[request][1] += 1 + accepted
        totals.append(by_prompt)
    generator = random.Random(0)
    gains = []
    for _ in range(resamples):
        drawn = generator.choices(range(prompts), k=prompts)
        lengths = [
            sum(side[i][1] for i in drawn) / max(1, sum(side[i][0] for i in drawn))
            for side in totals
        ]
        gains.append(100 * (lengths[0] / lengths[1] - 1))
    gains.sort()
    return gains[resamples // 20], gains[-resamples // 20 - 1]


@dataclass
class Reference:
    """What plain torch says.

    Attributes:
        outputs: the most likely tokens after each prompt.
        rounds: by mode of :mod:`tools.mimo_torch_drafts`.
    """

    outputs: list[list[int]]
    rounds: dict[str, list[Round]]


def reference(prompts: int, outputs: int, modes: Sequence[str], workers: int) -> Reference:
    """Decode the held-out prompts speculatively in plain torch."""
    jobs = [
        (first, min(BATCH, prompts - first), prompts, outputs, tuple(modes))
        for first in range(0, prompts, BATCH)
    ]
    result = Reference([], {mode: [] for mode in modes})
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for found in pool.map(_batch, jobs):
            result.outputs += found.outputs
            for mode, rounds in found.rounds.items():
                result.rounds[mode] += rounds
    return result


def _batch(job: tuple[int, int, int, int, tuple[str, ...]]) -> Reference:
    import torch

    from tools import mimo_torch, mimo_torch_drafts

    first, count, prompts, outputs, modes = job
    torch.set_num_threads(1)
    model = mimo_torch.load(tiny_trained.CHECKPOINT)
    asked = tiny_trained.held_out_prompts(prompts)[first : first + count]
    known = _greedy(model, asked, outputs + DRAFTS)
    rounds: dict[str, list[Round]] = {}
    for mode in modes:
        rounds[mode] = [
            (first + i, r.output_index, len(r.drafts), r.accepted)
            for i, (prompt, tokens) in enumerate(zip(asked, known, strict=True))
            for r in mimo_torch_drafts.speculate(model, prompt, outputs, DRAFTS, mode, tokens)
        ]
    return Reference([tokens[:outputs] for tokens in known], rounds)


def _greedy(model: object, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """``mimo_torch.greedy`` for prompts of one length together."""
    import torch

    from tools import mimo_torch

    assert isinstance(model, mimo_torch.MiMo)
    with torch.inference_mode():
        hidden, past = model(torch.tensor(prompts))
        columns = []
        while True:
            columns.append(model.logits(hidden[:, -1]).argmax(-1))
            if len(columns) == outputs:
                return torch.stack(columns, dim=1).tolist()
            start = len(prompts[0]) + len(columns) - 1
            hidden, past = model(columns[-1][:, None], start, past)
