# SPDX-License-Identifier: Apache-2.0
"""The Triton backend for interpreted kernels, and the environment of Model Runner V2."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tools import model_runner_v2
from tools.model_runner_v2 import BACKEND, ModelRunnerV2Error, environment
from tools.server import is_cpu_build

ROOT = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not is_cpu_build(),
    reason="needs the CPU build of vLLM and the package triton",
)

# A kernel with what the engine's kernels use: program ids, masks, a loop, a reduction.
KERNEL = textwrap.dedent(
    """
    import json, torch, triton, triton.language as tl
    from importlib.metadata import version

    @triton.jit
    def row_sums(out, rows, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            total += tl.load(rows + row * columns + offset, mask=offset < columns, other=0.0)
        tl.store(out + row, tl.sum(total, axis=0))

    rows = torch.arange(21, dtype=torch.float32).reshape(3, 7)
    out = torch.full((4,), -1.0)
    row_sums[(3,)](out, rows, 7, BLOCK=4)
    result = {"sums": out.tolist(), "triton": version("triton")}
    """
)
BACKENDS = textwrap.dedent(
    """
    from triton.backends import backends
    from triton.runtime import driver
    result["cpu"] = [backends["cpu"].driver.__name__, backends["cpu"].compiler.__name__]
    result["active"] = type(driver.active).__name__
    """
)
VLLM = textwrap.dedent(
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON
    result["vllm"] = [HAS_TRITON, envs.VLLM_USE_V2_MODEL_RUNNER]
    """
)
PRINT = "print(json.dumps(result))\n"


def run(tmp_path: Path, code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a file: the interpreter reads a kernel's source."""
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
def test_kernels_run_on_cpu_tensors_and_vllm_uses_triton(tmp_path: Path) -> None:
    result = answer(
        run(tmp_path, KERNEL + BACKENDS + VLLM + PRINT, {**os.environ, **environment()})
    )
    assert result["sums"] == [21.0, 70.0, 119.0, -1.0]
    assert result["cpu"] == ["CpuDriver", "CpuBackend"]
    assert result["active"] == "CpuDriver"
    assert result["vllm"] == [True, True]


@needs_triton
def test_without_the_backend_vllm_disables_triton(tmp_path: Path) -> None:
    """When this fails, Triton or vLLM brings a CPU backend: drop the stub."""
    plain = {name: value for name, value in os.environ.items() if name not in environment()}
    assert answer(run(tmp_path, "import json\nresult = {}\n" + VLLM + PRINT, plain)) == {
        "vllm": [False, None]
    }


@needs_triton
def test_a_kernel_that_is_not_interpreted_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, KERNEL, {**os.environ, **environment(), "TRITON_INTERPRET": "0"})
    assert done.returncode != 0
    assert "set TRITON_INTERPRET=1 before importing" in done.stderr


@needs_triton
def test_enable_works_in_the_process_and_in_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], check=True)"
    show = "from triton.backends import backends; print(backends['cpu'].driver.__name__)"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.model_runner_v2 import enable\nenable()\n"
        f"{show}\n{child.format(show)}\n"
    )
    plain = {name: value for name, value in os.environ.items() if name not in environment()}
    done = run(tmp_path, code, plain)
    assert done.stdout.split() == ["CpuDriver", "CpuDriver"], done.stderr[-3000:]


def test_the_environment_keeps_the_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    first = environment({"PYTHONPATH": f"/a{os.pathsep}/b"})
    assert first["PYTHONPATH"].split(os.pathsep) == ["/a", "/b", str(BACKEND)]
    assert environment(first) == first
    assert environment({})["PYTHONPATH"] == str(BACKEND)


def test_missing_triton_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelRunnerV2Error, match=r"needs the package triton.*pip install triton"):
        environment()


def test_enable_after_an_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", sys)
    before = dict(os.environ)
    with pytest.raises(ModelRunnerV2Error, match="before anything imports"):
        model_runner_v2.enable()
    assert dict(os.environ) == before


def test_the_metadata_names_the_backend() -> None:
    (entry,) = importlib.metadata.distributions(path=[str(BACKEND)])
    (point,) = entry.entry_points.select(group="triton.backends")
    assert (point.name, point.value) == ("cpu", "triton_cpu_interpreter")
    assert (BACKEND / point.value / "driver.py").is_file()
