# SPDX-License-Identifier: Apache-2.0
"""Frames of a video file, as a full decode gives them, for less than a full decode.

``VideoFile`` reads the container's index, tells frames and times, and decodes the frames that are
asked for. Audio tracks are never read. Needs PyAV (``pip install "mimo-plugin[video]"``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mimo_plugin.core.frames import FramePlan, FrameRules, VideoError, plan_frames
from mimo_plugin.media.video_decode import Run, RunDecoder, decode_linear, plan_runs
from mimo_plugin.media.video_index import VideoIndex, mean_rate, read_index
from mimo_plugin.media.video_source import Source, VideoLimits

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

__all__ = ["VideoError", "VideoFile", "VideoInfo", "VideoLimits", "sample"]

logger = logging.getLogger("vllm.mimo_plugin.media")

MAX_WORKERS = 64


@dataclass(frozen=True)
class VideoInfo:
    """What the container says of a video.

    Attributes:
        total_frames: frames that a full decode gives.
        fps: mean frames per second; 0 when it is unknown.
        duration_s: from the first frame to the end of the last; 0 when it is unknown.
        width: of a frame as it is shown, in pixels.
        height: of a frame as it is shown, in pixels.
        rotation: degrees counter-clockwise by which stored frames were turned: 0, 90, 180, 270.
        has_audio: there is an audio track (it is not read).
        times_s: when each frame is shown, behind the first one; None when the container has no
            times.
        why_linear: why frames are counted from the start of the file on; None when they are found
            by the index.
    """

    total_frames: int
    fps: float
    duration_s: float
    width: int
    height: int
    rotation: int
    has_audio: bool
    times_s: tuple[float, ...] | None
    why_linear: str | None = None


class VideoFile:
    """A video in memory or on disk.

    Args:
        data: the file's bytes, which are not copied (a view of shared memory must outlive this
            object), or its path.
        limits: what it may ask of this process.

    Attributes:
        info: what the container says.
        decoded_frames: frames that decoders have put out in passes that came to their end.

    Raises:
        VideoError: it can't be served: no video, no frames, cut off, or beyond the limits.
    """

    def __init__(
        self,
        data: bytes | bytearray | memoryview | str | Path,
        *,
        limits: VideoLimits | None = None,
    ) -> None:
        self._source = Source(data, limits or VideoLimits())
        self._index = read_index(self._source)
        self.info = _info(self._index)
        self.decoded_frames = 0
        self._lock = threading.Lock()

    def frames(self, indices: Sequence[int], *, workers: int = 1) -> Iterator[tuple[int, Any]]:
        """Position in ``indices`` and frame, ``[height, width, 3]`` uint8 RGB, upright.

        Pairs come in no particular order, so that a frame needn't wait for another; the consumer
        puts each in its place. No more than ``frames_in_flight(workers)`` frames exist at once as
        long as the consumer keeps one. Where an index repeats, its positions share one array.

        A frame that can't be decoded is left out, with a warning: no other takes its place.

        Args:
            indices: frames in order of display, counted from 0, in any order.
            workers: threads that decode; each opens the file for itself.

        Raises:
            VideoError: an index or ``workers`` is out of range, none of the frames can be decoded,
                or frames change their size.
        """
        if not 1 <= workers <= MAX_WORKERS:
            raise VideoError(f"workers: found {workers}; allowed: 1 to {MAX_WORKERS}")
        total = self.info.total_frames
        for index in indices:
            if not 0 <= index < total:
                raise VideoError(f"frame {index} is not there: the video has {total} frames")
        return self._frames(indices, workers)

    def _frames(self, indices: Sequence[int], workers: int) -> Iterator[tuple[int, Any]]:
        positions: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            positions.setdefault(index, []).append(position)
        missing = set(positions)
        for index, pixels in self._decoded(sorted(positions), workers):
            missing.discard(index)
            for position in positions[index]:
                yield position, pixels
        if missing and len(missing) == len(positions):
            raise VideoError(f"none of the {len(positions)} frames asked for can be decoded")
        if missing:
            logger.warning(
                "video: %d of %d frames can't be decoded and are left out; the first is frame %d",
                len(missing),
                len(positions),
                min(missing),
            )

    def _decoded(self, wanted: Sequence[int], workers: int) -> Iterator[tuple[int, Any]]:
        if self._index.why_linear is not None:
            for index, frame in decode_linear(self._source, wanted):
                yield index, self._pixels(frame)
            self.decoded_frames += max(wanted, default=-1) + 1
            return
        runs = plan_runs(self._index, wanted)
        workers = min(workers, len(runs))
        if workers > 1:
            yield from _shared(runs, workers, self._worker)
        else:
            yield from self._worker(iter(runs))

    def _worker(self, runs: Iterator[Run]) -> Iterator[tuple[int, Any]]:
        decoder = RunDecoder(self._source, self._index)
        for index, frame in decoder.decode(runs):
            yield index, self._pixels(frame)
        with self._lock:
            self.decoded_frames += decoder.decoded

    def _pixels(self, frame: VideoFrame) -> Any:
        if (frame.width, frame.height) != (self._index.width, self._index.height):
            raise VideoError(
                f"the video changes its size from {self._index.width}x{self._index.height} to "
                f"{frame.width}x{frame.height}; allowed: one size"
            )
        # Where chroma must be scaled up, bicubic is what OpenCV, and so stock vLLM, uses. Threads
        # of the scaler would only get in the way of the workers.
        pixels = frame.to_ndarray(format="rgb24", interpolation="BICUBIC", threads=1)
        turns = self._index.rotation // 90
        return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def sample(
    data: bytes | bytearray | memoryview | str | Path,
    rules: FrameRules,
    *,
    limits: VideoLimits | None = None,
    workers: int = 1,
) -> tuple[FramePlan, Iterator[tuple[int, Any]]]:
    """Plan a video by a checkpoint's rules and decode what the plan takes.

    Returns:
        The plan, and position in it and frame as ``VideoFile.frames`` yields them.

    Raises:
        VideoError: as ``VideoFile`` and ``VideoFile.frames``.
    """
    video = VideoFile(data, limits=limits)
    info = video.info
    plan = plan_frames(rules, info.total_frames, info.times_s, info.fps, info.duration_s)
    return plan, video.frames(plan.indices, workers=workers)


def _info(index: VideoIndex) -> VideoInfo:
    unit_s, rate = index.time_base, mean_rate(index)
    times = None
    if index.frame_pts:
        first = index.frame_pts[0]
        times = tuple(float((pts - first) * unit_s) for pts in index.frame_pts)
    upright = index.rotation % 180 == 0
    return VideoInfo(
        total_frames=index.total_frames,
        fps=rate,
        duration_s=index.total_frames / rate if rate > 0 else 0.0,
        width=index.width if upright else index.height,
        height=index.height if upright else index.width,
        rotation=index.rotation,
        has_audio=index.has_audio,
        times_s=times,
        why_linear=index.why_linear,
    )


@dataclass(frozen=True)
class _Ended:
    """A worker's last word."""

    failure: BaseException | None


