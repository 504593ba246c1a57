# SPDX-License-Identifier: Apache-2.0
"""The model: upstream's, which gets its patch rows from packed pixels on its own device.

One call of ``embed_multimodal`` holds media of many requests; they become patch rows in one kernel
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.mimo_v2_omni import MiMoV2OmniForCausalLM, MiMoVisionPatchEmbed
from vllm.multimodal import MULTIMODAL_REGISTRY

from mimo_plugin.engines.vllm.vision.dummy import DummyMedia
from mimo_plugin.engines.vllm.vision.names import STOCK_ARCHITECTURE
from mimo_plugin.engines.vllm.vision.packing import unpack
from mimo_plugin.engines.vllm.vision.processor import MimoOmniInfo, MimoOmniProcessor
from mimo_plugin.engines.vllm.vision.report import REPORT
from mimo_plugin.engines.vllm.vision.setup import setup_of
from mimo_plugin.kernels.preprocess.dispatch import chosen_backend
from mimo_plugin.kernels.preprocess.fold import fold_patch_embed

_ROWS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Upstream's name of the patch rows of each kind."""


class OncePatchEmbed(MiMoVisionPatchEmbed):  # type: ignore[misc]
    """Patch embedding that also takes rows in which a still is written once."""

    #: how the checkpoint wants its pixels; set when it takes the place of upstream's
    spec: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, C*T*P*P) or, for stills, (rows, C*P*P) to (rows, hidden)."""
        if x.shape[1] == self.spec.row_values():
            rows: torch.Tensor = super().forward(x)
            return rows
        folded = fold_patch_embed(self.proj.weight, self.spec).flatten(1)
        return torch.nn.functional.linear(x, folded)


@MULTIMODAL_REGISTRY.register_processor(
    MimoOmniProcessor, info=MimoOmniInfo, dummy_inputs=DummyMedia
)
class MimoOmniForCausalLM(MiMoV2OmniForCausalLM):  # type: ignore[misc]
    """MiMo-V2.5 with pixels made on the device."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vision_setup = setup_of(vllm_config.model_config.hf_config)
        if self.vision_setup.config.once:
            embed = self.visual.patch_embed
            embed.__class__ = OncePatchEmbed
            embed.spec = self.vision_setup.spec

    def embed_multimodal(self, **kwargs: object) -> Any:
        """Embeddings of the media of a batch, one tensor an item."""
        given: dict[str, object] = {}
        for name, value in kwargs.items():
            kind = name.removesuffix("_pixels")
            if kind in _ROWS and name != kind:
                given[_ROWS[kind]] = self._rows(kind, value, kwargs[f"{kind}_sizes"])
            elif name not in ("image_sizes", "video_sizes", "video_patch_times"):
                given[name] = value
        return super().embed_multimodal(**given)

    def _rows(self, kind: str, data: Any, sizes: Any) -> torch.Tensor:
        """Patch rows in the tower's dtype.

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
                setup.spec,
                dtype=self.visual.dtype,
                backend=backend,
                once=kind == "image" and setup.config.once,
            )
        return rows


# vLLM's first model runner finds out by the name of the class where a model that drafts keeps its
# image token.
MimoOmniForCausalLM.__name__ = STOCK_ARCHITECTURE
