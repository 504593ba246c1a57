# SPDX-License-Identifier: Apache-2.0
"""Fixtures: plain and patched trees of the installed engine, and probes run on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli._patch_queue import load_series
from tests.patches.patch_trees import CHECKOUT, overlay
from tools.server import SGLANG_CPU_ENVIRONMENT

PROBES = Path(__file__).parent / "probes"
PROBE_LIMIT_S = 300


@pytest.fixture(scope="session")
def vllm_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed vLLM as published."""
    return overlay("vllm", (), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def vllm_patched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The installed vLLM with the series up to the patch whose number is given."""
    trees: dict[str, Path] = {}

    def tree(number: str) -> Path:
        if number not in trees:
            series = [patch for patch in load_series("vllm") if patch.name[:4] <= number]
            assert series[-1].name.startswith(number)
            trees[number] = overlay("vllm", series, tmp_path_factory.mktemp(f"upto-{number}"))
        return trees[number]

    return tree


@pytest.fixture(scope="session")
def sglang_measured(
    probe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """What SGLang's probes measure: as published, and with the whole series.

    One process each, because importing SGLang takes longer than all that is measured.
    """
    trees = [
        overlay("sglang", series, tmp_path_factory.mktemp("sglang"))
        for series in ((), load_series("sglang"))
    ]
    plain, patched = (probe("sglang_all.py", tree) for tree in trees)
    return plain, patched


@pytest.fixture(scope="session")
def probe() -> Callable[..., Any]:
    """Run a script of ``probes/`` on a source tree; returns the JSON it prints."""
    seen: dict[tuple[str, ...], Any] = {}

    def run(name: str, tree: Path, *arguments: str) -> Any:
        key = (name, str(tree), *arguments)
        if key not in seen:
            env = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
            env |= {"PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
            if name.startswith("sglang"):  # its probes drive it with a benchmark of the checkout
                env |= {"PYTHONPATH": f"{tree}:{CHECKOUT}", **SGLANG_CPU_ENVIRONMENT}
            done = subprocess.run(
                [sys.executable, str(PROBES / name), *arguments],
                env=env,
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT_S,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            seen[key] = json.loads(done.stdout.splitlines()[-1])
        return seen[key]

    return run
