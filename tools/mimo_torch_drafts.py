# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding in plain torch: which drafts an exact engine must make and accept.

    rounds = speculate(model, prompt, outputs=16, drafts=3)
    acceptance([rounds], drafts=3).conditional

A round starts when the prompt and ``output_index`` outputs are known (at least one: the first comes
from the prompt's own pass). Let p be the last position with a target hidden state, so token p+1 is
the last known one. Draft step i predicts token p+2+i and is right when the target's greedy choice
is the same; a round accepts drafts up to the first wrong one and gains one token more than that.

How a step's logits come about (``mode``):

``exact``
    Step i runs MTP layer i at row p, on the layer's own rows 0..p. Row q holds the target's hidden
    state at q and token q+1+i: the true token where it is known, else the draft for that place.
``chained``
    As above, but layers after the first get the previous layer's output in place of the target's
    hidden state, in all rows.
``layer0``
    Layer 0 drafts every step: step i appends a row at position p+i with the previous step's draft
    and the previous step's output. The rows up to p are exact again in the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.mimo_torch import KV, MiMo, greedy

MODES = ("exact", "chained", "layer0")


@dataclass(frozen=True)
class Round:
    """One round: its drafts and how many of them the target confirmed."""

    output_index: int
    """Outputs known before the round; the first draft is for this place, counted from 0."""
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of many rounds, by draft step."""

    tried: tuple[int, ...]
    """Rounds whose earlier drafts were all right, for each step."""
    accepted: tuple[int, ...]

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share of right drafts among those whose earlier drafts were right, for each step."""
        return tuple(a / max(1, t) for a, t in zip(self.accepted, self.tried, strict=True))

    @property
    def length_tokens(self) -> float:
        """Mean tokens gained by a round: accepted drafts and the target's own token."""
        return 1 + sum(self.accepted) / max(1, self.tried[0])


class Drafter:
    """Drafts for any place of one known token sequence, from the rows of its true history."""

    def __init__(self, model: MiMo, tokens: Sequence[int], drafts: int, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
        if mode != "layer0" and not 1 <= drafts <= len(model.mtp):
            raise ValueError(f"drafts is {drafts}; the model has {len(model.mtp)} MTP layers")
        self.model, self.tokens, self.drafts, self.mode = model, list(tokens), drafts, mode
        embeddings = model.embed(torch.tensor([self.tokens]))
        hidden = model(torch.tensor([self.tokens]))[0]
        self.inputs: list[Tensor] = []
        self.history: list[KV] = []
        for i in range(1 if mode == "layer0" else drafts):
            # Layer i's rows end where token q+1+i does.
            rows = len(self.tokens) - 1 - i
            self.inputs.append(hidden)
            output, kv = model.mtp[i](embeddings[:, 1 + i :], hidden[:, :rows])
            self.history.append(kv)
            if mode == "chained":
                hidden = output

    def draft(self, known: int) -> list[int]:
        """Drafts for the places ``known`` onwards when the first ``known`` tokens are known."""
        return self.from_one_layer(known) if self.mode == "layer0" else self.from_layers(known)

    def from_layers(self, known: int) -> list[int]:
        """Step i from layer i: recompute only the rows whose token is still a draft, and row p."""
        model, last_row = self.model, known - 2
        tokens = self.tokens[:known]
        previous: Tensor | None = None
        for i, layer in enumerate(list(model.mtp)[: self.drafts]):
            start = max(0, min(last_row, last_row + 1 - i))
            end = last_row + 1
            if self.mode == "chained" and previous is not None:
                # What the previous layer made of drafts goes before its true history.
                end -= previous.shape[1]
                hidden = torch.cat([self.inputs[i][:, start:end], previous], dim=1)
            else:
                hidden = self.inputs[i][:, start:end]
            row_tokens = torch.tensor([tokens[start + 1 + i : last_row + 2 + i]])
            output, _ = layer(model.embed(row_tokens), hidden, start, self.history[i])
            tokens.append(int(model.logits(output[0, -1]).argmax()))
            previous = output
        return tokens[known:]

    def from_one_layer(self, known: int) -> list[int]:
        """All steps from layer 0, each on a row more."""
        model, row = self.model, known - 2
        hidden, kv = self.inputs[0][:, row : row + 1], self.history[0]
        tokens = self.tokens[:known]
        for i in range(self.drafts):
            embeddings = model.embed(torch.tensor([tokens[-1:]]))
            hidden, kv = model.mtp[0](embeddings, hidden, row + i, kv)
            tokens.append(int(model.logits(hidden[0, -1]).argmax()))
        return tokens[known:]


@torch.inference_mode()
def speculate(
    model: MiMo,
    prompt: Sequence[int],
    outputs: int,
    drafts: int = 3,
    mode: str = "exact",
    continuation: Sequence[int] | None = None,
) -> list[Round]:
    """The rounds of greedy speculative decoding of ``outputs`` tokens after ``prompt``.

    The last round's drafts may reach past ``outputs``; they are checked like all others.
    ``continuation`` saves computing it when known: ``greedy(model, prompt, outputs + drafts)``.
    """
    if continuation is None:
        continuation = greedy(model, prompt, outputs + drafts)
    if len(continuation) < outputs + drafts:
        raise ValueError(f"continuation has {len(continuation)} tokens; {outputs + drafts} needed")
    drafter = Drafter(model, [*prompt, *continuation], drafts, mode)
    rounds: list[Round] = []
    index = 1
    while index < outputs:
        proposed = drafter.draft(len(prompt) + index)
        right = 0
        while right < drafts and proposed[right] == continuation[index + right]:
            right += 1
        rounds.append(Round(index, tuple(proposed), right))
        index += right + 1
    return rounds


def acceptance(
    requests: Sequence[Sequence[Round]],
    drafts: int = 3,
    first_output: int = 0,
    end_output: int | None = None,
) -> Acceptance:
    """Acceptance over the rounds of many requests that start at outputs of the given range."""
    chosen = [
        round_
        for rounds in requests
        for round_ in rounds
        if first_output <= round_.output_index
        and (end_output is None or round_.output_index < end_output)
    ]
    return Acceptance(
        tried=tuple(sum(r.accepted >= i for r in chosen) for i in range(drafts)),
        accepted=tuple(sum(r.accepted > i for r in chosen) for i in range(drafts)),
    )
