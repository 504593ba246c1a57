# SPDX-License-Identifier: Apache-2.0
"""Media of the run in which vLLM measures memory: as large as media that travel as bytes may be.

Upstream's have the size of the largest target. Bytes of a source may be ``host_resize_ratio`` times
as many, and lie on the device beside the patch rows that are made of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.mimo_v2_omni import MiMoV2OmniDummyInputsBuilder

from mimo_plugin.core.pixels import (
    HOST_RESIZE_RATIO,
    Item,
    patch_rows_of,
    resize_on_host,
    target_size,
)
from mimo_plugin.engines.vllm.vision.limits import Limits, limits_of
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, setup_of

_TRIES = 4
"""Rounding to whole pixels may shift the target by a block; then the next size fits."""


class DummyMedia(MiMoV2OmniDummyInputsBuilder):  # type: ignore[misc]
    """Upstream's, with larger sources."""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Images and videos, as many as ``mm_counts`` says."""
        info = self.info
        setup = setup_of(info.get_hf_config())
        kwargs = info.ctx.get_merged_mm_kwargs({})
        width, height = info.get_image_size_with_most_features()
        frames = info.get_num_frames_with_most_features(seq_len, mm_counts)
        sides = {
            kind: largest_source(
                setup, limits_of(setup, kwargs, kind), Item(count, height, width, height, width)
            )
            for kind, count in (("image", 1), ("video", frames))
        }
        return {
            "image": self._get_dummy_images(
                width=sides["image"][1],
                height=sides["image"][0],
                num_images=mm_counts.get("image", 0),
                overrides=mm_options.get("image"),
            ),
            "video": self._get_dummy_videos(
                width=sides["video"][1],
                height=sides["video"][0],
                num_frames=frames,
                num_videos=mm_counts.get("video", 0),
                overrides=mm_options.get("video"),
            ),
        }


def largest_source(setup: VisionSetup, limits: Limits, item: Item) -> tuple[int, int]:
    """Height and width of a source that travels as bytes and has as many of them as any.

    A ``host_resize_ratio`` above the default counts as the default: what a user allows beyond that
    has no bound that could be set aside.

    Args:
        setup: of the engine.
        limits: of media of this kind.
        item: frames, and the size that upstream takes: the answer where no larger source travels
            as bytes, or has a target with more tokens than vLLM counts on.
    """
    spec = setup.spec
    size = (item.height, item.width)
    ratio = min(setup.config.host_resize_ratio, HOST_RESIZE_RATIO)
    if ratio <= 1:
        return size
    limits = limits.of_frames(item.frames, spec.temporal_patch_size)

    def target_of(height: int, width: int) -> tuple[int, int]:
        return target_size(
            spec, height, width, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
        )

    target = target_of(*size)
    for _ in range(_TRIES):
        scale = math.sqrt(ratio)
        height, width = int(target[0] * scale), int(target[1] * scale)
        target = target_of(height, width)
        if not resize_on_host(height * width, target[0] * target[1], ratio):
            break
    made = item._replace(target_height=target[0], target_width=target[1])
    larger = height * width > math.prod(size)
    if not larger or patch_rows_of(spec, made) > patch_rows_of(spec, item):
        return size
    return height, width
