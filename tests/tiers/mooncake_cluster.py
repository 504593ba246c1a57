# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake: a master, and a process that holds the memory."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mimo_plugin.tiers.mooncake_client import MooncakeUnavailable, require_library

HOST = "127.0.0.1"
LONG_S = 60.0


def folder() -> Path:
    """Where the programs are; the test is skipped where they can't run."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no Mooncake here: `make setup` installs it, see tools/environment.py")
    try:
        require_library()
    except MooncakeUnavailable as error:
        pytest.skip(f"Mooncake does not load here: {error}")
    return Path(spec.submodule_search_locations[0])


def free_ports(number):
    """Ports that nobody listens on now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Program:
    """One of Mooncake's programs with its options; what it says goes to a file."""

    def __init__(self, path, **options):
        self.command = [str(path), *(f"--{name}={value}" for name, value in options.items())]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the cluster
        self.process = None

    def start(self):
        assert self.process is None or self.process.poll() is not None
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT
        )

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait(LONG_S)

    def stop(self):
        """Stop it; on a busy machine some of its threads may run on for a moment."""
        self.process.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + LONG_S
        while not self._stopped():
            assert time.monotonic() < end_s, "it runs on"
            time.sleep(0.01)

    def _stopped(self):
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-2000:]


class Cluster:
    """A master, and a process that holds memory.

    Args:
        lease_ms: for which pages are spared after each use.
        memory_mb: of the process that holds it.
    """

    def __init__(self, lease_ms=500, memory_mb=32):
        programs = folder()
        rpc, self.http, holder = free_ports(3)
        self.address = f"{HOST}:{rpc}"
        self.master = Program(
            programs / "mooncake_master",
            rpc_address=HOST,
            rpc_port=rpc,
            metrics_host=HOST,
            metrics_port=self.http,
            default_kv_lease_ttl=lease_ms,
            client_ttl=2,
        )
        self.holder = Program(
            programs / "mooncake_client",
            host=HOST,
            port=holder,
            master_server_address=self.address,
            metadata_server="P2PHANDSHAKE",
            global_segment_size=f"{memory_mb}MB",
        )
        self.start()

    def start(self):
        """Start what is not alive, and wait until it works."""
        if not self.master.alive():
            self.master.start()
            self.wait(lambda: self.segments() is not None)
        if not self.holder.alive():
            old = self.segments()
            self.holder.start()
            self.wait(lambda: self.segments() - old)

    def segments(self):
        """Those that the master knows; None where it does not answer."""
        url = f"http://{HOST}:{self.http}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=LONG_S) as answer:
                return set(answer.read().decode().split())
        except urllib.error.HTTPError:
            return set()
        except OSError:
            return None

    def wait(self, ready):
        end_s = time.monotonic() + LONG_S
        while not ready():
            assert time.monotonic() < end_s, self.master.said() + self.holder.said()
            time.sleep(0.02)

    def close(self):
        for program in (self.holder, self.master):
            if program.alive():
                program.kill()
            program.log.close()
