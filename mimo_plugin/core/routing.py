# SPDX-License-Identifier: Apache-2.0
"""Which worker gets a request.

The cost of a worker is the time until the request's first token there, plus what its prefill costs
the others: ``wait + (1 + w * q) * T_prefill(uncached)``. ``q`` is the mean number of requests per
worker that wait for their first token: what is computed again delays those behind it, and, as
queues that long do not end soon, as many again that have yet to come (``w``, 2). The hit is what
the worker has or, by requests on their way to it, will have when its turn comes.

Workers whose costs are equal are a tie. A session stays where it was while that is one of them;
else the worker takes it that has most of the prompt in full attention, though it lacks the windows
for a hit: engines learn where prompts part from such misses, and nothing is held twice. Then the
one that was given least work lately, and chance decides among those. For a new
session, the hit on a worker that has ``spread`` times its share of the live sessions counts no more
than the best one elsewhere: or all that share a system prompt would follow the first one.

Media: each key has an owner, by consistent hashing over the workers that are not overloaded; any
other worker costs an encoder run more.

Several routers over the same workers tell each other what they did; the methods ``…_elsewhere``
take that, in any order and more than once, of targets and requests that may not be known here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from random import Random

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.load import Load, Speed
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.ring import HashRing
from mimo_plugin.core.targets import ROLES, Candidate, Decision, NoTargetError, Request, Target

_TIE = 1e-6  # of the cost; below that it is rounding
_RING_POINTS = 256
_RING_TRIES = 16
_MAX_OVER = 10_000


Lookup = Callable[[Sequence[Hash], int], Mapping[str, int]]


class Router:
    """Decides, and keeps what it needs to know for that. Times are the caller's clock, in seconds.

    Args:
        lookup: hits by target name of ``(hashes, max_hit_tokens)``, as
            :meth:`ResidencyIndex.lookup` gives them.
        prefixes: the same for full attention alone (:meth:`ResidencyIndex.full_prefixes`), where
            there are sliding windows.
        reservations: of requests on their way.
        speed: of every target, unless ``set_target`` is given another one.
        random: chance.
        queue_weight: of ``q``; 0 leaves out what a prefill costs others.
        encode_s: of one image or video on a worker that doesn't have its embedding.
        spread: most sessions of a target, and most requests in flight of a media key's owner, as
            a multiple of an even share; >= 1.
        session_ttl_s: how long a session without requests counts as alive.
        max_sessions: remembered; the ones that were silent longest are forgotten.
        reservation_s: how long a request may be on its way before it counts no more, beyond twice
            what was expected.
        grace_s: how long it counts after its first token, until the worker's events tell.
        max_elsewhere: requests of other routers that are kept; the oldest count as done.
    """

    def __init__(
        self,
        lookup: Lookup,
        reservations: Reservations,
        speed: Speed,
        random: Random,
        *,
        prefixes: Lookup | None = None,
        queue_weight: float = 2.0,
        encode_s: float = 0.2,
        spread: float = 1.25,
        session_ttl_s: float = 600.0,
        max_sessions: int = 100_000,
        reservation_s: float = 10.0,
        grace_s: float = 0.5,
        max_elsewhere: int = 100_000,
    ) -> None:
        if spread < 1:
            raise ValueError(f"spread: found {spread}; allowed: >= 1")
        self.targets: dict[str, Target] = {}
        self.loads: dict[str, Load] = {}
        self._speeds: dict[str, Speed] = {}
        self._lookup, self._prefixes, self._reservations = lookup, prefixes, reservations
        self._speed, self._random = speed, random
        self._queue_weight, self._encode_s, self._spread = queue_weight, encode_s, spread
        self._ttl_s, self._max_sessions = session_ttl_s, max_sessions
        self._reservation_s, self._grace_s = reservation_s, grace_s
        # Where a session was last, and when; the one that was silent longest comes first.
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._homes: Counter[str] = Counter()
        self._where: dict[str, tuple[str, ...]] = {}  # of each request in flight
        # Of other routers, oldest first, and those that were over before they were heard of.
        self._elsewhere: dict[str, None] = {}
        self._over: dict[str, None] = {}
        self._max_elsewhere = max_elsewhere
        self._rings: dict[tuple[str, ...], HashRing] = {}

    # Targets

    def set_target(self, target: Target, speed: Speed | None = None) -> None:
        """A target is there, or has changed; its load stays."""
        self.targets[target.name] = target
        self._speeds[target.name] = speed or self._speed
        self.loads.setdefault(target.name, Load())

    def drain(self, worker: str, drained: bool = True) -> None:
        """No rank of the worker gets anything new; what it has goes on."""
        for name, target in self.targets.items():
            if target.worker == worker:
                self.targets[name] = replace(target, drained=drained)

    def remove_target(self, name: str) -> None:
        """It is gone, with its load and what was on its way to it."""
        self.targets.pop(name, None)
        self.loads.pop(name, None)
        self._speeds.pop(name, None)
        self._reservations.release_target(name)
        for session in [s for s, (home, _) in self._sessions.items() if home == name]:
            self._forget_session(session)

    def sessions_of(self, name: str) -> int:
        """Sessions that were last sent to the target."""
        return self._homes[name]

    # Requests

    def choose(
        self,
        request: Request,
        now_s: float,
        *,
        role: str = "prefill",
        exclude: Iterable[str] = (),
    ) -> Decision:
        """Find the target of a request, without sending it there (see :meth:`sent`).

        Args:
            role: ``prefill``, ``decode`` or ``encode``: what it has to be done there; targets of
                role ``both`` take the first two.
            exclude: names that must not be chosen: those that failed it.

        Raises:
            NoTargetError: nobody can take it.
        """
        names = self._eligible(role, frozenset(exclude))
        queue = sum(self.loads[name].in_flight for name in names) / len(names)
        if role == "encode":
            return self._encoder(request, names, queue, now_s)
        limit = max(0, request.prompt_tokens - 1)
        resident = self._lookup(request.hashes, limit)
        coming = self._reservations.lookup(request.hashes, limit, now_s)
        hits = {name: max(resident.get(name, 0), coming.get(name, 0)) for name in names}
        bounded = self._bounded(request, names, now_s)
        most = max(hits[name] for name in bounded)
        media_s = self._media_s(request, names)
        candidates = []
        for name in names:
            load, speed, hit = self.loads[name], self._speeds[name], hits[name]
            wait_s, prefill_s = load.wait_s(now_s), speed.prefill_s(hit, request.prompt_tokens)
            if role == "decode":  # memory is what decodes compete for
                cost = float(load.decode_tokens)
            else:
                counted_s = prefill_s
                if name not in bounded:
                    counted_s = speed.prefill_s(min(hit, most), request.prompt_tokens)
                cost = wait_s + media_s[name] + (1 + self._queue_weight * queue) * counted_s
            reserved = coming.get(name, 0) > resident.get(name, 0)
            within = name in bounded
            candidates.append(
                Candidate(name, hit, reserved, wait_s, prefill_s, media_s[name], cost, within)
            )
        candidates.sort(key=lambda c: (c.cost, not c.in_bound))
        name, reason = self._pick(request, candidates, now_s)
        return Decision(name, reason, queue, tuple(candidates))

    def sent(self, request: Request, decision: Decision, now_s: float) -> None:
        """The request goes to the target: it is load there, and its prefix is on its way."""
        chosen = decision.chosen
        prefill_s = chosen.prefill_s + chosen.media_s
        self._sent(request, decision.target, prefill_s, chosen.wait_s + prefill_s, now_s)
        if request.session is not None:
            self._settle(request.session, decision.target, now_s)

    def first_token(self, request: Request, now_s: float, decode_on: str | None = None) -> None:
        """Its prefill is done; it decodes at the target ``decode_on``, or where it is."""
        self._first_token(request.id, request.prompt_tokens, now_s, decode_on)

    def done(self, request: Request, now_s: float, *, failed: bool = False) -> None:
        """It is over. After a failure its prefix may never have come to be."""
        self._done(request.id, now_s, failed)

    # What other routers did

    def sent_elsewhere(
        self, request: Request, target: str, prefill_s: float, expected_s: float, at_s: float
    ) -> None:
        """Another router sent a request to a target.

        Args:
            request: its ``id`` begins with what names that router (see :meth:`release_process`).
            target: its name; it may become known here later.
            prefill_s: what its first token takes there, without waiting.
            expected_s: the same with waiting.
            at_s: when it was sent.
        """
        if target in self._where.get(request.id, ()):
            return
        if request.id in self._over:
            del self._over[request.id]
            return
        self._elsewhere[request.id] = None
        while len(self._elsewhere) > self._max_elsewhere:
            self._done(next(iter(self._elsewhere)), at_s, failed=False)
        # A target that isn't known is nobody's choice, but its load is there when it is added.
        self.loads.setdefault(target, Load())
        self._sent(request, target, prefill_s, expected_s, at_s)
        if request.session is not None:
            self.session_elsewhere(request.session, target, at_s)

    def first_token_elsewhere(
        self, request_id: str, prompt_tokens: int, at_s: float, decode_on: str | None = None
    ) -> None:
        """The first token came of what another router sent."""
        if request_id in self._elsewhere:
            self._first_token(request_id, prompt_tokens, at_s, decode_on)

    def done_elsewhere(self, request_id: str, at_s: float, *, failed: bool = False) -> None:
        """What another router sent is over."""
        if request_id in self._elsewhere:
            self._done(request_id, at_s, failed)
        else:
            self._over[request_id] = None
            if len(self._over) > _MAX_OVER:
                del self._over[next(iter(self._over))]

    def session_elsewhere(self, session: str, target: str, at_s: float) -> None:
        """A session was at a target then; what is known of later counts more."""
        if self._sessions.get(session, ("", -inf))[1] <= at_s:
            self._settle(session, target, at_s)

    def release_process(self, prefix: str, now_s: float) -> None:
        """A router is gone, with all that it had sent: ids that begin with ``prefix``."""
        for request_id in [r for r in self._elsewhere if r.startswith(prefix)]:
            self._done(request_id, now_s, failed=True)

    def sessions(self) -> list[tuple[str, str, float]]:
        """Name, target and time of each session that is remembered, about oldest first."""
        return [(session, home, at_s) for session, (home, at_s) in self._sessions.items()]

    # What is the same for all requests

    def _sent(
        self, request: Request, target: str, prefill_s: float, expected_s: float, at_s: float
    ) -> None:
        self._where[request.id] = (*self._where.get(request.id, ()), target)
        self.loads[target].start(request.id, prefill_s, at_s)
        expires_s = at_s + 2 * expected_s + self._reservation_s
        self._reservations.add(
            request.id,
            target,
            request.hashes,
            expires_s,
            request.kept_tokens,
            prompt_tokens=request.prompt_tokens,
        )

    def _first_token(
        self, request_id: str, prompt_tokens: int, at_s: float, decode_on: str | None
    ) -> None:
        targets = self._where.get(request_id, ())
        for name in targets:
            if name in self.loads:
                self.loads[name].prefilled(request_id, at_s)
        self._reservations.expire(request_id, at_s + self._grace_s)
        decoder = decode_on or (targets[-1] if targets else None)
        if decoder in self.loads:
            self.loads[decoder].decode(request_id, prompt_tokens)
            self._where[request_id] = (*targets, decoder)

    def _done(self, request_id: str, at_s: float, failed: bool) -> None:
        self._elsewhere.pop(request_id, None)
        for name in self._where.pop(request_id, ()):
            if name in self.loads:
                load = self.loads[name]
                load.end(request_id, at_s)
                if name not in self.targets and not load.prefills and not load.decodes:
                    del self.loads[name]
        if failed:
            self._reservations.release(request_id)
        else:
            self._reservations.expire(request_id, at_s + self._grace_s)

    def _settle(self, session: str, target: str, at_s: float) -> None:
        self._forget_session(session)
        self._sessions[session] = target, at_s
        self._homes[target] += 1
        while len(self._sessions) > self._max_sessions:
            self._forget_session(next(iter(self._sessions)))

    # Rules

    def _eligible(self, role: str, exclude: frozenset[str]) -> list[str]:
        if role not in ROLES or role == "both":
            raise ValueError(f"role: found {role!r}; allowed: {', '.join(ROLES[1:])}")
        roles = {role} if role == "encode" else {role, "both"}
        names = [
            name
            for name, target in self.targets.items()
            if target.role in roles and not target.drained and name not in exclude
        ]
        if not names:
            raise NoTargetError(
                f"no target for {role}: {len(self.targets)} known, "
                f"{sum(t.drained for t in self.targets.values())} drained, {len(exclude)} excluded"
            )
        return names

    def _bounded(self, request: Request, names: list[str], now_s: float) -> frozenset[str]:
        """Targets that may take one more session; all, where the request opens none."""
        while self._sessions:
            oldest, (_, seen_s) = next(iter(self._sessions.items()))
            if seen_s > now_s - self._ttl_s:
                break
            self._forget_session(oldest)
        session = request.session
        if session is None or self._sessions.get(session, ("", 0.0))[0] in names:
            return frozenset(names)
        live = sum(self._homes[name] for name in names)
        most = ceil(self._spread * (live + 1) / len(names))
        return frozenset(name for name in names if self._homes[name] < most)

    def _pick(self, request: Request, candidates: list[Candidate], now_s: float) -> tuple[str, str]:
        best = candidates[0]
        if len(candidates) == 1:
            return best.target, "only"
        worst = best.cost + _TIE * max(1.0, best.cost)
        within = [c for c in candidates if c.cost <= worst]
        tied = [c.target for c in within if c.in_bound] or [c.target for c in within]
        if len(tied) == 1:
            return tied[0], "cost"
        home, _ = self._sessions.get(request.session or "", ("", 0.0))
        if home in tied:
            return home, "session"
        if self._prefixes is not None:
            found = self._prefixes(request.hashes, max(0, request.prompt_tokens - 1))
            most = max(found.get(name, 0) for name in tied)
            longest = [name for name in tied if found.get(name, 0) == most]
            if len(longest) == 1:
                return longest[0], "prefix"
            tied = longest
        work = {name: self.loads[name].recent_work_s(now_s) for name in tied}
        least = min(work.values()) + _TIE
        idle = [name for name in tied if work[name] <= least]
        if len(idle) == 1:
            return idle[0], "work"
        return self._random.choice(idle), "chance"

    def _media_s(self, request: Request, names: list[str]) -> dict[str, float]:
        found = dict.fromkeys(names, 0.0)
        for key in request.media_keys:
            owner = self._owner(key, names)
            for name in names:
                if name != owner:
                    found[name] += self._encode_s
        return found

    def _owner(self, key: str, names: list[str]) -> str:
        """Whose a media key is: by the ring, but nobody is given much more than others have."""
        ring = self._ring(tuple(sorted(names)))
        most = ceil(self._spread * (sum(self.loads[n].in_flight for n in names) + 1) / len(names))
        for attempt in range(_RING_TRIES):
            owner = ring.store_of(f"{key}\0{attempt}" if attempt else key)
            if self.loads[owner].in_flight < most:
                return owner
        return min(names, key=lambda name: (self.loads[name].in_flight, name))

    def _ring(self, names: tuple[str, ...]) -> HashRing:
        ring = self._rings.get(names)
        if ring is None:
            if len(self._rings) >= 8:  # sets of targets that were drained or excluded
                self._rings.clear()
            ring = self._rings[names] = HashRing(dict.fromkeys(names, _RING_POINTS))
        return ring

    def _encoder(self, request: Request, names: list[str], queue: float, now_s: float) -> Decision:
        owner = self._owner(request.media_keys[0] if request.media_keys else request.id, names)
        media_s = self._encode_s * len(request.media_keys)
        candidates = []
        for name in names:
            wait_s = self.loads[name].wait_s(now_s)
            candidates.append(Candidate(name, 0, False, wait_s, 0.0, media_s, wait_s + media_s))
        candidates.sort(key=lambda c: c.cost)
        return Decision(owner, "only" if len(names) == 1 else "owner", queue, tuple(candidates))

    def _forget_session(self, session: str) -> None:
        home = self._sessions.pop(session, None)
        if home is not None:
            self._homes[home[0]] -= 1
