# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` that must not start."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tools.server import engine_environment, free_port, vllm_command

TIMEOUT_S = 240
AT_ONCE = 2


@dataclass(frozen=True)
class Refusal:
    """A command that must end with one line that holds ``words``."""

    arguments: Sequence[str]
    words: Sequence[str]
    model: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def serve_until_end(model: Path, refusal: Refusal) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [
            *vllm_command(),
            "serve",
            str(refusal.model or model),
            f"--port={free_port()}",
            "--enforce-eager",
            *refusal.arguments,
        ],
        env=engine_environment(refusal.environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def serve_all(
    model: Path, refusals: Mapping[str, Refusal]
) -> dict[str, subprocess.CompletedProcess[str]]:
    """How each command ended; nearly all of the time is imports, so a few run side by side."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = pool.map(lambda refusal: serve_until_end(model, refusal), refusals.values())
        return dict(zip(refusals, ends, strict=True))


def check_refused(done: subprocess.CompletedProcess[str], words: Sequence[str]) -> None:
    """The command ended with one line that holds ``words`` and the fix, before any engine."""
    log = done.stdout + done.stderr
    assert done.returncode not in (0, None), log[-3000:]
    line = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in line, log[-3000:]
    assert "fix:" in line
    assert "Traceback" not in log
    assert "EngineCore" not in log
