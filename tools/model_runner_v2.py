# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's Model Runner V2 on a machine without a GPU.

    with VllmServer(model, environment=environment(), log=log) as server: ...

or, for an engine in this process, before anything imports vLLM or Triton::

    enable()
    from vllm import LLM

Every Triton kernel then runs in Triton's interpreter: right, and slow (see the README in
``tools/triton_cpu``). Child processes of the engine inherit the environment, so nothing has to be
installed. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

BACKEND = Path(__file__).resolve().parent / "triton_cpu"
"""Folder that holds the Triton backend ``cpu`` and its metadata."""


class ModelRunnerV2Error(RuntimeError):
    """Model Runner V2 can't run here; the message says what is missing."""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that make an engine process use Model Runner V2 with interpreted kernels.

    Args:
        base: environment that the result will be laid over; only its ``PYTHONPATH`` is read.
            None: this process's own.

    Raises:
        ModelRunnerV2Error: this interpreter has no package ``triton``.

    """
    if importlib.util.find_spec("triton") is None:
        raise ModelRunnerV2Error(
            "Model Runner V2 on the CPU needs the package triton, which is not installed: "
            f"{sys.executable} -m pip install triton"
        )
    path = (os.environ if base is None else base).get("PYTHONPATH", "")
    entries = [entry for entry in path.split(os.pathsep) if entry and entry != str(BACKEND)]
    return {
        "PYTHONPATH": os.pathsep.join([*entries, str(BACKEND)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def enable() -> None:
    """Switch this process and its children to Model Runner V2.

    Raises:
        ModelRunnerV2Error: no package ``triton``, or vLLM or Triton is imported already.

    """
    early = [name for name in ("vllm", "triton") if name in sys.modules]
    if early:
        raise ModelRunnerV2Error(f"call enable() before anything imports {early[0]}")
    os.environ.update(environment())
    if str(BACKEND) not in sys.path:
        sys.path.append(str(BACKEND))
