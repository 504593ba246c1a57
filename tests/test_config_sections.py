# SPDX-License-Identifier: Apache-2.0
"""What holds for the settings of every feature; their own values have files of their own."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin import config as cfg
from mimo_plugin.errors import ConfigError, MimoError
from mimo_plugin.features import available
from tests.config_refusal import parse_section, refusal_of

FEATURES = available("vllm")
SETTINGS = {
    name: [field.name for field in dataclasses.fields(getattr(cfg.MimoConfig(features=()), name))]
    for name in FEATURES
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("section", [True, 3, "all", [], None])
def test_a_section_is_an_object(feature, section):
    text = refusal_of(feature, section)
    assert f"mimo.{feature}" in text and "an object" in text


@pytest.mark.parametrize(("feature", "written"), [(f, f[:-1] + "u") for f in FEATURES])
def test_a_misspelt_section_names_the_nearest(feature, written):
    with pytest.raises(ConfigError, match=f"did you mean '{feature}'"):
        cfg.parse_config({written: {}}, environ={})


@pytest.mark.parametrize("feature", FEATURES)
def test_a_section_for_a_feature_that_is_not_named(feature):
    others = [name for name in FEATURES if name != feature]
    with pytest.raises(ConfigError, match=r"mimo\.features"):
        cfg.parse_config({"features": others, feature: {}}, environ={})


@pytest.mark.parametrize("feature", FEATURES)
def test_settings_of_a_feature_that_is_off_are_not_written(feature):
    others = tuple(name for name in FEATURES if name != feature)
    assert feature not in cfg.MimoConfig(features=others, named=others).to_dict()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_LANES = st.lists(
    st.dictionaries(st.sampled_from(["over_tokens", "max_prefills", "x"]), _VALUES), max_size=3
)


@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
def test_arbitrary_input_is_parsed_or_refused_in_one_line(feature, data):
    keys = st.sampled_from(SETTINGS[feature])
    raw = data.draw(st.dictionaries(keys, _VALUES | _LANES) | _VALUES)
    try:
        parse_section(feature, raw)
    except MimoError as error:
        assert "\n" not in str(error)
