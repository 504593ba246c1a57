# SPDX-License-Identifier: Apache-2.0
"""Which frames of a video a checkpoint wants.

The rules are those of MiMo's reference processors: a number of frames from the checkpoint's rate
and bounds, spread over the video. Nothing here opens a file: the numbers come from the container's
index, so a plan costs no decoding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SPREADS = ("ends", "steps", "time")

# Defaults of MiMo's reference processors, for keys that a checkpoint leaves out.
_FPS = 2.0
_MIN_FRAMES, _MAX_FRAMES = 8, 256

MAX_TAKEN_FRAMES = 65_536
"""Frames of one video that a request can get, whatever it asks for."""


class VideoError(ValueError):
    """A video or a video setting that can't be served; one line that says why."""


@dataclass(frozen=True)
class FrameRules:
    """How a checkpoint samples videos.

    Attributes:
        fps: frames per second to take; used when ``num_frames`` is None.
        num_frames: frames to take whatever the length; goes before ``fps``.
        min_frames: the fewest frames that ``fps`` may lead to, as far as the video has them.
        max_frames: the most frames that ``fps`` may lead to.
        temporal_patch_size: frames in a patch; numbers of frames are multiples of it.
        spread: ``ends``: first and last frame and equal distances between, rounded down (SGLang's
            processor for MiMo-V2.5, and stock vLLM); ``steps``: the start of each of n equal parts,
            rounded to the nearest (Xiaomi's processor without its last frame); ``time``: the frame
            on screen at the start of each of n equal parts of the time.

    Raises:
        VideoError: a value is out of range.
    """

    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    temporal_patch_size: int
    spread: str = "ends"

    def __post_init__(self) -> None:
        if self.fps is None and self.num_frames is None:
            raise VideoError("fps, num_frames: found neither; allowed: at least one of them")
        if self.fps is not None and not (0 < self.fps < math.inf):
            raise _bad("fps", self.fps, "a number above 0")
        if self.num_frames is not None and not _is_count(self.num_frames):
            raise _bad("num_frames", self.num_frames, "a whole number above 0")
        for name in ("min_frames", "temporal_patch_size"):
            if not _is_count(getattr(self, name)):
                raise _bad(name, getattr(self, name), "a whole number above 0")
        if not _is_count(self.max_frames) or self.max_frames < self.min_frames:
            allowed = f"a whole number not below min_frames ({self.min_frames})"
            raise _bad("max_frames", self.max_frames, allowed)
        if self.spread not in SPREADS:
            raise _bad("spread", self.spread, f"one of {', '.join(SPREADS)}")

    def asked(self, *, fps: float | None = None, num_frames: int | None = None) -> FrameRules:
        """The rules of a request that asks for a rate or a number of frames of its own.

        ``num_frames`` goes before ``fps``, and either before what the checkpoint says.
        """
        if num_frames is not None:
            return replace(self, num_frames=num_frames)
        if fps is not None:
            return replace(self, fps=fps, num_frames=None)
        return self


@dataclass(frozen=True)
class FramePlan:
    """The frames to decode.

    Attributes:
        indices: frames in order of display, counted from 0.
        times_s: when each is shown, in seconds behind the first frame of the video.
    """

    indices: tuple[int, ...]
    times_s: tuple[float, ...]


def mimo_rules(config: Mapping[str, Any]) -> FrameRules:
    """The rules of a MiMo checkpoint.

    Args:
        config: its ``config.json``; ``processor_config`` and ``vision_config`` are read.

    Raises:
        VideoError: a value is out of range.
    """
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    given: Mapping[str, Any] = config.get("processor_config") or {}
    patch = vision.get("temporal_patch_size") or given.get("temporal_patch_size") or 2
    return FrameRules(
        fps=given.get("fps") or _FPS,
        num_frames=given.get("num_frames"),
        min_frames=given.get("min_frames") or _MIN_FRAMES,
        max_frames=given.get("max_frames") or _MAX_FRAMES,
        temporal_patch_size=patch,
    )


