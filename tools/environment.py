# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of the engines: what the set-ups of all engines have in common.

Standard library only, because it runs before anything is installed.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP_NAME = ".mimo-setup.json"
LOG_NAME = "mimo-setup.log"
MIN_PYTHON = (3, 10)
PIP_FLAGS = (
    "--disable-pip-version-check",
    "--no-input",
    "--prefer-binary",
    "--no-compile",
    "--progress-bar=off",
)
SHIM_MODULE = "_mimo_torchvision_beside_cpu_torch"
SHIM_SOURCE = Path(__file__).resolve().with_name("torchvision_beside_cpu_torch.py")
"""Copied into the test environment under that name, never into the wheel."""

MOONCAKE_PIN = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""A store for tests, with its master; it runs without a GPU."""
_MOONCAKE_LOADS = "import mooncake.store"
_DEBIAN = ("bash", str(Path(__file__).resolve().with_name("debian_libraries.sh")))


class SetupError(Exception):
    """A set-up step failed; the message is one finished line for the user."""


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


def key_of(facts: Sequence[object], with_project: bool, project: Path | None = None) -> str:
    """Hash of everything that decides what an environment must hold.

    Args:
        facts: JSON-able: pins and settings of the set-up.
        with_project: whether this project is installed too.
        project: its ``pyproject.toml``; that of this checkout when None.
    """
    project = ROOT / "pyproject.toml" if project is None else project
    digest = hashlib.sha256(json.dumps([*facts, with_project]).encode())
    digest.update(project.read_bytes() if project.is_file() else b"")
    return digest.hexdigest()


def venv_python(venv: Path) -> Path:
    """Path of the interpreter inside ``venv``."""
    return venv / "bin" / "python"


def stamp_matches(venv: Path, key: str, command: str) -> bool:
    """Whether an earlier run completed ``venv`` for ``key``; its Python and ``command`` exist."""
    try:
        stamp = json.loads((venv / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return False
    matches: bool = isinstance(stamp, dict) and stamp.get("key") == key
    return matches and venv_python(venv).exists() and (venv / "bin" / command).exists()


def write_stamp(venv: Path, key: str, facts: Mapping[str, object]) -> None:
    """Record atomically that ``venv`` is complete for ``key``."""
    part = venv / (STAMP_NAME + ".part")
    part.write_text(json.dumps({"key": key, **facts}, indent=1) + "\n")
    os.replace(part, venv / STAMP_NAME)


def clear_stamp(venv: Path) -> None:
    """Say that ``venv`` may be incomplete from now on."""
    (venv / STAMP_NAME).unlink(missing_ok=True)


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


def ensure_project(env: Environment, *packages: str) -> None:
    """Install this project, editable, with its development extra, and ``packages``."""
    wanted = ["-e", f"{ROOT}[dev]", *packages]
    modern = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
    if env.probe_code(modern) is None:
        wanted.insert(0, "--no-build-isolation")
    env.pip("installing the project and its development tools", "install", "-q", *wanted)


def ensure_mooncake(env: Environment) -> None:
    """Install the Mooncake store; without it the tests that need it are skipped.

    Its wheel lacks libraries that Debian has. They are laid beside those that it brings, where its
    own find them, so that neither root nor a change of the machine is needed.
    """
    if env.probe_code(_MOONCAKE_LOADS) is None:
        return
    try:
        if env.probe_code("import mooncake") is not None:
            env.pip(f"installing {MOONCAKE_PIN}", "install", "-q", MOONCAKE_PIN)
        if "cannot open shared object" in (env.probe_code(_MOONCAKE_LOADS) or ""):
            for place in env.venv.glob("lib/python*/site-packages/mooncake_*.libs"):
                env.run("laying Debian's libraries beside it", [*_DEBIAN, str(place)])
        problem = env.probe_code(_MOONCAKE_LOADS)
        if problem is not None:
            raise SetupError(problem)
    except SetupError as error:
        say(f"going on without the Mooncake store, its tests will be skipped ({error})")


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


def run(
    description: str,
    default_venv: Path,
    target: str,
    set_up: Callable[[Path, str, bool, bool], bool],
    complete: Callable[[Path, str, bool], bool],
    argv: Sequence[str] | None,
) -> int:
    """The command line that all set-ups have.

    Args:
        description: of the command.
        default_venv: the environment unless ``--venv`` names another.
        target: of the Makefile, for the hint to run it.
        set_up: completes an environment (venv, ``cpu`` or ``gpu``, with this project, force);
            whether it had to do anything; raises SetupError.
        complete: whether nothing is missing (venv, ``cpu`` or ``gpu``, with this project).
        argv: arguments, those of the process when None.

    Returns:
        The exit status; 0 when the environment is complete.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--venv", type=Path, default=default_venv, help=f"default: {default_venv}")
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
    venv, with_project = arguments.venv.absolute(), not arguments.no_project
    if arguments.check:
        done = complete(venv, kind, with_project)
        say(f"{venv} is {'complete' if done else f'not complete; run make {target}'}")
        return 0 if done else 1
    started = time.monotonic()
    try:
        changed = set_up(venv, kind, with_project, arguments.force)
    except SetupError as error:
        print(f"[setup] {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; run it again to continue", file=sys.stderr, flush=True)
        return 130
    if changed:
        say(f"{venv} is complete after {time.monotonic() - started:.0f} s")
    return 0
