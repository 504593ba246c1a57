# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``vision``: what is accepted, what is refused and with which line."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import pytest

from mimo_plugin import config as cfg
from mimo_plugin.config_vision import PIXEL_BACKENDS, VisionConfig
from mimo_plugin.core.pixels import HOST_RESIZE_RATIO
from mimo_plugin.kernels.preprocess import dispatch
from tests.config_refusal import parse_section, refusal_of

FULL = {
    "backend": "cpu",
    "mean_std": "stock",
    "timestamps": "stock",
    "outer_tokens": "stock",
    "processor_kwargs": "stock",
    "once": True,
    "host_resize_ratio": 0.0,
    "encoder_cache_tokens": "limit",
    "decode": "pool",
    "decode_workers": 3,
    "decode_queue": 1,
    "decode_wait_s": 0.5,
    "decode_timeout_s": 5.0,
    "decode_memory_mib": 256,
    "decode_max_expansion": 100,
}


parse = partial(parse_section, "vision")
refused = partial(refusal_of, "vision")


def test_defaults():
    config = parse({})
    assert config.features == config.named == ("vision",)
    assert config.vision == VisionConfig()
    assert VisionConfig().host_resize_ratio == HOST_RESIZE_RATIO


def test_every_setting_is_parsed():
    assert set(FULL) == {field.name for field in dataclasses.fields(VisionConfig)}
    assert parse(FULL).vision == VisionConfig(**FULL)


def test_backends_are_those_of_the_kernels():
    assert PIXEL_BACKENDS == dispatch.BACKENDS


def test_settings_survive_the_way_to_other_processes():
    config = parse(FULL)
    assert cfg.parse_config(json.loads(json.dumps(config.to_dict())), environ={}) == config


@pytest.mark.parametrize(
    ("key", "allowed", "values"),
    [
        ("backend", "auto, triton, cpu, reference", ["gpu", None, 1, ["cpu"]]),
        ("mean_std", "checkpoint, stock", ["clip", None, True]),
        ("timestamps", "frames, stock", ["real", None]),
        ("outer_tokens", "remove, stock", [False, ""]),
        ("processor_kwargs", "honour, stock", ["ignore", None]),
        ("once", "true or false", [0, 1, "true", None]),
        ("host_resize_ratio", "a number >= 0", [-1, math.nan, math.inf, "4", None, True]),
        ("encoder_cache_tokens", "a whole number of embeddings >= 1", [0, 2.5, "all", True, []]),
        ("decode", "auto, pool, stock", ["process", None, True]),
        ("decode_workers", "processes >= 1, or null", [0, 1.5, "2", True]),
        ("decode_queue", "pictures >= 1", [0, None]),
        ("decode_wait_s", "a number > 0", [0, None]),
        ("decode_timeout_s", "a number > 0", [0, math.inf]),
        ("decode_memory_mib", "MiB >= 1", [0, 0.5, None]),
        ("decode_max_expansion", "bytes per byte >= 1, or null", [0, 2.5]),
    ],
)
def test_bad_values_name_setting_value_and_range(key, allowed, values):
    for value in values:
        text = refused({key: value})
        assert f"mimo.vision.{key}" in text and allowed in text


def test_an_unknown_key_gets_the_nearest():
    assert "did you mean 'mean_std'?" in refused({"mean_sdt": "stock"})
