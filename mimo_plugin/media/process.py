# SPDX-License-Identifier: Apache-2.0
"""One worker process as the pool sees it: start it, give it a job, end it."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mimo_plugin.errors import MimoError
from mimo_plugin.media import segments, worker
from mimo_plugin.media.limits import MediaError
from mimo_plugin.media.pool_types import JobFailed

INLINE_MAX_BYTES = 64 << 10
"""Longer data travels in a segment; this much fits into a socket's buffer without a reader."""

START_TIMEOUT_S = 60.0
_KEPT_HEAP_BYTES = 256 << 20
_ENVIRONMENT = {
    # one thread per worker: the pool is what runs side by side
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # glibc keeps what a job frees for the next job, which saves it a page fault every 4 KiB
    "MALLOC_MMAP_THRESHOLD_": str(_KEPT_HEAP_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT_HEAP_BYTES),
}
_MESSAGE_MAX_BYTES = 16 << 20
_MAX_ARRAYS = 65_536
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from mimo_plugin.media.worker import main; main(sys.argv[1])"
)


class Gone(Exception):
    """The process ended in the middle of a job; the text says how."""


class TimedOut(Exception):
    """The job ran longer than it may."""


class Busy(Exception):
    """No shared memory came free in time."""


@dataclass(frozen=True, eq=False)
class Job:
    """A function by name, with its arguments.

    Attributes:
        function: module and qualified name.
        options: pickled keyword arguments are made from these.
        data: bytes the function works on; kept as given until a worker takes the job.
        timeout_s: longest run, waiting for memory not counted.
    """

    function: tuple[str, str]
    options: dict[str, Any]
    data: bytes | bytearray | memoryview
    timeout_s: float

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        data: bytes | bytearray | memoryview,
        timeout_s: float,
        options: dict[str, Any],
    ) -> Job:
        """Check that a worker can find the function.

        Raises:
            ValueError: the function has no importable name, or the time is not above 0.
        """
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or "<" in name:
            raise ValueError(
                f"media pool: function: found {module}.{name}; "
                "allowed: a function of an importable module"
            )
        if timeout_s <= 0:
            raise ValueError(f"media pool: timeout_s: found {timeout_s}; allowed: above 0")
        return cls((module, name), options, data, timeout_s)

    def spec(self) -> tuple[bytes, int]:
        """The message for the worker, and the bytes of data that follow in a segment."""
        length = memoryview(self.data).nbytes
        inline = length <= INLINE_MAX_BYTES
        message = {
            "function": self.function,
            "options": self.options,
            "data": bytes(self.data) if inline else None,
            "data_bytes": length,
            "timeout_s": self.timeout_s,
        }
        return pickle.dumps(message), 0 if inline else length


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How a worker is started.

    Attributes:
        preload: modules to import first.
        memory_bytes: its private memory at most; None for no limit.
        niceness: how much it yields to other processes.
    """

    preload: tuple[str, ...]
    memory_bytes: int | None
    niceness: int = 0


class Worker:
    """A running worker process.

    Raises:
        MimoError: it did not start.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection = Connection(os.dup(self._channel.fileno()))
        arguments = {
            "fd": theirs.fileno(),
            "path": sys.path,
            "preload": options.preload,
            "memory_bytes": options.memory_bytes,
            "niceness": options.niceness,
        }
        environment = {**os.environ, **_ENVIRONMENT}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        except BaseException:
            self._close_sockets()
            raise
        finally:
            theirs.close()
        try:
            self._message(time.monotonic() + START_TIMEOUT_S)
        except (Gone, TimedOut) as problem:
            self.kill()
            self.close()
            raise MimoError(f"media pool: a worker did not start: {problem}") from None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def run(
        self, job: Job, acquire: Callable[[int], bool], adopt: Callable[[object, int], None]
    ) -> tuple[Any, tuple[np.ndarray, ...]]:
        """Have one job done; blocks, without the interpreter lock.

        Args:
            acquire: takes bytes of shared memory; False when none came free, ValueError when
                there can never be as many.
            adopt: told each segment's memory and bytes; gives the bytes back when it dies.

        Raises:
            Gone, TimedOut: the process must be replaced.
            Busy, MediaError, JobFailed: it is ready for the next job.
        """
        deadline_s = time.monotonic() + job.timeout_s
        arrays: list[np.ndarray] = []
        refusal: Exception | None = None
        try:
            spec, data_bytes = job.spec()
            self._connection.send_bytes(spec)
            if data_bytes:
                self._grant(segments.create_from(job.data))
            while True:
                message = self._message(deadline_s)
                if "done" in message:
                    return message["done"], tuple(arrays)
                if "need" not in message:
                    raise refusal or _failure(message)
                shape = _shape(message["need"])
                length = max(1, math.prod(shape))
                asked_s = time.monotonic()
                try:
                    if len(arrays) >= _MAX_ARRAYS:
                        raise ValueError(f"found more than {_MAX_ARRAYS} arrays")
                    granted = acquire(length)
                    refusal = None if granted else Busy()
                except ValueError as problem:
                    granted, refusal = False, MediaError(f"media memory: {problem}")
                deadline_s += time.monotonic() - asked_s
                if not granted:
                    self._channel.sendall(worker.REFUSED)
                    continue
                arrays.append(self._new_array(shape, length, adopt))
        except (EOFError, OSError) as problem:
            raise Gone(self._how_it_ended(problem)) from None

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """Close the socket, upon which an idle worker ends, and wait for the process."""
        self._close_sockets()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: close what was inherited; the process belongs to the parent."""
        self._close_sockets()
        self._process.returncode = 0  # not ours to wait for

    def _new_array(
        self, shape: tuple[int, ...], length: int, adopt: Callable[[object, int], None]
    ) -> np.ndarray:
        fd = segments.create(length)
        memory = mmap.mmap(fd, length)
        adopt(memory, length)
        self._grant(fd)
        return segments.view(memory, shape)

    def _grant(self, fd: int) -> None:
        try:
            socket.send_fds(self._channel, [worker.GRANTED], [fd])
        finally:
            os.close(fd)

    def _message(self, deadline_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise TimedOut
            message = json.loads(self._connection.recv_bytes(_MESSAGE_MAX_BYTES))
        except (EOFError, OSError, ValueError) as problem:
            raise Gone(self._how_it_ended(problem)) from None
        if not isinstance(message, dict):
            raise Gone("it sent something that is no message")
        return message

    def _how_it_ended(self, problem: Exception) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"{type(problem).__name__}: {problem}"
        if code >= 0:
            return f"exit status {code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def _close_sockets(self) -> None:
        for end in (self._connection, self._channel):
            with contextlib.suppress(OSError):
                end.close()


def _shape(sides: object) -> tuple[int, ...]:
    if not isinstance(sides, list) or not all(isinstance(n, int) and n >= 0 for n in sides):
        raise Gone("it asked for an array of no valid shape")
    return tuple(sides)


def _failure(message: dict[str, Any]) -> Exception:
    text = str(message.get("text", ""))
    if message.get("error") == "media":
        return MediaError(text)
    return JobFailed(f"media pool: the job failed: {text}")
