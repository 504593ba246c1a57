# SPDX-License-Identifier: Apache-2.0
"""One look-up over workers that tell everything, some of it, or nothing.

Exact targets (vLLM with events) are answered by
:class:`~mimo_plugin.core.named_index.NamedIndex`, all others by
:class:`~mimo_plugin.core.approximate.ApproximateIndex`. Targets of one kind and one KV layout share
an index, so that a look-up takes one pass for all of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from mimo_plugin.core.approximate import ApproximateIndex
from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.core.sglang_names import SglangIndex
from mimo_plugin.core.targets import Request

EVENTS, BELIEVED, NONE = "events", "believed", "none"


@dataclass(frozen=True, slots=True)
class Exactness:
    """Where answers about a target come from.

    Attributes:
        full: ``events``, or ``believed``.
        windows: the same, or ``none`` where the model has no sliding windows.
    """

    full: str
    windows: str

    @property
    def exact(self) -> bool:
        """Whether all of it comes from events."""
        return BELIEVED not in (self.full, self.windows)


@dataclass(slots=True)
class _Sent:
    target: str
    now_s: float
    hit_tokens: int
    full_tokens: int


class Lookups:
    """Hits on every target, to be given to :class:`~mimo_plugin.core.routing.Router`.

        lookups = Lookups(hash_block_tokens=16)
        lookups.add_exact("http://a:8000#0")                      # vLLM, events on
        lookups.add_approximate("http://b:30000", Cache(told=True, …), block_tokens=64,
                                window_tokens=128)                # SGLang, events on
        lookups.add_approximate("http://c:8000", Cache(capacity_tokens=200_000))  # no events
        router = Router(lookups.lookup, …, prefixes=lookups.prefixes)
        EventReader(name, endpoint, replay, lookups.index(name), 16)

    Each request is told to :meth:`sent`, :meth:`first_token` and :meth:`done`, beside the router's
    methods of the same names; they do nothing for exact targets.

    Args:
        hash_block_tokens: tokens that each of a prompt's hashes stands for.
        make_exact: a new index for exact targets of one layout; None: a ``NamedIndex`` that takes
            the groups as they come.
        clock: seconds; ``now_s`` everywhere is of this clock.
        max_in_flight: requests remembered until they are done; the oldest are forgotten.
    """

    def __init__(
        self,
        hash_block_tokens: int,
        *,
        make_exact: Callable[[], NamedIndex] | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_in_flight: int = 100_000,
    ) -> None:
        self.hash_block_tokens = hash_block_tokens
        self._make_exact = make_exact or (lambda: NamedIndex(hash_block_tokens))
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._indexes: dict[Hashable, NamedIndex] = {}
        self._of: dict[str, tuple[Hashable, NamedIndex]] = {}
        self._exactness: dict[str, Exactness] = {}
        self._sent: OrderedDict[str, _Sent] = OrderedDict()

    # Targets

    def add_exact(self, target: str, layout: Hashable = None) -> NamedIndex:
        """A target whose events tell everything.

        Args:
            target: its name.
            layout: the same for targets whose KV cache groups are the same.
        """
        index = self._join(target, ("exact", layout), self._make_exact)
        self._exactness[target] = Exactness(EVENTS, EVENTS)
        return index

    def add_approximate(
        self,
        target: str,
        cache: Cache,
        *,
        block_tokens: int | None = None,
        window_tokens: int | None = None,
    ) -> SglangIndex:
        """A target of which something must be believed; again, to change what is known of it.

        Args:
            target: its name.
            cache: what is known of its cache.
            block_tokens: of its blocks; a multiple of ``hash_block_tokens``, None: that.
            window_tokens: sliding window of the model, the query's own token included; None: it
                has none.
        """

        def make() -> NamedIndex:
            return SglangIndex(
                self.hash_block_tokens,
                block_tokens=block_tokens,
                window_tokens=window_tokens,
                clock=self._clock,
            )

        block_tokens = block_tokens or self.hash_block_tokens
        index = self._join(target, ("believed", block_tokens, window_tokens), make)
        assert isinstance(index, SglangIndex)
        index.set_target(target, cache)
        windows = NONE if window_tokens is None else BELIEVED
        self._exactness[target] = Exactness(EVENTS if cache.told else BELIEVED, windows)
        return index

    def remove(self, target: str) -> None:
        """The target does not exist any more."""
        _, index = self._of.pop(target, (None, None))
        if index is not None:
            index.remove(target)
        self._exactness.pop(target, None)
        for request in [r for r, sent in self._sent.items() if sent.target == target]:
            del self._sent[request]

    def index(self, target: str) -> NamedIndex:
        """Where the target's events go."""
        return self._of[target][1]

    def exactness(self, target: str) -> Exactness:
        """How far answers about the target can be trusted."""
        return self._exactness[target]

    def _join(self, target: str, key: Hashable, make: Callable[[], NamedIndex]) -> NamedIndex:
        old = self._of.get(target)
        if old is not None and old[0] != key:
            self.remove(target)
        if key not in self._indexes:
            self._indexes[key] = make()
        index = self._indexes[key]
        self._of[target] = key, index
        return index

    # Look-up

    def lookup(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        """What a prompt would hit on each target, in tokens; those not named hit nothing."""
        found: dict[str, int] = {}
        for index in self._indexes.values():
            found.update(index.lookup(hashes, max_hit_tokens))
        return found

    def prefixes(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        """The same for full attention alone."""
        found: dict[str, int] = {}
        for index in self._indexes.values():
            found.update(index.full_prefixes(hashes, max_hit_tokens))
        return found

    # Requests

    def sent(self, request: Request, target: str, now_s: float) -> None:
        """The request goes to the target."""
        index = self._approximate(target)
        if index is None:
            return
        limit = max(0, request.prompt_tokens - 1)
        self._sent[request.id] = _Sent(
            target,
            now_s,
            index.lookup(request.hashes, limit).get(target, 0),
            index.full_prefixes(request.hashes, limit).get(target, 0),
        )
        while len(self._sent) > self._max_in_flight:
            self._sent.popitem(last=False)

    def first_token(self, request: Request, now_s: float) -> None:
        """The request's prefill is done."""
        sent = self._sent.get(request.id)
        index = self._approximate(sent.target) if sent is not None else None
        if sent is not None and index is not None:
            index.record(
                sent.target,
                request.hashes,
                now_s,
                prompt_tokens=request.prompt_tokens,
                hit_tokens=sent.hit_tokens,
                full_tokens=sent.full_tokens,
                kept_tokens=request.kept_tokens,
            )

    def done(
        self,
        request: Request,
        now_s: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
    ) -> int | None:
        """The request is over, or has failed (then without ``cached_tokens``).

        Args:
            cached_tokens: what its answer says was a hit; None: it doesn't say.
            output_tokens: length of its output.

        Returns:
            What was predicted when it was sent; None for exact targets.
        """
        sent = self._sent.pop(request.id, None)
        index = self._approximate(sent.target) if sent is not None else None
        if sent is None or index is None:
            return None
        if cached_tokens is not None:
            index.noted(sent.hit_tokens, cached_tokens)
            index.correct(
                sent.target,
                request.hashes,
                cached_tokens,
                now_s,
                since_s=sent.now_s,
                prompt_tokens=request.prompt_tokens,
                full_tokens=sent.full_tokens,
                kept_tokens=request.kept_tokens,
                output_tokens=output_tokens,
            )
        return sent.hit_tokens

    def _approximate(self, target: str) -> ApproximateIndex | None:
        index = self._of.get(target, (None, None))[1]
        return index if isinstance(index, ApproximateIndex) else None
