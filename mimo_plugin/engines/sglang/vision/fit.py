# SPDX-License-Identifier: Apache-2.0
"""Does the vision feature fit this model and these settings of SGLang?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.errors import setting_error
from mimo_plugin.kernels.preprocess.dispatch import BackendError, chosen_backend

ARCHITECTURE = "MiMoV2ForCausalLM"
USED = ("backend", "mean_std")
"""Settings of the section vision that mean something here."""

_LEAVE_OUT = "leave vision out of --plugin mimo:…"


def unused(cfg: Any, model_config: Any) -> bool:
    """Whether nothing here takes images: a plain ``--plugin mimo`` then leaves it out silently."""
    names = list(model_config.hf_config.architectures or [])
    return ARCHITECTURE not in names or not model_config.is_multimodal or cfg.language_model_only


def require(cfg: Any, model_config: Any, config: MimoConfig) -> None:
    """Refuse settings that would have no effect.

    Raises:
        ConfigError: a setting is for vLLM only.
    """
    stock = VisionConfig()
    for name in vars(stock):
        found = getattr(config.vision, name)
        if name not in USED and found != getattr(stock, name):
            raise setting_error(f"mimo.vision.{name}", found, "no value on SGLang", "drop it")


def why_not(cfg: Any, model_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Args:
        cfg: the resolved server arguments.
        model_config: SGLang's configuration of the model.
    """
    if cfg.language_model_only:
        return f"--language-model-only admits no images; {_LEAVE_OUT}"
    if unused(cfg, model_config):
        names = list(model_config.hf_config.architectures or [])
        return (
            f"SGLang serves {', '.join(names) or 'this model'} here without MiMo's vision and "
            f"audio towers; needed: {ARCHITECTURE} with both; {_LEAVE_OUT}"
        )
    return _why_not_routed(cfg, os.environ)


def why_not_settings(cfg: Any, model_config: Any, config: MimoConfig) -> str | None:
    """The same for the feature's own settings: the kernel's backend, the checkpoint's rule."""
    from sglang.srt.environ import envs

    from mimo_plugin.engines.sglang.vision.install import rule_of

    if cfg.language_only and not cfg.enable_adaptive_dispatch_to_encoder:
        return None  # encoders make the rows
    settings = config.vision
    device = cfg.device if envs.SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU.get() else "cpu"
    try:
        found = chosen_backend(device, settings.backend)
        rule_of(cfg, model_config, settings)
    except (BackendError, PixelError) as error:
        return f"{error}; or {_LEAVE_OUT}"
    if found == "reference" and settings.backend == "auto":
        needed = "numba" if device == "cpu" else "triton"
        return (
            f"pixels on {device} are fast with {needed} only, and it is not installed; pip install "
            f"{needed}, set mimo.vision.backend to reference (slow), or {_LEAVE_OUT}"
        )
    return None


def _why_not_routed(cfg: Any, environ: Mapping[str, str]) -> str | None:
    mode = environ.get("SGLANG_ENCODER_MM_RECEIVER_MODE", "http")
    if cfg.language_only and mode != "http":
        return (
            f"SGLANG_ENCODER_MM_RECEIVER_MODE is {mode}: its requests to one encoder share a name, "
            f"so items can't be sent one by one; set it to http, or {_LEAVE_OUT}"
        )
    return None
