# SPDX-License-Identifier: Apache-2.0
"""A real ``lmcache server`` (MP mode) beside ``vllm serve``, on loopback ports.

LMCache is no dependency: :func:`lmcache_folder` says where it is, or that it is nowhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mimo_plugin.cli import _patch_state as source
from mimo_plugin.cli._patch_queue import load_series
from tools.server import EngineServer, free_port

LMCACHE_VERSION = "0.5.6"
"""The version that these tests are about."""
CHUNK_TOKENS = 256
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""LMCache reports its use to a site of its makers unless it is told not to."""
_MAIN = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def lmcache_folder() -> Path | None:
    """The folder that has to be on ``PYTHONPATH`` for LMCache: ``MIMO_LMCACHE``, or that of the
    installed package; None without LMCache."""
    named = os.environ.get("MIMO_LMCACHE")
    if named and (Path(named) / "lmcache").is_dir():
        return Path(named).absolute()
    found = find_spec("lmcache")
    return Path(found.origin).parents[1] if found and found.origin else None


def patched_lmcache(target: Path) -> Path:
    """LMCache with the series of ``patches/lmcache`` on it, as links in ``target``."""
    folder = lmcache_folder()
    assert folder is not None
    series = load_series("lmcache")
    subprocess.run(["cp", "-as", str(folder / "lmcache"), str(target / "lmcache")], check=True)
    for name in {name for patch in series for name in patch.files}:
        (target / name).unlink()
        (target / name).write_bytes((folder / name).read_bytes())
    for patch in series:
        assert source.git_apply(patch, target), patch.name
    return target


def python_path(*more: Path) -> dict[str, str]:
    """Environment of a process that imports LMCache; ``more`` folders come first."""
    folder = lmcache_folder()
    assert folder is not None
    given = os.environ.get("PYTHONPATH", "")
    parts = [*map(str, more), str(Path(__file__).parents[1]), given, str(folder)]
    return {"PYTHONPATH": os.pathsep.join(part for part in parts if part), **QUIET}


class LmcacheServer(EngineServer):
    """One ``lmcache server`` process; ``port`` is that of its HTTP API.

    Args:
        arguments: of ``lmcache server``.
        log: what it prints.
        mq_port: where engines connect to; the same as that of a server before makes engines find
            this one again.
        main: code that starts it.
        before: folders before LMCache's own on ``PYTHONPATH``.
    """

    stop_grace_s = 8.0

    def __init__(
        self,
        *,
        arguments: Sequence[str] = (),
        log: Path,
        mq_port: int | None = None,
        main: str = _MAIN,
        before: Sequence[Path] = (),
    ) -> None:
        self.mq_port = mq_port or free_port()
        self._main = main
        super().__init__("", log=log, environment=python_path(*before), name="lmcache server")
        self.command = [
            *self._serve(),
            "--host=127.0.0.1",
            f"--port={self.mq_port}",
            "--http-host=127.0.0.1",
            f"--http-port={self.port}",
            "--l1-size-gb=0.25",
            "--no-l1-use-lazy",
            "--eviction-policy=LRU",
            *arguments,
        ]

    def _serve(self) -> list[str]:
        return [sys.executable, "-c", self._main, "server"]

    def connector(self, **extra: Any) -> str:
        """The value of ``--kv-transfer-config`` for an engine of this machine without a GPU."""
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.mq_port,
                # The only transfer that takes several groups; on a CPU it is not the default.
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                **extra,
            },
        }
        return json.dumps(config)

    def text(self, path: str, timeout_s: float = 60.0) -> str:
        """Body of a GET request; it calls its health differently from vLLM."""
        return super().text("/healthcheck" if path == "/health" else path, timeout_s)

    def clear(self) -> None:
        """Drop what its host memory (L1) holds."""
        body = {"force": False, "tier": "l1"}
        connection, response = self._open("POST", "/cache/clear", body, 60.0)
        response.read()
        connection.close()

    def status(self) -> dict[str, Any]:
        """Its own report."""
        found: dict[str, Any] = json.loads(self.text("/status"))
        return found

    def held(self) -> tuple[int, int]:
        """Objects and bytes in its host memory."""
        manager = self.status()["storage_manager"]["l1_managers"]["_default"]
        return manager["total_object_count"], manager["memory_used_bytes"]
