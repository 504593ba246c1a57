# SPDX-License-Identifier: Apache-2.0
"""What the coordinator knows of the model's groups, and of one running request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from mimo_plugin.core.tree import Path
from mimo_plugin.core.window import GroupGeometry


@dataclass(slots=True)
class RequestState:
    """What the coordinator knows of a running request's cached prefix."""

    request: Any
    path: Path
    hit_tokens: int
    planned_tokens: int
    cached_tokens: int
    computed_tokens: int
    scanned_tokens: int
    loaded_tokens: int = 0
    #: computed tokens below which there is nothing new to cache
    wake_tokens: int = 0
    #: window boundary up to which SWA blocks were given back
    released_tokens: int = -1
    #: whether SWA blocks of the last boundary's window are held back, and from where on again
    holds: bool = True
    resume_hold_tokens: int = 0
    #: full blocks not hashed because an equal block was resident: [first, stop) ranges
    skipped: list[range] = field(default_factory=list)


def group_geometry(coordinator: Any) -> tuple[GroupGeometry, ...]:
    """Window geometry of each KV cache group, in group order."""
    return tuple(
        GroupGeometry(
            block_size_tokens=manager.block_size,
            window_tokens=(
                manager.kv_cache_spec.sliding_window
                if isinstance(manager.kv_cache_spec, SlidingWindowSpec)
                else None
            ),
            lookahead_blocks=1 if manager.use_eagle else 0,
        )
        for manager in coordinator.single_type_managers
    )
