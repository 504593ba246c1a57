# SPDX-License-Identifier: Apache-2.0
"""What is routed, where to, and why: the values that routing takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_plugin.core.kv_events import Hash

ROLES = ("both", "prefill", "decode", "encode")


@dataclass(frozen=True, slots=True)
class Target:
    """One place that a request can be sent to: a worker, or one data-parallel rank of it.

    Attributes:
        worker: its address.
        rank: data-parallel rank, each with a KV cache of its own; None: the worker has one.
        role: one of ``ROLES``.
        drained: gets nothing new.
    """

    worker: str
    rank: int | None = None
    role: str = "both"
    drained: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role: found {self.role!r}; allowed: {', '.join(ROLES)}")

    @property
    def name(self) -> str:
        """Unique among targets."""
        return self.worker if self.rank is None else f"{self.worker}#{self.rank}"


@dataclass(frozen=True, slots=True)
class Request:
    """What has to be known of a request.

    Attributes:
        id: unique among those in flight.
        hashes: of its prompt's blocks, as the workers make them.
        prompt_tokens: length of the prompt.
        session: the chat that it is a turn of, or None.
        media_keys: of its images and videos.
        kept_tokens: lengths where its worker will keep windows, beside the prompt's end (starts of
            messages, where workers run the feature ``kv``).
    """

    id: str
    hashes: Sequence[Hash]
    prompt_tokens: int
    session: str | None = None
    media_keys: Sequence[str] = ()
    kept_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a target would cost.

    Attributes:
        hit_tokens: of the prompt, that it has or will have.
        reserved: the hit rests on a request on its way there.
        wait_s: until the prefill would begin.
        prefill_s: of what is not hit.
        media_s: of encoding images and videos that others have embeddings of.
        cost: seconds, what it is chosen by; for decodes the tokens in its memory.
        in_bound: False: it has its share of the sessions, and so this new one's hit counts no more
            there than elsewhere.
    """

    target: str
    hit_tokens: int
    reserved: bool
    wait_s: float
    prefill_s: float
    media_s: float
    cost: float
    in_bound: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    Attributes:
        target: name of the target.
        reason: ``only`` (no other could take it), ``cost`` (cheapest), or what decided a tie:
            ``session``, ``prefix`` (most in full attention), ``work`` (given least lately),
            ``chance``; for media ``owner``.
        queue: mean requests in flight per target, the ``q`` of the cost.
        candidates: all that could have taken it, cheapest first.
    """

    target: str
    reason: str
    queue: float
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate that it is."""
        return next(c for c in self.candidates if c.target == self.target)


class NoTargetError(LookupError):
    """No target can take the request: none of the role, or all drained or excluded."""
