# SPDX-License-Identifier: Apache-2.0
"""The job of a worker process: read a video, and leave its frames in shared memory.

A frame is copied, or made patch rows of, as soon as it is decoded, so that no more frames exist at
full size than travel so. Neither PyTorch nor vLLM is imported.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.frames import (
    FrameRules,
    VideoError,
    plan_asked,
    plan_of,
    workers_within,
)
from mimo_plugin.core.pixels import CHANNELS, Item, PixelError, PixelSpec, resize_on_host
from mimo_plugin.engines.vllm.vision.limits import Limits, sized
from mimo_plugin.kernels.preprocess.host import FrameRows
from mimo_plugin.media.limits import MediaError
from mimo_plugin.media.video import VideoFile, VideoLimits

MOST_PASSES = 4
"""Each pass that misses frames is followed by one for those that came; a file that still changes
its mind after so many is refused."""

DECODER_BYTES = 2 << 30
"""Memory that decoders of one video share; for larger frames there are fewer of them."""

_MOST_WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to read of a video.

    Attributes:
        rules: which frames are taken; None: as vLLM's own loader does.
        num_frames: frames that the request asks for.
        fps: rate that the request asks for.
        spec: how pixels are wanted.
        limits: of the pixels of a video.
        rows_dtype: type of patch rows; None: pixels, whatever their size.
        host_resize_ratio: source pixels per target pixel above which patch rows are made.
        workers: threads that decode; None: the cores, at most 4.
        max_file_bytes: of the file.
        max_duration_s: of the video.
        max_output_bytes: of the frames taken.
    """

    rules: FrameRules | None
    num_frames: int | None
    fps: float | None
    spec: PixelSpec
    limits: Limits
    rows_dtype: str | None
    host_resize_ratio: float
    workers: int | None
    max_file_bytes: int
    max_duration_s: float
    max_output_bytes: int


def read_video(data: Any, allocate: Callable[[Sequence[int]], Any], *, order: Order) -> Any:
    """Read a video; a job for the media pool.

    Args:
        data: the file.
        allocate: gives shared memory. The last array asked for holds the frames: pixels
            [frames, height, width, 3], or patch rows as bytes [t, h * w, bytes of a row].
        order: what to read.

    Returns:
        What the loader needs for the metadata and its counters; JSON-able.

    Raises:
        MediaError: the video can't be served.
    """
    started = time.perf_counter()
    limits = VideoLimits(max_bytes=order.max_file_bytes, max_duration_s=order.max_duration_s)
    try:
        video = VideoFile(data, limits=limits)
        info = video.info
        plan = plan_asked(
            order.rules,
            info.total_frames,
            info.times_s,
            info.fps,
            info.duration_s,
            num_frames=order.num_frames,
            asked_fps=order.fps,
        )
        kept, item, rows = _taken(video, plan.indices, order, allocate)
    except (VideoError, PixelError) as problem:
        raise MediaError(str(problem)) from None
    except MemoryError:
        raise MediaError("the video takes more memory than a worker may have") from None
    return {
        "source": [item.height, item.width],
        "target": [item.target_height, item.target_width],
        "rows": rows,
        "indices": list(kept),
        "times_s": list(plan_of(kept, info.times_s, info.fps).times_s),
        "total_frames": info.total_frames,
        "fps": info.fps,
        "duration_s": info.duration_s,
        "has_audio": info.has_audio,
        "decoded_frames": video.decoded_frames,
        "dropped_frames": len(plan.indices) - len(kept),
        "seconds": time.perf_counter() - started,
    }


def _taken(
    video: VideoFile, indices: Sequence[int], order: Order, allocate: Callable[..., Any]
) -> tuple[Sequence[int], Item, bool]:
    """Fill an array with all of the frames, or with those that can be decoded.

    A frame that is missing moves those behind it into other patches, and leaves the others more
    pixels of their common share. So the frames that did come are read once more.
    """
    for _ in range(MOST_PASSES):
        item, rows, found = _pass(video, indices, order, allocate)
        if len(found) == len(indices):
            return indices, item, rows
        indices = [index for position, index in enumerate(indices) if position in found]
    raise VideoError(f"the video is damaged: {MOST_PASSES} times not all frames came out again")


def _pass(
    video: VideoFile, indices: Sequence[int], order: Order, allocate: Callable[..., Any]
) -> tuple[Item, bool, set[int]]:
    """One item with all of the frames, whether it is patch rows, and the positions that came."""
    info = video.info
    item = sized(order.spec, order.limits, len(indices), info.height, info.width)
    target_pixels = item.target_height * item.target_width
    writer = None
    if order.rows_dtype is not None and resize_on_host(
        item.height * item.width, target_pixels, order.host_resize_ratio
    ):
        writer = FrameRows(order.spec, item, order.rows_dtype)
    shape = (*item[:3], CHANNELS) if writer is None else writer.shape
    size = math.prod(shape)
    if size > order.max_output_bytes:
        raise VideoError(
            f"{item.frames} frames of {item.width}x{item.height} are {size} bytes; allowed: up to "
            f"{order.max_output_bytes} (max_output_bytes); fix: ask for fewer frames"
        )
    out = allocate(shape)
    wanted = order.workers or min(_MOST_WORKERS, os.cpu_count() or 1)
    workers = workers_within(DECODER_BYTES, wanted, info.width, info.height, info.total_frames)
    found = set()
    for position, pixels in video.frames(indices, workers=workers):
        if writer is None:
            out[position] = pixels
        else:
            writer.write(pixels, position, out)
        found.add(position)
    return item, writer is not None, found
