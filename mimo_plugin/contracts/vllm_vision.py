# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature vision relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_VISION = ("vision",)
_call = partial(call, features=_VISION)
_class = partial(class_, features=_VISION)
_name = partial(replaced, features=_VISION)

_OMNI = "model_executor.models.mimo_v2_omni"
_CORE = "transformers_utils.processors.mimo_v2_omni"
_PROCESSOR = "multimodal.processing.processor"
_PROCESSING = "multimodal.processing"

_CONFIG_ROWS = (
    _class(
        "config.vllm",
        "VllmConfig",
        "what the engine is for, and where",
        has="device_config ec_transfer_config model_config parallel_config scheduler_config",
    ),
    _class(
        "config.model",
        "ModelConfig",
        "the model's configuration carries the feature's set-up, its architecture names the class",
        has="architectures dtype get_inputs_embeds_size hf_config max_model_len model model_impl "
        "multimodal_config revision",
    ),
    _class(
        "config.multimodal",
        "MultiModalConfig",
        "what media are admitted, and how the engine is to process them",
        has="get_limit_per_prompt get_mm_processor_device_type language_model_only "
        "limit_per_prompt mm_encoder_only mm_processor_kwargs",
    ),
    _class(
        "config.scheduler",
        "SchedulerConfig",
        "the size of the encoder cache is written here, for scheduler and API process",
        has="encoder_cache_size",
    ),
    _class(
        "multimodal.encoder_budget",
        "MultiModalBudget",
        "what the encoder makes and keeps; scheduler and API process size by it",
        has="encoder_cache_size encoder_compute_budget mm_max_toks_per_item",
    ),
    _call(
        "multimodal.encoder_budget",
        "MultiModalBudget.__init__",
        "what the encoder makes and keeps",
        first="vllm_config mm_registry",
        named="enable_cache",
    ),
    _class(
        "config.ec_transfer",
        "ECTransferConfig",
        "instances that exchange embeddings are refused",
        has="ec_role is_encode_only",
    ),
    _class("config.device", "DeviceConfig", "where pixels are made", has="device_type"),
    _class(
        "config.parallel",
        "ParallelConfig",
        "every engine has counters of its own",
        has="data_parallel_rank",
    ),
    _call(
        "transformers_utils.repo_utils",
        "get_hf_file_to_dict",
        "reads preprocessor_config.json",
        first="file_name model revision",
    ),
)

_MODEL_ROWS = (
    _name("model_executor.models", "ModelRegistry", "makes the model class known"),
    _call(
        "model_executor.models.registry",
        "_ModelRegistry.register_model",
        "makes the model class known",
        first="model_arch model_cls",
    ),
    _class(
        "model_executor.models.registry",
        "_ModelRegistry",
        "whether the model class is known",
        has="models",
    ),
    _name(
        "model_executor.model_loader.utils",
        "_MODEL_ARCH_BY_HASH",
        "the class is found by the architectures in the model's configuration",
    ),
    _class(
        _OMNI,
        "MiMoV2OmniForCausalLM",
        "base of the model class",
        has="embed_multimodal visual",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniForCausalLM._parse_and_validate_image_input",
        "reads patch rows under pixel_values",
        closed=False,
    ),
    _call(
        _OMNI,
        "MiMoV2OmniForCausalLM._parse_and_validate_video_input",
        "reads patch rows under pixel_values_videos",
        closed=False,
    ),
    _class(_OMNI, "MiMoVisionTransformer", "dtype of the rows", has="dtype patch_embed"),
    _class(_OMNI, "MiMoVisionPatchEmbed", "base of the embedding of stills that come once"),
    _class(
        "model_executor.models.qwen2_5_vl",
        "Qwen2_5_VisionPatchEmbed",
        "weights of the patch embedding",
        has="forward proj",
    ),
    _name("multimodal", "MULTIMODAL_REGISTRY", "gives the model class its processor"),
    _call(
        "multimodal.registry",
        "MultiModalRegistry.register_processor",
        "gives the model class its processor",
        first="processor",
        named="info dummy_inputs",
    ),
)

