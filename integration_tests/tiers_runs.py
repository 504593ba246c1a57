# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of :mod:`tiers_probe` side by side, in as few processes as there can be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration_tests.side_by_side import start_all
from tools.model_runner_v2 import environment
from tools.server import engine_environment

PROBE = Path(__file__).with_name("tiers_probe.py")
TIMEOUT_S = 400
FAILED, SKIPPED = "failed", "skipped"
REFUSED = {
    "no host memory": {},
    "no capacity": {"host_gib": 1, "path": "/tmp/kv"},
    "no such server": {"host_gib": 1, "store": "redis", "path": "nowhere"},
    "no such folder": {"host_gib": 1, "path": "/proc/kv", "capacity_gib": 1},
    "of the other engine": {"host_gib": 1, "host_swa_share": 0.5},
}
"""Sections that end the start."""
OURS = ["kv", "scheduler", "tiers"]


class Runs(dict[str, Any]):
    """What scripts found, by their names; one that failed fails whoever asks for it."""

    def __getitem__(self, name: str) -> Any:
        run = super().__getitem__(name)
        if isinstance(run, dict):
            assert FAILED not in run, run[FAILED]
            if SKIPPED in run:
                pytest.skip(run[SKIPPED])
        return run


def probe(
    model: Path,
    folder: Path,
    script: str,
    options: Mapping[str, Any],
    more: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a script finds in a process of its own, or why it failed.

    Args:
        model: the checkpoint.
        folder: made for it.
        script: its name.
        options: as the script takes them.
        more: environment.
    """
    folder.mkdir()
    variables = dict(more or {})
    paths = (
        str(PROBE.parents[1]),
        variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")),
    )
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, str(PROBE), str(model), script, str(folder), json.dumps(options)],
        env=engine_environment(variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return {FAILED: (done.stdout + done.stderr)[-3000:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@contextmanager
def redis_folder() -> Iterator[Path]:
    """A folder for a Redis server's socket.

    Raises:
        Skipped: there is no server or no client here.
    """
    from tests.tiers.test_redis_store import executable

    executable()
    pytest.importorskip("redis", reason="no Redis client here")
    # A socket's path may have 107 characters only.
    folder = tempfile.mkdtemp(prefix="mimo-")
    yield Path(folder)
    shutil.rmtree(folder)


@contextmanager
def mooncake_master() -> Iterator[str]:
    """Address of a real master with memory.

    Raises:
        Skipped: Mooncake is not here, or does not load.
    """
    from tests.tiers.mooncake_cluster import Cluster

    cluster = Cluster(lease_ms=500, memory_mb=64)
    yield cluster.address
    cluster.close()


def run_all(model: Path, drafting: Path, folder: Path, block_bytes: int) -> Runs:
    """All scripts.

    Args:
        model: of full attention and windows, both with blocks of 128 tokens.
        drafting: one with MTP layers that draft well.
        folder: for stores.
        block_bytes: of a block of any of ``model``'s groups.
    """

    def gib(blocks: int) -> float:
        return blocks * block_bytes / (1 << 30)

    pressed = {"script": "pressed", "blocks": 80}
    parts: dict[str, dict[str, dict[str, Any]]] = {
        "one": {
            "unasked": {},
            "refusals": REFUSED,
            "copies": {"rounds": 10_000},
            "stock": {},
            "host": {},
            "dense": {},
            "host kv": {"script": "host", "features": OURS},
            "rotation": {"host_gib": gib(40)},
        },
        "two": {
            "files": {},
            "folders": {},
            "keep_alive": {"capacity_gib": gib(34)},
            "pressed": {**pressed, "features": ["tiers"]},
            "pressed kv": {**pressed, "features": OURS},
        },
    }
    found = Runs()
    with ExitStack() as stack:
        for name, enter, settings in (
            ("redis", redis_folder, {"requests": 40}),
            ("mooncake", mooncake_master, {}),
        ):
            try:
                place = stack.enter_context(enter())
            except pytest.skip.Exception as reason:
                found[name] = {SKIPPED: str(reason)}
            else:
                parts["two"][name] = {**settings, "place": str(place)}
        starts: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(probe, model, folder / name, "several", scripts)
            for name, scripts in parts.items()
        }
        lengths = {"lengths": [300, 257, 256, 255, 97]}
        starts["mtp"] = partial(probe, drafting, folder / "mtp", "mtp", lengths, environment())
        results = start_all(starts)
    found["mtp"] = results.pop("mtp")
    for name, part in results.items():
        found.update({script: part for script in parts[name]} if FAILED in part else part)
    return found
