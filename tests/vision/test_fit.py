# SPDX-License-Identifier: Apache-2.0
"""What stops start-up, each with one line that says what was found, what is needed and the fix."""

from __future__ import annotations

import json
from types import SimpleNamespace as Fake

import pytest

from mimo_plugin.engines.vllm.vision import fit
from tests.vision.conftest import SIZE
from tools import tiny_omni

pytestmark = pytest.mark.vllm


class Multimodal(Fake):
    """What ``fit`` reads of vLLM's multi-modal configuration."""

    def get_limit_per_prompt(self, kind):
        return self.limits.get(kind, 999)

    def get_mm_processor_device_type(self):
        return (self.mm_processor_kwargs or {}).get("device")


class HfConfig(Fake):
    """A configuration as transformers has it."""

    def to_dict(self):
        return tiny_omni.config_json(SIZE) | self.changes


@pytest.fixture
def config(tmp_path):
    """A configuration that fits."""
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(tiny_omni.preprocessor_json(SIZE)))
    names = ["MiMoV2OmniForCausalLM"]
    return Fake(
        additional_config={"mimo": {"vision": {}}},
        model_config=Fake(
            architectures=names,
            hf_config=HfConfig(architectures=names, changes={}),
            model=str(tmp_path),
            revision=None,
            model_impl="auto",
            multimodal_config=Multimodal(
                limits={},
                language_model_only=False,
                mm_encoder_only=False,
                mm_processor_kwargs=None,
            ),
        ),
        ec_transfer_config=None,
        device_config=Fake(device_type="cpu"),
    )


def test_the_published_model_fits(config):
    assert fit.why_not(config) is None
    assert not fit.unused(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: setattr(c.model_config, "architectures", ["MiMoV2FlashForCausalLM"]),
            "the model is MiMoV2FlashForCausalLM",
        ),
        (lambda c: setattr(c.model_config.hf_config, "architectures", ["Other"]), "names Other"),
        (lambda c: setattr(c.model_config, "model_impl", "transformers"), "--model-impl"),
        (lambda c: setattr(c.model_config, "multimodal_config", None), "neither images nor"),
        (
            lambda c: c.model_config.multimodal_config.limits.update(image=0, video=0),
            "neither images nor",
        ),
        (
            lambda c: setattr(c.model_config.multimodal_config, "language_model_only", True),
            "neither images nor",
        ),
        (
            lambda c: setattr(
                c.model_config.multimodal_config, "mm_processor_kwargs", {"device": "cuda"}
            ),
            "--mm-processor-device",
        ),
        (
            lambda c: setattr(c, "ec_transfer_config", Fake(ec_connector="ECExampleConnector")),
            "the EC connector is ECExampleConnector",
        ),
        (
            lambda c: setattr(c.model_config.multimodal_config, "mm_encoder_only", True),
            "--mm-encoder-only",
        ),
        (lambda c: c.model_config.hf_config.changes.update(vision_config=None), "vision_config"),
        (
            lambda c: setattr(
                c.model_config.multimodal_config, "mm_processor_kwargs", {"max_pixel": 1}
            ),
            "max_pixel",
        ),
        (
            lambda c: setattr(c, "additional_config", {"mimo": {"vision": {"backend": "triton"}}}),
            "triton",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_fix(config, change, words):
    change(config)
    reason = fit.why_not(config)
    assert reason is not None and words in reason and "fix:" in reason
    assert "\n" not in reason


def test_the_shared_embedding_cache_fits(config):
    multimodal = config.model_config.multimodal_config
    for module in (None, "mimo_plugin.engines.vllm.ec_shared"):
        for encode_only in (False, True):
            config.ec_transfer_config = Fake(
                ec_connector="MimoSharedECConnector",
                ec_connector_module_path=module,
                is_encode_only=encode_only,
            )
            multimodal.mm_encoder_only = encode_only  # as vLLM sets it
            assert fit.why_not(config) is None
    config.ec_transfer_config.is_encode_only = False
    assert "--mm-encoder-only" in fit.why_not(config)
    config.ec_transfer_config.ec_connector_module_path = "theirs"
    assert "the EC connector is" in fit.why_not(config)


def test_a_media_connector_of_the_user_s_own(config, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "theirs")
    assert fit.why_not(config) is None
    config.additional_config = {"mimo": {"vision": {"decode": "pool"}}}
    assert "VLLM_MEDIA_CONNECTOR is 'theirs'" in fit.why_not(config)


def test_text_models_and_text_only_engines_leave_it_out_silently(config):
    config.model_config.multimodal_config.limits = {"image": 0, "video": 0}
    assert fit.unused(config)
    config.model_config.multimodal_config = None
    assert fit.unused(config)
    config.model_config.architectures = ["MiMoV2FlashForCausalLM"]
    assert fit.unused(config)


def test_engine_wide_kwargs_may_be_ignored_as_stock_does(config):
    config.model_config.multimodal_config.mm_processor_kwargs = {"max_pixel": 1}
    config.additional_config = {"mimo": {"vision": {"processor_kwargs": "stock"}}}
    assert fit.why_not(config) is None
