# SPDX-License-Identifier: Apache-2.0
"""What the pixels of a checkpoint become: mean and deviation, backend and dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.pixels import PixelError, PixelSpec, channel_values, rescale_of
from mimo_plugin.kernels.preprocess.dispatch import DTYPES

_FILE = "preprocessor_config.json"
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PixelRule:
    """How this engine's processes make patch rows.

    Attributes:
        mean: per channel, of values 0..255.
        std: per channel, of values 0..255.
        backend: of the kernel.
        dtype: of the rows: the vision tower's, to which SGLang brings them anyway.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    backend: str
    dtype: Any

    def spec(self, patch_size: int, merge_size: int, temporal_patch_size: int) -> PixelSpec:
        """For the kernel. Sizes are decided by SGLang, whose prompts count the tokens."""
        return PixelSpec(
            resample="bilinear",
            mean=self.mean,
            std=self.std,
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=temporal_patch_size,
            min_pixels=1,
            max_pixels=_NO_LIMIT,
        )


def make_rule(
    settings: VisionConfig,
    preprocessor: Mapping[str, Any],
    stock: tuple[tuple[float, float, float], tuple[float, float, float]],
    dtype: Any,
) -> PixelRule:
    """The rule of a checkpoint.

    Args:
        settings: the user's.
        preprocessor: the checkpoint's ``preprocessor_config.json``, empty when there is none.
        stock: mean and standard deviation that SGLang has built in, of values 0..255.
        dtype: the model's.

    Raises:
        PixelError: a value of the file is out of range.
    """
    mean, std = stock
    if settings.mean_std == "checkpoint":
        factor = rescale_of(preprocessor)
        mean = channel_values(preprocessor, "image_mean", factor, mean)
        std = channel_values(preprocessor, "image_std", factor, std)
    rule = PixelRule(
        mean=mean,
        std=std,
        backend=settings.backend,
        dtype=dtype if dtype in DTYPES else torch.float32,
    )
    rule.spec(1, 1, 1)  # refuses what is out of range
    return rule


def read_preprocessor(model: str, revision: str | None) -> dict[str, Any]:
    """The image settings of a checkpoint; empty when it has none.

    Raises:
        PixelError: the file can't be read.
    """
    from transformers.utils import cached_file

    try:
        found = cached_file(
            model, _FILE, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        values = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    except (OSError, ValueError) as error:
        raise PixelError(f"{_FILE} of {model}: can't be read: {error}") from None
    if not isinstance(values, dict):
        raise PixelError(f"{_FILE} of {model}: found {type(values).__name__}; needed: an object")
    # A processor's file may hold the settings of images in a section of their own.
    section = values.get("image_processor", values)
    return section if isinstance(section, dict) else values
