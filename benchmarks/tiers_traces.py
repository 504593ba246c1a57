# SPDX-License-Identifier: Apache-2.0
"""What each rule for keeping windows costs and gives on public request traces; no engine.

A trace names its prompts' blocks of 512 tokens, so 512 tokens are the unit of everything here:
lengths of hits, places of windows. KV has the size that the report's geometry gives: 10 full and 60
sliding-window layers, 16 bits. A store takes what is new of each prompt and drops what was used
longest ago, the end of a prefix before its beginning. Outputs are not in the traces' prompts, so
ends of turns are not seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import TraceRequest, read_trace
from mimo_plugin.core.retention import Ladder

UNIT_TOKENS, WINDOW_TOKENS = 512, 128
FULL_BYTES = 10 * 4 * (192 + 128) * 2
"""Of one token in all full-attention layers."""
SWA_BYTES = 60 * 8 * (192 + 128) * 2
"""Of one token in all sliding-window layers."""

POLICIES: dict[str, float | None] = {
    "dense": None,
    "ladder 0.125": 0.125,
    "ladder 0.25": 0.25,
    "ladder 0.5": 0.5,
    "ladder 1": 1.0,
    "no ladder": None,
    "prompt ends": None,
}
"""By name the ladder's growth. All but ``dense`` keep prompt ends; all but ``prompt ends`` also
junctions."""

CAPACITIES_TB: tuple[float | None, ...] = (None, 4.0, 1.0, 0.25)
"""None: everything is kept."""


@dataclass
class Replayed:
    """One policy on one trace with one capacity; tokens and bytes."""

    trace: str
    policy: str
    capacity_tb: float | None
    requests: int = 0
    prompt_tokens: int = 0
    full_hit_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0

    @property
    def hit_pct(self) -> float:
        """Of all prompt tokens."""
        return 100.0 * self.hit_tokens / self.prompt_tokens

    @property
    def lost_pct(self) -> float:
        """Of the tokens that full attention alone could have reused, those that were not."""
        return 100.0 * (1.0 - self.hit_tokens / max(1, self.full_hit_tokens))

    @property
    def bytes_per_token(self) -> float:
        """Written for each prompt token."""
        return self.stored_bytes / self.prompt_tokens


class _Store:
    """Pages by age."""

    def __init__(self, capacity_bytes: float) -> None:
        self._capacity_bytes = capacity_bytes
        self._items: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._held_bytes = 0

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._items

    def use(self, key: tuple[str, int], size_bytes: int) -> int:
        """Make a page the last to die; bytes that had to be written for that."""
        if key in self._items:
            self._items.move_to_end(key)
            return 0
        self._items[key] = size_bytes
        self._held_bytes += size_bytes
        return size_bytes

    def shrink(self) -> None:
        """Drop the oldest pages until the rest fits."""
        while self._held_bytes > self._capacity_bytes:
            _, size_bytes = self._items.popitem(last=False)
            self._held_bytes -= size_bytes


def replay(
    requests: Sequence[TraceRequest], trace: str, policy: str, capacity_tb: float | None
) -> Replayed:
    """Play a trace, its requests one by one.

    Args:
        requests: of the trace.
        trace: its name.
        policy: of :data:`POLICIES`.
        capacity_tb: of the store, 10^12 bytes; None: unlimited.
    """
    store = _Store(float("inf") if capacity_tb is None else capacity_tb * 1e12)
    growth = POLICIES[policy]
    ladder = None if growth is None else Ladder(WINDOW_TOKENS, growth, UNIT_TOKENS)
    dense = policy == "dense"
    window_bytes = SWA_BYTES * (UNIT_TOKENS if dense else WINDOW_TOKENS)
    out = Replayed(trace, policy, capacity_tb)
    for request in requests:
        blocks = request.input_tokens // UNIT_TOKENS
        ids = request.block_ids[:blocks]
        reusable = (request.input_tokens - 1) // UNIT_TOKENS
        full = 0
        while full < reusable and ("full", ids[full]) in store:
            full += 1
        hit = full
        while hit and ("swa", ids[hit - 1]) not in store:
            hit -= 1
        out.requests += 1
        out.prompt_tokens += request.input_tokens
        out.full_hit_tokens += full * UNIT_TOKENS
        out.hit_tokens += hit * UNIT_TOKENS
        if dense:
            points = set(range(hit + 1, blocks + 1))
        else:
            points = {blocks, reusable}
            if policy != "prompt ends":
                points.add(full)
            if ladder is not None:
                rungs = ladder.between(hit * UNIT_TOKENS, blocks * UNIT_TOKENS)
                points |= {rung // UNIT_TOKENS for rung in rungs}
        points = {point for point in points if point > hit} | {hit}
        # From the end on: the beginning of a prefix is the last to die.
        for block in reversed(range(blocks)):
            if block + 1 in points:
                out.stored_bytes += store.use(("swa", ids[block]), window_bytes)
            out.stored_bytes += store.use(("full", ids[block]), FULL_BYTES * UNIT_TOKENS)
        store.shrink()
    return out


def replay_all(folder: Path, limit: int | None = None) -> list[Replayed]:
    """All policies and capacities on each ``*.jsonl`` of a folder.

    Args:
        folder: of the traces.
        limit: requests from the head of each; None: all.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        requests = list(read_trace(path, limit))
        found += [
            replay(requests, path.stem, policy, capacity_tb)
            for capacity_tb in CAPACITIES_TB
            for policy in POLICIES
        ]
    return found


def trace_table(found: Sequence[Replayed]) -> list[str]:
    """Text: bytes written and hits of each policy; the longest-lived trace first."""
    lines = []
    for trace in dict.fromkeys(each.trace for each in found):
        lines.append(
            f"{trace}: kB written per prompt token, tokens lost against full attention, hit"
        )
        shown = dict.fromkeys(each.capacity_tb for each in found)
        header = "".join(f"{'all kept' if tb is None else f'{tb:g} TB':>24}" for tb in shown)
        lines.append(f"{'':14}{header}")
        for policy in POLICIES:
            cells = [
                f"{each.bytes_per_token / 1e3:7.0f} {each.lost_pct:6.1f} % {each.hit_pct:6.1f} %"
                for each in found
                if (each.trace, each.policy) == (trace, policy)
            ]
            lines.append(f"{policy:14}" + "".join(cell.rjust(24) for cell in cells))
    return lines
