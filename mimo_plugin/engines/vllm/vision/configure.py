# SPDX-License-Identifier: Apache-2.0
"""What the feature writes into one engine's configuration, and how its model class is found."""

from __future__ import annotations

import logging
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.vision.board import BoardReader, BoardWriter, board_path
from mimo_plugin.engines.vllm.vision.budget import settle_budget
from mimo_plugin.engines.vllm.vision.names import (
    ARCHITECTURE,
    QWEN_FAMILIES,
    REPLACES,
    SETUP_KEY,
    is_qwen,
)
from mimo_plugin.engines.vllm.vision.report import REPORT
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, resolve_qwen_setup, resolve_setup

logger = logging.getLogger("vllm.mimo_plugin")

_PACKAGE = "mimo_plugin.engines.vllm.vision"
_MODELS = {
    ARCHITECTURE: f"{_PACKAGE}.model:MimoOmniForCausalLM",
    **{
        REPLACES[f"{family}ForConditionalGeneration"]: f"{_PACKAGE}.qwen_model:Mimo{family}"
        for family in QWEN_FAMILIES
    },
}
"""Our architectures and where their classes are."""


def setup_from(vllm_config: Any, config: MimoConfig) -> VisionSetup:
    """The pixel rule of the engine's checkpoint.

    Raises:
        PixelError: the checkpoint's settings are missing or out of range.
    """
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model_config = vllm_config.model_config
    if is_qwen(model_config.hf_config.architectures):
        return _qwen_setup(model_config, config)
    preprocessor = get_hf_file_to_dict(
        "preprocessor_config.json", model_config.model, model_config.revision
    )
    preprocessor = preprocessor or {}
    # A processor's file may hold the settings of images in a section of their own.
    preprocessor = preprocessor.get("image_processor", preprocessor)
    return resolve_setup(config.vision, model_config.hf_config.to_dict(), preprocessor)


def _qwen_setup(model_config: Any, config: MimoConfig) -> VisionSetup:
    """What the checkpoint's image processor says, whichever files it is read from."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from vllm.transformers_utils.processor import get_image_processor

    try:
        processor = get_image_processor(
            model_config.model,
            revision=model_config.revision,
            trust_remote_code=model_config.trust_remote_code,
            backend="pil",
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise PixelError(f"image processor: found none that loads ({error})") from error
    if type(processor) is not Qwen2VLImageProcessorPil:
        raise PixelError(
            f"image_processor_type: found {type(processor).__name__}; allowed: "
            "Qwen2VLImageProcessor"
        )
    return resolve_qwen_setup(
        config.vision,
        model_config.hf_config.vision_config.to_dict(),
        processor.to_dict(),
        normalised_later=bool(model_config.multimodal_config.mm_device_do_normalize),
    )


def configure(vllm_config: Any, config: MimoConfig) -> None:
    """Make this engine's processes build our model class and read the same pixel rule.

    Of the names only the one is changed that the model and its processor are found by: what vLLM
    has worked out about its own class holds for ours as well.
    """
    hf_config = vllm_config.model_config.hf_config
    names = [REPLACES.get(name, name) for name in hf_config.architectures]
    setup = setup_from(vllm_config, config)
    hf_config.update({"architectures": names, SETUP_KEY: setup.to_dict()})
    register()
    setup = settle_budget(vllm_config, setup)  # asks the processor, which reads the set-up
    hf_config.update({SETUP_KEY: setup.to_dict()})
    logger.info(
        "mimo vision: mean %s, std %s (of 0..255), from %s; %s, patches of %d pixels",
        _rounded(setup.spec.mean),
        _rounded(setup.spec.std),
        config.vision.mean_std,
        setup.spec.resample,
        setup.spec.patch_size,
    )


def prepare_scheduler(vllm_config: Any) -> BoardReader:
    """Make the model class known in the scheduler's process; returns the worker's counters."""
    register()
    return BoardReader(board_path(vllm_config))


def prepare_worker(vllm_config: Any, rank: int) -> None:
    """Make the model class known in a worker's process; the first worker counts for all."""
    register()
    if rank == 0:
        try:
            REPORT.board = BoardWriter(board_path(vllm_config))
        except OSError as error:
            logger.warning("mimo vision: no counters of kernel passes here: %s", error)


def register() -> None:
    """Make our classes known in this process, under names that only our configuration uses."""
    from vllm.model_executor.models import ModelRegistry

    for name, place in _MODELS.items():
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, place)


def _rounded(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
