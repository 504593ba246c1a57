# SPDX-License-Identifier: Apache-2.0
"""When the frames of a video were shown, and the tokens that say so to the model. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.pixels import PixelError

STOCK_FPS = 1.0
"""Frames per second that vLLM's MiMo processor takes for every video."""


def frame_times_s(frames: int, metadata: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Presentation time of each frame in seconds.

    A loader that knows them says so under ``times_s``. Others give the numbers of the frames in
    the file (``frames_indices``) and its mean rate (``fps``), from which the time follows for
    videos of constant rate.

    Args:
        frames: number of frames that came.
        metadata: of the video's loader, empty when frames came without one.

    Returns:
        One time per frame, or None where nothing is known.

    Raises:
        PixelError: times that are not one per frame, or go back.
    """
    given = metadata.get("times_s")
    if given is not None:
        times = tuple(float(t) for t in given)
        if len(times) != frames or any(b < a for a, b in zip(times, times[1:], strict=False)):
            raise PixelError(
                f"video metadata times_s: found {len(times)} times for {frames} frames; needed: "
                "one for each, ascending"
            )
        return times
    indices, fps = metadata.get("frames_indices"), metadata.get("fps")
    if indices is None or not fps or len(indices) != frames:
        return None
    return tuple(float(i) / float(fps) for i in indices)


def stock_times_s(frames: int) -> tuple[float, ...]:
    """What vLLM's MiMo processor takes the times for: one frame a second from 0."""
    return tuple(i / STOCK_FPS for i in range(frames))


def patch_times_s(times_s: Sequence[float], temporal_patch_size: int) -> tuple[float, ...]:
    """Time of each temporal patch: that of its first frame."""
    return tuple(times_s[::temporal_patch_size])


@dataclass(frozen=True)
class VideoTokens:
    """Ids of the tokens around videos."""

    video_start: int
    video_end: int
    vision_start: int
    vision_end: int
    video_pad: int


def video_prompt(
    times_s: Sequence[float],
    tokens_per_patch: int,
    tokens: VideoTokens,
    label: Callable[[float], list[int]],
) -> tuple[list[int], list[bool]]:
    """Tokens that stand for a video, and which of them are embeddings of it.

    The layout is that of vLLM's MiMo processor: for each temporal patch its time, then its
    tokens between vision start and vision end; all between video start and video end.

    Args:
        times_s: one for each temporal patch.
        tokens_per_patch: of a temporal patch.
        tokens: ids.
        label: the tokens that say a time.
    """
    full, embeds = [tokens.video_start], [False]
    for time_s in times_s:
        text = [*label(time_s), tokens.vision_start]
        full += [*text, *[tokens.video_pad] * tokens_per_patch, tokens.vision_end]
        embeds += [*[False] * len(text), *[True] * tokens_per_patch, False]
    return [*full, tokens.video_end], [*embeds, False]
