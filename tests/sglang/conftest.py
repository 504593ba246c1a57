# SPDX-License-Identifier: Apache-2.0
"""The same examples every time; no engine is imported here."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("sglang-fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("sglang-explore", deadline=None, database=None)
settings.load_profile(
    "sglang-explore" if os.environ.get("MIMO_HYPOTHESIS") == "explore" else "sglang-fixed"
)
