# SPDX-License-Identifier: Apache-2.0
"""The same examples every time; `MIMO_HYPOTHESIS=explore` draws new ones."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest.importorskip("torch")

settings.register_profile("kernels-fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("kernels-explore", deadline=None, database=None)
settings.load_profile(
    "kernels-explore" if os.environ.get("MIMO_HYPOTHESIS") == "explore" else "kernels-fixed"
)
