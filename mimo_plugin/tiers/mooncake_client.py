# SPDX-License-Identifier: Apache-2.0
"""Mooncake's client library, in a process that can be ended.

The library can't be told to give up: a call to a master that hangs waits for it, a set-up without a
master takes one and a half minutes, and a transfer that failed may still write to the memory that
it was given. So it runs in a process beside the engine's, and whatever is late or goes wrong ends
that process; the next call starts another. The two share memory, in lanes: one for each call that
is on its way. It is registered with the library, which reads and writes it in place, and it goes
with the process, so nothing that comes late is ever read. Memory of the engine that is a mapping of
a file can be shared, too; a call that has failed then returns when the process is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from mimo_plugin.errors import MimoError, one_line
from mimo_plugin.tiers import mooncake_worker as worker
from mimo_plugin.tiers.mooncake_url import MooncakeSettings
from mimo_plugin.tiers.mooncake_worker import Piece
from mimo_plugin.tiers.store import Parts

LANES = 4
START_S = 60.0
"""Longest time until the library has connected and registered its memory."""
_CONNECT_S = 5.0
_END_S = 1.0
_LEVEL = "GLOG_minloglevel"
_LIBRARY_FIX = (
    "pip install 'mimo-plugin[mooncake]', on Debian and Ubuntu also apt-get install libibverbs1 "
    "libnuma1"
)


class MooncakeUnavailable(MimoError):
    """The client library is missing, or the store does not answer; one line that says so."""


@dataclass(frozen=True)
class Shared:
    """Memory of the engine that the library's process may read and write.

    Attributes:
        file: number of the file that it is a mapping of, from its start.
        start: its address.
        size: bytes.
    """

    file: int
    start: int
    size: int


class Lane:
    """A part of the shared memory, and what the library is asked with.

    Attributes:
        memory: of its pages, writable.
    """

    def __init__(self, session: Session, memory: memoryview, start: int, line: Any) -> None:
        self.memory = memory
        self._session = session
        self._start = start
        self._line: Connection[Any, Any] = line

    def piece(self, offset: int, size: int) -> Piece:
        """So many bytes of its memory from there on."""
        return 0, self._start + offset, size

    def in_place(self, page: Parts) -> list[Piece] | None:
        """A page in memory of the engine's that is shared; None where it lies elsewhere."""
        return self._session.in_place(page)

    def ask(
        self,
        what: str,
        keys: Sequence[str],
        values: Sequence[Sequence[Piece]],
        end_s: float,
    ) -> list[int]:
        """Mooncake's codes for each key.

        Args:
            what: one of ``exist``, ``put``, ``get``, ``remove``.
            keys: at least one.
            values: where they are or go to; none where no value moves.
            end_s: when to give up, monotonic seconds.

        Raises:
            MooncakeUnavailable: no answer; the process has ended.
        """
        try:
            self._line.send((what, list(keys), [list(value) for value in values]))
            if not self._line.poll(max(0.0, end_s - time.monotonic())):
                raise MooncakeUnavailable("no answer in time")
            answer = self._line.recv()
            if isinstance(answer, str):
                raise MooncakeUnavailable(one_line(answer))
        except (EOFError, OSError) as error:
            self.end()
            raise MooncakeUnavailable("its process ended") from error
        except BaseException:
            self.end()
            raise
        return list(answer)

    def end(self) -> None:
        """End the session, as what the library does can't be relied on."""
        self._session.end()


