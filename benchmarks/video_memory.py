# SPDX-License-Identifier: Apache-2.0
"""Peak memory of reading a video at 1 fps as a server does; a process of its own for clean figures.

The worker is one of the media pool; what it takes beyond its idle state is measured, and what it
maps of shared memory, the file and the frames, counts.
The server's side is this process: the file, the frames in shared memory, the processor's copy.

Run: ``python -m benchmarks.video_memory PATH WORKERS`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.frames import FrameRules, peak_bytes
from mimo_plugin.core.pixels import IMAGENET_MEAN, IMAGENET_STD, MIMO_TOTAL_TOKENS, PixelSpec
from mimo_plugin.engines.vllm.video.job import Order, read_video
from mimo_plugin.engines.vllm.video.names import ROWS_KEY
from mimo_plugin.engines.vllm.vision.limits import Limits
from mimo_plugin.engines.vllm.vision.packing import pack, pack_rows
from mimo_plugin.engines.vllm.vision.setup import VisionSetup
from mimo_plugin.media.pool import MediaPool, PoolSettings

TOKEN = 32 * 32
"""Pixels of a token of MiMo-V2.5."""

DTYPE = torch.bfloat16
LIMITS = Limits(4 * TOKEN, 4096 * TOKEN, MIMO_TOTAL_TOKENS * TOKEN)
_WARM_UP_BYTES = 1 << 20
_SLACK_BYTES = 16 << 20
"""Of the server's side: what allocators keep, pages that are touched for the first time."""


def rules_at_1fps() -> FrameRules:
    """One frame a second for an hour."""
    return FrameRules(
        fps=1.0,
        num_frames=None,
        min_frames=2,
        max_frames=3600,
        temporal_patch_size=2,
    )


def setup() -> VisionSetup:
    """MiMo-V2.5's patches and limits."""
    spec = PixelSpec(
        resample="bilinear",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=LIMITS.min_pixels,
        max_pixels=LIMITS.max_pixels,
    )
    return VisionSetup(
        spec=spec,
        video_min_pixels=LIMITS.min_pixels,
        video_max_pixels=LIMITS.max_pixels,
        video_total_max_pixels=MIMO_TOTAL_TOKENS * TOKEN,
        config=VisionConfig(),
    )


def order_at_1fps(workers: int) -> Order:
    """What the loader asks the worker for."""
    return Order(
        rules=rules_at_1fps(),
        num_frames=None,
        fps=None,
        spec=setup().spec,
        limits=LIMITS,
        rows_dtype=str(DTYPE).removeprefix("torch."),
        host_resize_ratio=VisionConfig().host_resize_ratio,
        workers=workers,
        max_file_bytes=4 << 30,
        max_duration_s=7200.0,
        max_output_bytes=1 << 30,
    )


def server_bytes(file_bytes: int, kept_bytes: int) -> int:
    """Bound of the server's side: the file, the frames, and the processor's copy of them."""
    return file_bytes + 2 * kept_bytes + _SLACK_BYTES


class Watch:
    """Peak of a process' resident memory, shared memory included, since this was made."""

    def __init__(self, process: int) -> None:
        self._folder = Path(f"/proc/{process}")
        (self._folder / "clear_refs").write_text("5")  # the peak starts anew
        self._before = self._bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Bytes beyond those at the start."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, key: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)


def children() -> list[int]:
    """Processes that threads of this one have started."""
    found = (task / "children" for task in Path("/proc/self/task").iterdir())
    return [int(child) for path in found for child in path.read_text().split()]


def main(path: str, workers: int) -> dict[str, Any]:
    """Read the video by the loader's job and pack its frames as the processor does."""
    order, warm = order_at_1fps(workers), Path(path).with_name("warm-up.mp4")
    pool = MediaPool(PoolSettings(workers=1, job_timeout_s=600.0))
    try:
        as_rows = replace(order, host_resize_ratio=0.0)
        pool.run_sync(read_video, warm.read_bytes(), order=as_rows)
        (worker,) = children()
        torch.cat([torch.zeros(_WARM_UP_BYTES)])
        watches = {"worker": Watch(worker), "server": Watch(os.getpid())}
        started = time.perf_counter()
        data = Path(path).read_bytes()
        told, (*_, frames) = pool.run_sync(read_video, data, order=order)
        metadata = {"frames_indices": told["indices"], ROWS_KEY: told}
        if told["rows"]:
            packed = pack_rows(frames, metadata, setup(), LIMITS, DTYPE)
        else:
            packed = pack(frames, setup(), LIMITS, DTYPE)
        travels = torch.cat([packed.data])
        seconds = time.perf_counter() - started
        measured = {name: watch.peak_bytes() for name, watch in watches.items()}
    finally:
        pool.close()
    height, width = told["source"]
    kept = travels.numel()
    bounds = {
        "worker": peak_bytes(
            width,
            height,
            total_frames=told["total_frames"],
            workers=workers,
            file_bytes=len(data),
            kept_bytes=kept,
        ),
        "server": server_bytes(len(data), kept),
    }
    return {
        "seconds_of_video": round(told["duration_s"], 1),
        "frames": told["total_frames"],
        "taken": len(told["indices"]),
        "form": "rows" if told["rows"] else "pixels",
        "workers": workers,
        "file_bytes": len(data),
        "kept_bytes": kept,
        "measured_bytes": measured,
        "bound_bytes": bounds,
        "float_bytes": len(told["indices"]) * width * height * 3 * 4,
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
