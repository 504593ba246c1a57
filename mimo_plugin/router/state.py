# SPDX-License-Identifier: Apache-2.0
"""What router processes over the same workers tell each other, so that they decide as one.

A process publishes each change right after it has made it in its own
:class:`~mimo_plugin.core.routing.Router`; a :class:`Listener` takes the changes of the others. With
:class:`MemoryState` there are no others.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Decision, Request
from mimo_plugin.errors import setting_error


class Sent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request goes to a target.

    Attributes:
        id: of the request, unique within its process.
        target: its name.
        prompt_tokens: length of the prompt.
        prefill_s: of what is not cached, without waiting.
        expected_s: until its first token.
        hash_kind: of ``hashes``, see :func:`pack_hashes`.
        hashes: packed.
        session: see :class:`~mimo_plugin.core.targets.Request`.
        kept_tokens: the same.
    """

    id: str
    target: str
    prompt_tokens: int
    prefill_s: float
    expected_s: float
    hash_kind: str
    hashes: bytes
    session: str | None = None
    kept_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, decision: Decision) -> Sent:
        """What the router's own ``sent(request, decision, …)`` says."""
        chosen = decision.chosen
        prefill_s = chosen.prefill_s + chosen.media_s
        return cls(
            request.id,
            decision.target,
            request.prompt_tokens,
            prefill_s,
            chosen.wait_s + prefill_s,
            *pack_hashes(request.hashes),
            request.session,
            tuple(request.kept_tokens),
        )


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Its first token came; it decodes at ``decode_on``, or where it was sent."""

    id: str
    prompt_tokens: int
    decode_on: str | None = None


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It is over."""

    id: str
    failed: bool = False


class WorkerChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker was added, drained, taken back or removed while the routers ran.

    Attributes:
        url: of the worker.
        settings: as ``--worker`` takes them; they are kept in Redis, so there is no secret in them.
        drained: gets nothing new.
        removed: is gone.
        added: at run time, not on a command line: a router that starts later has it too.
        at_us: set by the state: the later one of two changes counts.
        by: set by the state: the process.
    """

    url: str
    settings: dict[str, str] = {}
    drained: bool = False
    removed: bool = False
    added: bool = False
    at_us: int = 0
    by: str = ""


Change: TypeAlias = Sent | FirstToken | Done | WorkerChanged


def pack_hashes(hashes: Sequence[Hash]) -> tuple[str, bytes]:
    """Hashes of blocks for the wire, all of one kind and size.

    Returns:
        The kind, ``Q`` or ``q`` as in ``array`` for integers or the size of each for bytes, and
        the hashes one after the other; integers are little-endian.

    Raises:
        ValueError: they are of several kinds or sizes, or integers of more than 64 bits.
    """
    for kind in "Qq":
        try:
            packed = array(kind, hashes)  # type: ignore[type-var]
        except (OverflowError, TypeError):
            continue
        if sys.byteorder == "big":
            packed.byteswap()
        return kind, packed.tobytes()
    sizes = {len(h) if isinstance(h, bytes) else 0 for h in hashes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError("hashes: found several kinds or sizes; allowed: one of int64 or bytes")
    return str(sizes.pop()), b"".join(hashes)  # type: ignore[arg-type]


def unpack_hashes(kind: str, packed: bytes) -> Sequence[Hash]:
    """What :func:`pack_hashes` packed; for integers a view of the bytes.

    Raises:
        ValueError: it is nothing that it makes.
    """
    size = int(kind) if kind.isdecimal() else 8 if kind in ("Q", "q") else 0
    if not size or len(packed) % size:
        raise ValueError(f"packed hashes: found kind {kind!r}, {len(packed)} bytes")
    if kind.isdecimal():
        return [packed[start : start + size] for start in range(0, len(packed), size)]
    if sys.byteorder == "big":
        swapped = array(kind, packed)
        swapped.byteswap()
        packed = swapped.tobytes()
    return memoryview(packed).cast(kind)  # type: ignore[call-overload, no-any-return]


class Listener(Protocol):
    """Takes what other processes did. Times are those of the clock that the state was given."""

    def changed(self, process: str, change: Sent | FirstToken | Done, at_s: float) -> None:
        """Of one process in its order, each change once."""

    def left(self, process: str) -> None:
        """A process is gone, or has not been heard of for long: what it sent counts no more."""

    def worker_changed(self, change: WorkerChanged) -> None:
        """A worker that may be known here or not: when it is not, and is not removed, add it."""

    def session(self, session: str, target: str, at_s: float) -> None:
        """Where a session was, and when; may be older than what is known."""

    def sessions(self) -> Iterable[tuple[str, str, float]]:
        """Name, target and time of all sessions that are known here."""


class RouterListener:
    """Gives a router what the others did.

    Args:
        router: takes it.
        on_worker: called with changes of workers.
        clock: what the router's times are of.
    """

    def __init__(
        self,
        router: Router,
        on_worker: Callable[[WorkerChanged], None],
        clock: Callable[[], float],
    ) -> None:
        self._router, self._on_worker, self._clock = router, on_worker, clock

    def changed(self, process: str, change: Sent | FirstToken | Done, at_s: float) -> None:
        """See :class:`Listener`."""
        request_id = f"{process}/{change.id}"
        if isinstance(change, Sent):
            request = Request(
                request_id,
                unpack_hashes(change.hash_kind, change.hashes),
                change.prompt_tokens,
                change.session,
                kept_tokens=change.kept_tokens,
            )
            self._router.sent_elsewhere(
                request, change.target, change.prefill_s, change.expected_s, at_s
            )
        elif isinstance(change, FirstToken):
            self._router.first_token_elsewhere(
                request_id, change.prompt_tokens, at_s, change.decode_on
            )
        else:
            self._router.done_elsewhere(request_id, at_s, failed=change.failed)

    def left(self, process: str) -> None:
        """See :class:`Listener`."""
        self._router.release_process(f"{process}/", self._clock())

    def worker_changed(self, change: WorkerChanged) -> None:
        """See :class:`Listener`."""
        self._on_worker(change)

    def session(self, session: str, target: str, at_s: float) -> None:
        """See :class:`Listener`."""
        self._router.session_elsewhere(session, target, at_s)

    def sessions(self) -> Iterable[tuple[str, str, float]]:
        """See :class:`Listener`."""
        return self._router.sessions()


class SharedState(Protocol):
    """What a router process shares with the others.

    Attributes:
        process: name of this process.
    """

    process: str

    async def start(self, listener: Listener, given: Mapping[str, dict[str, str]]) -> None:
        """Take part.

        Args:
            listener: is called in the event loop's thread, first for what was kept, before this
                returns.
            given: settings by URL of the workers on this process's command line: they exist
                whatever was kept.

        Raises:
            MimoError: it can't be reached now; one line.
        """

    def publish(self, change: Change) -> None:
        """Tell the others. It takes microseconds, and never waits or raises."""

    async def save_snapshot(self, target: str, data: bytes) -> bool:
        """Keep what a target holds; False: another process does that, or it can't be kept."""

    async def load_snapshot(self, target: str) -> bytes | None:
        """What was kept last of a target, if it was not long ago."""

    @property
    def status(self) -> dict[str, Any]:
        """For metrics and people.

        ``kind`` (``memory`` or ``redis``), ``connected``, ``queue`` and ``queue_bytes`` (changes
        that wait to be sent), ``dropped`` (changes that others learn late, from what is in flight),
        ``last_error``, ``lag_s`` (age of the last change when it came here), ``peers``,
        ``published``, ``received``, ``decode_errors``, ``reloads`` (of what a peer has in flight),
        ``reconnects``, ``open`` (own requests in flight).
        """

    async def close(self) -> None:
        """Say goodbye; the others drop what this process had in flight."""


