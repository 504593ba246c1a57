# SPDX-License-Identifier: Apache-2.0
"""Profile and mark of the tests that drive the engine's scheduler with a KV connector."""

from __future__ import annotations

import pytest

from tests.profiles import load_vllm_profile, mark_vllm

load_vllm_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here imports vLLM."""
    mark_vllm(items, "mtp_transfer")
