# SPDX-License-Identifier: Apache-2.0
"""``mm_processor_kwargs`` of Qwen-VL models: limits of images, and what goes on to vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_plugin.engines.vllm.vision.limits import Limits, bad_kwarg, checked, limits_in
from mimo_plugin.engines.vllm.vision.setup import VisionSetup

_LIMITS = ("size", "min_pixels", "max_pixels")
_STEPS = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
_ONLY: Mapping[str, object] = {"use_fast": False, "device": "cpu", **dict.fromkeys(_STEPS, True)}
"""Settings that may say only what is done anyway."""

_IMAGES = "images_kwargs"
_OTHER_SCOPES = ("text_kwargs", "videos_kwargs")
_OF_VIDEOS = (
    "fps",
    "num_frames",
    "min_frames",
    "max_frames",
    "do_sample_frames",
    "cap_pixels_per_frame",
    "max_video_tokens",
)
"""Settings that vLLM's processor takes for videos; others go into ``videos_kwargs``."""


def check_qwen_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse settings that would change images and can't, and names that nothing knows.

    Raises:
        PixelError: such a setting, or a limit out of range.
    """
    for key, value in kwargs.items():
        if key == _IMAGES:
            if not isinstance(value, Mapping):
                raise bad_kwarg(key, value, "an object")
            for inner, found in value.items():
                _check(f"{key}.{inner}", inner, found)
        elif key not in (*_OTHER_SCOPES, *_OF_VIDEOS):
            _check(key, key, value)
    limits_in(kwargs, "image")
    limits_in(kwargs.get(_IMAGES, {}), "image")


def qwen_limits(setup: VisionSetup, kwargs: Mapping[str, Any]) -> Limits:
    """Limits of the images of a request.

    Args:
        setup: of the engine.
        kwargs: ``mm_processor_kwargs`` of engine and request, merged as vLLM does for the model.

    Raises:
        PixelError: a limit out of range.
    """
    values = {"min_pixels": setup.spec.min_pixels, "max_pixels": setup.spec.max_pixels}
    for source in (kwargs, kwargs.get(_IMAGES) or {}):
        values.update(limits_in(source, "image"))
    return checked(values, "image")


def _check(name: str, key: str, value: object) -> None:
    if key in _LIMITS:
        return
    if key not in _ONLY:
        names = ", ".join((*_LIMITS, *_ONLY))
        raise bad_kwarg(name, value, f"for images {names}; for videos what videos_kwargs holds")
    if value != _ONLY[key]:
        raise bad_kwarg(name, value, f"{_ONLY[key]}, as images are made on the model's device")