def plan_frames(
    rules: FrameRules,
    total_frames: int,
    times_s: Sequence[float] | None,
    fps: float,
    duration_s: float,
) -> FramePlan:
    """The frames that the rules take of a video.

    A video with fewer frames than a patch is taken whole; where the reference processors refuse it,
    the patch repeats the last frame.

    Args:
        rules: the checkpoint's or the request's.
        total_frames: frames of the video.
        times_s: when each is shown, rising; None when the container has no times: then they are
            ``index / fps``.
        fps: mean rate of the video; 0 when it is unknown.
        duration_s: its length, used where ``fps`` is 0.

    Raises:
        VideoError: there are no frames, or ``times_s`` is of another length.
    """
    _check_video(total_frames, times_s)
    count = _count(rules, total_frames, total_frames / fps if fps > 0 else duration_s)
    if rules.spread == "steps":
        indices = [_round_ratio(i * total_frames, count) for i in range(count)]
    elif rules.spread == "time" and times_s is not None:
        step_s = (times_s[-1] - times_s[0]) / max(1, total_frames - 1) * total_frames / count
        starts = [times_s[0] + i * step_s for i in range(count)]
        indices = [max(0, bisect_right(times_s, start) - 1) for start in starts]
    else:
        indices = _linspace(total_frames, count)
    return plan_of(sorted(set(indices)), times_s, fps)


def plan_of(indices: Sequence[int], times_s: Sequence[float] | None, fps: float) -> FramePlan:
    """A plan with frames chosen elsewhere, e.g. by ``uniform_indices``; they may repeat."""
    times = (
        [times_s[i] for i in indices] if times_s else [i / fps if fps > 0 else 0.0 for i in indices]
    )
    return FramePlan(tuple(indices), tuple(times))


def plan_asked(
    rules: FrameRules | None,
    total_frames: int,
    times_s: Sequence[float] | None,
    fps: float,
    duration_s: float,
    *,
    num_frames: int | None = None,
    asked_fps: float | None = None,
) -> FramePlan:
    """The frames for a request that may ask for a number, a rate, or both: then the fewer count.

    Args:
        rules: the checkpoint's; None: as vLLM's own loader takes them (``uniform_indices``).
        total_frames: see ``plan_frames``, also for the next three.
        times_s: see there.
        fps: see there.
        duration_s: see there.
        num_frames: asked for; None: not.
        asked_fps: asked for; None: not.

    Raises:
        VideoError: as ``plan_frames``; or more than ``MAX_TAKEN_FRAMES`` frames.
    """
    if rules is None:
        indices = uniform_indices(
            total_frames, duration_s, num_frames=num_frames or -1, fps=asked_fps or -1
        )
        plans = [plan_of(indices, times_s, fps)]
    else:
        asked = [rules.asked(num_frames=num_frames)] if num_frames else []
        asked += [rules.asked(fps=asked_fps)] if asked_fps else []
        plans = [
            plan_frames(one, total_frames, times_s, fps, duration_s) for one in asked or [rules]
        ]
    plan = min(plans, key=lambda plan: len(plan.indices))
    if len(plan.indices) > MAX_TAKEN_FRAMES:
        raise VideoError(
            f"{len(plan.indices)} frames are to be taken of the video; allowed: {MAX_TAKEN_FRAMES}"
        )
    return plan


def uniform_indices(
    total_frames: int, duration_s: float, *, num_frames: int = -1, fps: float = -1
) -> list[int]:
    """The frames that vLLM's own loader takes (``VideoBackend`` of vLLM 0.32).

    Args:
        total_frames: frames of the video.
        duration_s: its length.
        num_frames: the most frames; -1: no limit.
        fps: the most frames per second; -1: no limit.

    Raises:
        VideoError: there are no frames.
    """
    _check_video(total_frames, None)
    count = total_frames if num_frames <= 0 else min(num_frames, total_frames)
    if fps > 0:
        count = min(count, math.floor(duration_s * fps))
    return _linspace(total_frames, max(1, count))


