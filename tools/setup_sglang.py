# SPDX-License-Identifier: Apache-2.0
"""Create or complete the SGLang environment of the project.

Standard library only, because it runs before anything is installed:

    python3 -m tools.setup_sglang                # .venv-sglang with engine, plugin and dev tools
    python3 -m tools.setup_sglang --check        # exit 1 when something is missing, change nothing

What it does, each step only when it is needed:

1. a virtual environment (an existing one is kept; one whose Python does not start is rebuilt);
2. the engine. With an NVIDIA GPU: the release as it is. Without one: SGLang without its
   requirements, most of which are kernels for GPUs, a torch that it runs with, and what remains;
3. without a GPU: the torchvision of the package index beside a torch that is not its own (see
   ``tools/setup_vllm.py``), and the reference platform of ``integration_tests/sglang_cpu``, which
   supplies in plain PyTorch what the engine's wheel has for GPUs only;
4. this project, editable, with its ``dev`` extra and what the tools, tests and benchmarks use.

It is an environment of its own because the requirements of the two engines exclude each other. As
with vLLM's, a stamp makes a later run a no-op, and an interrupted run is continued by the next.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools import environment
from tools.environment import (
    MOONCAKE_PIN,
    ROOT,
    SHIM_SOURCE,
    Environment,
    SetupError,
    clear_stamp,
    ensure_mooncake,
    ensure_project,
    ensure_venv,
    key_of,
    locked,
    say,
    stamp_matches,
    write_shim,
    write_stamp,
)

DEFAULT_VENV = ROOT / ".venv-sglang"
LAYOUT_VERSION = 2
"""Raise when the steps below change, so that existing environments are completed again."""

ENGINE_PIN = "sglang==0.5.23"
TORCH_PINS = ("torch==2.13.0",)
"""A torch that SGLang 0.5.23 runs with on a CPU; its own requirement is a later CUDA build."""
BARE_PINS = ("torchvision==0.28.0", ENGINE_PIN)
"""Installed without their requirements, which would bring GPU kernels and another torch."""
ENGINE_NEEDS = (
    "IPython",
    "aiohttp",
    "compressed-tensors==0.18.0",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "jsonschema",
    "msgspec",
    "openai==2.8.0",
    "orjson",
    "partial_json_parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "pybase64",
    "python-multipart",
    "pyzmq",
    "requests",
    "scipy",
    "sentencepiece==0.2.1",
    "setproctitle",
    "setuptools",
    "soundfile==0.13.1",
    "tiktoken",
    "transformers==5.19.0",
    "uvicorn>=0.51",
    "uvloop",
    "watchfiles",
    "xgrammar==0.2.7",
    "zstandard",
)
"""What the engine imports when it serves text models on a CPU."""
TOOL_PACKAGES = ("matplotlib>=3.8",)
PLATFORM = ROOT / "integration_tests" / "sglang_cpu"
_IMPORTS = "import torch, torchvision, transformers, sglang.srt.server_args"


def content_key(kind: str, with_project: bool) -> str:
    """Hash of everything that decides what the environment must hold."""
    facts = [LAYOUT_VERSION, kind, TORCH_PINS, BARE_PINS, ENGINE_NEEDS, TOOL_PACKAGES, MOONCAKE_PIN]
    return key_of([*facts, SHIM_SOURCE.read_text()], with_project)


def ensure_engine(env: Environment, kind: str) -> None:
    """Install the pinned engine unless it is there, then make sure that it imports.

    Raises:
        SetupError: a step failed, or the engine does not import.
    """
    name, _, version = ENGINE_PIN.partition("==")
    present = f"from importlib.metadata import version; assert version({name!r}) == {version!r}"
    if env.probe_code(present) is None and env.probe_code(_IMPORTS) is None:
        say(f"keeping the installed {ENGINE_PIN}")
        return
    if kind == "gpu":
        env.pip(f"installing {ENGINE_PIN} (a few GB, some minutes)", "install", ENGINE_PIN)
    else:
        env.pip(f"installing {TORCH_PINS[0]}", "install", "-q", *TORCH_PINS)
        env.pip(f"installing {ENGINE_PIN}", "install", "-q", "--no-deps", *BARE_PINS)
        env.pip("installing what it needs on a CPU", "install", "-q", *ENGINE_NEEDS)
        write_shim(purelib_of(env))
    problem = env.probe_code(_IMPORTS)
    if problem is not None:
        raise SetupError(
            f"the engine in {env.venv} does not import: {problem} "
            f"(fix: remove {env.venv} and run the set-up again)"
        )


def ensure_platform(env: Environment) -> None:
    """Install the reference platform, editable; it needs nothing that is not there."""
    if env.probe_code("import mimo_sglang_cpu") is not None:
        arguments = ("install", "-q", "--no-deps", "--no-build-isolation", "-e", str(PLATFORM))
        env.pip("installing the reference platform", *arguments)


def purelib_of(env: Environment) -> Path:
    """Where the environment keeps its packages."""
    found = sorted(env.venv.glob("lib/python*/site-packages"))
    if not found:
        raise SetupError(f"{env.venv} has no site-packages (fix: remove it and run again)")
    return found[0]


def set_up(venv: Path, kind: str, with_project: bool = True, force: bool = False) -> bool:
    """Bring ``venv`` to the wanted state; False when nothing had to be done.

    Raises SetupError naming the step, the reason and the log.
    """
    if not force and complete(venv, kind, with_project):
        return False
    with locked(venv):
        if not force and complete(venv, kind, with_project):
            return False
        clear_stamp(venv)
        env = Environment(venv)
        ensure_venv(env)
        ensure_engine(env, kind)
        if kind == "cpu":
            ensure_platform(env)
        if with_project:
            ensure_project(env, *TOOL_PACKAGES)
            ensure_mooncake(env)
        write_stamp(venv, content_key(kind, with_project), {"engine": ENGINE_PIN, "kind": kind})
    return True


def complete(venv: Path, kind: str, with_project: bool = True) -> bool:
    """Whether an earlier run brought ``venv`` to the wanted state."""
    return stamp_matches(venv, content_key(kind, with_project), "sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when the environment is complete."""
    text = "Create or complete the SGLang environment."
    return environment.run(text, DEFAULT_VENV, "setup-sglang", set_up, complete, argv)


if __name__ == "__main__":
    sys.exit(main())
