# SPDX-License-Identifier: Apache-2.0
"""Pages of KV as files of a directory, which any number of processes may share.

A page is written to a file beside its place and then renamed, so that a reader finds a whole page
or none. Each file begins with its length and a checksum: a page that was cut off by a crash of the
machine, or damaged, is a miss, and goes. The age of a page is the time of its file, which every use
renews. When the pages take more than the store may hold, the process that finds out removes the
oldest; others go on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimo_plugin.errors import MimoError, setting_error
from mimo_plugin.tiers.framing import (
    HEADER_BYTES,
    checksum_in,
    checksum_of,
    header_of,
    size_of,
)
from mimo_plugin.tiers.store import Parts, StoreStats

logger = logging.getLogger("mimo_plugin.tiers")

SHARDS = 256
"""Folders over which the files spread."""

EVICT_TO = 0.9
"""Evicting goes on down to this part of the capacity, so that it is seldom needed."""

RECOUNT_PART = 0.01
"""The directory is counted again when this part of the capacity was written since."""

_SUFFIX, _PART_SUFFIX = ".page", ".part"
_GATE = ".lock"
_MAX_RUNS = min(os.sysconf("SC_IOV_MAX"), 1024)
_STALE_PART_S = 3600.0
_ABSENT, _FULL = (errno.ENOENT,), (errno.ENOSPC, errno.EDQUOT)
"""Errors that a disk in order gives where there is no such page, and where there is no room."""


class StoreError(MimoError):
    """A store that can't be opened; one line that says why."""