class Session:
    """A process with the library, connected, and its memory.

    Args:
        wanted: arguments of the library's set-up; none: only to see that it can be loaded.
        buffer_bytes: of all lanes, a multiple of their number.
        shared: memory of the engine that values are moved from and to in place.

    Raises:
        MooncakeUnavailable: the library can't be loaded, or does not connect.
    """

    def __init__(
        self, wanted: Sequence[object], buffer_bytes: int, shared: Sequence[Shared] = ()
    ) -> None:
        self.lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        self._shared = tuple(shared)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        self._over = threading.Event()
        file = os.memfd_create("mimo-mooncake")
        self._control, theirs = Pipe()
        pipes = [Pipe() for _ in range(LANES)]
        try:
            os.ftruncate(file, buffer_bytes)
            files = [file, *(each.file for each in shared)]
            lines = [pipe[1].fileno() for pipe in pipes]
            memory = memoryview(mmap.mmap(file, buffer_bytes))
            self._process = _spawn(theirs.fileno(), [*files, *lines], self._log)
        finally:
            os.close(file)
            for line in (theirs, *(pipe[1] for pipe in pipes)):
                line.close()
        size = buffer_bytes // LANES
        for index, (ours, _) in enumerate(pipes):
            start = index * size
            self.lanes.put(Lane(self, memory[start : start + size], start, ours))
        try:
            self._connect((tuple(wanted), files, lines))
        except BaseException:
            self.end()
            raise

    @property
    def over(self) -> bool:
        """It has ended."""
        return self._over.is_set()

    def end(self) -> None:
        """End the process; from then on nothing moves."""
        self._over.set()
        self._process.kill()
        # The engine may use its own memory for something else once this returns.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(None if self._shared else _END_S)
        self._control.close()
        self._log.close()

    def in_place(self, page: Parts) -> list[Piece] | None:
        """See ``Lane``."""
        pieces: list[Piece] = []
        for part in page:
            if not part.nbytes:
                continue
            if not self._shared or part.readonly or not part.contiguous:
                return None
            at = _address_of(part)
            for index, each in enumerate(self._shared, 1):
                if each.start <= at and at + part.nbytes <= each.start + each.size:
                    pieces.append((index, at - each.start, part.nbytes))
                    break
            else:
                return None
        return pieces

    def _connect(self, wanted: tuple[object, ...]) -> None:
        try:
            self._control.send(wanted)
            if not self._control.poll(START_S):
                raise MooncakeUnavailable(f"the client has not started in {START_S:g} s")
            state, what = self._control.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            status = self._process.returncode
            said = self._said()
            raise MooncakeUnavailable(f"the client ended with status {status}{said}") from error
        if state == worker.LIBRARY:
            raise MooncakeUnavailable(one_line(f"no client library ({what}); fix: {_LIBRARY_FIX}"))
        if state != worker.READY:
            raise MooncakeUnavailable(f"the client did not start: {what}{self._said()}")

    def _said(self) -> str:
        """The last thing that the library had to say, if anything."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({one_line(lines[-1])})" if lines else ""


class Client:
    """Sessions, one after the other.

    Args:
        settings: of the store.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self.lane_bytes = (settings.buffer_mib << 20) // LANES
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._starting = self._closed = False
        self._problem = ""
        self._shared: list[Shared] = []

    def share(self, memory: memoryview, file: int) -> None:
        """Move what lies in this memory in place, from the next session on.

        Args:
            memory: a writable mapping of a file, from its start, until this is closed.
            file: its number; it may be closed after the call.
        """
        shared = Shared(os.dup(file), _address_of(memory), memory.nbytes)
        with self._changed:
            self._shared.append(shared)
        self.fail()

    @contextmanager
    def lane(self, end_s: float) -> Iterator[Lane]:
        """A lane of one's own; where there is no session, one is started.

        Args:
            end_s: when to give up, monotonic seconds; a session that is not ready by then goes on
                starting, for later calls.

        Raises:
            MooncakeUnavailable: why there is none.
        """
        session = self.connect(end_s)
        try:
            lane = session.lanes.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            raise MooncakeUnavailable("no answer in time to calls before this one") from None
        try:
            yield lane
        finally:
            session.lanes.put(lane)

    def connect(self, end_s: float) -> Session:
        """The session; see ``lane``."""
        with self._changed:
            if self._closed:
                raise MooncakeUnavailable("closed")
            if self._ready() is None and not self._starting:
                self._starting, self._problem = True, "the client is still starting"
                threading.Thread(target=self._start, name="mimo-mooncake", daemon=True).start()
            self._changed.wait_for(
                lambda: self._ready() is not None or not self._starting,
                max(0.0, end_s - time.monotonic()),
            )
            session = self._ready()
            if session is None:
                raise MooncakeUnavailable(self._problem)
            return session

    def fail(self) -> None:
        """End the session, as what it does can't be relied on."""
        with self._changed:
            session, self._session = self._session, None
        if session is not None:
            session.end()

    def close(self) -> None:
        """End for good."""
        with self._changed:
            self._closed = True
            shared, self._shared = self._shared, []
        self.fail()
        for each in shared:
            os.close(each.file)

    def _ready(self) -> Session | None:
        session = self._session
        return None if session is None or session.over else session

    def _start(self) -> None:
        session, problem = None, ""
        try:
            buffer_bytes = self.settings.buffer_mib << 20
            session = Session(self._wanted(), buffer_bytes, self._shared)
        except MooncakeUnavailable as error:
            problem = str(error)
        except Exception as error:  # no memory, no more processes or files
            problem = one_line(repr(error))
        with self._changed:
            self._starting, self._session, self._problem = False, session, problem
            closed = self._closed
            self._changed.notify_all()
        if closed:
            self.fail()

    def _wanted(self) -> tuple[object, ...]:
        settings = self.settings
        address = reach(settings)
        return (
            settings.local or address,
            settings.metadata,
            int(settings.segment_gib * (1 << 30)),
            0,  # the library's own copies, of which there are none
            settings.protocol,
            settings.device,
            settings.master,
        )


def reach(settings: MooncakeSettings) -> str:
    """Does the master accept a connection? The address of this machine on it.

    The library itself would try for long.

    Raises:
        MooncakeUnavailable: no.
    """
    try:
        with socket.create_connection((settings.host, settings.port), _CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise MooncakeUnavailable(
            f"no mooncake_master at {settings.master} ({one_line(error)}); "
            "fix: start one there, or correct the address"
        ) from error


def require_library() -> None:
    """See that the library can be loaded.

    Raises:
        MooncakeUnavailable: it can't.
    """
    Session((), LANES * mmap.PAGESIZE).end()


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _spawn(control: int, files: Sequence[int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The worker's process, which has these files open, and writes there until it has started."""
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # The library says something of every page that fails; who wants to read that sets its level.
    loud = _LEVEL in os.environ
    quiet = {} if loud else {_LEVEL: "2", "MC_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [sys.executable, "-m", worker.__name__, str(int(loud)), str(control)],
        env={**os.environ, **quiet, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=None if loud else log,
        stderr=None if loud else log,
        pass_fds=(control, *files),
        # What a terminal sends to the engine is for the engine to handle.
        start_new_session=True,
    )
