# SPDX-License-Identifier: Apache-2.0
"""Does the vision feature fit this model and these engine settings?"""

from __future__ import annotations

import os
from typing import Any

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.contracts import check_vllm
from mimo_plugin.contracts.vllm_qwen import QWEN_TAG
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm import ec_switch, media_switch
from mimo_plugin.engines.vllm.vision.configure import setup_from
from mimo_plugin.engines.vllm.vision.limits import check_kwargs
from mimo_plugin.engines.vllm.vision.names import REPLACES, is_qwen
from mimo_plugin.engines.vllm.vision.qwen_limits import check_qwen_kwargs
from mimo_plugin.kernels.preprocess.dispatch import BackendError, chosen_backend

_LEAVE_OUT = "fix: leave vision out of --plugin mimo:…"

_QWEN_SETTINGS = {
    "mean_std": "vLLM takes them from the checkpoint",
    "timestamps": "videos of these models are vLLM's own",
    "outer_tokens": "videos of these models are vLLM's own",
    "processor_kwargs": "vLLM honours them",
    "once": "the patch embedding has no such form",
}
"""Settings that mean nothing for Qwen-VL, and why."""


def unused(vllm_config: Any) -> bool:
    """Whether nothing here takes images: a plain ``--plugin mimo`` then leaves it out silently."""
    names = vllm_config.model_config.architectures or []
    multimodal = vllm_config.model_config.multimodal_config
    return not REPLACES.keys() & set(names) or _nothing_admitted(multimodal, _kinds(names))


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    return _why_model(vllm_config) or _why_engine(vllm_config) or _why_pixels(vllm_config)


def _kinds(names: list[str]) -> tuple[str, ...]:
    """The kinds of media of a model that the feature takes."""
    return ("image",) if is_qwen(names) else ("image", "video")


def _nothing_admitted(multimodal: Any, kinds: tuple[str, ...]) -> bool:
    """Whether the engine takes no media of these kinds."""
    if multimodal is None or multimodal.language_model_only:
        return True
    return not any(multimodal.get_limit_per_prompt(kind) for kind in kinds)


def _why_model(vllm_config: Any) -> str | None:
    model_config = vllm_config.model_config
    names = list(model_config.architectures or [])
    served = [name for name in names if name in REPLACES]
    if not served:
        return (
            f"the model is {', '.join(names) or 'unknown'}, which takes no images as MiMo or "
            f"Qwen-VL does; needed: {', '.join(REPLACES)}; {_LEAVE_OUT}"
        )
    found = list(getattr(model_config.hf_config, "architectures", None) or [])
    if not {*served, *(REPLACES[name] for name in served)}.intersection(found):
        return (
            f"the configuration names {', '.join(found) or 'no architecture'}; needed: "
            f"{', '.join(served)}; fix: leave out the plugin that replaces it"
        )
    if str(model_config.model_impl) in ("transformers", "terratorch"):
        return (
            f"--model-impl is {model_config.model_impl}, which has another processor; needed: "
            "auto or vllm; fix: drop the option"
        )
    if _nothing_admitted(model_config.multimodal_config, _kinds(names)):
        what = "no images" if is_qwen(names) else "neither images nor videos"
        return f"this engine admits {what}; {_LEAVE_OUT}"
    return None


def _why_engine(vllm_config: Any) -> str | None:
    from mimo_plugin.engines.vllm.register import config_from

    multimodal = vllm_config.model_config.multimodal_config
    device = multimodal.get_mm_processor_device_type()
    if device not in (None, "cpu"):
        return (
            f"the multi-modal processor is to run on {device!r}, but the feature hands pixels to "
            "the model's process and works there; fix: drop --mm-processor-device, or "
            '"device" from --mm-processor-kwargs'
        )
    transfer = vllm_config.ec_transfer_config
    if transfer is not None and not ec_switch.is_ours(transfer):
        return (
            f"the EC connector is {transfer.ec_connector}, which hands embeddings to other "
            "instances under keys that do not say how pixels were made; needed: "
            f"{ec_switch.CONNECTOR}, whose keys do; fix: name it in --ec-transfer-config, or leave "
            "vision out of --plugin mimo:…"
        )
    if multimodal.mm_encoder_only and not (transfer is not None and transfer.is_encode_only):
        return (
            "--mm-encoder-only makes this an instance without a language model, whose embeddings "
            f"nobody gets; fix: use --ec-transfer-config with {ec_switch.CONNECTOR} and the role "
            "ec_producer, or leave vision out of --plugin mimo:…"
        )
    config = config_from(vllm_config)
    assert config is not None
    return media_switch.why_not(config.vision.decode, os.environ)


def _why_pixels(vllm_config: Any) -> str | None:
    """The checkpoint's rule, the processor settings of the engine, and the kernel's backend."""
    from mimo_plugin.engines.vllm.register import config_from

    config = config_from(vllm_config)
    assert config is not None
    multimodal = vllm_config.model_config.multimodal_config
    qwen = is_qwen(vllm_config.model_config.hf_config.architectures)
    if qwen:
        reason = _why_qwen(config.vision)
        if reason is not None:
            return reason
    try:
        setup_from(vllm_config, config)
    except PixelError as error:
        return f"{error}; fix: correct the checkpoint's config.json or preprocessor_config.json"
    try:
        if config.vision.processor_kwargs == "honour":
            check = check_qwen_kwargs if qwen else check_kwargs
            check(multimodal.mm_processor_kwargs or {})
    except PixelError as error:
        return f"{error}; fix: correct --mm-processor-kwargs"
    try:
        chosen_backend(vllm_config.device_config.device_type, config.vision.backend)
    except BackendError as error:
        return str(error)
    return None


def _why_qwen(settings: VisionConfig) -> str | None:
    """What Qwen-VL needs besides: symbols of vLLM, and only settings that can act."""
    for name, why in _QWEN_SETTINGS.items():
        value, default = getattr(settings, name), getattr(VisionConfig(), name)
        if value != default:
            return (
                f"vision.{name}: found {value!r}; allowed with a Qwen-VL model: {default!r}, as "
                f"{why}; fix: drop the setting"
            )
    problems = check_vllm(features=(QWEN_TAG,))
    return f"{problems[0]}; fix: run `mimo doctor`, use an unmodified release" if problems else None
