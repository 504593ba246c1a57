# SPDX-License-Identifier: Apache-2.0
"""How a Qwen-VL checkpoint wants its pixels: what its image processor of transformers says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_plugin.core.pixels import PixelSpec, bad_setting, channel_values, rescale_of

# Defaults of the Qwen2-VL image processor of transformers, for keys a checkpoint leaves out.
_QWEN_DEFAULTS: Mapping[str, Any] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
_PIL_BICUBIC = 3


def qwen_spec(preprocessor: Mapping[str, Any]) -> PixelSpec:
    """The rule of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint.

    Args:
        preprocessor: its ``preprocessor_config.json``; a key that is missing has the value of
            transformers' Qwen2-VL image processor.

    Raises:
        PixelError: a value is out of range, or the processor leaves out a step.
    """
    for step in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
        if not preprocessor.get(step, True):
            raise bad_setting(step, preprocessor[step], "true: no step is left out here")
    resample = preprocessor.get("resample", _PIL_BICUBIC)
    if resample != _PIL_BICUBIC:
        raise bad_setting("resample", resample, f"{_PIL_BICUBIC} (bicubic)")
    given = {k: v for k, v in preprocessor.items() if v is not None}
    merged = {**_QWEN_DEFAULTS, **given}
    size = merged["size"]
    if not isinstance(size, Mapping):
        raise bad_setting("size", size, "an object with shortest_edge and longest_edge")
    factor = rescale_of(merged)
    least: Any = given.get("min_pixels", size.get("shortest_edge"))
    most: Any = given.get("max_pixels", size.get("longest_edge"))
    return PixelSpec(
        resample="bicubic",
        mean=channel_values(merged, "image_mean", factor),
        std=channel_values(merged, "image_std", factor),
        patch_size=merged["patch_size"],
        merge_size=merged["merge_size"],
        temporal_patch_size=merged["temporal_patch_size"],
        min_pixels=least,
        max_pixels=most,
        rescale=factor,
    )
