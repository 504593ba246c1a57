# SPDX-License-Identifier: Apache-2.0
"""What ``media_io_kwargs`` may say to the loader, at start and per request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mimo_plugin.core.frames import VideoError
from mimo_plugin.engines.vllm.video.names import SETUP_KEY
from mimo_plugin.engines.vllm.vision.limits import Limits
from mimo_plugin.errors import nearest

PIXEL_LIMITS = ("min_pixels", "max_pixels", "total_max_pixels")
KEYS = ("num_frames", "fps", *PIXEL_LIMITS)
"""Options for users."""

_WHERE = "media_io_kwargs.video"
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Asked:
    """What a request, or the engine for all of them, asks for; None: the rule decides.

    Attributes:
        num_frames: frames to take.
        fps: frames per second to take.
        pixels: changed limits of pixels, by the names of ``Limits``.
    """

    num_frames: int | None = None
    fps: float | None = None
    pixels: Mapping[str, int] = field(default_factory=dict)

    def limits(self, limits: Limits) -> Limits:
        """The engine's limits with what was asked for.

        Raises:
            VideoError: the fewest pixels are more than the most.
        """
        changed = replace(limits, **self.pixels)
        if changed.min_pixels > changed.max_pixels:
            raise VideoError(
                f"{_WHERE}: found min_pixels {changed.min_pixels}, max_pixels "
                f"{changed.max_pixels}; allowed: the first not above the second"
            )
        return changed


def parse(given: Mapping[str, Any], default_frames: int | None = None) -> Asked:
    """Check the options of the loader.

    Args:
        given: options without the loader's name; the key of the set-up is not looked at.
        default_frames: what vLLM says for ``num_frames`` when nobody does. Beside a rate it counts
            as not said; None: every number counts, as with vLLM's own loader.

    Raises:
        VideoError: an unknown option, or a value out of range.
    """
    for key, value in given.items():
        if key not in (*KEYS, SETUP_KEY):
            close = nearest(str(key), KEYS)
            hint = f" (did you mean {close!r}?)" if close else ""
            raise VideoError(
                f"{_WHERE}: found the key {_shown(key)} with {_shown(value)}; allowed keys: "
                f"{', '.join(KEYS)}{hint}"
            )
    frames = given.get("num_frames")
    if frames is not None and not (_is_whole(frames) and (frames > 0 or frames == -1)):
        raise _bad("num_frames", frames, "a whole number above 0, or -1 to leave it to the rule")
    fps = given.get("fps")
    if fps is not None and not (_is_number(fps) and (fps > 0 or fps == -1)):
        raise _bad("fps", fps, "a number above 0, or -1 to leave it to the rule")
    pixels = {name: given[name] for name in PIXEL_LIMITS if given.get(name) is not None}
    for name, value in pixels.items():
        if not _is_whole(value) or value < 1:
            raise _bad(name, value, "a whole number of pixels above 0")
    frames, fps = (None if value == -1 else value for value in (frames, fps))
    if fps is not None and frames == default_frames:
        frames = None
    return Asked(frames, None if fps is None else float(fps), pixels)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    """What a client sent, as far as it helps."""
    return repr(value)[:_SHOWN_CHARS]


def _bad(name: str, value: object, allowed: str) -> VideoError:
    return VideoError(f"{_WHERE}.{name}: found {_shown(value)}; allowed: {allowed}")
