# SPDX-License-Identifier: Apache-2.0
"""Set-up of the tests that drive vLLM's own classes without a model."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings


def load_vllm_profile() -> None:
    """The same histories every time; `MIMO_HYPOTHESIS=explore` draws new ones and shrinks."""
    common = {
        "deadline": None,
        "database": None,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    }
    settings.register_profile(
        "vllm-fixed", derandomize=True, phases=(Phase.explicit, Phase.generate), **common
    )
    settings.register_profile("vllm-explore", derandomize=False, **common)
    explore = os.environ.get("MIMO_HYPOTHESIS") == "explore"
    settings.load_profile("vllm-explore" if explore else "vllm-fixed")


def mark_vllm(items: Iterable[pytest.Item], folder: str) -> None:
    """Everything in ``folder`` of the tests imports vLLM."""
    for item in items:
        if f"/{folder}/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