def frames_in_flight(workers: int) -> int:
    """The most full-resolution RGB frames that exist at once while a video is read.

    One worker holds the frame that it makes beside the consumer's last one. Several hold one each,
    as many again wait, and the consumer has its last one and the next.
    """
    return 2 if workers == 1 else 2 * workers + 2


DECODED_FRAMES = 34
"""Decoded YUV frames that a decoder holds at most: 16 of the picture buffer (the limit of H.264 and
HEVC), as many that wait for frames they refer to, the one in work and the one that is converted."""

_INDEX_BYTES_PER_FRAME = 400
"""Python objects for a frame's time and place in the file; measured below 300."""


def peak_bytes(
    width: int,
    height: int,
    *,
    total_frames: int,
    workers: int,
    file_bytes: int = 0,
    kept_bytes: int = 0,
) -> int:
    """Bound of the memory that reading a video takes.

    Args:
        width: of a frame, in pixels.
        height: of a frame, in pixels.
        total_frames: frames of the video, of which only times and places are kept.
        workers: threads that decode.
        file_bytes: what the file takes when it is in memory; 0 when it is read from a path.
        kept_bytes: what the consumer keeps of the frames, e.g. resized ones.
    """
    padded = _align(width) * _align(height)
    decoders = workers * DECODED_FRAMES * padded * 3 // 2
    # A worker may turn a frame, which makes a second one for a moment.
    frames = (frames_in_flight(workers) + workers) * 3 * width * height
    return file_bytes + kept_bytes + decoders + frames + total_frames * _INDEX_BYTES_PER_FRAME


def workers_within(limit_bytes: int, workers: int, width: int, height: int, frames: int) -> int:
    """The most of ``workers`` threads whose decoders keep to ``limit_bytes``; at least one.

    Args:
        limit_bytes: of the memory that ``peak_bytes`` bounds, the file and what is kept left out.
        workers: threads at most.
        width: of a frame, in pixels.
        height: of a frame, in pixels.
        frames: frames of the video.
    """
    while workers > 1:
        if peak_bytes(width, height, total_frames=frames, workers=workers) <= limit_bytes:
            break
        workers -= 1
    return workers


def _align(pixels: int) -> int:
    # Decoders pad frames to whole blocks and add an edge on both sides.
    return (pixels + 63) // 64 * 64 + 128


def _count(rules: FrameRules, total_frames: int, duration_s: float) -> int:
    """How many frames are taken, 1 <= x <= total_frames."""
    factor = rules.temporal_patch_size
    if rules.num_frames is not None:
        wanted = max(factor, round(rules.num_frames / factor) * factor)
        count = float(min(wanted, total_frames))
    else:
        assert rules.fps is not None  # __post_init__
        low = math.ceil(rules.min_frames / factor) * factor
        high = max(factor, rules.max_frames // factor * factor)
        count = min(max(duration_s * rules.fps, low), high, total_frames)
    whole = math.floor(count / factor) * factor
    return whole if whole else total_frames


def _linspace(total_frames: int, count: int) -> list[int]:
    """``count`` indices from the first to the last frame, as numpy's integer ``linspace``."""
    if count == 1:
        return [0]
    step = (total_frames - 1) / (count - 1)
    return [*(math.floor(i * step) for i in range(count - 1)), total_frames - 1]


def _round_ratio(numerator: int, denominator: int) -> int:
    """The nearest whole number, an even one where two are as near."""
    whole, rest = divmod(numerator, denominator)
    up = 2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1)
    return whole + up


def _check_video(total_frames: int, times_s: Sequence[float] | None) -> None:
    if total_frames < 1:
        raise VideoError(f"the video has {total_frames} frames; needed: at least 1")
    if times_s is not None and len(times_s) != total_frames:
        raise VideoError(f"{len(times_s)} frame times for a video of {total_frames} frames")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bad(name: str, found: object, allowed: str) -> VideoError:
    return VideoError(f"{name}: found {found!r}; allowed: {allowed}")
