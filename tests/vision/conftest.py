# SPDX-License-Identifier: Apache-2.0
"""A set-up and small media for the tests of the vision adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, resolve_setup
from tools import tiny_omni, tiny_qwen

SIZE = tiny_omni.TinyOmni()


def make_setup(**settings: Any) -> VisionSetup:
    """The set-up of the tiny checkpoint with the user's ``settings``."""
    return resolve_setup(
        VisionConfig(**settings), tiny_omni.config_json(SIZE), tiny_omni.preprocessor_json(SIZE)
    )


def picture(height: int, width: int, seed: int = 0) -> Any:
    """Random uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def movie(frames: int, height: int, width: int, seed: int = 0) -> Any:
    """Random uint8 [frames, height, width, 3]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture
def setup() -> VisionSetup:
    """The tiny checkpoint's, with default settings."""
    return make_setup()


@pytest.fixture(scope="session")
def qwen_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each Qwen-VL family."""
    folder = tmp_path_factory.mktemp("tiny-qwen")
    return {
        name: tiny_qwen.make(folder / name, tiny_qwen.TinyQwen(family=name))
        for name in tiny_qwen.FAMILIES
    }
