# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint wants its pixels, and the sizes that follow."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_ASPECT,
    Item,
    PixelError,
    PixelSpec,
    check_item,
    grid_of,
    mimo_spec,
    patch_rows_of,
    resize_on_host,
    target_size,
)
from mimo_plugin.core.qwen_pixels import qwen_spec

CONFIG = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MIMO = mimo_spec(CONFIG, {})
QWEN = qwen_spec({})


def test_mimo_takes_sizes_from_the_configuration():
    assert (MIMO.resample, MIMO.patch_size, MIMO.merge_size, MIMO.factor) == ("bilinear", 16, 2, 32)
    assert MIMO.temporal_patch_size == 2
    assert (MIMO.min_pixels, MIMO.max_pixels) == (4 * 32 * 32, 4096 * 32 * 32)
    limits = {"image_min_pixels": 5000, "image_max_pixels": 70000}
    spec = mimo_spec({**CONFIG, "processor_config": limits}, {})
    assert (spec.min_pixels, spec.max_pixels) == (5000, 70000)


def test_mimo_normalises_as_the_checkpoint_says():
    assert (MIMO.mean, MIMO.std) == (IMAGENET_MEAN, IMAGENET_STD)
    spec = mimo_spec(CONFIG, {"image_mean": CLIP_MEAN, "image_std": CLIP_STD})
    assert spec.mean == pytest.approx([255 * v for v in CLIP_MEAN])
    assert spec.std == pytest.approx([255 * v for v in CLIP_STD])
    unscaled = {"image_mean": [120.0] * 3, "image_std": 60.0, "do_rescale": False}
    spec = mimo_spec(CONFIG, unscaled)
    assert (spec.mean, spec.std) == ((120.0,) * 3, (60.0,) * 3)


def test_qwen_takes_everything_from_the_preprocessor():
    assert (QWEN.resample, QWEN.patch_size, QWEN.factor) == ("bicubic", 14, 28)
    assert (QWEN.min_pixels, QWEN.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert QWEN.mean == pytest.approx([255 * v for v in CLIP_MEAN])
    given = {
        "patch_size": 16,
        "merge_size": 1,
        "temporal_patch_size": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "rescale_factor": 1 / 128,
        "size": {"shortest_edge": 1000, "longest_edge": 90000},
    }
    spec = qwen_spec(given)
    assert (spec.factor, spec.temporal_patch_size) == (16, 3)
    assert (spec.mean, spec.std, spec.rescale) == ((64.0,) * 3, (32.0,) * 3, 1 / 128)
    assert (spec.min_pixels, spec.max_pixels) == (1000, 90000)
    # As in transformers, the older names win over `size`.
    spec = qwen_spec({**given, "min_pixels": 2000, "max_pixels": None})
    assert (spec.min_pixels, spec.max_pixels) == (2000, 90000)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mimo_spec({}, {}), "vision_config: found None"),
        (lambda: mimo_spec({"vision_config": {}}, {}), "patch_size: found None"),
        (lambda: mimo_spec(CONFIG, {"image_mean": [0.5]}), r"image_mean: found \[0.5\]"),
        (lambda: mimo_spec(CONFIG, {"image_std": [0.5, 0.5, 0.0]}), "std"),
        (lambda: mimo_spec(CONFIG, {"rescale_factor": 0}), "rescale_factor: found 0"),
        (lambda: qwen_spec({"resample": 2}), r"resample: found 2; allowed: 3 \(bicubic\)"),
        (lambda: qwen_spec({"resample": None}), "resample: found None"),
        (lambda: qwen_spec({"do_normalize": False}), "do_normalize: found False"),
        (lambda: qwen_spec({"do_resize": None}), "do_resize: found None"),
        (lambda: qwen_spec({"do_convert_rgb": False}), "do_convert_rgb: found False"),
        (MIMO.as_bytes, "resample: found 'bilinear'"),
        (lambda: qwen_spec({"size": 224}), "size: found 224"),
        (lambda: qwen_spec({"size": {"height": 224}}), "min_pixels: found None"),
        (lambda: qwen_spec({"patch_size": 0}), "patch_size: found 0"),
        (lambda: qwen_spec({"min_pixels": 9, "max_pixels": 8}), "max_pixels: found 8"),
        (lambda: PixelSpec("lanczos", (0, 0, 0), (1, 1, 1), 1, 1, 1, 1, 1), "resample"),
        (lambda: PixelSpec("bicubic", (0, 0, math.nan), (1, 1, 1), 1, 1, 1, 1, 1), "mean"),
    ],
)
def test_settings_that_are_refused(make, said):
    with pytest.raises(PixelError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "source", "target"),
    [
        (MIMO, (333, 517), (320, 512)),
        (MIMO, (48, 80), (64, 64)),  # ties go to even, then the least pixels
        (MIMO, (4096, 4096), (2048, 2048)),
        (MIMO, (1, 300), (32, 9600)),  # short sides are enlarged first, whatever the shape
        (MIMO, (20, 100), (32, 160)),
        (QWEN, (100, 200), (112, 196)),
        (QWEN, (20, 100), (28, 112)),
        (QWEN, (14, 2000), (28, 672)),
        (QWEN, (28, 3000 * 2), None),
        (MIMO, (32, 6432), None),
        (MIMO, (1, 200000), None),
    ],
)
def test_known_sizes(spec, source, target):
    if target is None:
        with pytest.raises(PixelError, match=f"image of {source[0]}x{source[1]} pixels"):
            target_size(spec, *source)
    else:
        assert target_size(spec, *source) == target


