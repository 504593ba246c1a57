# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests without an engine process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def plugin_log_reaches_caplog() -> Iterator[None]:
    """Importing vLLM anywhere in the process cuts its loggers, ours among them, off from caplog."""
    upstream, ours = logging.getLogger("vllm"), logging.getLogger("vllm.mimo_plugin")
    before = upstream.propagate, ours.level
    upstream.propagate = True
    ours.setLevel(logging.DEBUG)
    yield
    upstream.propagate = before[0]
    ours.setLevel(before[1])
