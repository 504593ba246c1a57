# SPDX-License-Identifier: Apache-2.0
"""What the encoder makes and keeps: no medium waits forever (B42), media of a prompt fit (B80)."""

from __future__ import annotations

import copy
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.vision.budget import EncoderBudget, check_tokens
from mimo_plugin.engines.vllm.vision.limits import Limits
from mimo_plugin.engines.vllm.vision.packing import pack
from tests.vision.conftest import SIZE, make_setup, movie, picture
from tools import tiny_omni

pytestmark = pytest.mark.vllm

VIDEO = 229_376
"""Embeddings of each of the two videos of B80."""


def budget(**changes: Any) -> EncoderBudget:
    given = {
        "step_tokens": VIDEO,
        "cache_tokens": VIDEO,
        "largest": {"image": 4096, "video": VIDEO},
        "limits": {"image": 999, "video": 2},
        "context_tokens": 1_048_576,
    }
    return EncoderBudget(**{**given, **changes})


# --- B80: the size of the cache --------------------------------------------------------------


def test_stock_holds_one_of_the_largest_and_that_is_known():
    assert budget().cache_size(None) == VIDEO
    assert budget().short(VIDEO) == ["image", "video"]
    assert budget(limits={"image": 999, "video": 1}).short(VIDEO) == ["image"]


def test_limit_has_room_for_every_prompt():
    assert budget(limits={"image": 3, "video": 2}).cache_size("limit") == 2 * VIDEO + 3 * 4096
    # No prompt has more embeddings than tokens.
    assert budget().cache_size("limit") == 1_048_576
    assert budget().short(budget().cache_size("limit")) == []
    assert budget(context_tokens=300_000).per_prompt("video") == 1


def test_a_number_is_taken_but_never_less_than_one_medium():
    assert budget().cache_size(500_000) == 500_000
    assert budget().cache_size(10) == VIDEO
    assert budget(largest={}, limits={}).cache_size(None) == VIDEO


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    size = dataclasses.replace(SIZE, image_max_pixels=256 * 256)
    return tiny_omni.make(tmp_path_factory.mktemp("tiny-omni"), size)


@pytest.fixture(scope="module")
def config_of(model):
    """The configuration of an engine whose prompts have at most two images, and no videos."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def make(settings: dict[str, Any], **changes: Any) -> Any:
        given = {
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0},
            "additional_config": {"mimo": {"vision": settings}},
        }
        args: Any = {**given, **changes}
        return EngineArgs(model=str(model), **args).create_engine_config()

    return make


def cache_size(config: Any) -> int:
    """As scheduler and API process work it out, each on its own copy of the configuration."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    found = MultiModalBudget(copy.deepcopy(config), MULTIMODAL_REGISTRY)
    return int(found.encoder_cache_size)