def _shared(
    runs: Sequence[Run],
    workers: int,
    decode: Callable[[Iterator[Run]], Iterator[tuple[int, Any]]],
) -> Iterator[tuple[int, Any]]:
    """Let threads take runs from one list, and yield what they decode.

    PyAV gives up the interpreter's lock while it decodes and converts. The queue is short, so a
    slow consumer stops the workers.
    """
    results: queue.Queue[tuple[int, Any] | _Ended] = queue.Queue(maxsize=workers)
    stop = threading.Event()
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)

    def taken() -> Iterator[Run]:
        while not stop.is_set():
            try:
                yield waiting.get_nowait()
            except queue.Empty:
                return

    def worker() -> None:
        failure: BaseException | None = None
        try:
            for found in decode(taken()):
                results.put(found)
                del found
                if stop.is_set():
                    break
        except BaseException as error:
            failure = error
        results.put(_Ended(failure))

    threads = [
        threading.Thread(target=worker, name=f"mimo-video-{n}", daemon=True) for n in range(workers)
    ]
    for thread in threads:
        thread.start()
    running = workers
    try:
        while running:
            found = results.get()
            if not isinstance(found, _Ended):
                yield found
                del found
                continue
            running -= 1
            if found.failure is not None:
                raise found.failure
    finally:
        stop.set()
        while running:
            running -= isinstance(results.get(), _Ended)
        for thread in threads:
            thread.join()
