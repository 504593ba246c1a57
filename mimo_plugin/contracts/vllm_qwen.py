# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature vision relies on with Qwen-VL models, and with no other model."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_

QWEN_TAG = "vision-qwen"
"""In place of a feature: a missing symbol here is nothing to other models of the feature."""

_call = partial(call, features=(QWEN_TAG,))
_class = partial(class_, features=(QWEN_TAG,))

_MODELS = "model_executor.models"
_PROCESSOR = "multimodal.processing.processor"
# module -> prefix of its classes
_FAMILIES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}

_MODEL_ROWS = (
    *(
        row
        for module, prefix in {**_FAMILIES, "qwen3_vl_moe": "Qwen3VLMoe"}.items()
        for row in (
            _class(
                f"{_MODELS}.{module}",
                f"{prefix}ForConditionalGeneration",
                "base of the model class; its tower normalises where the engine says so",
                has="_get_pixel_values_by_modality embed_multimodal "
                "supports_mm_device_do_normalize visual",
            ),
            _class(
                f"{_MODELS}.{module}",
                f"{prefix}ProcessingInfo",
                "what the processor knows of the model",
                has="_merge_and_resolve_mm_processor_kwargs get_hf_config",
            ),
        )
    ),
    *(
        row
        for module, prefix in _FAMILIES.items()
        for row in (
            _class(
                f"{_MODELS}.{module}",
                f"{prefix}DummyInputsBuilder",
                "makes the inputs of the profile run",
            ),
            _call(
                f"{_MODELS}.{module}",
                f"{prefix}ForConditionalGeneration._parse_and_validate_image_input",
                "reads patch rows under pixel_values",
                closed=False,
            ),
            _call(
                f"{_MODELS}.{module}",
                f"{prefix}ForConditionalGeneration._get_pixel_values_by_modality",
                "encoder CUDA graphs take patch rows there",
                first="mm_kwargs",
                accepts="",
            ),
        )
    ),
    *(
        _class(f"{_MODELS}.{module}", tower, "dtype of the rows", has="dtype input_norm")
        for module, tower in (
            ("qwen2_vl", "Qwen2VisionTransformer"),
            ("qwen2_5_vl", "Qwen2_5_VisionTransformer"),
            ("qwen3_vl", "Qwen3_VisionTransformer"),
        )
    ),
    _class(
        "config.multimodal",
        "MultiModalConfig",
        "whether the vision tower normalises",
        has="mm_device_do_normalize",
    ),
    _class(
        "model_executor.layers.fusion.mm_input_norm",
        "FusedMMInputNorm",
        "normalises patch rows of bytes",
        has="input_dtype",
    ),
)

_PROCESSOR_ROWS = (
    *(
        row
        for module, prefix in _FAMILIES.items()
        for row in (
            _class(
                f"{_MODELS}.{module}",
                f"{prefix}MultiModalProcessor",
                "base of the processor",
                has="_get_mm_fields_config",
            ),
            _call(
                f"{_MODELS}.{module}",
                f"{prefix}MultiModalProcessor._get_mm_fields_config",
                "says how fields are cut into items",
                first="hf_inputs hf_processor_mm_kwargs",
                accepts="",
            ),
        )
    ),
    *(
        _call(
            module,
            name,
            "images are packed in its place",
            first="mm_items hf_kwargs",
            accepts="",
        )
        for module, name in (
            (_PROCESSOR, "BaseMultiModalProcessor._apply_hf_processor_main"),
            (f"{_MODELS}.qwen3_vl", "Qwen3VLMultiModalProcessor._apply_hf_processor_main"),
        )
    ),
    _call(
        "multimodal.processing.context",
        "BaseProcessingInfo._merge_and_resolve_mm_processor_kwargs",
        "settings of engine and request together",
        first="mm_kwargs",
    ),
    _class(
        "multimodal.parse",
        "ImageProcessorItems",
        "images that are to be processed",
        has="get_processor_data",
    ),
    _class("multimodal.parse", "MultiModalDataItems", "media of a request"),
    _call(
        "transformers_utils.processor",
        "get_image_processor",
        "reads what the checkpoint's image processor says",
        first="processor_name",
        named="revision trust_remote_code",
    ),
)

QWEN_ROWS: tuple[Contract, ...] = (*_MODEL_ROWS, *_PROCESSOR_ROWS)
"""Every row of Qwen-VL models."""