_PROCESSOR_ROWS = (
    _class(
        _OMNI,
        "MiMoV2OmniMultiModalProcessor",
        "base of the processor",
        has="_get_hf_mm_inputs _get_mm_fields_config _get_prompt_updates",
    ),
    _class(
        _OMNI,
        "MiMoV2OmniProcessingInfo",
        "base of what the processor knows of the model",
        has="get_data_parser get_hf_config get_hf_processor get_image_size_with_most_features "
        "get_max_image_tokens get_num_frames_with_most_features",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniProcessingInfo.get_image_size_with_most_features",
        "the largest image, by the limits that count",
        first="max_pixels",
        accepts="",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniProcessingInfo.get_num_frames_with_most_features",
        "frames of the largest video",
        first="seq_len mm_counts",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniProcessingInfo.get_max_image_tokens",
        "the largest image, by the limits that count",
        accepts="",
    ),
    _class(
        _OMNI,
        "MiMoV2OmniDummyInputsBuilder",
        "base of what makes the inputs of the profile run",
        has="get_dummy_mm_data",
    ),
    _class(
        "multimodal.processing.dummy_inputs",
        "BaseDummyInputsBuilder",
        "makes the inputs of the profile run",
        has="_get_dummy_images _get_dummy_videos info",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniDummyInputsBuilder.get_dummy_mm_data",
        "the inputs of the profile run are larger sources",
        first="seq_len mm_counts mm_options",
        accepts="",
    ),
    *(
        _call(
            "multimodal.processing.dummy_inputs",
            f"BaseDummyInputsBuilder._get_dummy_{kind}s",
            "the inputs of the profile run",
            named=f"width height {more}num_{kind}s overrides",
        )
        for kind, more in (("image", ""), ("video", "num_frames "))
    ),
    _class(
        _OMNI,
        "MiMoV2OmniMultiModalDataParser",
        "base of the parser that keeps the metadata of videos",
    ),
    _class(
        "multimodal.parse",
        "MultiModalDataParser",
        "keeps the metadata of videos where it is told so",
        has="_get_video_with_metadata video_needs_metadata",
    ),
    _call(
        "multimodal.parse",
        "MultiModalDataParser._get_video_with_metadata",
        "frames that come without metadata get an empty one",
        first="video",
        accepts="",
    ),
    *(
        _name(_PROCESSING, name, "the base of processors, and what they say about prompts")
        for name in ("BaseMultiModalProcessor", "PromptReplacement", "PromptUpdateDetails")
    ),
    _class(
        _PROCESSOR,
        "BaseMultiModalProcessor",
        "base of all processors",
        has="_call_hf_processor _get_hf_mm_inputs _get_mm_fields_config _get_prompt_updates "
        "_postprocess_prompt apply info",
    ),
    _call(
        _PROCESSOR,
        "BaseMultiModalProcessor.apply",
        "media that the encoder can't make are refused behind it",
        first="inputs timing_ctx",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "BaseMultiModalProcessor._postprocess_prompt",
        "the prompt as it came, also on a patched engine",
        first="prompt",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "BaseMultiModalProcessor._get_hf_mm_inputs",
        "hands over the media as they were decoded",
        first="mm_items hf_kwargs",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "BaseMultiModalProcessor._call_hf_processor",
        "images and videos are packed in its place",
        first="hf_data hf_kwargs",
        accepts="",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniMultiModalProcessor._get_mm_fields_config",
        "says how fields are cut into items",
        first="hf_inputs hf_processor_mm_kwargs",
        accepts="",
    ),
    _call(
        _OMNI,
        "MiMoV2OmniMultiModalProcessor._get_prompt_updates",
        "says what replaces the placeholders",
        first="mm_items hf_processor_mm_kwargs out_mm_kwargs",
        accepts="",
    ),
    _class(_PROCESSOR, "PromptUpdateDetails", "tokens and mask of a video", has="full is_embed"),
    _class(
        _PROCESSOR,
        "PromptReplacement",
        "what replaces the placeholder of a video",
        has="modality replacement target",
    ),
    _call(
        "multimodal.processing.context",
        "InputProcessingContext.get_merged_mm_kwargs",
        "settings of engine and request together",
        first="kwargs",
    ),
    _call(
        "multimodal.inputs",
        "MultiModalFieldConfig.flat_from_sizes",
        "cuts packed pixels into items",
        first="modality size_per_item",
    ),
    _call(
        "multimodal.inputs",
        "MultiModalFieldConfig.batched",
        "a line of sizes, or the times, for each item",
        first="modality",
        named="keep_on_cpu",
    ),
    _class(
        "multimodal.inputs",
        "MultiModalFieldConfig",
        "how fields are cut into items",
        has="batched flat_from_sizes",
    ),
    _call(_CORE, "_format_timestamp", "writes the time of a frame", first="ts"),
    _class(
        _CORE,
        "MiMoVLProcessor",
        "ids of the tokens around media",
        has="merge_size video_end_token_id video_start_token_id video_token_id "
        "vision_end_token_id vision_start_token_id",
    ),
    _class(_CORE, "MiMoOmniProcessor", "holds the ids of tokens", has="mimo_processor"),
)

VISION_ROWS: tuple[Contract, ...] = (*_CONFIG_ROWS, *_MODEL_ROWS, *_PROCESSOR_ROWS)
"""Every row of feature vision."""
