# SPDX-License-Identifier: Apache-2.0
"""B41: what vLLM measures at start are media as large as any that travel as bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from mimo_plugin.core.pixels import Item
from mimo_plugin.engines.vllm.vision.limits import limits_of
from tests.vision.conftest import SIZE, make_setup
from tools import tiny_omni

pytestmark = pytest.mark.vllm


def source(item: Item, **settings: Any) -> tuple[int, int]:
    from mimo_plugin.engines.vllm.vision.dummy import largest_source

    setup = make_setup(**settings)
    kind = "image" if item.frames == 1 else "video"
    return largest_source(setup, limits_of(setup, {}, kind), item)


def test_a_still_has_four_times_the_pixels_of_its_target():
    assert source(Item(1, 512, 512, 512, 512)) == (1024, 1024)
    assert source(Item(1, 256, 1024, 256, 1024)) == (512, 2048)
    # A ratio without bound can't be set aside; below 1 the API process resizes all of them.
    assert source(Item(1, 512, 512, 512, 512), host_resize_ratio=1000.0) == (1024, 1024)
    for ratio in (0.0, 0.5, 1.0):
        assert source(Item(1, 512, 512, 512, 512), host_resize_ratio=ratio) == (512, 512)


@pytest.mark.parametrize("ratio", [1.5, 2.0, 2.5, 3.0, 3.9])
def test_it_travels_as_bytes(ratio):
    from mimo_plugin.engines.vllm.vision.packing import pack

    item = Item(1, 32 * 9, 32 * 28, 32 * 9, 32 * 28)
    height, width = source(item, host_resize_ratio=ratio)
    assert height * width > 0.95 * ratio * item.height * item.width
    setup = make_setup(host_resize_ratio=ratio)
    frames = torch.zeros(1, height, width, 3, dtype=torch.uint8).numpy()
    packed = pack(frames, setup, limits_of(setup, {}, "image"), torch.float32)
    assert not packed.rows and math.prod(packed.grid) // 4 <= 9 * 28


def test_no_more_tokens_than_vllm_counts_on():
    """Upstream's largest frame is that of an image, which may be smaller than a video's."""
    item = Item(2, 64, 64, 64, 64)
    assert source(item) == (64, 64)


def test_the_engine_measures_them(tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    model = tiny_omni.make(tmp_path, dataclasses.replace(SIZE, image_max_pixels=256 * 256))
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=4096,
        limit_mm_per_prompt={"image": 1, "video": 0},
        additional_config={"mimo": {"vision": {}}},
    ).create_engine_config()
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    (_, item), *_ = budget.get_dummy_encoder_profile_inputs()
    assert item is not None
    assert item["image_pixels"].data.numel() == 4 * 256 * 256 * 3
    assert item["image_grid_thw"].data.tolist() == [1, 16, 16]
