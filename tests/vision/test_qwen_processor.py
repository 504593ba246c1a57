# SPDX-License-Identifier: Apache-2.0
"""Qwen-VL: what the model sees of an image is what vLLM's processor makes with Pillow, bit for bit.

No engine runs: configurations are made as an engine makes them, and asked for their processor.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mimo_plugin.core.pixels import PixelError
from tests.vision.conftest import movie, picture

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PILLOW = {"use_fast": False}
"""How a user of stock chooses the processor that computes with Pillow."""


@pytest.fixture(scope="module")
def processor_of(qwen_models):
    """Stock's processor that computes with Pillow, or the plugin's with ``settings``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    @cache
    def made(family: str, host_resize_ratio: float | None, **options: Any) -> Any:
        mimo = {}
        if host_resize_ratio is not None:
            vision = {"host_resize_ratio": host_resize_ratio, "backend": "cpu"}
            mimo = {"mimo": {"features": ["vision"], "vision": vision}}
        kwargs = {} if mimo else {"mm_processor_kwargs": PILLOW}
        args = EngineArgs(
            model=str(qwen_models[family]),
            dtype="float32",
            max_model_len=8192,
            additional_config=mimo,
            **kwargs,
            **options,
        )
        return MULTIMODAL_REGISTRY.create_processor(args.create_engine_config().model_config)

    return made


@pytest.fixture(params=FAMILIES)
def both(request, processor_of):
    """Stock's and ours, of a family."""
    return processor_of(request.param, None), processor_of(request.param, 4.0)


def run(processor, text, data, **kwargs):
    return processor(text, processor.info.parse_mm_data(data), hf_processor_mm_kwargs=kwargs)


def rows_of(processor, out):
    """Patch rows that the model makes of what ours hands over."""
    from mimo_plugin.engines.vllm.vision.packing import unpack

    setup = processor.setup
    items = [item.get_data() for item in out["mm_kwargs"]["image"]]
    return unpack(
        torch.cat([item["image_pixels"] for item in items]),
        torch.stack([item["image_sizes"] for item in items]),
        setup.row_spec,
        dtype=torch.uint8 if setup.normalised_later else torch.float32,
        backend="cpu",
        once=False,
    )


def same(stock, ours, text, data, **kwargs):
    """Ours and stock's agree in tokens, places, grids and, bit for bit, in patch rows."""
    theirs, mine = run(stock, text, data, **kwargs), run(ours, text, data, **kwargs)
    assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert mine["mm_placeholders"] == theirs["mm_placeholders"]
    items = [item.get_data() for item in theirs["mm_kwargs"]["image"]]
    expected = torch.cat([item["pixel_values"] for item in items])
    found = rows_of(ours, mine)
    assert found.dtype == (torch.uint8 if ours.setup.normalised_later else expected.dtype)
    assert torch.equal(found.to(expected.dtype), expected)
    for one, other in zip(items, mine["mm_kwargs"]["image"], strict=True):
        assert torch.equal(one["image_grid_thw"], other.get_data()["image_grid_thw"])
    return mine


def in_mode(mode: str, height: int, width: int, seed: int) -> Any:
    """A picture of any of Pillow's modes, with its own alpha, palette or depth."""
    if mode == "I;16":
        wide = np.random.default_rng(seed).integers(0, 65536, (height, width), dtype=np.uint16)
        return Image.fromarray(wide)
    if mode in ("RGBA", "LA", "CMYK"):
        bands = {"RGBA": 4, "LA": 2, "CMYK": 4}[mode]
        values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), np.uint8)
        return Image.fromarray(values, mode)
    return Image.fromarray(picture(height, width, seed)).convert(mode)


MODES = ("RGB", "RGBA", "LA", "L", "P", "1", "CMYK", "I;16", "YCbCr", "HSV")


@pytest.mark.parametrize("shift", range(4))
def test_random_sizes_and_modes_are_stock_s_to_the_last_bit(both, shift):
    """Every fourth of 40 pictures: a call with one to four of them."""
    draw = random.Random(shift)
    left = 10
    while left:
        count = min(left, draw.randint(1, 4))
        left -= count
        pictures = [
            in_mode(draw.choice(MODES), draw.randint(20, 700), draw.randint(20, 700), left + i)
            for i in range(count)
        ]
        same(*both, IMAGE * count, {"image": pictures})


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_stock_s(processor_of, mode):
    pair = processor_of("qwen2_5_vl", None), processor_of("qwen2_5_vl", 4.0)
    same(*pair, IMAGE, {"image": [in_mode(mode, 90, 120, 3)]})


