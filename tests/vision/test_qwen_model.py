# SPDX-License-Identifier: Apache-2.0
"""The side of the model: what reaches upstream's classes, with and without CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.qwen_pixels import qwen_spec
from mimo_plugin.engines.vllm.vision.setup import VisionSetup
from tests.vision.conftest import picture

pytestmark = pytest.mark.vllm

CLASSES = ("MimoQwen2VL", "MimoQwen2_5_VL", "MimoQwen3VL", "MimoQwen3VLMoe")


@pytest.fixture(params=CLASSES)
def model(request):
    """An object of a class of ours as far as pixels are concerned."""
    from mimo_plugin.engines.vllm.vision import qwen_model

    cls = getattr(qwen_model, request.param)
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    made.vision_setup = VisionSetup(
        spec=qwen_spec({}), config=VisionConfig(backend="reference"), normalised_later=True
    )
    visual = SimpleNamespace(dtype=torch.bfloat16, spatial_merge_size=2)
    object.__setattr__(made, "visual", visual)
    return made


def batch(*sizes):
    """Fields of a batch of images, as the engine hands them over."""
    from mimo_plugin.engines.vllm.vision.qwen_limits import qwen_limits
    from mimo_plugin.engines.vllm.vision.qwen_processor import pack_image

    setup = VisionSetup(spec=qwen_spec({}), config=VisionConfig())
    packed = [
        pack_image(picture(*size, seed), setup, qwen_limits(setup, {}))
        for seed, size in enumerate(sizes)
    ]
    return {
        "image_pixels": torch.cat([one.data for one in packed]),
        "image_sizes": torch.tensor([one.sizes for one in packed]),
        "image_grid_thw": torch.tensor([one.grid for one in packed]),
    }


def test_rows_are_bytes_where_the_tower_normalises(model):
    given = batch((84, 112), (60, 90))
    rows = model.with_rows(given)
    assert list(rows) == ["pixel_values", "image_grid_thw"]
    assert rows["pixel_values"].dtype == torch.uint8
    assert len(rows["pixel_values"]) == int(given["image_grid_thw"].prod(-1).sum())
    model.vision_setup = VisionSetup(
        spec=qwen_spec({}), config=VisionConfig(backend="reference"), normalised_later=False
    )
    assert model.with_rows(given)["pixel_values"].dtype == torch.bfloat16


def test_videos_and_embeddings_pass(model):
    other = {"pixel_values_videos": "rows", "video_grid_thw": "grid", "image_embeds": "values"}
    assert model.with_rows(other) == other


def test_encoder_cuda_graphs_get_the_same_rows(model):
    """They take items out of a batch, in any order, and never call ``embed_multimodal``."""
    sizes = (84, 112), (60, 90), (140, 56)
    rows = model.with_rows(batch(*sizes))["pixel_values"]
    counts = batch(*sizes)["image_grid_thw"].prod(-1).tolist()
    parts = rows.split(counts)
    given = batch(*sizes)
    assert [spec.input_size for spec in model.get_encoder_cudagraph_item_specs(given)] == counts
    chosen = model.select_encoder_cudagraph_items(given, [2, 0])
    assert torch.equal(chosen["pixel_values"], torch.cat([parts[2], parts[0]]))
    assert "image_pixels" not in given  # made once: the rest of the batch finds the rows
    again = model.select_encoder_cudagraph_items(given, [1])
    assert torch.equal(again["pixel_values"], parts[1])


@pytest.mark.parametrize("normalise", [True, False])
def test_the_tower_sees_what_it_sees_in_stock(normalise):
    """Rows of bytes through vLLM's own step are those of its default, to the last bit."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

    with set_current_vllm_config(VllmConfig()):
        norm = FusedMMInputNorm([0.5, 0.4, 0.3], [0.2, 0.3, 0.4], 1 / 255)
    rows = torch.randint(0, 256, (7, 3 * 2 * 14 * 14), dtype=torch.uint8)
    as_stock = rows.float() if normalise else rows.bfloat16()
    assert torch.equal(norm(rows, torch.bfloat16), norm(as_stock, torch.bfloat16))
