# SPDX-License-Identifier: Apache-2.0
"""SGLang symbols that the feature vision relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_VISION = ("vision",)
_call = partial(call, features=_VISION)
_class = partial(class_, features=_VISION)
_name = partial(replaced, features=_VISION)

_PROCESSOR = "srt.multimodal.processors.mimo_v2"
_PREPROCESSOR = "srt.disaggregation.encoder.preprocessor"
_RECEIVER = "srt.disaggregation.encoder.receiver"

VISION_ROWS: tuple[Contract, ...] = (
    _class(
        _PROCESSOR,
        "MiMoProcessor",
        "base of the processor that makes rows",
        has="default_image_processor_kwargs device merge_size patch_size temporal_patch_size "
        "fetch_image from_hf_config process_image process_video",
    ),
    _call(
        _PROCESSOR,
        "MiMoProcessor.get_visual_transform",
        "hands on bytes instead of floats",
        first="img factor min_pixels max_pixels device",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "MiMoProcessor.get_visual_transform_batch",
        "hands on bytes instead of floats",
        first="frames factor min_pixels max_pixels device",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "MiMoProcessor._flatten_visual_inputs",
        "calls the kernel",
        first="visual visual_type",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "MiMoProcessor.preprocess_for_encoder",
        "one pass for all images",
        first="mm_data modality",
        accepts="",
    ),
    _call(
        _PROCESSOR,
        "MiMoProcessor.smart_resize",
        "the size a picture gets",
        first="height width factor min_pixels max_pixels",
    ),
    _name(_PROCESSOR, "_QWEN2VL_PIXEL_MEAN", "what SGLang has built in"),
    _name(_PROCESSOR, "_QWEN2VL_PIXEL_STD", "what SGLang has built in"),
    _name("srt.managers.schedule_batch", "Modality", "kinds of media"),
    _class(
        "srt.models.mimo_v2",
        "MiMoV2ForCausalLM",
        "says that its preprocessing runs in threads",
        has="preprocess_mm_for_encoder",
    ),
    _class(
        "srt.multimodal.encoder_preprocessing",
        "EncoderMediaProcessorConfig",
        "says that preprocessing runs in threads",
        has="preprocess_off_event_loop",
    ),
    _call(
        _PREPROCESSOR,
        "EncoderPreprocessor._process_video_items",
        "videos too are prepared in threads",
        first="mm_items model_preprocessor",
        accepts="",
    ),
    _class(
        _PREPROCESSOR,
        "EncoderPreprocessor",
        "where threads come from",
        has="preproc_executor vision_config",
    ),
    _class(
        _RECEIVER,
        "MMReceiverBase",
        "encoders of a request",
        has="encode_urls",
    ),
    _call(
        _RECEIVER,
        "MMReceiverBase._send_encode_request",
        "items are sent by their content",
        first="obj",
        closed=False,
    ),
    _call(
        _RECEIVER,
        "MMReceiverBase.recv_mm_data",
        "items are sent by their content",
        first="request_obj",
        closed=False,
    ),
    _call(
        _RECEIVER,
        "MMReceiverBase._assign_items_by_modality",
        "one part for each item",
        first="mm_data encoder_num",
        closed=False,
    ),
    _call(_RECEIVER, "MMReceiverBase._extract_url_data", "items of a request", first="request_obj"),
    _class(_RECEIVER, "MMReceiverHTTP", "numbers the parts of a request", base="MMReceiverBase"),
    _name("srt.environ", "envs", "where images are prepared"),
)
"""Every row of the feature vision."""
