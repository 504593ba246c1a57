# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` that must not start."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.server import engine_environment, free_port, vllm_command

TIMEOUT_S = 240


def check_refused(
    model: Path, *arguments: str, words: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """The command ends with one line that holds ``words`` and the fix, before any engine starts."""
    done = subprocess.run(
        [
            *vllm_command(),
            "serve",
            str(model),
            f"--port={free_port()}",
            "--enforce-eager",
            *arguments,
        ],
        env=engine_environment(environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode not in (0, None), log[-3000:]
    line = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in line, log[-3000:]
    assert "fix:" in line
    assert "Traceback" not in log
    assert "EngineCore" not in log