def prepare(folder: Path) -> None:
    """Make the folder of a store, unless it is there.

    Raises:
        StoreError: it can't be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(SHARDS):
            (folder / f"{shard:02x}").mkdir(exist_ok=True)
        os.close(os.open(folder / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreError(
            f"page store {folder}: {error.strerror}; needed: a folder that can be written to"
        ) from error


class FileStore:
    """See the module.

    Args:
        folder: made when it is not there. All who share it must agree on what a key stands for.
        capacity_bytes: of all pages in it, > 0.
        verify: check what is read against its checksum.
        guarded: for use through ``tiers/breaker.py``. Where the disk fails or the folder has gone,
            an OSError is raised, instead of finding no page and dropping what can't be written (a
            full disk is no failure); and room is made on a thread of its own, so that a call ends
            soon, while which the store may hold more than its capacity.

    Raises:
        ConfigError: ``capacity_bytes`` is out of range.
        StoreError: the folder can't be written to.
    """

    def __init__(
        self, folder: Path, *, capacity_bytes: int, verify: bool = True, guarded: bool = False
    ) -> None:
        if capacity_bytes < 1:
            raise setting_error("capacity_bytes", capacity_bytes, "above 0", "change it")
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._verify = verify
        self._guarded = guarded
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(
            ("put", "got", "missed", "damaged", "touched", "dropped", "evicted"), 0
        )
        self._held = 0
        self._unseen_bytes = 0
        prepare(folder)
        self._gate = os.open(folder / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._recount()

    def __str__(self) -> str:
        return str(self.folder)

    # -- the protocol --------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there."""
        return self._present([self._is_there(self._path(key)) for key in keys])

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages; where it says False the memory of a page may have been written to."""
        return self._present([self._get(key, page) for key, page in zip(keys, pages, strict=True)])

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages that are not there yet."""
        done = [self._put(key, page) for key, page in zip(keys, pages, strict=True)]
        if self._unseen_bytes > RECOUNT_PART * self.capacity_bytes:
            self._make_room()
        return done

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Renew the age of pages."""
        found = [self._renew(self._path(key)) for key in keys]
        self._count("touched", sum(found))
        return self._present(found)

    def stats(self) -> StoreStats:
        """Counters of this process; the bytes are those of the last count and its own since."""
        with self._lock:
            counts = {f"pages_{name}": number for name, number in self._counts.items()}
            return StoreStats(bytes_held=self._held, **counts)

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            gate, self._gate = self._gate, -1
        if gate >= 0:
            os.close(gate)

    # -- one page ------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        # Keys may be long, and hold what file names must not.
        name = hashlib.blake2b(key.encode(), digest_size=24).hexdigest()
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _get(self, key: str, page: Parts) -> bool:
        path = self._path(key)
        size = size_of(page)
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            self._failed(error, _ABSENT)
            self._count("missed")
            return False
        with file:
            problem = self._fill(file.fileno(), page, size)
        if problem:
            self._count("damaged")
            with contextlib.suppress(OSError):
                path.unlink()
            if isinstance(problem, OSError):
                self._failed(problem)
            return False
        with contextlib.suppress(OSError):  # a disk that went read-only still reads
            self._renew(path)
        self._count("got")
        return True

    def _fill(self, fd: int, page: Parts, size: int) -> Exception | None:
        """Read a page; what is wrong with it, if anything."""
        try:
            checksum = checksum_in(os.read(fd, HEADER_BYTES), size)
            whole = checksum is not None and _read(fd, page)
        except OSError as error:
            return error
        if whole and (not self._verify or checksum_of(page) == checksum):
            return None
        return ValueError("not what was written")

    def _put(self, key: str, page: Parts) -> bool:
        path = self._path(key)
        if self._renew(path):
            self._count("touched")
            return True
        size = size_of(page)
        part = path.with_name(f".{uuid.uuid4().hex}{_PART_SUFFIX}")
        try:
            if size + HEADER_BYTES > self.capacity_bytes:
                raise OSError(errno.ENOSPC, "larger than the store")
            with open(part, "xb", buffering=0) as file:
                _write(file.fileno(), [memoryview(header_of(page)), *page])
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._failed(error, _FULL)
            self._count("dropped")
            return False
        with self._lock:
            self._counts["put"] += 1
            self._held += size + HEADER_BYTES
            self._unseen_bytes += size + HEADER_BYTES
            full = self._held > self.capacity_bytes
        if full:
            self._make_room()
        return True

    def _renew(self, path: Path) -> bool:
        try:
            os.utime(path)
        except OSError as error:
            self._failed(error, (*_ABSENT, *_FULL))
            return False
        return True

    def _is_there(self, path: Path) -> bool:
        try:
            os.stat(path)
        except OSError as error:
            self._failed(error, _ABSENT)
            return False
        return True

    def _failed(self, error: OSError, expected: tuple[int, ...] = ()) -> None:
        """Raise an error of the disk, where that is wanted."""
        if self._guarded and error.errno not in expected:
            raise error

    def _present(self, found: list[bool]) -> list[bool]:
        """``found``, unless it is all missing because the folder has gone."""
        if self._guarded and found and not any(found):
            os.stat(self.folder / _GATE)
        return found

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    # -- room ----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        if not self._guarded:
            self._recount()
        elif not self._counting.locked():
            threading.Thread(target=self._recount, name="mimo-tiers-room", daemon=True).start()

    def _recount(self) -> None:
        """Count what all processes hold, and make room when it is too much; one at a time."""
        if not self._counting.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._recount_alone()
        finally:
            self._counting.release()

    def _recount_alone(self) -> None:
        with self._lock:
            gate = self._gate
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, ValueError):
            return  # another process is at it, or the store is closed
        try:
            found = sorted(self._files())
            total = sum(size for _, size, _ in found)
            evicted = 0
            if total > self.capacity_bytes:
                for _, size, path in found:
                    if total <= EVICT_TO * self.capacity_bytes:
                        break
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        evicted += 1
                    total -= size
            with self._lock:
                self._held, self._unseen_bytes = total, 0
                self._counts["evicted"] += evicted
        finally:
            with contextlib.suppress(OSError):  # closed meanwhile
                fcntl.flock(gate, fcntl.LOCK_UN)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Age, size and path of every page; what an interrupted writer left goes."""
        for shard in range(SHARDS):
            with (
                contextlib.suppress(OSError),
                os.scandir(self.folder / f"{shard:02x}") as entries,
            ):
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        if entry.name.endswith(_SUFFIX):
                            yield status.st_mtime, status.st_size, entry.path
                        elif time.time() - status.st_mtime > _STALE_PART_S:
                            os.unlink(entry.path)


# --- bytes -----------------------------------------------------------------------------------


def _read(fd: int, page: Parts) -> bool:
    """Fill the parts from a file; False when it ends early or holds more."""
    left = [part.cast("B") for part in page if part.nbytes]
    while left:
        count = os.readv(fd, left[:_MAX_RUNS])
        if not count:
            return False
        left = _after(left, count)
    return not os.read(fd, 1)


def _write(fd: int, page: Parts) -> None:
    left = [part.cast("B") for part in page if part.nbytes]
    while left:
        left = _after(left, os.writev(fd, left[:_MAX_RUNS]))


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` behind the first ``count`` bytes."""
    done = 0
    for part in parts:
        if count < part.nbytes:
            break
        count -= part.nbytes
        done += 1
    rest = parts[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest
