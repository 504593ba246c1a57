# SPDX-License-Identifier: Apache-2.0
"""Which Qwen-VL engines the feature fits, from the checkpoint's files to the model class."""

from __future__ import annotations

import json
import shutil

import pytest

from mimo_plugin.engines.vllm.vision import fit
from mimo_plugin.engines.vllm.vision.names import REPLACES, SETUP_KEY
from mimo_plugin.engines.vllm.vision.setup import setup_of
from mimo_plugin.errors import FeatureUnavailable
from tools import tiny_qwen

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def config_of():
    """The configuration of an engine; ``vision`` are the plugin's settings, None without it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def make(model, vision, *, named=True, **options):
        section = {"vision": vision, "features": ["vision"]} if named else {"features": "auto"}
        args = EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=4096,
            additional_config={} if vision is None else {"mimo": section},
            **options,
        )
        return args.create_engine_config()

    return make


@pytest.fixture
def changed(qwen_models, tmp_path):
    """A copy of a checkpoint with keys of a file changed."""

    def make(name, family="qwen2_5_vl", **values):
        out = tmp_path / family
        shutil.copytree(qwen_models[family], out, dirs_exist_ok=True)
        written = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps({**written, **values}))
        return out

    return make


@pytest.mark.parametrize("family", sorted(tiny_qwen.FAMILIES))
def test_each_family_gets_its_class_and_rule(config_of, qwen_models, family):
    from vllm.model_executor.models import ModelRegistry

    config = config_of(qwen_models[family], {}).model_config
    (stock,) = config_of(qwen_models[family], None).model_config.architectures
    assert config.hf_config.architectures == [REPLACES[stock]]
    setup = setup_of(config.hf_config)
    assert setup.normalised_later and setup.spec.resample == "bicubic"
    assert setup.spec.patch_size == tiny_qwen.FAMILIES[family].patch_size
    assert (setup.spec.min_pixels, setup.spec.max_pixels) == (8192, 512 * 512)
    cls = ModelRegistry._try_load_model_cls(REPLACES[stock])
    assert cls.__name__ == stock and cls.__module__.endswith("vision.qwen_model")
    assert cls.supports_mm_device_do_normalize


def test_a_plain_switch_takes_it_along_where_images_are_admitted(config_of, qwen_models):
    model = qwen_models["qwen3_vl"]
    assert "vision" in features(config_of(model, {}, named=False))
    text = config_of(model, {}, named=False, limit_mm_per_prompt={"image": 0, "video": 0})
    assert "vision" not in features(text) and not hasattr(text.model_config.hf_config, SETUP_KEY)


def features(config):
    return config.additional_config["mimo"].get("features", [])


def test_limits_come_from_the_files_that_transformers_reads(config_of, changed):
    """Older names of limits, and a file that has all processors of a checkpoint."""
    model = changed("preprocessor_config.json", min_pixels=None, size={"longest_edge": 90_000})
    with pytest.raises(FeatureUnavailable, match="min_pixels: found None"):
        config_of(model, {})
    model = changed("preprocessor_config.json", min_pixels=5000, max_pixels=70_000, size=None)
    spec = setup_of(config_of(model, {}).model_config.hf_config).spec
    assert (spec.min_pixels, spec.max_pixels) == (5000, 70_000)
    images = json.loads((model / "preprocessor_config.json").read_text())
    images.update(max_pixels=60_000)
    joined = {"processor_class": images["processor_class"], "image_processor": images}
    (model / "processor_config.json").write_text(json.dumps(joined))
    from vllm.transformers_utils.processor import cached_get_image_processor

    cached_get_image_processor.cache_clear()
    spec = setup_of(config_of(model, {}).model_config.hf_config).spec
    assert (spec.min_pixels, spec.max_pixels) == (5000, 60_000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_resize": False}, "do_resize: found False"),
        ({"do_normalize": False}, "do_normalize: found False"),
        ({"do_convert_rgb": False}, "do_convert_rgb: found False"),
        ({"resample": 2}, "resample: found 2"),
        ({"patch_size": 16}, "patch_size: found 16; allowed: 14"),
        ({"image_std": [0.5, 0.5, 0.0]}, "std"),
        ({"image_processor_type": "CLIPImageProcessor"}, "found CLIPImageProcessorPil"),
    ],
    ids=str,
)
def test_checkpoints_that_want_other_pixels_are_refused_by_name(config_of, changed, values, words):
    with pytest.raises(FeatureUnavailable, match=words) as caught:
        config_of(changed("preprocessor_config.json", **values), {})
    assert "fix:" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vision", "options", "words"),
    [
        ({"mean_std": "stock"}, {}, "vision.mean_std: found 'stock'"),
        ({"timestamps": "stock"}, {}, "vision.timestamps"),
        ({"outer_tokens": "stock"}, {}, "vision.outer_tokens"),
        ({"processor_kwargs": "stock"}, {}, "vision.processor_kwargs"),
        ({"once": True}, {}, "vision.once: found True"),
        ({"backend": "triton"}, {}, "triton"),
        ({}, {"mm_processor_kwargs": {"max_pixel": 3}}, "max_pixel"),
        ({}, {"mm_processor_kwargs": {"use_fast": True}}, "use_fast"),
        ({}, {"mm_processor_kwargs": {"images_kwargs": {"do_resize": False}}}, "do_resize"),
        ({}, {"model_impl": "transformers"}, "--model-impl"),
        ({}, {"limit_mm_per_prompt": {"image": 0}}, "admits no images"),
    ],
    ids=str,
)
def test_settings_that_can_not_act_are_refused(config_of, qwen_models, vision, options, words):
    with pytest.raises(FeatureUnavailable, match=words) as caught:
        config_of(qwen_models["qwen2_vl"], vision, **options)
    assert "fix:" in str(caught.value) and "\n" not in str(caught.value)


def test_settings_of_videos_are_none_of_ours(config_of, qwen_models):
    kwargs = {"fps": 1.0, "videos_kwargs": {"do_resize": False}, "use_fast": False}
    config_of(qwen_models["qwen3_vl"], {}, mm_processor_kwargs=kwargs)


def test_a_missing_symbol_is_nothing_to_mimo(config_of, qwen_models, monkeypatch):
    """Rows of Qwen-VL are checked with a Qwen-VL model, and then they count."""
    asked = []

    def broken(features):
        asked.append(tuple(features))
        return ["vllm.x: expected to exist, found nothing"]

    monkeypatch.setattr(fit, "check_vllm", broken)
    with pytest.raises(FeatureUnavailable, match="vllm.x: expected"):
        config_of(qwen_models["qwen2_vl"], {})
    assert asked == [("vision-qwen",)]
