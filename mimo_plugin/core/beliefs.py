# SPDX-License-Identifier: Apache-2.0
"""What is believed of one worker's cache, in the order in which it will be evicted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.retention import RetentionRule


@dataclass(frozen=True, slots=True)
class Cache:
    """One worker's cache, as far as it is known.

    Attributes:
        told: events tell its full attention.
        capacity_tokens: of full attention; None: the index's ``default_capacity_tokens``.
        window_capacity_tokens: of the pool for sliding windows; None: as many as full attention.
        chunk_tokens: of one prefill step, where the engine keeps a window at its end; else None.
        rule: the plugin's retention, where the worker runs its feature ``kv``.
    """

    told: bool = False
    capacity_tokens: int | None = None
    window_capacity_tokens: int | None = None
    chunk_tokens: int | None = None
    rule: RetentionRule | None = None

    def __post_init__(self) -> None:
        for name in ("capacity_tokens", "window_capacity_tokens", "chunk_tokens"):
            found = getattr(self, name)
            if found is not None and found <= 0:
                raise ValueError(f"{name}: found {found}; allowed: > 0, or None")


Spare: TypeAlias = tuple[str, int]
"""Blocks that no prompt can be matched with: an output, whose tokens are not known here."""


@dataclass(slots=True)
class Belief:
    """One worker's blocks as they are believed; the index holds the same ones for look-ups."""

    cache: Cache
    #: blocks believed in full attention, with their number; those to be evicted next come first
    full: OrderedDict[Hash | Spare, int] = field(default_factory=OrderedDict)
    full_blocks: int = 0
    #: blocks believed in windows, with the time they came; those to be evicted next come first
    windows: OrderedDict[Hash, float] = field(default_factory=OrderedDict)
    spares: int = 0

    def clear(self) -> None:
        """Nothing is left."""
        self.full.clear()
        self.windows.clear()
        self.full_blocks = 0
