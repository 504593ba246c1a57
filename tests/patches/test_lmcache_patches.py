# SPDX-License-Identifier: Apache-2.0
"""LMCache's patches on its own functions, without a server; with one, see
``integration_tests/test_vllm_lmcache.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.lmcache_server import LMCACHE_VERSION, lmcache_folder, patched_lmcache

if lmcache_folder() is None:
    pytest.skip(
        f"LMCache is not here: pip install --no-deps lmcache=={LMCACHE_VERSION}, "
        "or set MIMO_LMCACHE to the folder that holds it",
        allow_module_level=True,
    )

_MASKS = """
import inspect, json, sys
from types import SimpleNamespace as Group
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import all_null_chunk_masks as masks

def run(blocks, per_chunk, kept, groups):
    named = {}
    if "kept_blocks_per_chunk" in inspect.signature(masks).parameters:
        named["kept_blocks_per_chunk"] = kept
    chunks = len(blocks[0]) // per_chunk[0]
    grouped = [Group(kernel_group_indices=group) for group in groups]
    return masks(blocks, grouped, per_chunk, chunks, 0, **named)

print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
"""

FULL = [1, 2, 3, 4, 5, 6]
"""Two blocks a chunk, three chunks."""
WINDOW = [0, 0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11]
"""Four blocks a chunk, of which the last two are stored; the window begins in the second chunk."""
CASES = {
    "a window that begins inside what is stored": ([FULL, WINDOW], [2, 4], [2, 2], [[0], [1]]),
    "a window that begins before what is stored": (
        [FULL, [0, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11, 12]],
        [2, 4],
        [2, 2],
        [[0], [1]],
    ),
    "one object for all layers": ([FULL, WINDOW], [2, 4], [2, 2], [[0, 1]]),
    "the last state of a chunk is not there": (
        [FULL, [4, 0, 0, 5, 6, 7]],
        [2, 2],
        [2, 1],
        [[0], [1]],
    ),
}


def masks(*folders: Path) -> dict[str, Any]:
    path = os.pathsep.join(map(str, (*folders, lmcache_folder())))
    done = subprocess.run(
        [sys.executable, "-c", _MASKS, json.dumps(list(CASES.values()))],
        env={**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_a_chunk_of_which_a_stored_block_is_null_is_left_out(tmp_path: Path) -> None:
    plain, patched = masks(), masks(patched_lmcache(tmp_path))
    first, second, one, last = CASES
    whole = [False, False, False]
    assert patched[first] == [whole, [True, True, False]]
    assert patched[second] == [whole, [True, False, False]]
    assert patched[one] == [[True, True, False]]
    assert patched[last] == [whole, [True, False, False]]
    # Published: only chunks without any block. When this fails, LMCache mends it: drop the patch.
    assert plain[first] == [whole, [True, False, False]]
    assert plain[second] == patched[second], "what was right stays as it is"
    assert plain[one] == [whole]
    assert plain[last] == [whole, whole]
