# SPDX-License-Identifier: Apache-2.0
"""Stored events that tell of a hit, not of new blocks.

A request with ``kv_cache_report_mode`` "full" has vLLM publish what it found in the cache
(``BlockPool.emit_cached_block_events``): one event for each group, in a row, of all blocks from the
prompt's start to the hit's end. They look like new copies, and name window blocks before the last
window too, which need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import lcm

from mimo_plugin.core.engine_events import EngineEvent, EngineStored, Groups, in_device
from mimo_plugin.core.kv_events import Hash

_SURE = 3


class ReuseReports:
    """Finds them.

    Args:
        groups: of the engine.
        has: whether a group has a block.
    """

    __slots__ = ("_groups", "_has", "_sure", "seen")

    def __init__(self, groups: Groups, has: Callable[[Hash, int], bool]) -> None:
        self._groups = groups
        self._has = has
        self._sure = 0
        #: those that were certain
        self.seen = 0

    def find(self, batch: Sequence[EngineEvent]) -> dict[int, bool]:
        """Events of a report's form, by index; True where the hit was known, and nothing is new.

        A request does not store again what it finds, so a known hit makes it certain; but for a
        prompt as short as one aligned block, which may not hit itself. Once an engine is known to
        publish reports (several were longer than a window) all events of that form are taken for
        them.
        """
        groups = sorted(self._groups.geometry)
        found: dict[int, bool] = {}
        at = 0
        while groups and at + len(groups) <= len(batch):
            row = self._row(batch[at : at + len(groups)], groups)
            if not row:
                at += 1
                continue
            known = all(self._has_hit(event) for event in row)
            long = self._is_long(row[0])
            self.seen += known and long > 0
            self._sure += known and long > 1
            if self._sure >= _SURE or (known and long):
                found.update(dict.fromkeys(range(at, at + len(groups)), known))
            at += len(groups)
        return found

    def certain_part(self, event: EngineStored) -> EngineStored:
        """What holds of an event that may be a report: blocks a hit needs, if not known yet."""
        first = self._first_needed(event)
        listed = [
            (block, keys)
            for at, (block, keys) in enumerate(
                zip_longest(event.block_hashes, event.extra_keys or ())
            )
            if at >= first and not self._has(block, event.group)
        ]
        return replace(
            event,
            block_hashes=[block for block, _ in listed],
            extra_keys=[keys for _, keys in listed],
        )

    def _row(self, row: Sequence[EngineEvent], groups: Sequence[int]) -> list[EngineStored]:
        """The events if they have a report's form, else none."""
        found: list[EngineStored] = []
        for event, group in zip(row, groups, strict=True):
            if (
                not isinstance(event, EngineStored)
                or event.group != group
                or event.parent_block_hash is not None
                or not event.block_hashes
                or not event.is_whole
                or not in_device(event)
                or event.block_size != self._groups.geometry[group].block_size_tokens
                or (found and event.token_ids != found[0].token_ids)
            ):
                return []
            found.append(event)
        return found

    def _is_long(self, event: EngineStored) -> int:
        """1: a prompt that computes all of the range would have found some of it; 2: and the range
        is longer than any window."""
        geometry = self._groups.geometry.values()
        unit = lcm(*(group.block_size_tokens for group in geometry))
        ahead = max(group.lookahead_blocks for group in geometry)
        tokens = len(event.token_ids)
        if tokens <= unit * (1 + ahead):
            return 0
        return 1 + all(tokens > (group.window_tokens or 0) for group in geometry)

    def _has_hit(self, event: EngineStored) -> bool:
        """Whether the group has what a hit of the whole range needs."""
        needed = event.block_hashes[self._first_needed(event) :]
        return all(self._has(block, event.group) for block in needed)

    def _first_needed(self, event: EngineStored) -> int:
        geometry = self._groups.geometry[event.group]
        if geometry.is_full:
            return 0
        return max(0, len(event.block_hashes) - geometry.window_blocks)
