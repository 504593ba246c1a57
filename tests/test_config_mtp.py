# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``mtp``: what is accepted, what is refused and with which line."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin import config as cfg
from tests.config_refusal import parse_section, refusal_of

FULL = {"layers": 2, "adaptive_length": True, "warn_after_drafts": 0}


parse = partial(parse_section, "mtp")
refused = partial(refusal_of, "mtp")


def test_defaults():
    config = parse({})
    assert config.features == config.named == ("mtp",)
    assert config.mtp == cfg.MtpConfig(layers=None, adaptive_length=False, warn_after_drafts=200)


def test_every_setting_is_parsed():
    assert set(FULL) == {field.name for field in dataclasses.fields(cfg.MtpConfig)}
    assert parse(FULL).mtp == cfg.MtpConfig(layers=2, adaptive_length=True, warn_after_drafts=0)


def test_null_reads_the_layers_from_the_weights():
    assert parse({"layers": None}).mtp.layers is None


_NO_COUNTS = [-1, 1.0, 2.5, True, False, "3", [], {}, math.nan, math.inf]


@pytest.mark.parametrize(
    ("key", "allowed", "values"),
    [
        ("layers", "a whole number of layers >= 1, or null", [*_NO_COUNTS, 0]),
        ("adaptive_length", "true or false", [0, 1, "true", None, []]),
        ("warn_after_drafts", ">= 0", [*_NO_COUNTS, None]),
    ],
)
def test_bad_values_name_setting_value_and_range(key, allowed, values):
    for value in values:
        text = refused({key: value})
        assert f"mimo.mtp.{key}" in text, value
        assert allowed in text, value
        assert repr(value) in text, value


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"layer": 3}, ("mimo.mtp.layer", "did you mean 'layers'?")),
        ({"adaptive": True}, ("did you mean 'adaptive_length'?",)),
        ({"num_speculative_tokens": 3}, ("mimo.mtp.num_speculative_tokens",)),
    ],
)
def test_unknown_keys(section, words):
    text = refused(section)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({}, False),
        ({"features": "auto"}, False),
        ({"kv": {}, "features": "auto"}, False),
        ({"features": "auto", "mtp": {}}, True),
        ({"features": ["mtp"]}, True),
        ({"features": ["mtp", "kv"]}, True),
    ],
)
def test_only_who_names_it_starts_speculation(raw, named):
    config = cfg.parse_config(raw, environ={})
    assert "mtp" in config.features
    assert ("mtp" in config.named) is named


mtp_configs = st.builds(
    cfg.MtpConfig,
    layers=st.none() | st.integers(1, 10**6),
    adaptive_length=st.booleans(),
    warn_after_drafts=st.integers(0, 10**9),
)


@given(
    mtp=mtp_configs,
    others=st.sets(st.sampled_from(["kv", "scheduler"])),
    named=st.booleans(),
)
def test_round_trip(mtp, others, named):
    config = cfg.MimoConfig(
        features=tuple(name for name in ("kv", "scheduler", "mtp") if name in {*others, "mtp"}),
        named=("mtp",) if named else (),
        mtp=mtp,
    )
    section = json.loads(json.dumps(config.to_dict()))
    assert cfg.parse_config(section, environ={}) == config
