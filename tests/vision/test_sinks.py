# SPDX-License-Identifier: Apache-2.0
"""B76: sinks of MiMo's tower count in its window blocks, on the first key and nowhere else.

vLLM before 0.32 loaded them and did not use them, for 24 of 28 blocks. 0.32 has them in its Triton
kernel; this holds it to that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.model_runner_v2 import environment
from tools.server import is_cpu_build

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not is_cpu_build(),
        reason="needs the CPU build of vLLM and the package triton",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {"B76-half": 2.0**-9}
"""Largest error by case; elsewhere that of float32 sums."""
SINGLE = 5e-6
WRONG = 0.1
"""What a wrong reading is off by at least, on the values of these cases."""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vision.interpreted_sinks"],
        env={**os.environ, **environment()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {case["name"]: case for case in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("name", ["B76", "B76-half", "grouped", "several", "large-sinks"])
def test_b76_the_sink_is_added_to_the_first_key(results, name):
    case = results[name]
    assert case["error"] <= BOUNDS.get(name, SINGLE)
    for wrong in ("unused", "denominator", "narrower"):
        assert case[wrong] > WRONG, wrong


def test_blocks_without_sinks_are_plain_windows(results):
    assert results["no-sinks"]["error"] <= SINGLE
    assert results["no-sinks"]["narrower"] > WRONG
