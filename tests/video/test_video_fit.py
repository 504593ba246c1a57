# SPDX-License-Identifier: Apache-2.0
"""What stops start-up or leaves the feature out, each with one line and the fix."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace as Fake

import pytest

from mimo_plugin.engines.vllm.video import fit
from tests.vision.conftest import SIZE
from tools import tiny_omni

pytestmark = pytest.mark.vllm


class Multimodal(Fake):
    """What ``fit`` reads of vLLM's multi-modal configuration."""

    def get_limit_per_prompt(self, kind):
        return self.limits.get(kind, 999)

    def get_mm_processor_device_type(self):
        return None


class HfConfig(Fake):
    """A configuration as transformers has it."""

    def to_dict(self):
        given = tiny_omni.config_json(SIZE)
        return given | {"processor_config": given["processor_config"] | self.changes}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A configuration that fits."""
    monkeypatch.delenv("VLLM_VIDEO_LOADER_BACKEND", raising=False)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(tiny_omni.preprocessor_json(SIZE)))
    names = ["MiMoV2OmniForCausalLM"]
    return Fake(
        additional_config={"mimo": {"vision": {}, "video": {}}},
        model_config=Fake(
            architectures=names,
            hf_config=HfConfig(architectures=names, changes={}),
            model=str(tmp_path),
            revision=None,
            model_impl="auto",
            dtype="torch.bfloat16",
            multimodal_config=Multimodal(
                limits={},
                language_model_only=False,
                mm_encoder_only=False,
                mm_processor_kwargs=None,
                media_io_kwargs={},
            ),
        ),
        ec_transfer_config=None,
        device_config=Fake(device_type="cpu"),
    )


def options(config, **given):
    config.model_config.multimodal_config.media_io_kwargs = {"video": given}


def test_the_published_model_fits(config):
    assert fit.why_not(config) is None
    assert not fit.unused(config)


@pytest.mark.parametrize(
    "given", [{"num_frames": 8}, {"fps": 2}, {"num_frames": 32, "fps": -1}, {"max_pixels": 9000}]
)
def test_options_of_the_user_fit(config, given):
    options(config, **given)
    assert fit.why_not(config) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: setattr(c, "additional_config", {"mimo": {"features": ["video"]}}),
            ["feature vision, which is off", "fix: add vision to --plugin"],
        ),
        (
            lambda c: setattr(c.model_config, "architectures", ["MiMoV2FlashForCausalLM"]),
            ["needs the feature vision", "MiMoV2FlashForCausalLM"],
        ),
        (
            lambda c: c.model_config.multimodal_config.limits.update(video=0),
            ["admits no videos", "--limit-mm-per-prompt"],
        ),
        (lambda c: options(c, video_backend="torchcodec"), ["'torchcodec'", "fix: drop it"]),
        (lambda c: options(c, backend="torchcodec"), ["'backend'", "allowed keys", "fix:"]),
        (lambda c: options(c, num_frames=0), ["num_frames", "found 0", "fix:"]),
        (lambda c: c.model_config.hf_config.changes.update(max_frames=1), ["max_frames", "fix:"]),
    ],
    ids=["vision off", "model", "no videos", "loader", "codec", "option", "checkpoint"],
)
def test_what_does_not_fit(config, change, words):
    change(config)
    reason = fit.why_not(config)
    assert reason is not None and "\n" not in reason
    for word in words:
        assert word in reason


def test_another_model_that_vision_takes(config, monkeypatch):
    """Videos of such a model are left to vLLM."""
    monkeypatch.setattr(fit.vision_fit, "why_not", lambda vllm_config: None)
    monkeypatch.setattr(fit.vision_fit, "unused", lambda vllm_config: False)
    config.model_config.architectures = ["Qwen3VLForConditionalGeneration"]
    assert "whose videos are left to vLLM; needed: MiMoV2Omni" in fit.why_not(config)
    assert fit.unused(config)


def test_the_environment_s_loader(config, monkeypatch):
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv")
    assert "VLLM_VIDEO_LOADER_BACKEND is 'opencv'" in fit.why_not(config)
    options(config, video_backend="mimo")
    assert fit.why_not(config) is None
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "mimo")
    options(config)
    assert fit.why_not(config) is None


def test_without_pyav(config, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest)
    )
    assert "PyAV is missing" in fit.why_not(config) and "mimo-plugin[video]" in fit.why_not(config)


def test_unused_where_no_videos_come(config):
    config.model_config.multimodal_config.limits["video"] = 0
    assert fit.unused(config)
    config.model_config.multimodal_config.limits.clear()
    config.additional_config = {"mimo": {"vision": {"backend": "triton"}}}
    assert fit.unused(config)  # vision says why
    config.additional_config = {"mimo": {"vision": {}}}
    assert not fit.unused(config)
    config.model_config.architectures = ["MiMoV2FlashForCausalLM"]
    assert fit.unused(config)
