# SPDX-License-Identifier: Apache-2.0
"""Profile and mark of the tests of the tiers on vLLM that need no engine process."""

from __future__ import annotations

import logging

import pytest

from tests.profiles import load_vllm_profile, mark_vllm

load_vllm_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here imports vLLM."""
    mark_vllm(items, "vllm_tiers")


@pytest.fixture
def start(caplog):
    """Starts tiers, which end with the test and leave nothing behind."""
    from tests.vllm_tiers.harness import Tiers

    started = []

    def make(*args, **kwargs):
        started.append(Tiers(*args, **kwargs))
        return started[-1]

    yield make
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        for tiers in started:
            if not tiers.closed:
                tiers.close()
        assert not [r for r in caplog.records if "mmap" in r.getMessage()]


@pytest.fixture
def files(tmp_path):
    """Settings of a store of files."""
    return {"store": "file", "path": str(tmp_path / "kv"), "capacity_gib": 1.0}
