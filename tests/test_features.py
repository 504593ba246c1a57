# SPDX-License-Identifier: Apache-2.0
"""The feature table is complete and says what this version can do."""

from mimo_plugin import features


def test_names_are_the_designed_ones_in_order():
    assert tuple(features.FEATURES) == (
        "kv",
        "replay",
        "scheduler",
        "mtp",
        "vision",
        "video",
        "tiers",
        "dp_affinity",
    )


def test_available_features_are_fully_described():
    for feature in features.FEATURES.values():
        if feature.status == "available":
            assert feature.engines and feature.seam and feature.contracts and feature.replaced_by
        else:
            assert not feature.engines and not feature.default


def test_lists_by_engine():
    unasked = ("kv", "scheduler", "mtp", "vision", "video", "dp_affinity")
    assert features.defaults("vllm") == unasked
    assert features.defaults("sglang") == ("kv", "scheduler", "vision")
    # Host memory needs room and a store a place, so nobody gets them unasked.
    assert set(features.available("vllm")) == {*unasked, "tiers"}
    assert features.available("sglang") == (*features.defaults("sglang"), "tiers")
