# SPDX-License-Identifier: Apache-2.0
"""Counters from the worker that runs the model to the scheduler's process, through shared memory.

The worker may be a process of its own, and nothing that it returns has room for counters. So it
writes running totals into a small memory-mapped file, and the scheduler counts what has been added
since it last looked. The first worker of an engine writes; the others do the same work.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from mimo_plugin.engines.vllm.vision.setup import setup_of
from mimo_plugin.metrics import PIXEL_BACKENDS, MetricsBuffer

NAMES = (
    "vision_kernel_passes",
    "vision_kernel_items",
    "vision_kernel_seconds",
    "vision_encode_seconds",
)
"""Counters on the board, for each backend."""

_SLOTS = len(NAMES) * len(PIXEL_BACKENDS)
_VALUE = struct.Struct("=d")
BOARD_BYTES = _SLOTS * _VALUE.size


def board_path(vllm_config: Any) -> Path:
    """Where the processes of one engine meet."""
    token = setup_of(vllm_config.model_config.hf_config).engine_token
    name = f"{token}-{vllm_config.parallel_config.data_parallel_rank}"
    shared = Path("/dev/shm")
    folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"mimo-vision-{name}"


class BoardWriter:
    """Running totals of the worker; one thread writes.

    Raises:
        OSError: there is no place for the file.
    """

    def __init__(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            path.unlink()  # of a worker before this one
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, BOARD_BYTES)
            self._map = mmap.mmap(descriptor, BOARD_BYTES)
        finally:
            os.close(descriptor)

    def add(self, backend: str, values: tuple[float, ...]) -> None:
        """Add to the totals of a backend, in the order of ``NAMES``."""
        first = PIXEL_BACKENDS.index(backend) * len(NAMES)
        for slot, value in enumerate(values, start=first):
            offset = slot * _VALUE.size
            (total,) = _VALUE.unpack_from(self._map, offset)
            _VALUE.pack_into(self._map, offset, total + value)


class BoardReader:
    """What a worker has added since the last ``drain``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._seen = [0.0] * _SLOTS

    def _open(self) -> None:
        """Map the file once the worker has made it; then no name of it needs to remain."""
        with suppress(OSError, ValueError):
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                self._map = mmap.mmap(descriptor, BOARD_BYTES, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
            self._path.unlink(missing_ok=True)

    def drain(self) -> dict[str, Any] | None:
        """A payload of counters, None when nothing was added."""
        if self._map is None:
            self._open()
        if self._map is None:
            return None
        buffer = MetricsBuffer()
        for slot in range(_SLOTS):
            (total,) = _VALUE.unpack_from(self._map, slot * _VALUE.size)
            if total > self._seen[slot]:
                backend, name = divmod(slot, len(NAMES))
                added = total - self._seen[slot]
                buffer.inc(NAMES[name], added, backend=PIXEL_BACKENDS[backend])
                self._seen[slot] = total
        return buffer.drain()
