# SPDX-License-Identifier: Apache-2.0
"""Fixtures and profiles of the tests that drive vLLM's own scheduler without a model."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
# The same histories every time; `MIMO_HYPOTHESIS=explore` draws new ones and shrinks failures.
settings.register_profile(
    "sched-fixed", derandomize=True, phases=(Phase.explicit, Phase.generate), **_COMMON
)
settings.register_profile("sched-explore", derandomize=False, **_COMMON)
settings.load_profile(
    "sched-explore" if os.environ.get("MIMO_HYPOTHESIS") == "explore" else "sched-fixed"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here imports vLLM."""
    for item in items:
        if "/sched/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
