# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``video``: what is accepted, what is refused and with which line."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import pytest

from mimo_plugin import config as cfg
from mimo_plugin.config_video import VideoConfig
from tests.config_refusal import parse_section, refusal_of

FULL = {
    "frames": "stock",
    "spread": "time",
    "workers": 2,
    "max_file_bytes": 1,
    "max_duration_s": 0.5,
    "max_output_bytes": 7,
    "job_timeout_s": 1.5,
}

parse = partial(parse_section, "video")
refused = partial(refusal_of, "video")


def test_defaults_and_every_setting():
    assert parse({}).video == VideoConfig()
    assert set(FULL) == {field.name for field in dataclasses.fields(VideoConfig)}
    assert parse(FULL).video == VideoConfig(**FULL)


def test_settings_survive_the_way_to_other_processes():
    config = parse(FULL)
    assert cfg.parse_config(json.loads(json.dumps(config.to_dict())), environ={}) == config


@pytest.mark.parametrize(
    ("key", "allowed", "values"),
    [
        ("frames", "checkpoint, stock", ["all", None, 32]),
        ("spread", "ends, steps, time", ["even", None]),
        ("workers", "a whole number of threads >= 1, or null", [0, -1, 1.5, "2", True]),
        ("max_file_bytes", "a whole number of bytes >= 1", [0, None, 1.5]),
        ("max_duration_s", "a number > 0", [0, -1, math.inf, None, True]),
        ("max_output_bytes", "a whole number of bytes >= 1", [0, None]),
        ("job_timeout_s", "a number > 0", [0, math.nan, "30"]),
    ],
)
def test_bad_values_name_setting_value_and_range(key, allowed, values):
    for value in values:
        text = refused({key: value})
        assert f"mimo.video.{key}" in text and allowed in text


def test_spreads_are_those_of_the_rules():
    """Written twice, because the configuration imports no rules."""
    from mimo_plugin import config_video
    from mimo_plugin.core import frames

    assert config_video.SPREADS == frames.SPREADS
