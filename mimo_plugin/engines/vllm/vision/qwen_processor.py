# SPDX-License-Identifier: Apache-2.0
"""Requests to Qwen-VL models: images travel as bytes, everything else is upstream's.

Upstream's processors resize and cut images here, in the API process, by the image processor of
transformers. These hand the pixels over; the model makes of them what the processor that computes
with Pillow would have made. Videos, precomputed embeddings and tokens stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLMultiModalProcessor
from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalProcessor
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

from mimo_plugin.core.pixels import Item, PixelError, grid_of, resize_on_host, target_size
from mimo_plugin.engines.vllm.vision.budget import FitsEncoder, check_budget
from mimo_plugin.engines.vllm.vision.limits import Limits
from mimo_plugin.engines.vllm.vision.packing import SIZES, Packed, image_frames
from mimo_plugin.engines.vllm.vision.qwen_limits import check_qwen_kwargs, qwen_limits
from mimo_plugin.engines.vllm.vision.report import REPORT
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, setup_of

_BYTES = SIZES.index("bytes")


def pack_image(image: Any, setup: VisionSetup, limits: Limits) -> Packed:
    """Pack one image at its source size or, where that is much larger, at its target's.

    Args:
        image: a Pillow image of any mode, or an array of RGB values.
        setup: of the engine.
        limits: of this request.

    Raises:
        PixelError: no image, a size that the model has no target for, or more tokens than the
            engine's encoder takes.
    """
    frames = image_frames(image)
    height, width = frames.shape[1:3]
    target = target_size(
        setup.spec, height, width, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
    )
    check_budget(Item(1, height, width, *target), setup)
    ratio = setup.config.host_resize_ratio
    if resize_on_host(height * width, target[0] * target[1], ratio):
        small = Image.fromarray(frames[0]).resize(target[::-1], Image.Resampling.BICUBIC)
        frames, (height, width) = np.array(small)[None], target
    item = Item(1, height, width, *target)
    data = torch.from_numpy(np.ascontiguousarray(frames).reshape(-1))
    return Packed(data, item, False, grid_of(setup.spec, item))


class _PacksImages(FitsEncoder):
    """Stands before a Qwen-VL processor of vLLM and takes its images away."""

    info: Any

    @cached_property
    def setup(self) -> VisionSetup:
        """The engine's set-up."""
        return setup_of(self.info.get_hf_config())

    def _merged(self, hf_kwargs: Mapping[str, object]) -> Mapping[str, Any]:
        """Settings of engine and request as the family's processor merges them."""
        merged: Mapping[str, Any] = self.info.ctx.get_merged_mm_kwargs(hf_kwargs)
        return merged

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """Fields of images by us, of everything else by upstream.

        Raises:
            PixelError: a request that can't be served; a ValueError, so a client error.
        """
        items = {**mm_items}
        images = items.get("image")
        if not isinstance(images, ImageProcessorItems):
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        del items["image"]
        others = MultiModalDataItems(items)
        fields = super()._apply_hf_processor_main(others, hf_kwargs)  # type: ignore[misc]
        with REPORT.packing():
            fields.update(self._image_fields(images.get_processor_data()["images"], hf_kwargs))
        return fields

    def _image_fields(self, images: Iterable[Any], hf_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        setup = self.setup
        try:
            check_qwen_kwargs(hf_kwargs)
            limits = qwen_limits(setup, self._merged(hf_kwargs))
            packed = [pack_image(image, setup, limits) for image in images]
        except PixelError:
            REPORT.refused("image")
            raise
        for one in packed:
            REPORT.packed("image", one.rows, one.data.numel())
        data = [one.data for one in packed]
        return {
            "image_pixels": data[0] if len(data) == 1 else torch.cat(data),
            "image_sizes": torch.tensor([one.sizes for one in packed], dtype=torch.int64),
            "image_grid_thw": torch.tensor([one.grid for one in packed], dtype=torch.int64),
        }

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> dict[str, Any]:
        """How the fields are cut into items: upstream's, and ours beside them."""
        config: dict[str, Any] = dict(
            super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)  # type: ignore[misc]
        )
        sizes = hf_inputs.get("image_sizes")
        if sizes is not None:
            config["image_pixels"] = MultiModalFieldConfig.flat_from_sizes(
                "image", sizes[:, _BYTES]
            )
            config["image_sizes"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return config


class MimoQwen2VLProcessor(_PacksImages, Qwen2VLMultiModalProcessor):  # type: ignore[misc]
    """Of Qwen2-VL."""


class MimoQwen2_5_VLProcessor(_PacksImages, Qwen2_5_VLMultiModalProcessor):  # type: ignore[misc]
    """Of Qwen2.5-VL."""


class MimoQwen3VLProcessor(_PacksImages, Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    """Of Qwen3-VL and its mixture of experts."""

    def _merged(self, hf_kwargs: Mapping[str, object]) -> Mapping[str, Any]:
        """Here a setting of a request goes before the engine's under whichever name."""
        merged: Mapping[str, Any] = self.info._merge_and_resolve_mm_processor_kwargs(hf_kwargs)
        return merged
