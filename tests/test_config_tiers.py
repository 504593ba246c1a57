# SPDX-License-Identifier: Apache-2.0
"""Bounds of the section ``tiers``."""

from __future__ import annotations

import json

import pytest

from mimo_plugin.config import parse_config
from mimo_plugin.errors import ConfigError


def parse(tiers):
    return parse_config({"tiers": tiers}, environ={}, engine="sglang")


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"path": 3}, ("mimo.tiers.path", "a text")),
        ({"capacity_gib": 0}, ("mimo.tiers.capacity_gib", "> 0")),
        ({"capacity_gib": True}, ("mimo.tiers.capacity_gib",)),
        ({"prefetch_tokens": 0}, ("mimo.tiers.prefetch_tokens", ">= 1")),
        ({"host_swa_share": 0}, ("mimo.tiers.host_swa_share", "> 0 and < 1")),
        ({"host_swa_share": 1}, ("mimo.tiers.host_swa_share",)),
        ({"verify": 1}, ("mimo.tiers.verify", "true or false")),
        ({"store": "redis"}, ("mimo.tiers.store", "file")),
        ({"capacity_gb": 1}, ("did you mean 'capacity_gib'?",)),
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
