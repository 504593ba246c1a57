# SPDX-License-Identifier: Apache-2.0
"""SGLang's own checks, and starts that are refused, for the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.server import SGLANG_CPU_ARGUMENTS, engine_environment, free_port, sglang_command

TREE_CHECK = {"SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1"}

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    **TREE_CHECK,
}
"""Every slot is accounted for after each step, and the tree is checked whenever the engine is idle.
"""


def refused(model: Path, arguments: Sequence[str], extra: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and last line of a server that does not start."""
    done = subprocess.run(
        [*sglang_command(), "serve", f"--model-path={model}", f"--port={free_port()}"]
        + [*SGLANG_CPU_ARGUMENTS, "--trust-remote-code", *arguments],
        env=engine_environment(extra),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