@pytest.mark.parametrize("family", FAMILIES)
def test_normalised_here_or_on_the_device(processor_of, family):
    """Without ``--mm-device-do-normalize`` rows are normalised ones, equal to the last bit too."""
    options = {"mm_device_do_normalize": False}
    stock = processor_of(family, None, **options)
    ours = processor_of(family, 4.0, **options)
    assert not ours.setup.normalised_later
    same(stock, ours, IMAGE * 2, {"image": [in_mode("RGB", 333, 517, 1), in_mode("P", 64, 64, 2)]})


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e9])
def test_resized_by_the_host_or_by_the_model_is_the_same(processor_of, ratio):
    stock, ours = processor_of("qwen3_vl", None), processor_of("qwen3_vl", ratio)
    out = same(stock, ours, IMAGE, {"image": [in_mode("RGB", 900, 1400, 1)]})
    item = out["mm_kwargs"]["image"][0].get_data()
    _, height, width, *target = item["image_sizes"].tolist()[:5]
    assert ([height, width] == target) == (ratio < 1e9)
    assert item["image_pixels"].numel() == height * width * 3


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_pixels": 100_000},
        {"min_pixels": 200_000},
        {"size": {"shortest_edge": 10_000, "longest_edge": 90_000}},
        {"images_kwargs": {"max_pixels": 90_000}},
        {"images_kwargs": {"size": {"shortest_edge": 10_000, "longest_edge": 60_000}}},
        {"max_pixels": 90_000, "images_kwargs": {"max_pixels": 40_000}},
        {"videos_kwargs": {"fps": 1.0}, "num_frames": None},
        {"do_resize": True, "do_convert_rgb": True},
    ],
    ids=str,
)
def test_settings_of_a_request_act_as_in_stock(both, kwargs):
    same(*both, IMAGE, {"image": [in_mode("RGB", 300, 400, 5)]}, **kwargs)


def test_a_limit_of_a_request_goes_before_the_engine_s(qwen_models):
    """Under the other name: what stock does depends on the family, and so does ours."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    for family in FAMILIES:
        pair = []
        for mimo in ({}, {"mimo": {"features": ["vision"]}}):
            args = EngineArgs(
                model=str(qwen_models[family]),
                dtype="float32",
                max_model_len=8192,
                mm_processor_kwargs={"max_pixels": 50_000, **PILLOW},
                additional_config=mimo,
            )
            config = args.create_engine_config().model_config
            pair.append(MULTIMODAL_REGISTRY.create_processor(config))
        size = {"shortest_edge": 4000, "longest_edge": 100_000}
        data = {"image": [in_mode("RGB", 500, 600, 6)]}
        for kwargs in ({}, {"size": size}, {"max_pixels": 70_000}):
            same(*pair, IMAGE, data, **kwargs)


def test_photo_and_noise_are_pillow_s(processor_of):
    """B40: a photo of 1024x1024 to 476x476 and noise of 512 to 252, per channel in 8-bit levels."""
    ours = processor_of("qwen2_5_vl", 4.0)
    noise = Image.fromarray(picture(512, 512))
    coarse = Image.fromarray(picture(18, 18, 1)).resize((1024, 1024), Image.Resampling.BICUBIC)
    for image, side, mean, most in ((coarse, 476, 0.15, 2), (noise, 252, None, 5)):
        out = run(ours, IMAGE, {"image": [image]}, max_pixels=side * side)
        small = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
        found = pixels_of(rows_of(ours, out), side // 14)
        apart = np.abs(found - small)
        assert apart.max() <= most
        assert mean is None or apart.mean() <= mean
        assert not apart.any()  # what the case allows another resize, Pillow's own has no use for
        assert len(out["prompt_token_ids"]) == 2 + (side // 28) ** 2


def pixels_of(rows, patches):
    """[height, width, 3] of the one picture whose patch rows these are."""
    blocks = patches // 2
    split = rows.view(blocks, blocks, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    return split.permute(0, 2, 5, 1, 3, 6, 4).reshape(patches * 14, patches * 14, 3).numpy()


def test_the_torchvision_processor_differs_by_rounding_only(processor_of, qwen_models):
    """What stock takes by default: ours is the other one, and this is how far apart they are."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    args = EngineArgs(model=str(qwen_models["qwen2_5_vl"]), dtype="float32", max_model_len=8192)
    default = MULTIMODAL_REGISTRY.create_processor(args.create_engine_config().model_config)
    ours = processor_of("qwen2_5_vl", 4.0)
    assert type(default.info.get_image_processor()).__name__ == "Qwen2VLImageProcessor"
    for size in ((512, 512), (333, 640), (700, 90)):
        data = {"image": [Image.fromarray(picture(*size))]}
        theirs = run(default, IMAGE, data)["mm_kwargs"]["image"][0].get_data()["pixel_values"]
        apart = (rows_of(ours, run(ours, IMAGE, data)).int() - theirs.int()).abs()
        assert apart.max() <= 2
        assert apart.float().mean() < 0.01


