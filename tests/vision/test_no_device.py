# SPDX-License-Identifier: Apache-2.0
"""B41: the process that takes requests never makes a context on the GPU, which would cost memory.

The GPU is pretended: PyTorch says that there is one, and any use of it is an error.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from mimo_plugin.engines.vllm.vision.limits import limits_of
from mimo_plugin.engines.vllm.vision.packing import pack
from mimo_plugin.kernels.preprocess import dispatch
from tests.vision.conftest import make_setup, movie, picture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU that must not be touched."""

    def touched(*_, **__):
        raise AssertionError("the GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    monkeypatch.setattr(torch.cuda, "init", touched)
    dispatch._automatic.cache_clear()
    yield
    dispatch._automatic.cache_clear()


def test_the_pretended_gpu_is_an_error_to_touch():
    """Control."""
    with pytest.raises(AssertionError, match="was touched"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["auto", "triton", "cpu", "reference"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_b41_packing_and_the_host_resize_stay_on_the_cpu(backend, kind):
    """Also where the user wants the model's process to take Triton."""
    frames = picture(2100, 2100)[None] if kind == "image" else movie(3, 900, 1000)
    for ratio, rows in ((4.0, True), (1000.0, False)):
        setup = make_setup(backend=backend, host_resize_ratio=ratio)
        packed = pack(frames, setup, limits_of(setup, {}, kind), torch.bfloat16)
        assert packed.rows is rows
        assert packed.data.device.type == "cpu" and not packed.data.is_pinned()
    assert dispatch.chosen_backend("cpu") == "cpu"
    assert not torch.cuda.is_initialized()


def test_b41_choosing_the_model_s_backend_does_not_touch_it():
    pytest.importorskip("triton")
    assert dispatch.chosen_backend("cuda", "auto") == "triton"


SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from tests.vision.conftest import make_setup, picture
    from mimo_plugin.engines.vllm.vision.limits import limits_of
    from mimo_plugin.engines.vllm.vision.packing import pack
    setup = make_setup()
    large = pack(picture(2100, 2100)[None], setup, limits_of(setup, {}, "image"), torch.bfloat16)
    assert large.rows
    assert not torch.cuda.is_initialized()
    print([name for name in ("triton", "vllm", "cupy", "pycuda") if name in sys.modules])
    """
)


def test_b41_nothing_of_the_gpu_is_imported():
    """In a fresh process: what packs media brings neither Triton nor a CUDA runtime along."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"
