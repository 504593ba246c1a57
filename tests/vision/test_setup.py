# SPDX-License-Identifier: Apache-2.0
"""The set-up that all processes of an engine share: from the checkpoint, through JSON, and back."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.pixels import IMAGENET_MEAN, IMAGENET_STD, PixelError
from mimo_plugin.engines.vllm.vision.names import SETUP_KEY
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, resolve_setup, setup_of
from tests.vision.conftest import SIZE, make_setup
from tools import tiny_omni


def test_mean_and_std_come_from_the_checkpoint_unless_stock_is_asked_for():
    spec = make_setup().spec
    assert spec.mean == pytest.approx([255 * v for v in tiny_omni.CLIP_MEAN])
    assert spec.std == pytest.approx([255 * v for v in tiny_omni.CLIP_STD])
    spec = make_setup(mean_std="stock").spec
    assert (spec.mean, spec.std) == (IMAGENET_MEAN, IMAGENET_STD)


def test_limits_are_the_checkpoint_s_or_upstream_s():
    setup = make_setup()
    assert setup.video_total_max_pixels == SIZE.video_total_max_pixels
    model = tiny_omni.config_json(SIZE)
    del model["processor_config"]
    setup = resolve_setup(VisionConfig(), model, {})
    tokens = (32 * 32, 4, 4096, 16384)
    assert setup.spec.min_pixels == setup.video_min_pixels == tokens[0] * tokens[1]
    assert setup.spec.max_pixels == setup.video_max_pixels == tokens[0] * tokens[2]
    assert setup.video_total_max_pixels == tokens[0] * tokens[3]


def test_it_survives_json():
    setup = make_setup(backend="cpu", once=True)
    assert VisionSetup.from_dict(json.loads(json.dumps(setup.to_dict()))) == setup
    assert setup_of(SimpleNamespace(**{SETUP_KEY: setup.to_dict()})) == setup


def test_engines_do_not_share_a_token():
    assert make_setup().engine_token != make_setup().engine_token


def test_a_model_class_chosen_by_hand_is_told_so():
    with pytest.raises(PixelError, match="--plugin mimo:vision"):
        setup_of(SimpleNamespace())


@pytest.mark.parametrize("value", [-1, 2.5, "many", True])
def test_a_bad_limit_of_the_checkpoint_is_named(value):
    model = tiny_omni.config_json(SIZE)
    model["processor_config"]["video_max_pixels"] = value
    with pytest.raises(PixelError, match="processor_config.video_max_pixels"):
        resolve_setup(VisionConfig(), model, {})
