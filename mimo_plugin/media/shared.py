# SPDX-License-Identifier: Apache-2.0
"""Embeddings in shared memory, for all encoder processes of one node.

One file (in ``/dev/shm`` by default) holds a table of entries and an arena of bytes; every process
maps it. What keeps it right when processes run at once, and die at any moment:

* **The table is the only truth.** Free space follows from the entries; there is no list to repair.
  An entry changes hands by one store of its state byte, after all its other fields are written.
* **Locks are the kernel's** (open file description locks on bytes of the file), so those of a dead
  process are gone with it: one byte for allocating, one per entry (shared to read, exclusive to
  write or to evict), one that says somebody is alive.
* **An entry is served only when it is READY**, which its writer sets last. One that is WRITING
  without a lock has a dead writer, and its room is taken back.
* **Eviction takes the exclusive lock of the entry**, so that it never frees what is being read. The
  least recently used entry that nobody reads goes first.
* **A hit needs the key and the length** (:func:`~mimo_plugin.media.keys.length_agrees`).

The last process that closes the cache removes the file; a file that nobody holds (all were killed)
is started afresh by the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mimo_plugin.errors import setting_error
from mimo_plugin.media import file_locks
from mimo_plugin.media.keys import length_agrees
from mimo_plugin.media.shared_types import CacheCounts, Found

DEFAULT_FOLDER = Path("/dev/shm")
MAX_DIMENSIONS = 4
ALIGNMENT_BYTES = 64  # of each entry, a cache line: any dtype can be viewed in place

_MAGIC = b"mimo-ec1"
_HEADER_BYTES = 4096
_FREE, _WRITING, _READY = 0, 1, 2
_KEY_WORDS = 4  # of 8 bytes: a digest of 256 bits
_ENTRY: np.dtype[Any] = np.dtype(
    [
        ("state", "u1"),
        ("dimensions", "u1"),
        ("dtype", "S14"),
        ("key", "<u8", (_KEY_WORDS,)),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("used_ns", "<u8"),
        ("shape", "<u8", (MAX_DIMENSIONS,)),
    ],
)
# bytes of the file that serve as locks; beyond its end, so that they never meet data
_LOCK_TABLE = 1 << 62
_LOCK_ALIVE = _LOCK_TABLE + 1
_LOCK_FIRST_ENTRY = _LOCK_TABLE + 2


class SharedCache:
    """The cache as one process sees it; threads may share it.

    Args:
        name: of the file; processes that give the same name share the cache. It should contain
            what the embeddings depend on, the checkpoint above all.
        capacity_bytes: of the arena.
        max_entries: of the table.
        folder: where the file lies.

    Raises:
        ConfigError: a value is out of range, the file system has no room for the arena, or others
            run a cache of this name with other sizes.
    """

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int,
        max_entries: int = 4096,
        folder: Path = DEFAULT_FOLDER,
    ) -> None:
        if not name or "/" in name or name.startswith("."):
            raise setting_error("shared cache name", name, "a plain file name", "rename it")
        for setting, value in (("capacity_bytes", capacity_bytes), ("max_entries", max_entries)):
            if value < 1:
                raise setting_error(f"shared cache {setting}", value, "above 0", "raise it")
        self.capacity_bytes = capacity_bytes
        self.max_entries = max_entries
        self.path = folder / name
        self.counts = CacheCounts()
        self._thread = threading.Lock()
        table_bytes = _padded(max_entries * _ENTRY.itemsize)
        self._arena_at = _HEADER_BYTES + table_bytes
        self._file_bytes = self._arena_at + capacity_bytes
        self._fd = self._open()
        with self._new_lock() as opening:  # a mapping keeps its opening, and so its locks, alive
            self._memory = mmap.mmap(opening.fd, self._file_bytes)
        self._table = np.frombuffer(self._memory, _ENTRY, max_entries, _HEADER_BYTES)
        self._arena = np.frombuffer(self._memory, np.uint8, capacity_bytes, self._arena_at)

    # -- reading -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(
        self, key: str, expected_length: int | None = None, *, count: bool = True
    ) -> Iterator[Found | None]:
        """The entry for the time of a ``with`` block, in which it can't be evicted.

        Args:
            key: as it was stored, in full.
            expected_length: rows that the embedding must have; None takes any.
            count: whether the look-up is counted.

        Yields:
            The entry, or None for a miss.
        """
        digest = _digest(key)
        with contextlib.ExitStack() as stack:
            found: Found | None = None
            for index in self._indices(digest):
                lock = stack.enter_context(self._new_lock())
                if not lock.try_shared(_LOCK_FIRST_ENTRY + index):
                    continue  # being written or evicted
                if not self._is_ready(index, digest):
                    continue  # its writer has died, or it was evicted before we had the lock
                found = self._found(index)
                break
            agrees = found is not None and length_agrees(found.shape[0], expected_length)
            if agrees and found is not None:
                self._table["used_ns"][index] = time.monotonic_ns()
            if count:
                self._count_lookup(found, agrees)
            yield found if agrees else None

    def get(self, key: str, expected_length: int | None = None) -> Found | None:
        """A copy of the entry, or None for a miss."""
        with self.hold(key, expected_length) as found:
            if found is None:
                return None
            return Found(found.data.copy(), found.shape, found.dtype)

    def contains(self, key: str, expected_length: int | None = None) -> bool:
        """Whether a look-up would hit now; not counted. Only :meth:`hold` keeps it so."""
        with self.hold(key, expected_length, count=False) as found:
            return found is not None

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: np.ndarray, shape: Sequence[int], dtype: str) -> bool:
        """Store an embedding; one that is there already with the same form is left alone.

        Args:
            key: names content and settings, see :func:`~mimo_plugin.media.keys.content_key`.
            data: its bytes as a flat uint8 array.
            shape: first axis: length in tokens; up to four axes.
            dtype: name that readers get back, up to 14 ASCII characters.

        Returns:
            Whether it is in the cache now. False: larger than the arena, the room is in use, or
            another process is writing it.

        Raises:
            ValueError: a shape or dtype name that the table can't hold.
        """
        sides, label = tuple(int(side) for side in shape), dtype.encode("ascii")
        if not 1 <= len(sides) <= MAX_DIMENSIONS or not 1 <= len(label) <= 14:
            raise ValueError(
                f"shared cache: found shape {sides}, dtype {dtype!r}; "
                f"allowed: 1 to {MAX_DIMENSIONS} axes, a dtype name of 1 to 14 characters"
            )
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        digest = _digest(key)
        with self._new_lock() as entry_lock:
            with self._thread, self._new_lock() as table_lock:
                table_lock.wait_exclusive(_LOCK_TABLE)
                present = self._present(digest, sides, label)
                if present is not None:
                    return present
                index = self._allocate(flat.size, entry_lock)
                if index is None:
                    self.counts.refused += 1
                    return False
                entry = self._table[index]
                entry["key"] = digest
                entry["dtype"] = label
                entry["dimensions"] = len(sides)
                entry["shape"] = sides + (0,) * (MAX_DIMENSIONS - len(sides))
                entry["used_ns"] = time.monotonic_ns()
                self._table["state"][index] = _WRITING
            offset = int(self._table["offset"][index])
            self._arena[offset : offset + flat.size] = flat
            self._table["state"][index] = _READY
        with self._thread:
            self.counts.stored += 1
            self.counts.bytes_written += flat.size
        return True

    # -- state ---------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Bytes of all entries, of all processes."""
        taken = self._table["state"] != _FREE
        return int(self._table["length"][taken].sum())

    def entries(self) -> int:
        """Entries that can be served."""
        return int((self._table["state"] == _READY).sum())

    def close(self) -> None:
        """Leave the cache; the last one removes the file. Views that are still held stay valid."""
        if self._fd < 0:
            return
        with file_locks.FileLock(self._fd) as lock:
            lock.wait_exclusive(_LOCK_TABLE)  # nobody comes in meanwhile
            if lock.try_exclusive(_LOCK_ALIVE) and self._is_current(self._fd):
                with contextlib.suppress(FileNotFoundError):
                    self.path.unlink()
        os.close(self._fd)
        self._fd = -1

    # -- inside --------------------------------------------------------------------------------

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                lock = file_locks.FileLock(fd)
                lock.wait_exclusive(_LOCK_TABLE)
                if self._is_current(fd):  # else its last user removed it just now
                    if lock.try_exclusive(_LOCK_ALIVE):
                        self._format(fd)
                    else:
                        self._check(fd)
                    lock.wait_shared(_LOCK_ALIVE)
                    lock.unlock(_LOCK_TABLE)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _header(self) -> bytes:
        return _MAGIC + struct.pack("<QQ", self.capacity_bytes, self.max_entries)

    def _format(self, fd: int) -> None:
        os.ftruncate(fd, 0)
        try:
            os.posix_fallocate(fd, 0, self._file_bytes)  # room now rather than a bus error later
        except OSError as problem:
            os.ftruncate(fd, 0)
            raise setting_error(
                "shared cache capacity_bytes",
                self.capacity_bytes,
                f"what {self.path.parent} has room for ({problem.strerror})",
                "lower it, or give the file system more room",
            ) from None
        os.pwrite(fd, self._header(), 0)

    def _check(self, fd: int) -> None:
        found = os.pread(fd, len(self._header()), 0)
        if found != self._header():
            sizes = struct.unpack("<QQ", found[8:24]) if found[:8] == _MAGIC else "another format"
            raise setting_error(
                f"shared cache {self.path.name} (capacity_bytes, max_entries)",
                (self.capacity_bytes, self.max_entries),
                f"what its other users gave: {sizes}",
                "give the same, or another name",
            )

    def _new_lock(self) -> file_locks.FileLock:
        """A lock holder of its own: what one holds does not mix with what another does."""
        if self._fd < 0:
            raise ValueError(f"shared cache {self.path.name}: closed; allowed: before close()")
        return file_locks.FileLock.reopen(self._fd)

    def _indices(self, digest: np.ndarray) -> list[int]:
        """Entries in use that have this key."""
        same = (self._table["key"] == digest).all(axis=1) & (self._table["state"] != _FREE)
        return [int(index) for index in np.flatnonzero(same)]

    def _is_ready(self, index: int, digest: np.ndarray) -> bool:
        entry = self._table[index]
        return bool(entry["state"] == _READY and (entry["key"] == digest).all())

    def _found(self, index: int) -> Found:
        entry = self._table[index]
        offset, length = int(entry["offset"]), int(entry["length"])
        data = self._arena[offset : offset + length]
        data.flags.writeable = False
        shape = tuple(int(side) for side in entry["shape"][: int(entry["dimensions"])])
        return Found(data, shape, bytes(entry["dtype"]).decode("ascii"))

    def _count_lookup(self, found: Found | None, agrees: bool) -> None:
        with self._thread:
            if found is None:
                self.counts.misses += 1
            elif not agrees:
                self.counts.mismatches += 1
            else:
                self.counts.hits += 1
                self.counts.bytes_read += found.data.size

    def _present(self, digest: np.ndarray, sides: tuple[int, ...], label: bytes) -> bool | None:
        """Whether an equal entry can be read already; None when there is none to keep."""
        for index in self._indices(digest):
            if self._table["state"][index] == _READY:
                found = self._found(index)
                if found.shape == sides and found.dtype.encode() == label:
                    return True
                if not self._free(index):  # another form of it, which someone reads now
                    return False
            elif not self._recover(index):
                return False  # somebody writes it now
        return None

    def _allocate(self, length: int, entry_lock: file_locks.FileLock) -> int | None:
        """Reserve an entry with room, evicting what it takes. Under the table lock."""
        need = _padded(length)
        if need > self.capacity_bytes:
            return None
        order: list[int] | None = None
        while True:
            index, offset = self._free_entry(entry_lock), self._gap(need)
            if index is not None and offset is not None:
                self._table["offset"][index] = offset
                self._table["length"][index] = length
                return index
            entry_lock.unlock_all()
            if order is None:
                order = self._oldest_first()
            while order:
                victim = order.pop(0)
                if self._table["state"][victim] == _WRITING:
                    if self._recover(victim):
                        break
                elif self._free(victim):
                    self.counts.evictions += 1
                    break
            else:
                return None

    def _free_entry(self, entry_lock: file_locks.FileLock) -> int | None:
        for index in np.flatnonzero(self._table["state"] == _FREE):
            if entry_lock.try_exclusive(_LOCK_FIRST_ENTRY + int(index)):
                return int(index)
        return None

    def _gap(self, need: int) -> int | None:
        """Start of the smallest gap that is large enough."""
        taken = self._table[self._table["state"] != _FREE]
        taken = taken[np.argsort(taken["offset"])]
        ends = np.concatenate(([0], taken["offset"] + _padded_each(taken["length"])))
        starts = np.concatenate((taken["offset"], [self.capacity_bytes]))
        room = starts.astype(np.int64) - ends.astype(np.int64)
        fits = np.flatnonzero(room >= need)
        return int(ends[fits[np.argmin(room[fits])]]) if fits.size else None

    def _oldest_first(self) -> list[int]:
        taken = np.flatnonzero(self._table["state"] != _FREE)
        return [int(i) for i in taken[np.argsort(self._table["used_ns"][taken])]]

    def _free(self, index: int) -> bool:
        """Free an entry unless somebody reads it. Under the table lock."""
        with self._new_lock() as lock:
            if not lock.try_exclusive(_LOCK_FIRST_ENTRY + index):
                return False
            self._table["state"][index] = _FREE
            return True

    def _recover(self, index: int) -> bool:
        """Free an entry whose writer has died; False when it is alive."""
        if not self._free(index):
            return False
        self.counts.recovered += 1
        return True


def _digest(key: str) -> np.ndarray:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _KEY_WORDS).digest()
    words: np.ndarray = np.frombuffer(digest, "<u8")
    return words


def _padded(length: int) -> int:
    return -(-max(1, length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _padded_each(lengths: np.ndarray) -> np.ndarray:
    wide = np.maximum(lengths, 1).astype(np.int64)
    padded: np.ndarray = -(-wide // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return padded
