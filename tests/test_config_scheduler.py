# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``scheduler``: what is accepted, what is refused and with which line."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin import config as cfg
from mimo_plugin.core.affinity import MODES
from tests.config_refusal import parse_section, refusal_of

FULL = {
    "mode": "hrrn",
    "age_credit": 0,
    "long_tokens": 1000,
    "long_growth": 0,
    "hit_weight": 2,
    "max_wait_s": 5,
    "protect_hits": False,
    "dedupe": False,
    "lanes": [{"over_tokens": 100, "max_prefills": 3}, {"over_tokens": 200, "max_prefills": 3}],
    "lane_share": 0.25,
    "scan_requests": 1,
    "calibrate": False,
}


parse = partial(parse_section, "scheduler")
refused = partial(refusal_of, "scheduler")


def test_defaults():
    config = parse({})
    assert config.features == ("scheduler",)
    assert config.scheduler == cfg.SchedulerConfig(
        mode="cost",
        age_credit=0.25,
        hit_weight=1.0,
        max_wait_s=300.0,
        dedupe=True,
        lanes=(
            cfg.LaneConfig(over_tokens=65_536, max_prefills=2),
            cfg.LaneConfig(over_tokens=262_144, max_prefills=1),
        ),
        long_tokens=config.scheduler.long_tokens,
        long_growth=config.scheduler.long_growth,
        lane_share=0.5,
        scan_requests=16,
        calibrate=True,
    )


def test_every_setting_is_parsed():
    assert set(FULL) == {field.name for field in dataclasses.fields(cfg.SchedulerConfig)}
    assert parse(FULL).scheduler == cfg.SchedulerConfig(
        mode="hrrn",
        age_credit=0.0,
        long_tokens=1000,
        long_growth=0.0,
        hit_weight=2.0,
        max_wait_s=5.0,
        protect_hits=False,
        dedupe=False,
        lanes=(
            cfg.LaneConfig(over_tokens=100, max_prefills=3),
            cfg.LaneConfig(over_tokens=200, max_prefills=3),
        ),
        lane_share=0.25,
        scan_requests=1,
        calibrate=False,
    )


def test_the_modes_are_those_of_the_line():
    """Not imported by config.py, which an engine without the plugin loads as well."""
    assert cfg.SCHEDULER_MODES == MODES


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode):
    assert parse({"mode": mode}).scheduler.mode == mode


def test_no_lanes():
    assert parse({"lanes": []}).scheduler.lanes == ()


_NUMBERS = [-0.001, -5, math.nan, math.inf, -math.inf, True, "1", None, [], {}, 10**400]


@pytest.mark.parametrize(
    ("key", "allowed", "values"),
    [
        ("mode", "cost, longest-hit, hrrn, fcfs", ["", "lpm", "COST", 1, None, True, ["cost"]]),
        ("age_credit", ">= 0", _NUMBERS),
        ("hit_weight", ">= 0", _NUMBERS),
        ("max_wait_s", "> 0", [*_NUMBERS, 0, 0.0]),
        ("long_tokens", ">= 1", [0, -1, 1.0, True, "16K", None]),
        ("long_growth", ">= 0 and <= 1", [value for value in (*_NUMBERS, 1.001) if value != 1]),
        ("dedupe", "true or false", [0, 1, "true", None, []]),
        ("protect_hits", "true or false", [0, 1, "true", None]),
        ("lane_share", "> 0 and < 1", [*_NUMBERS, 0, 1, 1.5]),
        ("scan_requests", ">= 1", [0, -1, 1.0, 64.5, True, "64", None, math.nan]),
        ("calibrate", "true or false", [0, 1, "no", None]),
    ],
)
def test_bad_values_name_setting_value_and_range(key, allowed, values):
    for value in values:
        text = refused({key: value})
        assert f"mimo.scheduler.{key}" in text, value
        assert allowed in text, value
        if not isinstance(value, int) or abs(value) < 10**9:
            assert repr(value) in text, value


