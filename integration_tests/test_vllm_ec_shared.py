# SPDX-License-Identifier: Apache-2.0
"""Two engines of one node share what the encoder made: same answers, encoded once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import tiny_omni
from tools.server import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


def start(stack, log_dir, label, *arguments):
    """An engine's process and its result."""
    log = stack.enter_context((log_dir / f"{label}.log").open("w"))
    environment = engine_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "integration_tests.ec_shared_client", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    )
    stack.callback(process.kill)
    for line in process.stdout:
        if line.startswith("RESULT "):
            return process, json.loads(line.removeprefix("RESULT "))
    pytest.fail(f"{label} ended early:\n" + (log_dir / f"{label}.log").read_text()[-4000:])


def finish(process):
    process.communicate("\n", timeout=60)


def caches():
    return {name for name in os.listdir("/dev/shm") if name.startswith("mimo-ec-")}


@pytest.mark.timeout(600)
def test_a_second_engine_takes_what_the_first_one_encoded(tmp_path):
    model = tiny_omni.make(tmp_path / "model")
    name = f"test-{os.getpid()}"
    before = caches()
    with contextlib.ExitStack() as stack:
        first, encoded = start(stack, tmp_path, "first", model, name)
        second, taken = start(stack, tmp_path, "second", model, name)
        finish(second)
        finish(first)
        stock, plain = start(stack, tmp_path, "stock", model)
        finish(stock)
    assert plain["encoded"] == encoded["encoded"] == 3
    assert taken["encoded"] == 0
    assert encoded["answers"] == plain["answers"]
    assert taken["answers"] == plain["answers"]
    assert caches() == before
