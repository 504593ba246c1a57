# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``video``."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_plugin.config_values import Validator, number, one_of, section, whole, whole_or_none

FRAME_RULES = ("checkpoint", "stock")
SPREADS = ("ends", "steps", "time")
"""Those of ``core.frames``, which an engine without the plugin does not import."""


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Settings of the feature ``video``.

    Attributes:
        frames: which frames are taken: by the ``checkpoint``'s rate and bounds, or as vLLM's own
            loader does (``stock``: 32, evenly spread).
        spread: how the checkpoint's rule spreads frames over a video, one of
            ``core.frames.SPREADS``.
        workers: threads that decode one video, each with a decoder of its own; None: the cores of
            the machine, at most 4.
        max_file_bytes: of a video as it is sent.
        max_duration_s: of a video.
        max_output_bytes: of the frames taken, as they travel.
        job_timeout_s: longest time for reading one video.
    """

    frames: str = "checkpoint"
    spread: str = "ends"
    workers: int | None = None
    max_file_bytes: int = 1 << 30
    max_duration_s: float = 6 * 3600.0
    max_output_bytes: int = 1 << 30
    job_timeout_s: float = 120.0


_VALUES: dict[str, Validator] = {
    "frames": one_of(FRAME_RULES),
    "spread": one_of(SPREADS),
    "workers": whole_or_none(1, "threads", "null takes the cores, at most 4"),
    "max_file_bytes": whole(1, "bytes"),
    "max_duration_s": number(over=0),
    "max_output_bytes": whole(1, "bytes"),
    "job_timeout_s": number(over=0),
}


def parse_video(where: str, raw: object) -> VideoConfig:
    """The settings of the section ``where``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
    """
    return VideoConfig(**section(where, raw, _VALUES))
