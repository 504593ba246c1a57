# SPDX-License-Identifier: Apache-2.0
"""Profile and mark of the tests of the tiers on vLLM that need no engine process."""

from __future__ import annotations

import pytest

from tests.profiles import load_vllm_profile, mark_vllm

load_vllm_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here imports vLLM."""
    mark_vllm(items, "vllm_tiers")