def lane(over, most):
    return {"over_tokens": over, "max_prefills": most}


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        ([lane(200, 1), lane(100, 1)], ("over_tokens ascending", "sort the lanes")),
        ([lane(100, 2), lane(100, 1)], ("over_tokens ascending",)),
        ([lane(100, 1), lane(200, 2)], ("max_prefills not ascending", "lower max_prefills")),
        ([lane(100, 3), lane(200, 2), lane(300, 3)], ("max_prefills not ascending",)),
        ([lane(0, 1)], ("lanes[0].over_tokens", ">= 1")),
        ([lane(100, 2), lane(200, 0)], ("lanes[1].max_prefills", ">= 1")),
        ([lane(-5, 1)], ("lanes[0].over_tokens", "-5")),
        ([lane(65_536.0, 1)], ("lanes[0].over_tokens", "65536.0")),
        ([lane("64K", 1)], ("lanes[0].over_tokens", "'64K'")),
        ([lane(100, True)], ("lanes[0].max_prefills", "True")),
        ([{"over_tokens": 100}], ("lanes[0]", "max_prefills")),
        ([{"max_prefills": 1}], ("lanes[0]", "over_tokens")),
        ([{}], ("lanes[0]",)),
        ([{**lane(100, 1), "over_token": 5}], ("over_token", "did you mean 'over_tokens'?")),
        ([{"over_tokens": 1, "max_prefill": 1}], ("did you mean 'max_prefills'?",)),
        ([[100, 1]], ("lanes[0]",)),
        ([100], ("lanes[0]",)),
        ({"over_tokens": 100, "max_prefills": 1}, ("mimo.scheduler.lanes", "JSON list")),
        ("none", ("mimo.scheduler.lanes",)),
        (None, ("mimo.scheduler.lanes",)),
        (3, ("mimo.scheduler.lanes",)),
    ],
)
def test_bad_lanes(lanes, words):
    text = refused({"lanes": lanes})
    for word in ("mimo.scheduler.lanes", *words):
        assert word in text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"age_credits": 1}, ("mimo.scheduler.age_credits", "did you mean 'age_credit'?")),
        ({"max_wait": 1}, ("did you mean 'max_wait_s'?",)),
        ({"modes": "cost"}, ("did you mean 'mode'?",)),
        ({"mode": "longesthit"}, ("did you mean 'longest-hit'?",)),
        ({"zzz": 1}, ("mimo.scheduler.zzz", "remove it")),
        ({"cost": 1}, ("mimo.scheduler.cost",)),
    ],
)
def test_unknown_keys(section, words):
    text = refused(section)
    for word in words:
        assert word in text


_SHARES = st.floats(0.001, 0.999)
_AMOUNTS = st.floats(0, 1e9)


@st.composite
def lane_lists(draw):
    over = sorted(draw(st.sets(st.integers(1, 10**7), max_size=4)))
    most = sorted(
        draw(st.lists(st.integers(1, 99), min_size=len(over), max_size=len(over))), reverse=True
    )
    return tuple(
        cfg.LaneConfig(over_tokens=o, max_prefills=m) for o, m in zip(over, most, strict=True)
    )


scheduler_configs = st.builds(
    cfg.SchedulerConfig,
    mode=st.sampled_from(MODES),
    age_credit=_AMOUNTS,
    hit_weight=_AMOUNTS,
    max_wait_s=st.floats(0.001, 1e9),
    long_tokens=st.integers(1, 10**7),
    long_growth=st.floats(0, 1),
    protect_hits=st.booleans(),
    dedupe=st.booleans(),
    lanes=lane_lists(),
    lane_share=_SHARES,
    scan_requests=st.integers(1, 10**6),
    calibrate=st.booleans(),
)


@given(scheduler=scheduler_configs, both=st.booleans(), named=st.booleans())
def test_round_trip(scheduler, both, named):
    config = cfg.MimoConfig(
        features=("kv", "scheduler") if both else ("scheduler",),
        named=("scheduler",) if named else (),
        scheduler=scheduler,
    )
    section = json.loads(json.dumps(config.to_dict()))
    assert cfg.parse_config(section, environ={}) == config
