# SPDX-License-Identifier: Apache-2.0
"""Pixel limits of a request: what ``mm_processor_kwargs`` may say."""

from __future__ import annotations

import pytest

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.vision.limits import Limits, check_kwargs, limits_of
from tests.vision.conftest import SIZE, make_setup


def test_without_kwargs_they_are_the_checkpoint_s(setup):
    assert limits_of(setup, {}, "image") == Limits(SIZE.image_min_pixels, SIZE.image_max_pixels)
    assert limits_of(setup, {}, "video") == Limits(
        SIZE.video_min_pixels, SIZE.video_max_pixels, SIZE.video_total_max_pixels
    )


@pytest.mark.parametrize(
    ("kwargs", "image", "video"),
    [
        ({"max_pixels": 9000}, 9000, 9000),
        ({"size": {"longest_edge": 9000}}, 9000, 9000),
        ({"images_kwargs": {"max_pixels": 9000}}, 9000, SIZE.video_max_pixels),
        ({"videos_kwargs": {"size": {"longest_edge": 9000}}}, SIZE.image_max_pixels, 9000),
        ({"max_pixels": 9000, "images_kwargs": {"max_pixels": 10000}}, 10000, 9000),
        ({"size": {"longest_edge": 9500}, "max_pixels": 9000}, 9000, 9000),
        ({"device": "cpu", "max_pixels": None}, SIZE.image_max_pixels, SIZE.video_max_pixels),
    ],
)
def test_kwargs_change_what_they_name(setup, kwargs, image, video):
    assert limits_of(setup, kwargs, "image").max_pixels == image
    assert limits_of(setup, kwargs, "video").max_pixels == video


def test_the_smallest_can_be_changed_as_well(setup):
    assert limits_of(setup, {"min_pixels": 8193}, "image").min_pixels == 8193
    assert limits_of(setup, {"size": {"shortest_edge": 8193}}, "video").min_pixels == 8193


def test_stock_ignores_all_of_them():
    setup = make_setup(processor_kwargs="stock")
    kwargs = {"max_pixels": 1, "nonsense": object()}
    assert limits_of(setup, kwargs, "image") == limits_of(setup, {}, "image")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_pixel": 3}, ["max_pixel", "max_pixels"]),
        ({"max_pixels": 0}, ["max_pixels", "0", "above 0"]),
        ({"max_pixels": "many"}, ["max_pixels", "many"]),
        ({"min_pixels": True}, ["min_pixels", "True"]),
        ({"size": {"height": 3}}, ["size.height", "longest_edge"]),
        ({"size": 3}, ["size", "an object"]),
        ({"images_kwargs": {"total_max_pixels": 3}}, ["images_kwargs.total_max_pixels"]),
        ({"videos_kwargs": 3}, ["videos_kwargs", "an object"]),
        ({"device": "cuda"}, ["device", "cuda", "cpu"]),
    ],
)
def test_what_can_not_be_honoured_is_refused(setup, kwargs, words):
    with pytest.raises(PixelError) as caught:
        check_kwargs(kwargs)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(PixelError):
        limits_of(setup, kwargs, "image")


def test_limits_that_contradict_the_checkpoint_s_are_refused(setup):
    with pytest.raises(PixelError, match="min_pixels 8192, max_pixels 100"):
        limits_of(setup, {"max_pixels": 100}, "image")


def test_frames_share_the_total_but_get_the_least():
    """As upstream: the total counts temporal patches, so two frames count once."""
    limits = Limits(100, 5000, 10_000)
    assert limits.of_frames(2, 2).max_pixels == 5000
    assert limits.of_frames(8, 2).max_pixels == 2500
    assert limits.of_frames(1000, 2).max_pixels == 100
    assert Limits(1, 2).of_frames(9, 2) == Limits(1, 2)
