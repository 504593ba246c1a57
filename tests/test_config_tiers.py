# SPDX-License-Identifier: Apache-2.0
"""Bounds of the section ``tiers``."""

from __future__ import annotations

import json
import os

import pytest

from mimo_plugin.config import parse_config
from mimo_plugin.config_tiers import VLLM_ONLY, TiersConfig, require_place
from mimo_plugin.errors import ConfigError


def parse(tiers):
    return parse_config({"tiers": tiers}, environ={}, engine="sglang")


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"path": 3}, ("mimo.tiers.path", "a text")),
        ({"path": []}, ("mimo.tiers.path", "a list of different ones", "at least one")),
        ({"path": ["/a", ""]}, ("mimo.tiers.path", "at least one")),
        ({"path": ["/a", 3]}, ("mimo.tiers.path", "in quotes")),
        ({"path": ["/a", "/b/../a/"]}, ("mimo.tiers.path", "name each once")),
        ({"capacity_gib": 0}, ("mimo.tiers.capacity_gib", "> 0")),
        ({"path": ["/a"], "capacity_gib": [0]}, ("mimo.tiers.capacity_gib", "> 0")),
        (
            {"path": ["/a", "/b"], "capacity_gib": [1]},
            ("mimo.tiers.capacity_gib: found [1.0]", "a list of 2, one for each folder"),
        ),
        ({"path": "/a", "capacity_gib": [1]}, ("mimo.tiers.capacity_gib", "as path is no list")),
        ({"capacity_gib": []}, ("mimo.tiers.capacity_gib", "a number")),
        ({"capacity_gib": True}, ("mimo.tiers.capacity_gib",)),
        ({"prefetch_tokens": 0}, ("mimo.tiers.prefetch_tokens", ">= 1")),
        ({"host_swa_share": 0}, ("mimo.tiers.host_swa_share", "> 0 and < 1")),
        ({"host_swa_share": 1}, ("mimo.tiers.host_swa_share",)),
        ({"verify": 1}, ("mimo.tiers.verify", "true or false")),
        ({"store": "moon"}, ("mimo.tiers.store", "did you mean 'mooncake'?")),
        ({"capacity_gb": 1}, ("did you mean 'capacity_gib'?",)),
        ({"host_gib": 0}, ("mimo.tiers.host_gib", "> 0")),
        ({"host_gib": "64"}, ("mimo.tiers.host_gib", "> 0")),
        ({"classes": ["laddr"]}, ("mimo.tiers.classes", "ladder")),
        ({"ladder_min_tokens": 0}, ("mimo.tiers.ladder_min_tokens", ">= 1")),
        ({"ladder_growth": 0}, ("mimo.tiers.ladder_growth", "> 0")),
        ({"ladder_growth": 1.5}, ("mimo.tiers.ladder_growth", "<= 1")),
        ({"outputs": 1}, ("mimo.tiers.outputs", "true or false")),
        ({"touch_interval_s": -1}, ("mimo.tiers.touch_interval_s", ">= 0")),
        ({"message_start_token_ids": [-1]}, ("mimo.tiers.message_start_token_ids",)),
    ],
)
def test_what_is_refused(tiers, words):
    with pytest.raises(ConfigError) as caught:
        parse(tiers)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("share", [None, 0.25])
def test_a_section_survives_its_way_to_the_other_processes(share):
    config = parse({"path": "/data", "capacity_gib": 3, "host_swa_share": share})
    carried = json.loads(json.dumps(config.to_dict()))
    assert parse_config(carried, environ={}, engine="sglang") == config
    assert config.features == ("tiers",)


@pytest.mark.parametrize("capacity", [3, [1, 2.5]])
def test_several_folders_survive_it_too(capacity):
    config = parse({"path": ["/a", "b"], "capacity_gib": capacity})
    carried = json.loads(json.dumps(config.to_dict()))
    assert parse_config(carried, environ={}, engine="sglang") == config
    assert config.tiers.path == ("/a", "b")
    assert config.tiers.paths == ("/a", os.path.abspath("b"))


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"capacity_gib": 1}, "mimo.tiers.path: found ''"),
        ({"path": "/a"}, "mimo.tiers.capacity_gib: found None"),
        ({"store": "redis"}, "mimo.tiers.path: found ''.*URL of a server"),
        ({"store": "redis", "path": "redis://h", "capacity_gib": 1}, "set maxmemory there"),
        ({"store": "mooncake"}, "mimo.tiers.path: found ''.*address of a master.*HOST:50051"),
        ({"store": "mooncake", "path": "h", "capacity_gib": 1}, "--global_segment_size of the"),
    ],
)
def test_where_and_how_much_must_be_said(tiers, words):
    with pytest.raises(ConfigError, match=words):
        require_place("mimo.tiers", parse(tiers).tiers)
    require_place("mimo.tiers", parse({"path": ["/a"], "capacity_gib": [1]}).tiers)
    require_place("mimo.tiers", parse({"store": "mooncake", "path": "host:1"}).tiers)
    servers = parse({"store": "redis", "path": ["redis://a", "redis://b"]}).tiers
    require_place("mimo.tiers", servers)
    assert servers.paths == ("redis://a", "redis://b")


def test_settings_of_vllm_survive_the_way_to_the_other_processes():
    section = {
        "host_gib": 0.5,
        "classes": ["ladder", "turn_end"],
        "ladder_min_tokens": 64,
        "ladder_growth": 1,
        "outputs": False,
        "touch_interval_s": 0,
        "message_start_token_ids": [3, 5],
    }
    config = parse_config({"tiers": section}, environ={}, engine="vllm")
    carried = json.loads(json.dumps(config.to_dict()))
    assert parse_config(carried, environ={}, engine="vllm") == config
    assert set(section) == set(VLLM_ONLY)
    assert all(getattr(config.tiers, name) != getattr(TiersConfig(), name) for name in section)
