# SPDX-License-Identifier: Apache-2.0
"""Random histories on SGLang's own tree, pools and allocators: no slot lost, no foreign KV read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.sglang_local import TREE_CHECK
from tools.server import engine_environment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]


def test_random_histories() -> None:
    """``MIMO_HYPOTHESIS=explore`` plays others."""
    explore = os.environ.get("MIMO_HYPOTHESIS") == "explore"
    first = int.from_bytes(os.urandom(3), "big") if explore else 0
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "integration_tests.sglang_histories",
            str(first),
            "16",
        ],
        cwd=ROOT,
        env=engine_environment(TREE_CHECK),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    total = json.loads(done.stdout.strip().splitlines()[-1])
    assert total["histories"] == 16
    assert total["hit_tokens"] > 0
    assert total["retractions"] > 0, "never short of memory"
    assert total["checked"] > 5000