def test_embeddings_are_upstream_s_own(processor_of):
    pair = [processor_of("qwen2_5_vl", r, enable_mm_embeds=True) for r in (None, 4.0)]
    given = {"image_embeds": torch.rand(6, 128), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    theirs, mine = (run(processor, IMAGE, {"image": given}) for processor in pair)
    assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
    (one,), (other,) = (out["mm_kwargs"]["image"] for out in (theirs, mine))
    assert one.keys() == other.keys() == {"image_embeds", "image_grid_thw"}
    assert torch.equal(one.get_data()["image_embeds"], other.get_data()["image_embeds"])


def test_videos_are_upstream_s_own(both):
    stock, ours = both
    frames = movie(6, 64, 96)
    metadata = {
        "fps": 2.0,
        "duration": 3.0,
        "total_num_frames": 6,
        "frames_indices": list(range(6)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    video = (frames, metadata) if stock.info.data_parser.video_needs_metadata else frames
    data = {"video": [video], "image": [in_mode("RGB", 100, 100, 1)]}
    text = f"a{VIDEO}b{IMAGE}c"
    theirs, mine = run(stock, text, data), run(ours, text, data)
    assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert mine["mm_placeholders"] == theirs["mm_placeholders"]
    (one,), (other,) = (out["mm_kwargs"]["video"] for out in (theirs, mine))
    assert one.keys() == other.keys()
    for name, value in one.get_data().items():
        found = other.get_data()[name]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize(
    ("data", "kwargs", "words"),
    [
        ([Image.new("RGB", (6000, 20))], {}, "20x6000"),
        ([Image.new("RGB", (64, 64))], {"max_pixel": 4}, "max_pixel"),
        ([Image.new("RGB", (64, 64))], {"do_resize": False}, "do_resize"),
        ([Image.new("RGB", (64, 64))], {"use_fast": True}, "use_fast"),
        ([Image.new("RGB", (64, 64))], {"images_kwargs": {"image_mean": [0]}}, "image_mean"),
        ([Image.new("RGB", (64, 64))], {"size": {"height": 4}}, "size.height"),
        ([Image.new("RGB", (64, 64))], {"min_pixels": 10**9}, "min_pixels 1000000000"),
    ],
)
def test_what_can_not_be_served_is_said_in_one_line(both, data, kwargs, words):
    with pytest.raises(PixelError, match=words) as caught:
        run(both[1], IMAGE, {"image": data}, **kwargs)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


def test_the_profile_run_has_its_inputs(both):
    for processor in both:
        out = processor.get_dummy_mm_inputs({"image": 2, "video": 1})
        assert len(out["mm_kwargs"]["image"]) == 2 and len(out["mm_kwargs"]["video"]) == 1


def test_the_mixture_of_experts_has_the_processor_of_its_family(processor_of):
    stock, ours = processor_of("qwen3_vl_moe", None), processor_of("qwen3_vl_moe", 4.0)
    same(stock, ours, IMAGE, {"image": [in_mode("RGB", 200, 300, 9)]})