_COUNTS = (
    "queue",
    "queue_bytes",
    "dropped",
    "peers",
    "received",
    "decode_errors",
    "reloads",
    "reconnects",
    "open",
)


class MemoryState:
    """One process alone; snapshots last as long as it does."""

    process = "memory"

    def __init__(self) -> None:
        self._snapshots: dict[str, bytes] = {}
        self._published = 0

    async def start(self, listener: Listener, given: Mapping[str, dict[str, str]]) -> None:
        """Nothing was kept."""

    def publish(self, change: Change) -> None:
        """Nobody listens."""
        self._published += 1

    async def save_snapshot(self, target: str, data: bytes) -> bool:
        """See :class:`SharedState`."""
        self._snapshots[target] = data
        return True

    async def load_snapshot(self, target: str) -> bytes | None:
        """See :class:`SharedState`."""
        return self._snapshots.get(target)

    @property
    def status(self) -> dict[str, Any]:
        """See :class:`SharedState`."""
        return dict.fromkeys(_COUNTS, 0) | {
            "kind": "memory",
            "connected": True,
            "last_error": "",
            "lag_s": 0.0,
            "published": self._published,
        }

    async def close(self) -> None:
        """See :class:`SharedState`."""


def open_state(url: str, clock: Callable[[], float]) -> SharedState:
    """The state that ``--state`` names.

    Args:
        url: ``memory``, or ``redis://[[user]:password@]host[:port][/db][?namespace=NAME]``,
            ``rediss://…`` (TLS) or ``unix://path``; more options as redis-py takes them.
        clock: what times are of, ``time.monotonic`` say.

    Raises:
        ConfigError: it is none of these.
        FeatureUnavailable: no client library.
    """
    if url == "memory":
        return MemoryState()
    if url.split("://")[0] in ("redis", "rediss", "unix"):
        from mimo_plugin.router.state_redis import RedisState

        return RedisState(url, clock=clock)
    raise setting_error(
        "--state",
        url if "@" not in url else "…@" + url.rsplit("@", 1)[1],
        "memory, redis://host:port/db, rediss://… or unix://path",
        "name one of them",
    )