sides = st.one_of(st.integers(1, 400), st.integers(1, 20000))


@given(sides, sides, st.sampled_from([MIMO, QWEN]))
def test_targets_are_blocks_within_the_limits(height, width, spec):
    try:
        target = target_size(spec, height, width)
    except PixelError as error:
        assert re.fullmatch(r".+", str(error))
        return
    assert all(side % spec.factor == 0 and side > 0 for side in target)
    # Qwen keeps one block along a thin side, which may exceed the limit a little.
    assert math.prod(target) <= spec.max_pixels or min(target) == spec.factor
    assert math.prod(target) >= spec.min_pixels
    check_item(spec, Item(1, height, width, *target))


@given(st.integers(28, 3000), st.integers(28, 3000), st.sampled_from([MIMO, QWEN]))
def test_square_enough_images_keep_their_shape(height, width, spec):
    if not 0.2 < height / width < 5 or min(height, width) < 8 * spec.factor:
        return
    target = target_size(spec, height, width)
    assert target[0] / target[1] == pytest.approx(height / width, rel=0.3)


def test_limits_can_be_given():
    assert target_size(MIMO, 1000, 1000, max_pixels=256 * 256) == (256, 256)
    assert target_size(MIMO, 100, 100, min_pixels=256 * 256) == (256, 256)
    with pytest.raises(PixelError, match="found min_pixels 9, max_pixels 8"):
        target_size(MIMO, 100, 100, min_pixels=9, max_pixels=8)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-1, 10), (10, True)])
def test_images_without_pixels(size):
    with pytest.raises(PixelError, match="both sides must be at least 1"):
        target_size(MIMO, *size)


def test_the_side_ratio_is_limited():
    assert target_size(QWEN, 28, 28 * MAX_ASPECT) == (28, 28 * MAX_ASPECT)
    with pytest.raises(PixelError, match="at most 200 times"):
        target_size(QWEN, 28, 28 * MAX_ASPECT + 1)


def test_the_host_resizes_above_four_times_the_target():
    assert not resize_on_host(4000, 1000)
    assert resize_on_host(4001, 1000)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (Item(0, 64, 64, 64, 64), "video of 0 frames"),
        (Item(1, 0, 64, 64, 64), "image of 0x64 pixels"),
        (Item(1, 64, 64, 64, 48), "target of 64x48 pixels: both sides must be multiples of 32"),
        (Item(1, 64, 64, 0, 64), "target of 0x64 pixels"),
    ],
)
def test_items_that_are_refused(item, said):
    with pytest.raises(PixelError, match=said):
        check_item(MIMO, item)


@pytest.mark.parametrize(("frames", "depth"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_last_frames_fill_a_patch(frames, depth):
    item = Item(frames, 100, 100, 64, 96)
    assert grid_of(MIMO, item) == (depth, 4, 6)
    assert patch_rows_of(MIMO, item) == depth * 24


def test_values_of_a_row():
    assert MIMO.row_values() == 1536
    assert MIMO.row_values(once=True) == 768
    assert Item(2, 3, 5, 32, 32).source_bytes == 90


def test_bytes_are_kept_only_where_nothing_changes_them():
    assert QWEN.as_bytes().keeps_bytes and not QWEN.keeps_bytes and not MIMO.keeps_bytes
    assert target_size(QWEN.as_bytes(), 300, 400) == target_size(QWEN, 300, 400)
