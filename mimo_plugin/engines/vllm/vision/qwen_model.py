# SPDX-License-Identifier: Apache-2.0
"""The Qwen-VL family: upstream's models, whose images become patch rows on the model's device."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from mimo_plugin.engines.vllm.vision.qwen_processor import (
    MimoQwen2_5_VLProcessor,
    MimoQwen2VLProcessor,
    MimoQwen3VLProcessor,
)
from mimo_plugin.engines.vllm.vision.rows import MakesRows


class _QwenRows(MakesRows):
    """Encoder CUDA graphs do not go through ``embed_multimodal``; they ask for the rows here."""

    def _get_pixel_values_by_modality(self, mm_kwargs: dict[str, Any]) -> Any:
        """Patch rows of a batch; made once, then the batch holds them instead of pixels."""
        if "image_pixels" in mm_kwargs:
            given = self.with_rows(mm_kwargs)
            mm_kwargs.clear()
            mm_kwargs.update(given)
        return super()._get_pixel_values_by_modality(mm_kwargs)  # type: ignore[misc]


@MULTIMODAL_REGISTRY.register_processor(
    MimoQwen2VLProcessor, info=Qwen2VLProcessingInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class MimoQwen2VL(_QwenRows, Qwen2VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen2-VL with pixels of images made on the device."""


@MULTIMODAL_REGISTRY.register_processor(
    MimoQwen2_5_VLProcessor,
    info=Qwen2_5_VLProcessingInfo,
    dummy_inputs=Qwen2_5_VLDummyInputsBuilder,
)
class MimoQwen2_5_VL(_QwenRows, Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen2.5-VL with pixels of images made on the device."""


@MULTIMODAL_REGISTRY.register_processor(
    MimoQwen3VLProcessor, info=Qwen3VLProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class MimoQwen3VL(_QwenRows, Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL with pixels of images made on the device."""


@MULTIMODAL_REGISTRY.register_processor(
    MimoQwen3VLProcessor, info=Qwen3VLMoeProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class MimoQwen3VLMoe(_QwenRows, Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """The mixture of experts of Qwen3-VL with pixels of images made on the device."""


# vLLM's first model runner finds out by the name of the class where a model that drafts keeps its
# image token.
for _ours in (MimoQwen2VL, MimoQwen2_5_VL, MimoQwen3VL, MimoQwen3VLMoe):
    _ours.__name__ = _ours.__bases__[1].__name__
