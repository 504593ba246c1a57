# SPDX-License-Identifier: Apache-2.0
"""Profile and mark of the tests that drive vLLM's own balancer without engines."""

from __future__ import annotations

import pytest

from tests.profiles import load_vllm_profile, mark_vllm

load_vllm_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here imports vLLM."""
    mark_vllm(items, "dp_affinity")
