# SPDX-License-Identifier: Apache-2.0
"""Servers of a test module, started and stopped at the same time.

A start is mostly imports on one core, and a stop mostly waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tools.server import EngineServer

T = TypeVar("T")
AT_ONCE = 4


def start_all(starts: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What the functions return, by name; each starts a server and waits until it answers."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(start) for name, start in starts.items()}
        return {name: future.result() for name, future in futures.items()}


def stop_all(servers: Sequence[EngineServer]) -> None:
    """Stop every server; the first error, if any, is raised when all were told to stop."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for done in [pool.submit(server.stop) for server in servers]:
            done.result()
