# SPDX-License-Identifier: Apache-2.0
"""Where the vision feature fits SGLang, and the pixel rule of a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo_plugin.config import MimoConfig
from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.sglang.vision import fit
from mimo_plugin.engines.sglang.vision.rule import make_rule, read_preprocessor
from mimo_plugin.errors import ConfigError
from mimo_plugin.kernels.preprocess import dispatch

CLIP = ((122.77, 116.75, 104.09), (68.5, 66.63, 70.32))


def options(**changes: Any) -> Any:
    """Resolved arguments of a server that does all."""
    plain = {
        "device": "cuda",
        "enable_adaptive_dispatch_to_encoder": False,
        "language_model_only": False,
        "language_only": False,
        "model_path": "/none",
        "revision": None,
    }
    return types.SimpleNamespace(**(plain | changes))


def model(architecture: str = "MiMoV2ForCausalLM", multimodal: bool = True) -> Any:
    """SGLang's configuration of a model."""
    hf_config = types.SimpleNamespace(architectures=[architecture])
    return types.SimpleNamespace(
        hf_config=hf_config, is_multimodal=multimodal, dtype=torch.bfloat16
    )


def config(**settings: Any) -> MimoConfig:
    """The plugin's configuration."""
    return MimoConfig(features=("vision",), vision=VisionConfig(**settings))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """SGLang's modules as far as the check touches them."""
    on_gpu = {"value": False}
    envs = types.SimpleNamespace(
        SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU=types.SimpleNamespace(get=lambda: on_gpu["value"])
    )
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in CLIP)
    contents = {
        "sglang.srt.environ": {"envs": envs},
        "sglang.srt.multimodal.processors.mimo_v2": {
            "_QWEN2VL_PIXEL_MEAN": mean,
            "_QWEN2VL_PIXEL_STD": std,
        },
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.multimodal"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    parent = "sglang.srt.multimodal.processors"
    monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("SGLANG_ENCODER_MM_RECEIVER_MODE", raising=False)
    dispatch._automatic.cache_clear()
    yield on_gpu
    dispatch._automatic.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """A process in which ``package`` is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        dispatch.importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )


def test_it_fits() -> None:
    assert fit.why_not(options(), model()) is None
    assert fit.why_not_settings(options(), model(), config(mean_std="stock")) is None
    assert not fit.unused(options(), model())


@pytest.mark.parametrize(
    ("cfg", "found", "words"),
    [
        (options(), model("LlamaForCausalLM"), "LlamaForCausalLM"),
        (options(), model(multimodal=False), "without MiMo's vision and audio towers"),
        (options(language_model_only=True), model(), "--language-model-only"),
    ],
)
def test_nothing_that_takes_images(cfg: Any, found: Any, words: str) -> None:
    reason = fit.why_not(cfg, found)
    assert reason is not None and words in reason and "\n" not in reason
    assert fit.unused(cfg, found)


def test_a_receiver_that_names_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENCODER_MM_RECEIVER_MODE", "grpc")
    reason = fit.why_not(options(language_only=True), model())
    assert reason is not None and "set it to http" in reason
    assert fit.why_not(options(), model()) is None


@pytest.mark.parametrize(("gpu", "package"), [(False, "numba"), (True, "triton")])
def test_a_kernel_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, bool], gpu: bool, package: str
) -> None:
    engine["value"] = gpu
    without(monkeypatch, package)
    stock = {"mean_std": "stock"}
    reason = fit.why_not_settings(options(), model(), config(**stock))
    assert reason is not None and f"pip install {package}" in reason
    slow = config(backend="reference", **stock)
    assert fit.why_not_settings(options(), model(), slow) is None
    # Encoders make the rows of a language server, unless it makes some itself.
    cfg = options(language_only=True)
    assert fit.why_not_settings(cfg, model(), config(**stock)) is None
    cfg = options(language_only=True, enable_adaptive_dispatch_to_encoder=True)
    assert fit.why_not_settings(cfg, model(), config(**stock)) is not None


def test_a_backend_that_cannot_run() -> None:
    reason = fit.why_not_settings(options(), model(), config(backend="triton", mean_std="stock"))
    assert reason is not None and "pixel backend triton" in reason and "\n" not in reason


def test_settings_of_vllm_are_refused() -> None:
    fit.require(options(), model(), config(backend="cpu", mean_std="stock"))
    for name, value in (("once", True), ("host_resize_ratio", 1.0), ("decode", "stock")):
        with pytest.raises(ConfigError, match=f"mimo.vision.{name}"):
            fit.require(options(), model(), config(**{name: value}))


def test_the_rule_of_a_checkpoint() -> None:
    says = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    rule = make_rule(VisionConfig(), says, CLIP, torch.bfloat16)
    assert rule.mean == (127.5,) * 3 and rule.std == (63.75,) * 3
    assert rule.dtype == torch.bfloat16
    assert make_rule(VisionConfig(mean_std="stock"), says, CLIP, torch.float16).mean == CLIP[0]
    silent = make_rule(VisionConfig(), {}, CLIP, torch.float64)
    assert (silent.mean, silent.std, silent.dtype) == (*CLIP, torch.float32)
    spec = rule.spec(16, 2, 2)
    assert (spec.factor, spec.mean, spec.resample) == (32, rule.mean, "bilinear")


@pytest.mark.parametrize(
    "wrong", [{"image_std": [0, 1, 1]}, {"image_mean": [1, 2]}, {"rescale_factor": -1}]
)
def test_a_rule_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(PixelError, match="processor setting"):
        make_rule(VisionConfig(), wrong, CLIP, torch.bfloat16)


def test_the_file_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    assert read_preprocessor(str(tmp_path), None) == {}
    file.write_text(json.dumps({"image_mean": [1, 1, 1]}), encoding="utf-8")
    assert read_preprocessor(str(tmp_path), None) == {"image_mean": [1, 1, 1]}
    file.write_text(json.dumps({"image_processor": {"a": 1}}), encoding="utf-8")
    assert read_preprocessor(str(tmp_path), None) == {"a": 1}
    for broken in ("{", "[]"):
        file.write_text(broken, encoding="utf-8")
        with pytest.raises(PixelError, match=r"preprocessor_config\.json"):
            read_preprocessor(str(tmp_path), None)
