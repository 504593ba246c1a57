# SPDX-License-Identifier: Apache-2.0
"""Locks on single bytes of a file that end with their holder, even when it is killed.

Linux's open file description locks: they belong to one opening of the file, not to the process as
POSIX locks do, so that two threads exclude each other too, and closing another descriptor of the
file leaves them alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from types import TracebackType

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process (0 for this kind)


class FileLock:
    """Locks of one opening of a file.

    Args:
        fd: the opening; closed at the end of a ``with`` block only if ``owned``.
        owned: whether ``fd`` belongs to this object.
    """

    def __init__(self, fd: int, *, owned: bool = False) -> None:
        self.fd = fd
        self._owned = owned

    @classmethod
    def reopen(cls, fd: int) -> FileLock:
        """A new opening of the same file, also when its name is gone."""
        return cls(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), owned=True)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned:
            os.close(self.fd)  # and with it all its locks

    def try_shared(self, at: int) -> bool:
        """Lock byte ``at`` together with other sharers; False when one holds it exclusively."""
        return self._try(fcntl.F_RDLCK, at)

    def try_exclusive(self, at: int) -> bool:
        """Lock byte ``at`` alone; False when another holds it."""
        return self._try(fcntl.F_WRLCK, at)

    def wait_exclusive(self, at: int) -> None:
        """Lock byte ``at`` alone, after those who hold it."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, at, 1)

    def wait_shared(self, at: int) -> None:
        """Lock byte ``at`` together with others; an exclusive lock of this opening turns shared."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, at, 1)

    def unlock(self, at: int) -> None:
        """Give byte ``at`` back."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, at, 1)

    def unlock_all(self) -> None:
        """Give all bytes back."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)

    def _try(self, kind: int, at: int) -> bool:
        try:
            self._set(fcntl.F_OFD_SETLK, kind, at, 1)
        except OSError as problem:
            if problem.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _set(self, command: int, kind: int, start: int, length: int) -> None:
        fcntl.fcntl(self.fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
