# SPDX-License-Identifier: Apache-2.0
"""The same examples every time; `MIMO_HYPOTHESIS=explore` draws new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("core-fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("core-explore", deadline=None, database=None)
settings.load_profile(
    "core-explore" if os.environ.get("MIMO_HYPOTHESIS") == "explore" else "core-fixed"
)
