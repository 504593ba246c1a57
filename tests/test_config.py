# SPDX-License-Identifier: Apache-2.0
"""Settings: what is accepted, what is refused and with which line."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin import config as cfg
from mimo_plugin.errors import ConfigError, FeatureUnavailable, MimoError
from mimo_plugin.features import defaults


def parse(raw, environ=None):
    return cfg.parse_config(raw, environ=environ or {})


def refused(raw, environ=None):
    with pytest.raises(MimoError) as caught:
        parse(raw, environ)
    text = str(caught.value)
    assert "\n" not in text
    assert "fix:" in text
    return text


def test_absent_is_off():
    assert parse(None) is None


def test_given_up_section_is_off():
    assert parse({cfg.DEGRADED_KEY: "vLLM too old"}) is None


@pytest.mark.parametrize("raw", [{}, {"features": "auto"}])
def test_plain_request_means_every_default_feature(raw):
    config = parse(raw)
    assert config.features == defaults("vllm")
    assert config.named == ()
    assert config.strict
    assert config.kv == cfg.KvConfig()
    assert config.scheduler == cfg.SchedulerConfig()


@pytest.mark.parametrize(
    ("raw", "features", "named"),
    [
        ({"features": ["kv"]}, ("kv",), ("kv",)),
        ({"features": "kv"}, ("kv",), ("kv",)),
        ({"kv": {}}, ("kv",), ("kv",)),
        ({"scheduler": {}}, ("scheduler",), ("scheduler",)),
        ({"features": "scheduler,kv"}, ("kv", "scheduler"), ("kv", "scheduler")),
        ({"features": "auto", "kv": {}}, defaults("vllm"), ("kv",)),
    ],
)
def test_what_the_user_named(raw, features, named):
    config = parse(raw)
    assert config.features == features
    assert config.named == named
    assert cfg.parse_config(config.to_dict(), environ={}) == config


def test_every_kv_setting_is_parsed():
    raw = {
        "swa_share": 0.4,
        "strict_split": True,
        "classes": ["ladder", "turn_end"],
        "message_start_token_ids": [7, 9, 7],
        "ladder_min_tokens": 512,
        "ladder_growth": 1,
        "draft_share": 0,
        "memoise": False,
    }
    assert set(raw) == {field.name for field in dataclasses.fields(cfg.KvConfig)}
    kv = parse({"kv": raw}).kv
    assert kv == cfg.KvConfig(
        swa_share=0.4,
        strict_split=True,
        classes=("turn_end", "ladder"),
        message_start_token_ids=(7, 9),
        ladder_min_tokens=512,
        ladder_growth=1.0,
        draft_share=0.0,
        memoise=False,
    )


def test_null_means_derived():
    kv = parse({"kv": {"message_start_token_ids": None, "ladder_min_tokens": None}}).kv
    assert kv.message_start_token_ids is None
    assert kv.ladder_min_tokens is None
    assert parse({"kv": {"message_start_token_ids": []}}).kv.message_start_token_ids == ()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("swa_share", [0, 1, -0.1, 1.5, True, "0.5", None, math.nan, math.inf, [], 10**400]),
        ("strict_split", [0, 1, "true", None]),
        ("classes", [[], "turn_end", ["turn_end", "turn_end"], ["turnend"], [1], None, {}]),
        ("message_start_token_ids", [[-1], [1.0], [True], "5", 5]),
        ("ladder_min_tokens", [0, -5, 1.0, True, "64"]),
        ("ladder_growth", [0, 1.01, math.nan, True]),
        ("draft_share", [-0.01, 1.01, False]),
        ("memoise", [1, "no", None]),
    ],
)
def test_bad_values_name_the_setting(key, values):
    for value in values:
        assert f"mimo.kv.{key}" in refused({"kv": {key: value}}), value


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"kv": {"swa_shar": 0.4}}, ("mimo.kv.swa_shar", "did you mean 'swa_share'?")),
        ({"featurs": ["kv"]}, ("mimo.featurs", "did you mean 'features'?")),
        ({"features": ["kw"]}, ("'kw'", "did you mean 'kv'?")),
        ({"features": ["kv", "kv"]}, ("name 'kv' once",)),
        ({"features": []}, ("name at least one feature",)),
        ({"features": [3]}, ("mimo.features",)),
        ({"features": {"kv": True}}, ("mimo.features",)),
        ({"kv": True}, ("mimo.kv", "{} for all defaults")),
        ({"kv": {"classes": ["junctoin"]}}, ("did you mean 'junction'?",)),
        ({"_secret": 1}, ("mimo._secret",)),
        ({"_strict": "no"}, ("mimo._strict",)),
        ("kv", ("mimo", "JSON object")),
        (["kv"], ("mimo", "JSON object")),
    ],
)
def test_wrong_shapes_and_names(raw, words):
    text = refused(raw)
    for word in words:
        assert word in text


def test_planned_feature_is_unavailable():
    for raw in ({"features": ["replay"]}, {"replay": {}}, {"features": ["kv"], "replay": {}}):
        with pytest.raises(FeatureUnavailable, match="not in this version; available: kv"):
            parse(raw)


def test_a_feature_of_another_engine_is_unavailable():
    with pytest.raises(FeatureUnavailable, match="not in this version for SGLang; available: kv"):
        cfg.parse_config({"mtp": {}}, environ={}, engine="sglang")


def test_strictness_comes_from_the_environment():
    assert parse({}, {"MIMO_STRICT": "1"}).strict
    assert not parse({}, {"MIMO_STRICT": "0"}).strict
    assert "MIMO_STRICT" in refused({}, {"MIMO_STRICT": "no"})


def test_off_ignores_the_environment():
    assert parse(None, {"MIMO_STRICT": "no"}) is None


def test_written_section_keeps_what_the_first_process_decided():
    first = dataclasses.replace(
        parse({}, {"MIMO_STRICT": "0"}),
        user_scheduler_cls="a.b.C",
        plugin_version="0.1.0",
        engine_label="vllm 0.32.0",
        contracts="ok",
    )
    section = json.loads(json.dumps(first.to_dict()))
    for environment in ({}, {"MIMO_STRICT": "1"}, {"MIMO_STRICT": "not even read"}):
        assert parse(section, environment) == first


shares = st.floats(min_value=0.001, max_value=0.999)
kv_configs = st.builds(
    cfg.KvConfig,
    swa_share=shares,
    strict_split=st.booleans(),
    classes=st.sets(st.sampled_from(cfg.CHECKPOINT_CLASSES), min_size=1).map(
        lambda chosen: tuple(name for name in cfg.CHECKPOINT_CLASSES if name in chosen)
    ),
    message_start_token_ids=st.none()
    | st.lists(st.integers(0, 2**20), unique=True, max_size=4).map(tuple),
    ladder_min_tokens=st.none() | st.integers(1, 10**7),
    ladder_growth=shares,
    draft_share=shares,
    memoise=st.booleans(),
)


@given(kv=kv_configs, named=st.booleans(), strict=st.booleans())
def test_round_trip(kv, named, strict):
    config = cfg.MimoConfig(features=("kv",), named=("kv",) if named else (), strict=strict, kv=kv)
    assert parse(json.loads(json.dumps(config.to_dict()))) == config


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(raw=values, kv=st.dictionaries(st.sampled_from(sorted(cfg._KV_VALUES)), values))
def test_arbitrary_input_is_parsed_or_refused_cleanly(raw, kv):
    for candidate in (raw, {"kv": kv}):
        try:
            parse(candidate)
        except MimoError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "names"), [("mimo", None), ("mimo:kv", ("kv",)), (" mimo:kv ", ("kv",))]
)
def test_plugin_option(text, names):
    assert cfg.parse_plugin_option(text) == names


@pytest.mark.parametrize("text", ["", "mimo:", "mino", "mimo:kvv", "mimo:kv,,", "kv", "mimo;kv"])
def test_plugin_option_refuses(text):
    with pytest.raises(ConfigError):
        cfg.parse_plugin_option(text)


def test_option_and_section_combine():
    section = {"kv": {"swa_share": 0.4}}
    assert cfg.merge_plugin_option(None, None) == {"features": "auto"}
    assert cfg.merge_plugin_option(None, section) == {"features": "auto", **section}
    assert cfg.merge_plugin_option(("kv",), section) == {"features": ["kv"], **section}
    assert cfg.merge_plugin_option(("kv",), {"features": "auto"}) == {"features": ["kv"]}
    assert cfg.merge_plugin_option(("kv",), {"features": ["kv"]}) == {"features": ["kv"]}
    assert section == {"kv": {"swa_share": 0.4}}


def test_option_and_section_must_agree():
    with pytest.raises(MimoError):
        cfg.merge_plugin_option(("kv",), {"features": ["replay"]})
    with pytest.raises(ConfigError):
        cfg.merge_plugin_option(None, ["kv"])


def test_section_of():
    assert cfg.section_of(None) is None
    assert cfg.section_of(object()) is None
    assert cfg.section_of({"other": 1}) is None
    assert cfg.section_of({"mimo": {"kv": {}}}) == {"kv": {}}
