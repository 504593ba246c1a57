# SPDX-License-Identifier: Apache-2.0
"""Where SWA checkpoints are kept.

A checkpoint is one window of SWA blocks in every SWA group, ending at an aligned token position.
Positions come in classes; where several classes meet at one position the strongest names it.

* ``junction``   where two requests were seen to part.
* ``boundary``   start of a chat message; the first one ends the system prompt.
* ``turn_end``   end of a request's output, when it finishes, is preempted or aborted.
* ``prompt_end`` last position that a replay of the prompt can resume at.
* ``tail``       one alignment unit before a prompt end or turn end: an edit of the last words
                 then costs one unit, not everything.
* ``ladder``     rungs whose spacing grows with the position; they bound the worst loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TURN_END = "turn_end"
BOUNDARY = "boundary"
JUNCTION = "junction"
PROMPT_END = "prompt_end"
TAIL = "tail"
LADDER = "ladder"
NONE = "none"

#: Strongest first: where two classes meet at one position the earlier one names the checkpoint,
#: and the later ones are the first to be given up.
CLASSES: tuple[str, ...] = (JUNCTION, BOUNDARY, TURN_END, PROMPT_END, TAIL, LADDER)
STRENGTH: dict[str, int] = {name: len(CLASSES) - i for i, name in enumerate(CLASSES)} | {NONE: 0}


@dataclass(slots=True)
class Ladder:
    """Rungs at ``p[k+1] = p[k] + max(min_tokens, growth * p[k])``, rounded up to the alignment.

    Rungs depend on the position alone, so requests that share a prefix share its rungs, and
    ``full_hit - hit <= max(min_tokens, growth * full_hit) + alignment`` while they are resident.
    """

    min_tokens: int
    growth: float
    alignment_tokens: int
    _rungs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.min_tokens <= 0 or self.alignment_tokens <= 0 or not 0 < self.growth <= 1:
            raise ValueError(
                f"ladder needs min_tokens > 0, alignment_tokens > 0 and 0 < growth <= 1, got "
                f"{self.min_tokens}, {self.alignment_tokens}, {self.growth}"
            )

    def between(self, after_tokens: int, upto_tokens: int) -> Sequence[int]:
        """Rungs in ``(after_tokens, upto_tokens]``."""
        rungs = self._rungs
        while not rungs or rungs[-1] < upto_tokens:
            last = rungs[-1] if rungs else 0
            step = max(self.min_tokens, int(self.growth * last))
            rungs.append(-(-(last + step) // self.alignment_tokens) * self.alignment_tokens)
        return rungs[bisect_right(rungs, after_tokens) : bisect_right(rungs, upto_tokens)]

    def max_loss_tokens(self, full_hit_tokens: int) -> int:
        """Stated worst loss of a hit against the full-attention hit, rungs being resident."""
        return max(self.min_tokens, int(self.growth * full_hit_tokens)) + self.alignment_tokens


def find_message_starts(
    token_ids: Sequence[int], start_ids: frozenset[int], first: int, stop: int
) -> list[int]:
    """Positions in ``[first, stop)`` that hold one of ``start_ids`` (a chat message begins there).

    ``token_ids`` only needs ``index(value, first, stop)``, which runs at C speed on a list.
    """
    found: list[int] = []
    for token in start_ids:
        at = first
        while at < stop:
            try:
                at = token_ids.index(token, at, stop)
            except ValueError:
                break
            found.append(at)
            at += 1
    found.sort()
    return found


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Decides the checkpoint positions of one model's requests.

    Args:
        alignment_tokens: hits are multiples of this (the engine's scheduler block size).
        lookahead_tokens: tokens that must be cached past a checkpoint (draft groups), else 0.
        classes: the classes in use, a subset of :data:`CLASSES`.
        ladder: the rungs, used when ``ladder`` is among the classes.
    """

    alignment_tokens: int
    lookahead_tokens: int
    classes: frozenset[str]
    ladder: Ladder

    def align(self, tokens: int) -> int:
        """The aligned position at or below ``tokens``; 0 for negative positions."""
        return max(0, tokens // self.alignment_tokens * self.alignment_tokens)

    def prompt_ends(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Positions at which a resend, and an extension, of the prompt can resume.

        A resend is capped at ``num_prompt_tokens - 1`` (the last token is computed again for its
        logits); an extension reaches the last aligned block. They differ on aligned prompts only.
        """
        ends = {
            self.align(num_prompt_tokens - 1 - self.lookahead_tokens),
            self.align(num_prompt_tokens - self.lookahead_tokens),
        }
        return tuple(sorted(ends - {0}))

    def thin_boundaries(self, message_starts: Sequence[int], hit_tokens: int) -> list[int]:
        """Message starts worth a checkpoint among those found in one stretch of a prompt.

        The first one past the hit (for a cold prompt the end of the system prompt) and the last
        one are kept; those between must be a ladder step apart, so that a long history that is
        computed in one go doesn't fill the cache with checkpoints that nobody resumes from.
        """
        kept: list[int] = []
        for position, start in enumerate(message_starts):
            if self.align(start) <= 0:
                continue
            ladder = self.ladder
            step = max(ladder.min_tokens, int(ladder.growth * start))
            last = position == len(message_starts) - 1
            if not kept or last or start - kept[-1] >= step:
                kept.append(start)
        return kept

    def plan(
        self,
        after_tokens: int,
        upto_tokens: int,
        num_prompt_tokens: int,
        junctions: Iterable[int] = (),
        message_starts: Iterable[int] = (),
    ) -> list[tuple[int, str]]:
        """Checkpoints in ``(after_tokens, upto_tokens]``, ascending, one class per position.

        Args:
            after_tokens: aligned position up to which checkpoints were already decided.
            upto_tokens: aligned position up to which KV (and look-ahead) is now cached.
            num_prompt_tokens: length of the request's prompt.
            junctions: token positions where this request was seen to part from a cached one.
            message_starts: token positions of chat message starts in the range of interest.
        """
        if upto_tokens <= after_tokens:
            return []
        best: dict[int, str] = {}

        def add(tokens: int, cls: str) -> None:
            if after_tokens < tokens <= upto_tokens and (
                STRENGTH[cls] > STRENGTH[best.get(tokens, NONE)]
            ):
                best[tokens] = cls

        classes = self.classes
        if LADDER in classes:
            for rung in self.ladder.between(after_tokens, upto_tokens):
                add(rung, LADDER)
        ends = self.prompt_ends(num_prompt_tokens)
        if TAIL in classes and ends:
            add(ends[0] - self.alignment_tokens, TAIL)
        if PROMPT_END in classes:
            for end in ends:
                add(end, PROMPT_END)
        if BOUNDARY in classes:
            for start in message_starts:
                add(self.align(start), BOUNDARY)
        if JUNCTION in classes:
            for tokens in junctions:
                add(self.align(tokens), JUNCTION)
                if self.lookahead_tokens:
                    # A sibling that parts right after the junction cannot use the block past it.
                    add(self.align(tokens - self.lookahead_tokens), JUNCTION)
        return sorted(best.items())
