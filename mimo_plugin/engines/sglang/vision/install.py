# SPDX-License-Identifier: Apache-2.0
"""Switching the vision feature on in the processes that handle images."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.engines.sglang import register
from mimo_plugin.engines.sglang.vision.rule import PixelRule, make_rule, read_preprocessor

logger = logging.getLogger(register.LOGGER_NAME)

_PROCESSORS = "sglang.srt.multimodal.processors.mimo_v2"

ROLES = ("encoder", "tokenizer")
"""Processes that make patch rows, or send items to those that do."""


def install_vision(server_args: Any, config: MimoConfig) -> None:
    """Let this process, which has just got its arguments, make rows and route items our way."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    cfg = register.resolved(server_args)
    rule = rule_of(cfg, model_config_of(server_args), config.vision)
    use(rule)
    logger.info(
        "mimo vision: mean %s, std %s (of 0..255), from %s; rows in %s",
        _rounded(rule.mean),
        _rounded(rule.std),
        config.vision.mean_std,
        rule.dtype,
    )


def use(rule: PixelRule) -> None:
    """Put our processor in the place of SGLang's in this process, and route items."""
    from mimo_plugin.engines.sglang.vision.encoder import leave_the_event_loop
    from mimo_plugin.engines.sglang.vision.processor import RowsProcessor
    from mimo_plugin.engines.sglang.vision.routing import install_routing

    RowsProcessor.rule = rule
    processors: Any = importlib.import_module(_PROCESSORS)
    processors.MiMoProcessor = RowsProcessor
    leave_the_event_loop()
    install_routing()


def rule_of(cfg: Any, model_config: Any, settings: VisionConfig) -> PixelRule:
    """The pixel rule of the engine's checkpoint.

    Raises:
        PixelError: the checkpoint's settings can't be read, or are out of range.
    """
    from sglang.srt.multimodal.processors.mimo_v2 import _QWEN2VL_PIXEL_MEAN, _QWEN2VL_PIXEL_STD

    preprocessor = (
        read_preprocessor(cfg.model_path, cfg.revision) if settings.mean_std == "checkpoint" else {}
    )
    stock = (_channels(_QWEN2VL_PIXEL_MEAN), _channels(_QWEN2VL_PIXEL_STD))
    return make_rule(settings, preprocessor, stock, model_config.dtype)


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = values.flatten().tolist()
    return red, green, blue


def _rounded(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
