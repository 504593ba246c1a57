# SPDX-License-Identifier: Apache-2.0
"""Anonymous shared memory that carries bytes between the pool and its workers.

The memory comes from ``memfd_create``: it has no name, so nothing is left behind when a process
is killed, and a container's small ``/dev/shm`` does not bound it. Its size is sealed, so that a
worker gone wrong can't shrink it under the reader. The last array that looks into a segment frees
it, and gives its bytes back to the budget.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np


def create(length_bytes: int) -> int:
    """A new sealed segment of zeros.

    Args:
        length_bytes: at least 1.

    Returns:
        Its file descriptor, which the caller closes.

    Raises:
        OSError: no memory or no descriptor left.
    """
    fd = os.memfd_create("mimo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_from(data: bytes | bytearray | memoryview) -> int:
    """A new sealed segment that holds ``data``; the caller closes the descriptor."""
    view = memoryview(data).cast("B")
    fd = create(max(1, view.nbytes))
    try:
        written = 0
        while written < view.nbytes:
            written += os.pwrite(fd, view[written:], written)
    except BaseException:
        os.close(fd)
        raise
    return fd


def view(memory: mmap.mmap, shape: Sequence[int]) -> np.ndarray:
    """uint8 array of ``shape`` over the start of ``memory``, which lives as long as the array."""
    flat: np.ndarray = np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape))
    return flat.reshape(tuple(shape))


class Budget:
    """Bytes of segments that may be outstanding at once.

    Acquirers are served one after the other, so that a large request is not starved by small
    ones. Giving back is safe wherever an object may die, a garbage collection included.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0  # changed by the holder of _turn only
        self._turn = threading.Lock()
        self._returned: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put() is reentrant

    def acquire(self, length_bytes: int, timeout_s: float) -> bool:
        """Take ``length_bytes``; False when they did not come free in time.

        Raises:
            ValueError: more than the whole budget.
        """
        if length_bytes > self.limit_bytes:
            raise ValueError(f"found {length_bytes} bytes; allowed: up to {self.limit_bytes}")
        deadline_s = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            self._collect()
            while self._used_bytes + length_bytes > self.limit_bytes:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                try:
                    self._used_bytes -= self._returned.get(timeout=left_s)
                except queue.Empty:
                    return False
            self._used_bytes += length_bytes
            return True
        finally:
            self._turn.release()

    def release(self, length_bytes: int) -> None:
        """Give back what was acquired."""
        self._returned.put(length_bytes)

    def release_with(self, owner: object, length_bytes: int) -> None:
        """Give back when ``owner`` dies."""
        weakref.finalize(owner, self._returned.put, length_bytes).atexit = False

    def outstanding_bytes(self) -> int:
        """Bytes that are taken now; while an acquirer waits, those returned may be missing."""
        if self._turn.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._turn.release()
        return self._used_bytes

    def _collect(self) -> None:
        while True:
            try:
                self._used_bytes -= self._returned.get_nowait()
            except queue.Empty:
                return
