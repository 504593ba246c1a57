# SPDX-License-Identifier: Apache-2.0
"""Prefill nodes of the router's simulation, and the traces that they serve.

A node serves one prefill after the other. Its memory holds blocks of 512 tokens, least recently
used first to go, the end of a prompt before its start. In a hybrid model it also holds windows: one
at the end of each prompt and, once a prompt was found to part from what is cached, where it does
so (what vLLM keeps by default). A window takes the memory of three blocks, dies with the last
block before it, and a hit ends at one. What comes and goes is reported as vLLM reports it.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.kv_events import BlockRemoved, BlockStored, KvEvent
from mimo_plugin.core.load import Speed

BLOCK = 512
WINDOW_WEIGHT = 3  # blocks; one window of MiMo's 60 SWA layers takes what 1536 full tokens take
#: MiMo-V2-Flash: 81,000 keys attended cost as much as all the rest of a token
SPEED = Speed(PrefillCost(81_000.0), tokens_per_s=20_000.0, fixed_s=0.02)


@dataclass(slots=True)
class Arrival:
    """One request of a trace: when, its length and its whole blocks."""

    time_s: float
    tokens: int
    blocks: list[int]

    @property
    def limit(self) -> int:
        """Blocks that may be a hit: the last token is always computed."""
        return (self.tokens - 1) // BLOCK


def read_trace(path: Path, requests: int | None = None) -> list[Arrival]:
    """Mooncake's format; the last block, which other prompts can't share in part, is left out."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if requests is not None and number >= requests:
                break
            row = json.loads(line)
            tokens = row["input_length"]
            found.append(
                Arrival(row["timestamp"] / 1e3, tokens, row["hash_ids"][: tokens // BLOCK])
            )
    return found


def synthetic_trace(requests: int = 4000, seed: int = 0) -> list[Arrival]:
    """Chats that grow turn by turn over some system prompts, mixed with single long prompts."""
    rnd = random.Random(seed)
    fresh = iter(range(1 << 40))
    systems = [[next(fresh) for _ in range(rnd.choice((1, 2, 4, 8)))] for _ in range(12)]
    chats: list[list[int]] = []
    found, now_s = [], 0.0
    for _ in range(requests):
        now_s += rnd.expovariate(3.4)
        kind = rnd.random()
        if kind < 0.55 and chats:
            chat = chats[int(len(chats) * rnd.betavariate(3, 1))]
        elif kind < 0.85:
            chat = list(rnd.choice(systems))
            chats.append(chat)
        else:
            chat = [next(fresh) for _ in range(int(rnd.lognormvariate(3.0, 1.0)))]
        chat.extend(next(fresh) for _ in range(1 + int(rnd.lognormvariate(1.8, 1.1))))
        del chat[240:]
        found.append(Arrival(now_s, len(chat) * BLOCK + rnd.randrange(1, BLOCK), list(chat)))
    return found


class Cache:
    """One node's memory.

    Args:
        capacity: in blocks.
        hybrid: hits need a window.
    """

    def __init__(self, capacity: int, hybrid: bool) -> None:
        self.events: list[KvEvent] = []
        self._capacity, self._hybrid = capacity, hybrid
        self._used = 0
        # Blocks by their ids, windows by the complements of theirs; the first is the next to go.
        self._held: OrderedDict[int, int] = OrderedDict()

    def full(self, arrival: Arrival) -> int:
        """Blocks of the prefix that full attention has."""
        held, count = self._held, 0
        for block in arrival.blocks[: arrival.limit]:
            if block not in held:
                break
            count += 1
        return count

    def hit(self, arrival: Arrival) -> int:
        """Blocks of the hit."""
        count = self.full(arrival)
        if self._hybrid:
            while count and ~arrival.blocks[count - 1] not in self._held:
                count -= 1
        return count

    def use(self, arrival: Arrival, blocks: int) -> None:
        """The hit of a request that begins is the last to go."""
        self._touch(arrival.blocks[:blocks], (blocks,))
        self._evict()

    def store(self, arrival: Arrival, junction: int) -> None:
        """The prefill is done; ``junction``: where the prompt parted from what was cached."""
        blocks = arrival.blocks
        new = [block not in self._held for block in blocks]
        start = None
        for index, is_new in enumerate([*new, False]):
            if is_new and start is None:
                start = index
            elif not is_new and start is not None:
                parent = blocks[start - 1] if start else None
                run = blocks[start:index]
                self.events.append(BlockStored(run, parent, len(run) * BLOCK, BLOCK, 0))
                start = None
        self._touch(blocks, (len(blocks), junction))
        self._evict()

    def _touch(self, blocks: Sequence[int], windows: tuple[int, ...]) -> None:
        held = self._held
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 1
                self._used += 1
            if self._hybrid and index + 1 in windows:
                if ~block in held:
                    held.move_to_end(~block)
                else:
                    held[~block] = WINDOW_WEIGHT
                    self._used += WINDOW_WEIGHT
                    window = BlockStored([block], None, 0, BLOCK, 1, "sliding_window", BLOCK)
                    self.events.append(window)

    def _evict(self) -> None:
        while self._used > self._capacity:
            block, weight = self._held.popitem(last=False)
            self._used -= weight
            group, block = (0, block) if block >= 0 else (1, ~block)
            self.events.append(BlockRemoved([block], group))


class Node:
    """A node's queue and what it is at; the figures that rules without an index go by."""

    __slots__ = (
        "busy_until_s",
        "cache",
        "history",
        "in_flight",
        "index",
        "junction",
        "queue",
        "queued_tokens",
        "running",
    )

    def __init__(self, index: int, capacity: int, hybrid: bool) -> None:
        self.index = index
        self.cache = Cache(capacity, hybrid)
        self.queue: deque[int] = deque()
        self.running: int | None = None
        self.busy_until_s = 0.0
        self.in_flight = 0
        self.junction = 0
        #: uncached tokens of all in flight, as the one who sent them thought
        self.queued_tokens = 0
        #: blocks that were ever sent here: what a router without events believes in
        self.history: set[int] = set()
