# SPDX-License-Identifier: Apache-2.0
"""What the plugin's model classes share: patch rows from packed pixels, on the model's own device.

One call of ``embed_multimodal`` holds media of many requests; they become patch rows in one kernel
pass.
"""

from __future__ import annotations

from typing import Any

import torch

from mimo_plugin.engines.vllm.vision.packing import unpack
from mimo_plugin.engines.vllm.vision.report import REPORT
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, setup_of
from mimo_plugin.kernels.preprocess.dispatch import chosen_backend

_ROWS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Upstream's name of the patch rows of each kind."""


class MakesRows:
    """Stands before a model class of vLLM, which then gets the patch rows that it knows."""

    visual: Any
    vision_setup: VisionSetup

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.vision_setup = setup_of(vllm_config.model_config.hf_config)

    def embed_multimodal(self, **kwargs: object) -> Any:
        """Embeddings of the media of a batch, one tensor an item."""
        given = self.with_rows(kwargs)
        rows = next((given[name] for name in _ROWS.values() if name in given), None)
        if not isinstance(rows, torch.Tensor):  # nothing for the tower to do
            return super().embed_multimodal(**given)  # type: ignore[misc]
        with REPORT.encoder(chosen_backend(rows.device, self.vision_setup.config.backend)):
            return super().embed_multimodal(**given)  # type: ignore[misc]

    def with_rows(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The fields of a batch as upstream knows them, in the order in which they came."""
        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            kind = name.removesuffix("_pixels")
            if kind in _ROWS and name != kind:
                given[_ROWS[kind]] = self._rows(kind, value, kwargs[f"{kind}_sizes"])
            elif name not in ("image_sizes", "video_sizes", "video_patch_times"):
                given[name] = value
        return given

    def _rows(self, kind: str, data: Any, sizes: Any) -> torch.Tensor:
        """Patch rows in the tower's dtype, or as bytes where the tower normalises.

        Args:
            kind: ``image`` or ``video``.
            data: uint8, 1-D, packed.
            sizes: [items, len(packing.SIZES)] on the host.
        """
        setup = self.vision_setup
        backend = chosen_backend(data.device, setup.config.backend)
        with REPORT.kernel(backend, len(sizes)):
            rows: torch.Tensor = unpack(
                data,
                sizes,
                setup.row_spec,
                dtype=torch.uint8 if setup.normalised_later else self.visual.dtype,
                backend=backend,
                once=kind == "image" and setup.config.once,
            )
        return rows
