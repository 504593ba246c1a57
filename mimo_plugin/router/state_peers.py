# SPDX-License-Identifier: Apache-2.0
"""What is known of the other processes, from the stream and from what each has in flight.

Each process numbers its changes. Who has missed some (the stream was cut, or the process was
too fast for its connection) reads what the process has in flight, which says up to which number it
is complete, and goes on from there. So each change is handed on once and in order, or, where it was
missed, only what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from mimo_plugin.router.state import Change, Done, FirstToken, Listener, Sent, WorkerChanged

# Fields of what a process has in flight: requests, its last number, and that nothing is lacking.
_NOW_US = 1 << 62  # never later than now
_REQUEST, SEQ, WHOLE = b"r", b"seq", b"whole"

encode = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, Change]]]).decode
_decode_open = msgspec.msgpack.Decoder(list[tuple[int, int, Sent | FirstToken]]).decode


class _Peer:
    __slots__ = ("seq", "ids", "behind_seq")

    def __init__(self) -> None:
        self.seq = -1  # of the last change that was handed on
        self.ids: set[str] = set()
        self.behind_seq = -1  # that it had reached when we looked last


class Peers:
    """Hands on what others did.

    Args:
        listener: takes it.
        on_worker: takes changes of workers.
        local_s: time of the listener's clock, of µs of the server's.
    """

    def __init__(
        self,
        listener: Listener,
        on_worker: Callable[[WorkerChanged], None],
        local_s: Callable[[int], float],
    ) -> None:
        self._listener, self._on_worker, self._local_s = listener, on_worker, local_s
        self._peers: dict[str, _Peer] = {}
        self.received = 0

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._peers))

    def take(self, process: str, data: bytes) -> bool:
        """A batch of the stream; False: :meth:`load` the process, something is missing.

        Raises:
            msgspec.MsgspecError, ValueError: it can't be read.
        """
        first_seq, changes = _decode_batch(data)
        peer = self._peers.get(process)
        missing = peer is None or first_seq > peer.seq + 1
        for seq, (at_us, change) in enumerate(changes, first_seq):
            if isinstance(change, WorkerChanged):
                self._on_worker(change)  # the later one counts, whatever is missing
            elif peer is not None and not missing and seq > peer.seq:
                self._hand_on(process, peer, change, at_us)
            if peer is not None and not missing:
                peer.seq = max(peer.seq, seq)
        return not missing

    def load(self, process: str, fields: Mapping[bytes, bytes]) -> bool:
        """What a process has in flight; False: it was not whole, and nothing was done.

        Raises:
            msgspec.MsgspecError, ValueError: it can't be read.
        """
        if WHOLE not in fields or SEQ not in fields:
            return False
        seq = int(fields[SEQ])
        flying = {
            field[1:].decode(): _decode_open(data)
            for field, data in fields.items()
            if field not in (SEQ, WHOLE)
        }
        peer = self._peers.setdefault(process, _Peer())
        if seq < peer.seq:
            return True  # the stream was faster
        known = peer.seq
        for name in tuple(peer.ids):
            if name not in flying or flying[name][0][0] > known:  # over, or over and sent again
                self._hand_on(process, peer, Done(name), _NOW_US)
        later = [change for all_ in flying.values() for change in all_ if change[0] > known]
        for _, at_us, change in sorted(later, key=lambda change: change[0]):
            self._hand_on(process, peer, change, at_us)
        peer.seq = seq
        return True

    def is_stuck(self, process: str, seq: int) -> bool:
        """Whether the process was ahead of what came here before, and still is by as much."""
        peer = self._peers.get(process)
        if peer is None:
            return True
        stuck = peer.seq < peer.behind_seq
        peer.behind_seq = seq
        return stuck

    def drop(self, process: str) -> None:
        """It is gone."""
        if self._peers.pop(process, None) is not None:
            self._listener.left(process)

    def drop_all(self) -> None:
        """Nothing is heard of anybody."""
        for process in tuple(self._peers):
            self.drop(process)

    def _hand_on(
        self, process: str, peer: _Peer, change: Sent | FirstToken | Done, at_us: int
    ) -> None:
        self.received += 1
        if isinstance(change, Sent):
            peer.ids.add(change.id)
        elif isinstance(change, Done):
            peer.ids.discard(change.id)
        self._listener.changed(process, change, self._local_s(at_us))


def field_of(name: str) -> bytes:
    """Where a request stands among what its process has in flight."""
    return _REQUEST + name.encode()


class OpenRequests:
    """This process's requests in flight, as others read them.

    Args:
        max_requests: beyond it the oldest is forgotten: others count it as done.
    """

    def __init__(self, max_requests: int) -> None:
        self._max = max_requests
        # Number, local time, change: all that were not followed by an end.
        self._all: dict[str, list[tuple[int, float, Sent | FirstToken]]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def add(self, seq: int, change: Sent | FirstToken | Done, at_s: float) -> list[str]:
        """Note a change; returns whose fields are not what they were."""
        name = change.id
        if isinstance(change, Done):
            self._all.pop(name, None)
        elif isinstance(change, FirstToken):
            # From here on the worker's events tell what is resident.
            for index, (number, sent_s, sent) in enumerate(self._all[name]):
                if isinstance(sent, Sent) and sent.hashes:
                    bare = msgspec.structs.replace(sent, hashes=b"", kept_tokens=())
                    self._all[name][index] = number, sent_s, bare
            self._all[name].append((seq, at_s, change))
        else:
            self._all.setdefault(name, []).append((seq, at_s, change))
            if len(self._all) > self._max:
                oldest = next(iter(self._all))
                del self._all[oldest]
                return [name, oldest]
        return [name]

    def names(self) -> list[str]:
        """Of all in flight."""
        return list(self._all)

    def field(self, name: str, server_us: Callable[[float], int]) -> bytes | None:
        """What others read of a request; None: it is over."""
        changes = self._all.get(name)
        if changes is None:
            return None
        return encode([(seq, server_us(at_s), change) for seq, at_s, change in changes])