def resident(size: int, *tokens: int) -> list[bool]:
    """Which media of one prompt vLLM's own manager finds room for, one behind the other."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    manager = EncoderCacheManager(size)
    request: Any = SimpleNamespace(
        request_id="one",
        mm_features=[SimpleNamespace(identifier=str(i)) for i in range(len(tokens))],
        get_num_encoder_embeds=lambda i: tokens[i],
    )
    found = []
    for i, count in enumerate(tokens):
        found.append(manager.can_allocate(request, i, count, 0))
        if found[-1]:
            manager.allocate(request, i)
    return found


def test_b80_both_media_are_resident(config_of):
    stock, limit = config_of({}), config_of({"encoder_cache_tokens": "limit"})
    assert (cache_size(stock), cache_size(limit)) == (64, 128)
    assert resident(cache_size(stock), 64, 64) == [True, False]
    assert resident(cache_size(limit), 64, 64) == [True, True]
    assert cache_size(config_of({"encoder_cache_tokens": 100})) == 100


def test_b80_the_bound_is_said_at_start(config_of, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def line(settings: dict[str, Any], **changes: Any) -> logging.LogRecord:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="vllm.mimo_plugin"):
            config_of(settings, **changes)
        (found,) = (r for r in caplog.records if "encoder cache of" in r.getMessage())
        return found

    stock = line({})
    assert stock.levelno == logging.WARNING
    for words in (
        "64 embeddings",
        "1 of image (64 embeddings each, 2 in a prompt)",
        '"limit" (128)',
    ):
        assert words in stock.getMessage()
    limit = line({"encoder_cache_tokens": "limit"})
    assert limit.levelno == logging.INFO
    assert "2 of image" in limit.getMessage() and "--gpu-memory-utilization" in limit.getMessage()
    # A limit that nobody set is no promise.
    assert line({}, limit_mm_per_prompt={"video": 0}).levelno == logging.INFO
    assert "is 10, less than" in line({"encoder_cache_tokens": 10}).getMessage()


# --- B42: what the encoder can't make --------------------------------------------------------


def test_b42_the_line_has_both_numbers_and_a_fix():
    setup = dataclasses.replace(make_setup(), item_tokens=64)
    check_tokens("image", 64, setup)
    with pytest.raises(PixelError, match=r"image: 65 .* at most 64 .*; fix: .*max_pixels"):
        check_tokens("image", 65, setup)
    check_tokens("image", 10**9, make_setup())


@pytest.mark.parametrize(
    ("frames", "name"),
    [(picture(8, 8)[None], "image of 8x8"), (movie(4, 8, 8), "video of 4 frames of 8x8")],
)
def test_b42_a_medium_is_refused_before_anything_is_made_of_it(frames, name):
    """Else a request that asks for 10^12 pixels takes the memory of the API process."""
    setup = dataclasses.replace(make_setup(host_resize_ratio=0.0), item_tokens=64)
    limits = Limits(min_pixels=10**12, max_pixels=10**12)
    with pytest.raises(PixelError, match=f"{name} pixels: [0-9]+ embedding tokens"):
        pack(frames, setup, limits, torch.float32)


@pytest.fixture
def request_of():
    """Runs the processor of an engine on one image, or on embeddings that a request brings."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    def run(config: Any, data: Any, **kwargs: Any) -> int:
        processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
        items = processor.info.parse_mm_data({"image": data})
        text = "<|vision_start|><|image_pad|><|vision_end|>"
        made = processor(text, items, hf_processor_mm_kwargs=kwargs)
        return len(made["prompt_token_ids"]) - 2

    return run


def test_b42_in_the_processor_of_an_engine(config_of, request_of):
    config = config_of({"encoder_cache_tokens": 4096})
    image = [Image.fromarray(picture(512, 512))]
    assert request_of(config, image) == 64
    with pytest.raises(PixelError, match=r"512x512 pixels: 256 embedding tokens.* at most 64 "):
        request_of(config, image, max_pixels=512 * 512)


def test_b42_embeddings_that_a_request_brings_are_checked_too(config_of, request_of):
    config = config_of({"encoder_cache_tokens": 8192}, enable_mm_embeds=True)
    most = config.model_config.hf_config.mimo_plugin_vision["item_tokens"]
    width = config.model_config.get_inputs_embeds_size()

    def given(tokens: int) -> dict[str, Any]:
        return {
            "image_embeds": torch.zeros(tokens, width),
            "image_grid_thw": torch.tensor([[1, 2, 2 * tokens]]),
        }

    assert request_of(config, given(most)) == most
    with pytest.raises(PixelError, match=f"image: {most + 1} embedding tokens"):
        request_of(config, given(most + 1))


@pytest.mark.parametrize(
    "kwargs", [{"max_pixels": 512 * 512}, {"images_kwargs": {"max_pixels": 512 * 512}}]
)
def test_b42_limits_of_the_start_count_in_the_budget(config_of, request_of, kwargs):
    """Upstream reads the first form only, and would size for smaller images."""
    config = config_of({}, mm_processor_kwargs=kwargs)
    assert cache_size(config) == 256
    assert request_of(config, [Image.fromarray(picture(512, 512))]) == 256
