# SPDX-License-Identifier: Apache-2.0
"""The reference against Pillow, the processors of vLLM and transformers, and itself."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Item,
    PixelError,
    PixelSpec,
    grid_of,
    mimo_spec,
    target_size,
)
from mimo_plugin.core.qwen_pixels import qwen_spec
from mimo_plugin.kernels.preprocess import taps
from mimo_plugin.kernels.preprocess.reference import bicubic, patch_rows, to_rows
from tests.kernels.pictures import batches, mixed, pixels, spec_of

Image = pytest.importorskip("PIL.Image")


def pillow(frame, height: int, width: int):
    image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


@given(*(st.one_of(st.integers(1, 40), st.integers(1, 300)) for _ in range(4)), st.integers(0, 99))
def test_bicubic_is_pillows(height, width, target_height, target_width, seed):
    frame = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = bicubic(torch.from_numpy(frame)[None], target_height, target_width)[0].numpy()
    assert np.array_equal(found, pillow(frame, target_height, target_width))


@pytest.mark.parametrize("narrower", [0, 1, 7, 20])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_order_of_passes_is_pillows_to_the_pixel(narrower, extra):
    """Height shrinking by more than twice as many pixels as width turns the order round."""
    height, width = 90, 60
    target = (height - max(1, 2 * narrower + extra), width - narrower)
    frame = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = bicubic(torch.from_numpy(frame)[None], *target)[0].numpy()
    assert np.array_equal(found, pillow(frame, *target))


def test_the_order_of_passes_matters(monkeypatch):
    frame = np.random.default_rng(1).integers(0, 256, (90, 60, 3), dtype=np.uint8)
    monkeypatch.setattr(taps, "_pillow_orders", lambda: False)
    assert taps.columns_first(90, 60, 30, 50) is False
    found = bicubic(torch.from_numpy(frame)[None], 30, 50)[0].numpy()
    assert not np.array_equal(found, pillow(frame, 30, 50))


def test_another_pillow_is_refused(monkeypatch):
    class Other:
        Resampling = Image.Resampling

        @staticmethod
        def fromarray(array):
            return Image.fromarray(255 - array)

    taps._pillow_orders.cache_clear()
    monkeypatch.setattr("PIL.Image", Other)
    with pytest.raises(RuntimeError, match="installed Pillow gives other pixels.*fix: install"):
        taps.columns_first(10, 10, 5, 5)
    taps._pillow_orders.cache_clear()


@pytest.mark.parametrize(
    ("source", "target"), [(4096, 2880), (1000, 736), (777, 544), (37, 512), (3000, 320), (1, 32)]
)
def test_bilinear_taps_are_pytorchs(source, target):
    """A line whose neighbours alternate between 0 and 1 shows every weight."""
    line = (torch.arange(source) % 2).float()
    found = torch.nn.functional.interpolate(
        line.view(1, 1, 1, -1).expand(1, 3, 2, -1), (2, target), mode="bilinear"
    )[0, 0, 0]
    first, weights = (torch.from_numpy(a.copy()) for a in taps.bilinear_taps(source, target))
    weight = weights[:, 0]
    behind = (first + 1).clamp(max=source - 1)
    expected = line[first.long()] * (1 - weight) + line[behind.long()] * weight
    assert (found - expected).abs().max() <= 1e-6


def stock_mimo_rows(module, spec: PixelSpec, frames, kind: str):
    """What vLLM's MiMo processor makes of [F, H, W, C]."""
    processor = object.__new__(module.MiMoVLProcessor)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        setattr(processor, name, getattr(spec, name))
    processor.temporal_compression_ratio = 1
    limits = (spec.factor, spec.min_pixels, spec.max_pixels)
    if kind == "image":
        values, width, height = module._transform_single(Image.fromarray(frames[0]), *limits)
    else:
        planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
        values, width, height = module._transform_batch(planes, *limits)
    rows, grid = processor._flatten_visual(values, kind)
    return rows, tuple(grid.tolist()), (height, width)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [(1, 333, 517), (1, 64, 64), (1, 20, 97), (2, 100, 160), (4, 77, 200)],
)
def test_mimo_is_vllms_processor(frames, height, width):
    module = pytest.importorskip("vllm.transformers_utils.processors.mimo_v2_omni")
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    spec = mimo_spec({"vision_config": vision}, {})
    assert (spec.mean, spec.std) == (IMAGENET_MEAN, IMAGENET_STD)
    images = np.random.default_rng(3).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    expected, grid, size = stock_mimo_rows(
        module, spec, images, "image" if frames == 1 else "video"
    )
    item = Item(frames, height, width, *target_size(spec, height, width))
    assert (item.target_height, item.target_width) == size
    assert grid_of(spec, item) == grid
    found = patch_rows(torch.from_numpy(images).flatten(), [item], spec, dtype=torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.vllm
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_the_processors(height, width):
    vllm = pytest.importorskip("vllm.transformers_utils.processors.mimo_v2_omni")
    qwen = hf_module()
    for spec, upstream in (
        (spec_of("bilinear"), vllm._smart_resize),
        (qwen_spec({}), qwen.smart_resize),
    ):
        try:
            expected = upstream(height, width, spec.factor, spec.min_pixels, spec.max_pixels)
        except ValueError:
            expected = None
        if expected is None or min(expected) < spec.factor:
            with pytest.raises(PixelError):
                target_size(spec, height, width)
        else:
            assert target_size(spec, height, width) == tuple(expected)


def hf_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")


def test_qwen_is_the_pillow_processor_of_transformers():
    """300 random sizes, to the bit; ``benchmarks/preprocess_cpu.py`` compares a thousand."""
    random = np.random.default_rng(5)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    spec = qwen_spec({"size": size})
    processor = hf_module().Qwen2VLImageProcessorPil(size=size)
    for _ in range(300):
        height, width = (int(v) for v in np.exp(random.uniform(np.log(8), np.log(200), 2)))
        frame = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = processor(images=[Image.fromarray(frame)], return_tensors="pt")
        item = Item(1, height, width, *target_size(spec, height, width))
        assert list(grid_of(spec, item)) == expected["image_grid_thw"][0].tolist()
        found = patch_rows(torch.from_numpy(frame).flatten(), [item], spec, dtype=torch.float32)
        assert torch.equal(found, expected["pixel_values"]), (height, width)


def test_another_rescale_factor_is_rounded_as_transformers_does():
    given = {"rescale_factor": 1 / 200, "image_mean": [0.3] * 3, "image_std": [0.7, 0.6, 0.5]}
    processor = hf_module().Qwen2VLImageProcessorPil(**given)
    frame = np.arange(56 * 56 * 3, dtype=np.int64).astype(np.uint8).reshape(56, 56, 3)
    expected = processor(images=[Image.fromarray(frame)], return_tensors="pt")["pixel_values"]
    found = patch_rows(
        torch.from_numpy(frame).flatten(),
        [Item(1, 56, 56, 56, 56)],
        qwen_spec(given),
        dtype=torch.float32,
    )
    assert torch.equal(found, expected)


def test_rows_and_columns_are_ordered():
    """Every value tells where it was: frame, channel, line and column."""
    spec = spec_of("bilinear", patch=2, merge=2, depth=2)
    f, c, h, w = 4, 3, 8, 12
    values = torch.arange(f * c * h * w).view(f, c, h, w)
    rows = to_rows(values, spec, 2)
    n = 0
    for t in range(f // 2):
        for bh in range(h // 4):
            for bw in range(w // 4):
                for mh in range(2):
                    for mw in range(2):
                        y, x = (bh * 2 + mh) * 2, (bw * 2 + mw) * 2
                        patch = values[2 * t : 2 * t + 2, :, y : y + 2, x : x + 2]
                        assert torch.equal(rows[n], patch.permute(1, 0, 2, 3).flatten())
                        n += 1
    assert n == len(rows)


@settings(max_examples=30)
@given(batches(most=3, largest=60))
def test_stills_and_last_frames_repeat(batch):
    """A still is a video of that frame; a video short of a patch repeats its last frame."""
    spec, items = batch
    packed = pixels(items)
    found = patch_rows(packed, items, spec, dtype=torch.float32)
    filled, parts, start = [], [], 0
    for item in items:
        frames = packed[start : start + item.source_bytes].view(item.frames, -1)
        start += item.source_bytes
        missing = -item.frames % spec.temporal_patch_size
        parts.append(torch.cat([frames, frames[-1:].expand(missing, -1)]).flatten())
        filled.append(item._replace(frames=item.frames + missing))
    assert torch.equal(found, patch_rows(torch.cat(parts), filled, spec, dtype=torch.float32))


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_once_is_the_first_frame_of_the_patch(resample):
    spec = spec_of(resample, patch=8, merge=2, depth=3)
    items = mixed(spec, stills_only=True)
    packed = pixels(items)
    whole = patch_rows(packed, items, spec, dtype=torch.float32)
    once = patch_rows(packed, items, spec, dtype=torch.float32, once=True)
    planes = whole.view(len(whole), 3, 3, 64)
    assert torch.equal(once.view(len(once), 3, 64), planes[:, :, 0])
    assert torch.equal(planes[:, :, 1], planes[:, :, 0])
