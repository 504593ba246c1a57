# SPDX-License-Identifier: Apache-2.0
"""Keys and values of unequal width: wrong attention is refused at start, never served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_plugin.engines.vllm.kv.backend import FLASH, TRITON, why_backend_unsafe
from mimo_plugin.engines.vllm.vision.names import ARCHITECTURE as VISION_ARCHITECTURE
from tools import tiny_mimo


def config(
    *,
    key: int = 192,
    value: int | None = 128,
    swa_key: int = 192,
    swa_value: int | None = 128,
    sinks: bool = True,
    pattern: tuple[int, ...] = (0, 1, 1, 1),
    backend: str | None = None,
    architecture: str = "MiMoV2FlashForCausalLM",
    device_type: str = "cuda",
) -> Any:
    text = SimpleNamespace(
        head_dim=key,
        swa_head_dim=swa_key,
        add_swa_attention_sink_bias=sinks,
        hybrid_layer_pattern=list(pattern),
    )
    if value is not None:
        text.v_head_dim = value
    if swa_value is not None:
        text.swa_v_head_dim = swa_value
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text, hf_config=SimpleNamespace(architectures=[architecture])
        ),
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name=backend) if backend else None
        ),
        device_config=SimpleNamespace(device_type=device_type),
    )


def hopper(*, with_4: bool = True) -> Any:
    """As vLLM resolves it on compute capability 9: version 3, or 4 for sinks if it is there."""
    return lambda key, value, sinks: 4 if sinks and key != value and with_4 else 3


def only(version: int | None) -> Any:
    return lambda key, value, sinks: version


def reason(vllm_config: Any, flash_version: Any) -> str | None:
    return why_backend_unsafe(vllm_config, flash_version=flash_version)


@pytest.mark.parametrize("backend", [None, FLASH, TRITON, "FLASHINFER"])
def test_published_widths_on_a_gpu_with_version_4(backend: str | None) -> None:
    assert reason(config(backend=backend), hopper()) is None
    assert reason(config(backend=backend), only(4)) is None


@pytest.mark.parametrize("version", [None, 2])
def test_without_a_fitting_version_vllm_takes_triton_unless_told_otherwise(
    version: int | None,
) -> None:
    assert reason(config(), only(version)) is None
    assert reason(config(backend=TRITON), only(version)) is None
    said = reason(config(backend=FLASH), only(version))
    assert said is not None
    assert f"--attention-backend {TRITON}" in said
    assert "is asked for" in said


@pytest.mark.parametrize("backend", [None, FLASH, "FLASH_ATTN"])
def test_version_3_with_sinks_is_refused_also_when_nobody_asked(backend: str | None) -> None:
    said = reason(config(backend=backend), hopper(with_4=False))
    assert said is not None
    assert "sliding-window layers" in said and "version 4" in said
    assert f"--attention-backend {TRITON}" in said
    assert "\n" not in said


def test_a_class_of_ours_is_known_as_upstream_s() -> None:
    said = reason(config(architecture=VISION_ARCHITECTURE, backend=FLASH), only(3))
    assert said is not None and said == reason(config(backend=FLASH), only(3))


def test_version_3_without_sinks_is_fine() -> None:
    assert reason(config(sinks=False), only(3)) is None
    assert reason(config(backend=TRITON), hopper(with_4=False)) is None


def test_two_value_widths_are_refused_with_any_backend() -> None:
    for backend in (None, FLASH, TRITON):
        said = reason(config(swa_value=64, backend=backend), hopper())
        assert said is not None
        assert "full-attention keys 192 / values 128" in said
        assert "sliding-window keys 192 / values 64" in said


def test_one_kind_with_equal_widths_does_not_count() -> None:
    """Its layers use an ordinary backend, which has no such attribute."""
    assert reason(config(swa_key=64, swa_value=64), hopper()) is None
    assert reason(config(swa_key=64, swa_value=None), hopper()) is None


def test_no_backend_on_the_cpu() -> None:
    said = reason(config(device_type="cpu"), only(None))
    assert said is not None and "run this checkpoint on a GPU" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"value": 192, "swa_value": 192},
        {"value": None, "swa_value": None},
        {"architecture": "DeepseekV3ForCausalLM"},
        {"pattern": ()},
    ],
)
def test_everything_else_is_left_alone(fields: dict[str, Any]) -> None:
    for device_type in ("cuda", "cpu"):
        assert reason(config(**fields, device_type=device_type), only(2)) is None


@pytest.mark.vllm
@pytest.mark.parametrize("v_head_dim", [None, 16])
def test_asks_the_installed_engine(v_head_dim: int | None, tmp_path: Path) -> None:
    """A real configuration: equal widths run anywhere, unequal ones not on the CPU."""
    from vllm.engine.arg_utils import EngineArgs

    tiny_mimo.make(tmp_path, tiny_mimo.TinyMiMo(layers=2, v_head_dim=v_head_dim))
    vllm_config = EngineArgs(model=str(tmp_path), enforce_eager=True).create_engine_config()
    said = why_backend_unsafe(vllm_config)
    if v_head_dim is None:
        assert said is None
    elif vllm_config.device_config.device_type == "cpu":
        assert said is not None and "CPU" in said
