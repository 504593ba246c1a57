# SPDX-License-Identifier: Apache-2.0
"""Counters of the loader, which runs in threads of the API process; its stat logger drains them."""

from __future__ import annotations

import threading
from typing import Any

from mimo_plugin.metrics import MetricsBuffer


class VideoReport:
    """What was read and refused since the last ``drain``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = MetricsBuffer()

    def read(self, told: dict[str, Any], size_bytes: int, elapsed_s: float) -> None:
        """A video was read.

        Args:
            told: what ``read_video`` returned.
            size_bytes: of its frames as they travel.
            elapsed_s: from the request for the job to its result.
        """
        form = "rows" if told["rows"] else "pixels"
        frames = {
            "file": told["total_frames"],
            "decoded": told["decoded_frames"],
            "taken": len(told["indices"]),
            "dropped": told["dropped_frames"],
        }
        with self._lock:
            self._buffer.inc("video_files", form=form)
            self._buffer.inc("video_bytes", size_bytes, form=form)
            for what, count in frames.items():
                self._buffer.inc("video_frames", count, what=what)
            self._buffer.inc("video_decode_seconds", told["seconds"])
            self._buffer.inc("video_wait_seconds", max(0.0, elapsed_s - told["seconds"]))

    def refused(self, reason: str) -> None:
        """A video was not read: ``input`` is to blame, or the pool was ``busy``."""
        with self._lock:
            self._buffer.inc("video_refused", reason=reason)

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, None when nothing happened."""
        with self._lock:
            return self._buffer.drain()


REPORT = VideoReport()
"""The counters of this process."""
