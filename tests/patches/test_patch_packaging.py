# SPDX-License-Identifier: Apache-2.0
"""The wheel carries the queue, so that ``mimo patches`` works without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_wheel_carries_the_queue(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mimo_plugin", "patches"):
        shutil.copytree(CHECKOUT / name, copy / name, symlinks=True, ignore=ignore)
    build = f"import setuptools.build_meta as b; print(b.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=True
    )
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    code = (
        "from mimo_plugin.cli._patch_queue import load_series, queue_root; "
        "print(queue_root(), *(p.name for e in ('vllm', 'sglang') for p in load_series(e)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert shown[0] == str(site / "mimo_plugin" / "_patches")
    there = [sorted((CHECKOUT / "patches" / e).glob("*.patch")) for e in ("vllm", "sglang")]
    assert shown[1:] == [path.name for paths in there for path in paths]
