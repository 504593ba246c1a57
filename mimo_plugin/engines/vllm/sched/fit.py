# SPDX-License-Identifier: Apache-2.0
"""Does the scheduler feature fit these engine settings?"""

from __future__ import annotations

from typing import Any


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    policy = vllm_config.scheduler_config.policy
    if policy not in ("fcfs", "priority"):
        return (
            f"--scheduling-policy is {policy!r}, the feature orders the queue under 'fcfs' and "
            "within each priority under 'priority'; use one of these"
        )
    return None
