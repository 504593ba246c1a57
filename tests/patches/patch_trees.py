# SPDX-License-Identifier: Apache-2.0
"""Source trees to test patches on.

``MIMO_VLLM_SOURCES=DIR[:DIR...]`` names further packages ``vllm``, or the directories that hold
them, to check that the series applies to other releases, and that none of them has a change
already. ``MIMO_SGLANG_SOURCES`` does the same. They need not be importable.

The engines' requirements exclude each other: one that this Python lacks is looked for in its
environment of the checkout, ``.venv-<engine>``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mimo_plugin.cli import _patch_state as source
from mimo_plugin.cli._patch_queue import Patch, PatchError, load_series

CHECKOUT = Path(__file__).resolve().parents[2]


def installed(engine: str) -> Path:
    """Directory that holds the installed engine; skips the test when there is none."""
    try:
        return source.locate(engine)
    except PatchError as error:
        for site in sorted(CHECKOUT.glob(f".venv-{engine}/lib/python*/site-packages")):
            return source.locate(engine, site)
        pytest.skip(str(error))


def source_trees(engine: str) -> list[Path]:
    """The installed engine and the trees of the environment."""
    more = os.environ.get(f"MIMO_{engine.upper()}_SOURCES", "")
    named = [source.locate(engine, Path(path)) for path in more.split(":") if path]
    return [installed(engine), *named]


def plain_files(base: Path, engine: str, files: Sequence[str], target: Path) -> None:
    """Copy the engine's own version of ``files``, also where the installed one is patched."""
    kept = base / engine / source.ORIGINALS
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).unlink(missing_ok=True)
        original = kept / name
        shutil.copyfile(original if original.is_file() else base / name, target / name)


def overlay(engine: str, series: Sequence[Patch], target: Path) -> Path:
    """Link the whole engine into ``target``, its touched files real and patched by ``series``."""
    base = installed(engine)
    subprocess.run(["cp", "-as", str(base / engine), str(target / engine)], check=True)
    touched = sorted({name for patch in load_series(engine) for name in patch.files})
    plain_files(base, engine, touched, target)
    for patch in series:
        assert source.git_apply(patch, target), patch.name
    return target
