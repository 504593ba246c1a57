# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature dp_affinity: bounds, and the way through the section."""

from __future__ import annotations

import pytest

from mimo_plugin.config import parse_config
from mimo_plugin.config_dp_affinity import DpAffinityConfig
from tests.config_refusal import refusal_of


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("slack_requests", -1, ">= 0"),
        ("slack_requests", 1.5, "whole number"),
        ("slack_share", -0.1, ">= 0"),
        ("slack_share", float("nan"), "a number"),
        ("spread", 0.99, ">= 1"),
        ("session_ttl_s", 0, "> 0"),
        ("max_sessions", 0, ">= 1"),
        ("answer_token_ids", [1, -2], "token ids >= 0"),
        ("answer_token_ids", 3, "token ids >= 0"),
    ],
)
def test_out_of_bounds_is_refused(setting, value, words):
    text = refusal_of("dp_affinity", {setting: value})
    assert f"mimo.dp_affinity.{setting}" in text and words in text


def test_bounds_themselves_are_taken():
    section = {
        "slack_requests": 0,
        "slack_share": 0,
        "spread": 1,
        "session_ttl_s": 0.1,
        "max_sessions": 1,
        "answer_token_ids": [5, 5, 6],  # a run of tokens, which may repeat
    }
    config = parse_config({"dp_affinity": section}, environ={})
    assert config.dp_affinity == DpAffinityConfig(**{**section, "answer_token_ids": (5, 5, 6)})
    assert parse_config(config.to_dict(), environ={}) == config


def test_sglang_has_it_not():
    with pytest.raises(Exception, match="not in this version for SGLang"):
        parse_config({"features": ["dp_affinity"]}, environ={}, engine="sglang")
