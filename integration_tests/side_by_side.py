# SPDX-License-Identifier: Apache-2.0
"""Servers of a test module, started at the same time: a start is mostly imports on one core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 4


def start_all(starts: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What the functions return, by name; each starts a server and waits until it answers."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(start) for name, start in starts.items()}
        return {name: future.result() for name, future in futures.items()}
