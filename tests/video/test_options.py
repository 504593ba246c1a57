# SPDX-License-Identifier: Apache-2.0
"""``media_io_kwargs`` for the loader: what counts, what is left to the rule, what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.frames import VideoError
from mimo_plugin.engines.vllm.video.options import Asked, parse
from mimo_plugin.engines.vllm.vision.limits import Limits

VLLM_DEFAULT = 32


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, Asked()),
        ({"num_frames": -1, "fps": -1}, Asked()),
        ({"num_frames": None, "fps": None}, Asked()),
        ({"num_frames": 8}, Asked(8)),
        ({"num_frames": 32}, Asked(32)),
        ({"fps": 2}, Asked(None, 2.0)),
        ({"num_frames": 32, "fps": 2}, Asked(None, 2.0)),  # vLLM says 32 when nobody does
        ({"num_frames": 31, "fps": 2}, Asked(31, 2.0)),
        ({"num_frames": 32, "fps": -1}, Asked(32)),
        ({"max_pixels": 4096}, Asked(pixels={"max_pixels": 4096})),
        ({"mimo_setup": "anything"}, Asked()),
    ],
)
def test_what_is_asked_for(given, asked):
    assert parse(given, VLLM_DEFAULT) == asked


def test_stock_s_rule_takes_every_number():
    assert parse({"num_frames": 32, "fps": 2}) == Asked(32, 2.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_frames": 0}, "video.num_frames: found 0; allowed: a whole number above 0, or -1"),
        ({"num_frames": -2}, "found -2"),
        ({"num_frames": 2.5}, "found 2.5"),
        ({"num_frames": True}, "found True"),
        ({"fps": 0}, "video.fps: found 0; allowed: a number above 0, or -1"),
        ({"fps": math.inf}, "found inf"),
        ({"fps": "2"}, "found '2'"),
        ({"max_pixels": 0}, "video.max_pixels: found 0; allowed: a whole number of pixels"),
        (
            {"frame_recovery": True},
            "video: found the key 'frame_recovery' with True; allowed keys: num_frames",
        ),
        ({"num_frame": 3}, r"did you mean 'num_frames'\?"),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(VideoError, match=words):
        parse(given, VLLM_DEFAULT)


@given(
    st.dictionaries(
        st.text(max_size=12) | st.sampled_from(["num_frames", "fps", "max_pixels"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
    )
)
def test_anything_is_understood_or_refused_in_one_line(given):
    try:
        asked = parse(given, VLLM_DEFAULT)
    except VideoError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert asked.num_frames is None or asked.num_frames > 0
        assert asked.fps is None or asked.fps > 0


def test_limits_of_pixels():
    limits = Limits(100, 1000, 5000)
    assert Asked().limits(limits) == limits
    changed = Asked(pixels={"max_pixels": 200, "total_max_pixels": 400}).limits(limits)
    assert changed == Limits(100, 200, 400)
    with pytest.raises(VideoError, match="min_pixels 100, max_pixels 99"):
        Asked(pixels={"max_pixels": 99}).limits(limits)
