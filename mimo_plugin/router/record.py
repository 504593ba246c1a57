# SPDX-License-Identifier: Apache-2.0
"""What was decided lately, for people to read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.targets import Decision

KEPT = 1000
_CANDIDATES = 64  # shown of one decision


@dataclass(slots=True, eq=False)
class Record:
    """One request.

    Attributes:
        time_s: Unix time at which it came.
        request: its id.
        predicted_hit_tokens: of the chosen target.
        actual_hit_tokens: what the worker said; None: it did not.
        ttft_s: until the first byte of a streamed answer; None: not streamed, or none came.
        status: of the answer, 0 while there is none.
    """

    time_s: float
    request: str
    path: str
    model: str | None
    session: str | None
    prompt_tokens: int
    decision: Decision | None = None
    actual_hit_tokens: int | None = None
    ttft_s: float | None = None
    status: int = 0
    retries: int = 0

    @property
    def predicted_hit_tokens(self) -> int:
        """What the chosen target was thought to have of the prompt."""
        return self.decision.chosen.hit_tokens if self.decision is not None else 0

    def as_dict(self) -> dict[str, Any]:
        """For ``/decisions``."""
        decision = self.decision
        candidates = decision.candidates if decision is not None else ()
        return {
            "time_s": self.time_s,
            "request": self.request,
            "path": self.path,
            "model": self.model,
            "session": self.session,
            "prompt_tokens": self.prompt_tokens,
            "target": decision.target if decision is not None else None,
            "reason": decision.reason if decision is not None else None,
            "hit_tokens": self.predicted_hit_tokens,
            "predicted_hit_tokens": self.predicted_hit_tokens,
            "actual_hit_tokens": self.actual_hit_tokens,
            "queue": decision.queue if decision is not None else 0.0,
            "ttft_s": self.ttft_s,
            "status": self.status,
            "retries": self.retries,
            "candidates": [
                {
                    "target": c.target,
                    "hit_tokens": c.hit_tokens,
                    "reserved": c.reserved,
                    "wait_s": c.wait_s,
                    "prefill_s": c.prefill_s,
                    "media_s": c.media_s,
                    "cost": c.cost,
                    "in_bound": c.in_bound,
                }
                for c in candidates[:_CANDIDATES]
            ],
        }


class Records:
    """The last ones, the newest first to be read."""

    def __init__(self, kept: int = KEPT) -> None:
        self._all: deque[Record] = deque(maxlen=kept)

    def add(self, record: Record) -> None:
        """It goes on changing until its request is over."""
        self._all.append(record)

    def last(self, limit: int) -> list[dict[str, Any]]:
        """The newest ``limit``, newest first."""
        count = len(self._all)
        return [self._all[count - 1 - i].as_dict() for i in range(min(limit, count))]
