# SPDX-License-Identifier: Apache-2.0
"""Peak memory of reading a video at 1 fps; a process of its own, so that the peak is its own.

Run: ``python -m benchmarks.video_memory PATH WORKERS`` prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mimo_plugin.core.frames import FrameRules, peak_bytes, plan_frames
from mimo_plugin.media.video import VideoFile


def rules_at_1fps() -> FrameRules:
    """One frame a second for an hour, with the shared pixels of MiMo's reference processors."""
    token = 32 * 32
    return FrameRules(
        fps=1.0,
        num_frames=None,
        min_frames=2,
        max_frames=3600,
        min_pixels=4 * token,
        max_pixels=4096 * token,
        total_max_pixels=16384 * token,
        temporal_patch_size=2,
    )


def status_bytes(key: str) -> int:
    """A figure of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def shrunk(pixels: Any, max_pixels: int) -> Any:
    """The frame with every n-th pixel, so that it has no more than ``max_pixels``."""
    step = int(np.ceil(np.sqrt(pixels.shape[0] * pixels.shape[1] / max_pixels)))
    return pixels[::step, ::step].copy()


def main(path: str, workers: int) -> dict[str, Any]:
    """Read the video as a server does: file in memory, each frame shrunk at once."""
    before = status_bytes("VmRSS")
    started = time.perf_counter()
    data = Path(path).read_bytes()
    video = VideoFile(data)
    info = video.info
    rules = rules_at_1fps()
    plan = plan_frames(rules, info.total_frames, info.times_s, info.fps, info.duration_s)
    kept: list[Any] = [None] * len(plan.indices)
    for position, pixels in video.frames(plan.indices, workers=workers):
        kept[position] = shrunk(pixels, plan.max_pixels)
    assert all(frame is not None for frame in kept)
    kept_bytes = sum(frame.nbytes for frame in kept)
    return {
        "seconds_of_video": round(info.duration_s, 1),
        "frames": info.total_frames,
        "taken": len(kept),
        "workers": workers,
        "file_bytes": len(data),
        "kept_bytes": kept_bytes,
        "measured_bytes": status_bytes("VmHWM") - before,
        "bound_bytes": peak_bytes(
            info.width,
            info.height,
            total_frames=info.total_frames,
            workers=workers,
            file_bytes=len(data),
            kept_bytes=kept_bytes,
        ),
        "float_bytes": len(kept) * info.width * info.height * 3 * 4,
        "seconds": round(time.perf_counter() - started, 2),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
