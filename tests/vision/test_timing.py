# SPDX-License-Identifier: Apache-2.0
"""Times of frames, and the tokens that say them."""

from __future__ import annotations

import pytest

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.vision.timing import (
    VideoTokens,
    frame_times_s,
    patch_times_s,
    stock_times_s,
    video_prompt,
)


def test_times_of_the_loader_come_first():
    metadata = {"times_s": [0.0, 0.5, 7.25], "frames_indices": [0, 1, 2], "fps": 1.0}
    assert frame_times_s(3, metadata) == (0.0, 0.5, 7.25)


def test_times_follow_from_frame_numbers_and_rate():
    metadata = {"frames_indices": [0, 6000, 12000], "fps": 30.0}
    assert frame_times_s(3, metadata) == (0.0, 200.0, 400.0)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"fps": 30.0}, {"frames_indices": [0, 1]}, {"frames_indices": [0, 1, 2], "fps": 0}],
)
def test_nothing_is_made_up(metadata):
    assert frame_times_s(2, metadata) is None
    assert frame_times_s(2, {"frames_indices": [0, 1, 2], "fps": 1.0}) is None


@pytest.mark.parametrize("times", [[0.0], [0.0, 1.0, 2.0], [1.0, 0.5], []])
def test_wrong_times_are_refused(times):
    with pytest.raises(PixelError, match=f"found {len(times)} times for 2 frames"):
        frame_times_s(2, {"times_s": times})


def test_stock_takes_a_frame_a_second():
    assert stock_times_s(3) == (0.0, 1.0, 2.0)


def test_a_patch_has_the_time_of_its_first_frame():
    assert patch_times_s((0.0, 1.0, 5.0, 9.0, 400.0), 2) == (0.0, 5.0, 400.0)


def test_tokens_of_a_video():
    tokens = VideoTokens(video_start=1, video_end=2, vision_start=3, vision_end=4, video_pad=5)
    full, embeds = video_prompt((0.0, 61.0), 2, tokens, lambda t: [100, 100 + int(t)])
    assert full == [1, 100, 100, 3, 5, 5, 4, 100, 161, 3, 5, 5, 4, 2]
    assert [token for token, embed in zip(full, embeds, strict=True) if embed] == [5] * 4
