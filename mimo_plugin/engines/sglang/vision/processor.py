# SPDX-License-Identifier: Apache-2.0
"""MiMo's processor in SGLang with the plugin's kernel: bytes to patch rows in one pass.

SGLang makes floats of every picture at full size, resizes, normalises and cuts them into patches,
each in a pass of its own and one picture after the other. Here the steps up to the rows hand on
bytes and the size that is wanted, and the last one calls the kernel, once for a batch of images.
Which frames are taken, which size a picture gets and what the prompt says stays SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.multimodal.processors.mimo_v2 import MiMoProcessor

from mimo_plugin.core.pixels import Item, PixelError, grid_of
from mimo_plugin.engines.sglang.vision.rule import PixelRule
from mimo_plugin.kernels.preprocess.dispatch import patch_rows


class Pixels(NamedTuple):
    """A picture or the frames of a video before the kernel.

    Attributes:
        data: uint8, 1-D: RGB lines of all frames.
        item: its size now and as it is wanted.
    """

    data: Any
    item: Item


class RowsProcessor(MiMoProcessor):  # type: ignore[misc]
    """SGLang's processor for MiMo; rows by the plugin's kernel."""

    rule: PixelRule | None = None
    """Of this process; set before a processor is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.rule is None:
            raise PixelError(
                "MiMo's processor: found no pixel rule in this process; needed: what the plugin "
                "prepares when a process gets its arguments; fix: run `mimo doctor`"
            )
        self.spec = self.rule.spec(self.patch_size, self.merge_size, self.temporal_patch_size)

    @classmethod
    def get_visual_transform(
        cls, img: Any, factor: int, min_pixels: int, max_pixels: int, device: Any = None
    ) -> Any:
        """One picture: its bytes, and the width and height that it gets."""
        if isinstance(img, torch.Tensor):
            frames = _bytes_of(img)[None].permute(0, 2, 3, 1)
        else:
            import numpy as np

            frames = torch.from_numpy(np.array(img.convert("RGB")))[None]
        return cls._sized(frames, factor, min_pixels, max_pixels)

    @classmethod
    def get_visual_transform_batch(
        cls, frames: Any, factor: int, min_pixels: int, max_pixels: int, device: Any = None
    ) -> Any:
        """The frames of a video [F, 3, H, W]: their bytes, and the size that they get."""
        return cls._sized(_bytes_of(frames).permute(0, 2, 3, 1), factor, min_pixels, max_pixels)

    @classmethod
    def _sized(cls, frames: Any, factor: int, min_pixels: int, max_pixels: int) -> Any:
        count, height, width, _ = frames.shape
        target = cls.smart_resize(height, width, factor, min_pixels, max_pixels)
        pixels = Pixels(frames.contiguous().reshape(-1), Item(count, height, width, *target))
        return pixels, target[1], target[0]

    def _flatten_visual_inputs(self, visual: Any, visual_type: str) -> Any:
        """Patch rows [t*h*w, C*T*P*P] and the grid (t, h, w) of one picture or video."""
        rows, grids = self.rows([visual])
        return rows, grids[0]

    def rows(self, pictures: Sequence[Pixels]) -> tuple[Any, Any]:
        """Patch rows of all pictures behind one another, and a grid for each.

        On the device that SGLang chose for images, else on the host.
        """
        assert self.rule is not None
        data = [picture.data for picture in pictures]
        packed = data[0] if len(data) == 1 else torch.cat(data)
        if self.device is not None:
            packed = packed.to(self.device)
        items = [picture.item for picture in pictures]
        made = patch_rows(
            packed, items, self.spec, dtype=self.rule.dtype, backend=self.rule.backend
        )
        grids = [grid_of(self.spec, item) for item in items]
        return made, torch.tensor(grids, dtype=torch.int32)

    def preprocess_for_encoder(self, mm_data: Any, modality: Any) -> Any:
        """As SGLang's; all images of a batch in one pass."""
        if modality != Modality.IMAGE:
            return super().preprocess_for_encoder(mm_data, modality)
        images = mm_data if isinstance(mm_data, (list, tuple)) else [mm_data]
        limits = self.default_image_processor_kwargs
        factor = self.patch_size * self.merge_size
        pictures = [
            self.get_visual_transform(image, factor, limits["min_pixels"], limits["max_pixels"])[0]
            for image in images
        ]
        rows, grids = self.rows(pictures)
        return {"pixel_values": rows, "image_grid_thw": grids}


def _bytes_of(values: Any) -> Any:
    """Whole values 0..255 as uint8.

    Raises:
        PixelError: others, which would lose what the model was to see.
    """
    if values.dtype == torch.uint8:
        return values
    found = values.clamp(0, 255).to(torch.uint8)
    if not torch.equal(found.to(values.dtype), values):
        raise PixelError(f"picture of {values.dtype}: needed: whole values 0..255")
    return found
