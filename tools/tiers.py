# SPDX-License-Identifier: Apache-2.0
"""Run the project's checks tier by tier; `make test` and CI call this.

    python -m tools.tiers                   # all tiers
    python -m tools.tiers --tier unit       # one of: lint, unit, contracts, engine

lint        ruff, ruff format, typos, mypy (strict)
unit        tests/, without what the next tier holds; no engine process
contracts   upstream contracts, patch queue, packaging
engine      integration_tests/: the real vLLM, on the CPU unless a GPU is there
sglang      integration_tests/: the real SGLang, in its own environment .venv-sglang; its patches

Every tier is a pytest call of its own (but lint), with its closing lines visible. A tier in which
no test passed fails, because a check that silently ran nothing is worse than one that failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
"""The requirements of the engines exclude each other, so SGLang's tests have a Python of their own.
"""
CONTRACT_PATHS = (
    "tests/contracts",
    "tests/patches",
    "tests/packaging",
    "tests/test_contracts.py",
    "tests/test_packaging.py",
)
"""Paths of the contracts tier; those that do not exist are left out."""


MAX_WORKERS = 8
"""Each worker imports the engine, about 1 GB."""


def workers() -> int:
    """Test processes of a tier whose files may run side by side."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


@dataclass(frozen=True)
class Tier:
    """One pytest call: what to collect, what to leave out, its time limit in seconds, whether its
    test files may run side by side, and whose Python runs it (None: the one of this process).

    Paths may be patterns.
    """

    name: str
    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    limit_s: float = 900.0
    parallel: bool = False
    python: Path | None = None

    def command(self, root: Path, report: Path, extra: Sequence[str]) -> list[str]:
        """The pytest command line, run in ``root``; results are also written to ``report``."""
        paths = _found(root, self.paths)
        ignored = [f"--ignore={path}" for path in _found(root, self.ignored)]
        python = sys.executable if self.python is None else str(self.python)
        if not Path(python).exists():
            raise FileNotFoundError(f"tier {self.name}: there is no {python}; run `make setup-all`")
        if not paths:
            raise FileNotFoundError(f"tier {self.name}: none of {', '.join(self.paths)} exists")
        options = [f"--junitxml={report}", "-o", "junit_family=xunit2", "-q", "--durations=8"]
        if self.parallel:
            options += [f"--numprocesses={workers()}", "--dist=loadfile"]
        return [python, "-m", "pytest", *options, *ignored, *paths, *extra]


def _found(root: Path, patterns: Sequence[str]) -> list[str]:
    """What is there of ``patterns``, relative to ``root``."""
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in paths]


_SGLANG_TESTS = ("integration_tests/test_sglang_*.py", "tests/patches/test_sglang_*.py")

TIERS = (
    Tier("unit", ("tests",), CONTRACT_PATHS, 1500.0, parallel=True),
    Tier("contracts", CONTRACT_PATHS, _SGLANG_TESTS, 900.0, parallel=True),
    Tier("engine", ("integration_tests",), _SGLANG_TESTS, 2700.0),
    Tier("sglang", _SGLANG_TESTS, (), 1200.0, python=SGLANG_PYTHON),
)


@dataclass(frozen=True)
class Result:
    """Outcome of a tier; ``problem`` is None when it is good."""

    tier: str
    passed: int
    failed: int
    skipped: int
    duration_s: float
    problem: str | None


def read_report(report: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a junit report; zeros when there is none."""
    if not report.is_file():
        return 0, 0, 0
    passed = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        bad = counts["failures"] + counts["errors"]
        failed += bad
        skipped += counts["skipped"]
        passed += max(0, counts["tests"] - bad - counts["skipped"])
    return passed, failed, skipped


def run_limited(command: Sequence[str], cwd: Path, limit_s: float) -> int | None:
    """Run ``command`` in a process group of its own; None when it ran past ``limit_s``."""
    process = subprocess.Popen(command, cwd=cwd, start_new_session=True)
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_tier(tier: Tier, root: Path, out: Path, extra: Sequence[str] = ()) -> Result:
    """Run one tier and judge it: exit status 0, in time, and at least one test passed."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / f"{tier.name}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        command = tier.command(root, report, extra)
    except FileNotFoundError as error:
        return Result(tier.name, 0, 0, 0, 0.0, str(error))
    code = run_limited(command, root, tier.limit_s)
    passed, failed, skipped = read_report(report)
    problem = None
    if code is None:
        problem = f"ran past its limit of {tier.limit_s:.0f} s"
    elif code == 5 or (code == 0 and passed == 0):
        problem = "ran no test"
    elif code != 0:
        problem = f"pytest ended with status {code}"
    duration_s = time.monotonic() - started
    return Result(tier.name, passed, failed, skipped, duration_s, problem)


def lint_commands(root: Path) -> list[list[str]]:
    """The static checks, each a command that fails with a non-zero status."""
    bin_dir = Path(sys.executable).parent
    commands = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [sys.executable, "-m", "mypy", "--strict", "-p", "tools"],
    ]
    typos = bin_dir / "typos"
    if typos.exists() or shutil.which("typos"):
        program = str(typos) if typos.exists() else "typos"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--", ".", ":!LICENSE", ":!patches"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        files = [name for name in tracked.stdout.decode().split("\0") if name]
        commands.append([program, "--force-exclude", *files])
    return commands


def run_lint(root: Path) -> Result:
    """Run every static check, also after one has failed."""
    started = time.monotonic()
    commands = lint_commands(root)
    bad = []
    for command in commands:
        title = " ".join(command[2:5] if command[1] == "-m" else [Path(command[0]).name])
        print(f"$ {title}", flush=True)
        if subprocess.run(command, cwd=root, check=False).returncode != 0:
            bad.append(title)
    problem = f"failed: {', '.join(bad)}" if bad else None
    good = len(commands) - len(bad)
    return Result("lint", good, len(bad), 0, time.monotonic() - started, problem)


def summary_lines(results: Sequence[Result]) -> list[str]:
    """One line per tier, then the totals of the tests in the plain form that CI reads."""
    lines = [
        f"{r.tier:<10} {r.passed:>5} passed {r.failed:>3} failed {r.skipped:>3} skipped "
        f"{r.duration_s:>6.0f} s  {r.problem or 'ok'}"
        for r in results
    ]
    tests = [r for r in results if r.tier != "lint"] or list(results)
    passed, failed, skipped = (
        sum(getattr(r, key) for r in tests) for key in ("passed", "failed", "skipped")
    )
    lines.append(f"total: {passed} passed, {failed} failed, {skipped} skipped")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen tiers; 0 only when every one of them is good."""
    names = ("lint", *(tier.name for tier in TIERS))
    parser = argparse.ArgumentParser(description="Run the project's checks tier by tier.")
    parser.add_argument("--tier", action="append", choices=names, help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "test", help="junit reports")
    parser.add_argument("pytest", nargs="*", help="more pytest arguments, after --")
    options = parser.parse_args(argv)
    chosen = options.tier or names
    results = []
    for name in names:
        if name not in chosen:
            continue
        print(f"\n=== tier {name}", flush=True)
        if name == "lint":
            results.append(run_lint(ROOT))
        else:
            tier = next(tier for tier in TIERS if tier.name == name)
            results.append(run_tier(tier, ROOT, options.out, options.pytest))
    print("\n=== summary")
    print("\n".join(summary_lines(results)), flush=True)
    return 0 if all(result.problem is None for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
