# SPDX-License-Identifier: Apache-2.0
"""Counters of the feature, one set for each process.

The processor of requests runs in threads of the API process, whose stat logger drains what it
counted. The model runs in a worker, which writes to a board that the scheduler reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mimo_plugin.engines.vllm.vision.board import BoardWriter
from mimo_plugin.metrics import MetricsBuffer


class VisionReport:
    """What was packed and refused since the last ``drain``, and kernel passes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = MetricsBuffer()
        self.board: BoardWriter | None = None

    def packed(self, kind: str, rows: bool, size_bytes: int) -> None:
        """An image or video is ready to travel, as pixels or as patch rows."""
        form = "rows" if rows else "pixels"
        with self._lock:
            self._buffer.inc("vision_items", kind=kind, form=form)
            self._buffer.inc("vision_bytes", size_bytes, kind=kind, form=form)

    def refused(self, kind: str) -> None:
        """An image or video can't be served."""
        with self._lock:
            self._buffer.inc("vision_refused", kind=kind)

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Time the work of the API process on the media of one request."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started
            with self._lock:
                self._buffer.inc("vision_host_seconds", elapsed_s)

    @contextmanager
    def kernel(self, backend: str, items: int) -> Iterator[None]:
        """Time one pass over the items of an encoder batch; on a GPU that is the launch only."""
        started = time.perf_counter()
        yield
        self._work(backend, 1, items, time.perf_counter() - started, 0.0)

    @contextmanager
    def encoder(self, backend: str) -> Iterator[None]:
        """Time the vision tower over a batch; on a GPU that is the launches only.

        Args:
            backend: what made the patch rows of the batch.
        """
        started = time.perf_counter()
        yield
        self._work(backend, 0, 0, 0.0, time.perf_counter() - started)

    def _work(self, backend: str, *values: float) -> None:
        if self.board is not None:
            with self._lock:
                self.board.add(backend, values)

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, None when nothing happened."""
        with self._lock:
            return self._buffer.drain()


REPORT = VisionReport()
"""The counters of this process."""
