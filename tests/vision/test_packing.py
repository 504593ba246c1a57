# SPDX-License-Identifier: Apache-2.0
"""What travels: bytes of the source or finished rows, and what the model makes of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.vision.limits import limits_of
from mimo_plugin.engines.vllm.vision.packing import (
    SIZES,
    image_frames,
    pack,
    unpack,
    video_frames,
)
from mimo_plugin.kernels.preprocess.dispatch import patch_rows
from tests.vision.conftest import make_setup, movie, picture


def packed(setup, frames, kind="image", dtype=torch.float32, once=False):
    return pack(frames, setup, limits_of(setup, {}, kind), dtype, once=once)


def rows_alone(setup, one, dtype=torch.float32, once=False):
    """Rows of one item that was packed as pixels."""
    return patch_rows(one.data, [one.item], setup.spec, dtype=dtype, backend="reference", once=once)


def batch(setup, items, dtype=torch.float32, once=False):
    return unpack(
        torch.cat([one.data for one in items]),
        torch.tensor([one.sizes for one in items]),
        setup.spec,
        dtype=dtype,
        backend="reference",
        once=once,
    )


def test_pixels_travel_as_they_are(setup):
    source = picture(300, 401)
    one = packed(setup, source[None])
    assert one.data.dtype == torch.uint8 and not one.rows
    assert np.array_equal(one.data.numpy().reshape(source.shape), source)
    line = dict(zip(SIZES, one.sizes, strict=True))
    assert (line["frames"], line["height"], line["width"]) == (1, 300, 401)
    assert line["target_height"] % 32 == line["target_width"] % 32 == 0
    assert line["bytes"] == 300 * 401 * 3 == one.data.numel()
    assert one.grid == (1, line["target_height"] // 16, line["target_width"] // 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_much_larger_sources_travel_as_rows(dtype):
    setup = make_setup(backend="reference")
    edge = 512 * 512 * 4
    below, above = picture(1024, edge // 1024), picture(1056, edge // 1024)
    assert not packed(setup, below[None]).rows
    one = packed(setup, above[None], dtype=dtype)
    assert one.rows and one.data.dtype == torch.uint8
    source = packed(make_setup(backend="reference", host_resize_ratio=100), above[None])
    assert not source.rows
    assert torch.equal(batch(setup, [one], dtype), rows_alone(setup, source, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_its_items_in_order(dtype):
    """Odd sizes put finished rows at addresses that are not aligned for their type."""
    setup = make_setup(backend="reference", host_resize_ratio=1.5)
    sizes = [(301, 403), (900, 901), (33, 35), (700, 720), (320, 320)]
    items = [packed(setup, picture(h, w, i)[None], dtype=dtype) for i, (h, w) in enumerate(sizes)]
    assert [one.rows for one in items] == [False, True, False, True, False]
    never = make_setup(backend="reference", host_resize_ratio=1e9)
    expected = [
        rows_alone(never, packed(never, picture(h, w, i)[None]), dtype)
        for i, (h, w) in enumerate(sizes)
    ]
    assert torch.equal(batch(setup, items, dtype), torch.cat(expected))
    only_rows = [items[1], items[3]]
    assert torch.equal(batch(setup, only_rows, dtype), torch.cat([expected[1], expected[3]]))


def test_one_pass_for_a_batch(setup, monkeypatch):
    from mimo_plugin.engines.vllm.vision import packing

    calls = []

    def counted(packed_pixels, items, *args, **kwargs):
        calls.append(len(items))
        return patch_rows(packed_pixels, items, *args, **kwargs)

    monkeypatch.setattr(packing, "patch_rows", counted)
    batch(setup, [packed(setup, picture(64 + 32 * i, 96)[None]) for i in range(7)])
    assert calls == [7]


def test_videos_share_their_total_and_repeat_a_last_frame(setup):
    five = packed(setup, movie(5, 128, 160), "video")
    assert five.grid[0] == 3
    many = packed(setup, movie(64, 128, 160), "video")
    assert many.item.target_height * many.item.target_width < 128 * 160
    six = packed(setup, movie(5, 128, 160)[[0, 1, 2, 3, 4, 4]], "video")
    assert torch.equal(batch(setup, [five]), batch(setup, [six]))


def test_stills_written_once_are_half_the_columns():
    setup = make_setup(backend="reference", once=True, host_resize_ratio=1.5)
    items = [packed(setup, picture(*s)[None], once=True) for s in ((100, 90), (900, 900))]
    assert [one.rows for one in items] == [False, True]
    once = batch(setup, items, once=True)
    twice = make_setup(backend="reference", host_resize_ratio=1.5)
    full = batch(twice, [packed(twice, picture(*s)[None]) for s in ((100, 90), (900, 900))])
    assert torch.equal(once, full.view(len(full), 3, 2, 256)[:, :, 0].reshape(len(full), -1))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1"])
def test_images_of_any_mode(mode):
    image = Image.fromarray(picture(20, 30)).convert(mode)
    frames = image_frames(image)
    assert frames.shape == (1, 20, 30, 3) and frames.dtype == np.uint8
    assert np.array_equal(frames[0], np.array(image.convert("RGB")))


def test_tensors_and_arrays_are_understood():
    source = picture(20, 30)
    chw = torch.from_numpy(source).permute(2, 0, 1)
    for given in (source, chw, chw.float(), source.astype(np.float64)):
        assert np.array_equal(image_frames(given)[0], source)
    clip = movie(3, 20, 30)
    tchw = torch.from_numpy(clip).permute(0, 3, 1, 2)
    for given in (clip, tchw, tchw.float(), list(clip)):
        assert np.array_equal(video_frames(given), clip)


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (image_frames, np.zeros((20, 30)), r"\(20, 30\)"),
        (image_frames, np.zeros((4, 20, 30)), "3 colour channels"),
        (image_frames, np.full((3, 4, 4), 0.5), "whole values 0..255"),
        (image_frames, np.full((3, 4, 4), 256), "whole values 0..255"),
        (image_frames, np.full((3, 4, 4), np.nan), "whole values 0..255"),
        (image_frames, np.full((3, 4, 4), "x"), "numbers 0..255"),
        (video_frames, picture(20, 30), r"\(20, 30, 3\)"),
        (video_frames, np.zeros((2, 20, 30, 1), np.uint8), "3 colour channels"),
    ],
)
def test_what_are_no_pixels_is_refused(make, value, words):
    with pytest.raises(PixelError, match=words):
        make(value)


def test_sizes_without_a_target_are_refused(setup):
    with pytest.raises(PixelError, match="0 frames"):
        packed(setup, movie(0, 64, 64), "video")
    with pytest.raises(PixelError, match="1x5000"):
        packed(setup, picture(1, 5000)[None])
