# SPDX-License-Identifier: Apache-2.0
"""MiMo: upstream's model, which gets its patch rows from packed pixels on its own device."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.mimo_v2_omni import MiMoV2OmniForCausalLM, MiMoVisionPatchEmbed
from vllm.multimodal import MULTIMODAL_REGISTRY

from mimo_plugin.engines.vllm.vision.dummy import DummyMedia
from mimo_plugin.engines.vllm.vision.names import STOCK_ARCHITECTURE
from mimo_plugin.engines.vllm.vision.processor import MimoOmniInfo, MimoOmniProcessor
from mimo_plugin.engines.vllm.vision.rows import MakesRows
from mimo_plugin.kernels.preprocess.fold import fold_patch_embed


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
class MimoOmniForCausalLM(MakesRows, MiMoV2OmniForCausalLM):  # type: ignore[misc]
    """MiMo-V2.5 with pixels made on the device."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.vision_setup.config.once:
            embed = self.visual.patch_embed
            embed.__class__ = OncePatchEmbed
            embed.spec = self.vision_setup.spec


# vLLM's first model runner finds out by the name of the class where a model that drafts keeps its
# image token.
MimoOmniForCausalLM.__name__ = STOCK_ARCHITECTURE
