# SPDX-License-Identifier: Apache-2.0
"""Limits: each is exact, can be switched off, and says what was found and what is allowed."""

import dataclasses

import pytest

from mimo_plugin.media.limits import (
    DecoderCrashed,
    DecodeTimeout,
    MediaError,
    MediaLimits,
    check_decoded,
    check_encoded,
)

OFF = MediaLimits(
    **{f.name: None for f in dataclasses.fields(MediaLimits) if "floor" not in f.name}
)


def check(limits, **changed):
    given = {"width": 100, "height": 50, "encoded_bytes": 1000, **changed}
    return check_decoded(limits, "image", **given)


def only(**limit):
    return dataclasses.replace(OFF, **limit)


@pytest.mark.parametrize(
    ("name", "fits", "too_much", "found"),
    [
        ("max_pixels", 5000, 4999, "100x50 = 5000 pixels"),
        ("max_aspect_ratio", 2.0, 1.9, "long side / short side = 2"),
        ("max_frames", 3, 2, "3 frames"),
        ("max_decoded_bytes", 45_000, 44_999, "3 x 100x50, 45000 bytes when decoded"),
    ],
)
def test_a_limit_is_exact(name, fits, too_much, found):
    assert check(only(**{name: fits}), frames=3) == 45_000
    with pytest.raises(MediaError) as caught:
        check(only(**{name: too_much}), frames=3)
    assert found in str(caught.value)
    assert str(caught.value).endswith(
        f"allowed: up to {too_much:g} ({name})".replace("5e+03", "4999")
    )


def test_expansion_counts_only_beyond_its_floor():
    limits = only(max_expansion=10.0, expansion_floor_bytes=15_000)
    assert check(limits, encoded_bytes=1) == 15_000
    above = {"frames": 2, "encoded_bytes": 3000}
    assert check(limits, **above) == 30_000
    with pytest.raises(MediaError, match=r"from 2999, 10 times; allowed: up to 10 \(max_exp"):
        check(limits, frames=2, encoded_bytes=2999)


def test_encoded_bytes():
    check_encoded(only(max_encoded_bytes=5), "image", 5)
    with pytest.raises(MediaError, match=r"found 6 bytes; allowed: up to 5 \(max_encoded_bytes\)"):
        check_encoded(only(max_encoded_bytes=5), "image", 6)
    with pytest.raises(MediaError, match="video: found 0 bytes; allowed: a file with content"):
        check_encoded(OFF, "video", 0)


@pytest.mark.parametrize("size", [{"width": 0}, {"height": 0}, {"width": -1}, {"frames": 0}])
def test_nothing_to_decode_is_refused_whatever_the_limits(size):
    with pytest.raises(MediaError, match="allowed: at least 1"):
        check(OFF, **size)


def test_without_limits_anything_goes():
    huge = check(OFF, width=10**6, height=1, frames=10**6, encoded_bytes=0)
    assert huge == 3 * 10**12


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(MediaLimits)])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: found {value}; allowed: above 0"):
        MediaLimits(**{name: value})


@pytest.mark.parametrize("error", [MediaError, DecodeTimeout, DecoderCrashed])
def test_errors_are_value_errors_which_engines_answer_with_400(error):
    assert issubclass(error, ValueError)
