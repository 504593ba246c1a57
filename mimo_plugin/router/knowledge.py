# SPDX-License-Identifier: Apache-2.0
"""What is known of the workers' caches, for prompts cut into blocks of one size.

Targets whose events are read are exact. Of the others it is only remembered what they were sent.
The block size is the greatest that all exact workers' blocks are multiples of; it is not known
before the first worker is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from mimo_plugin.core.block_hashes import PromptHasher
from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.residency import ResidencyIndex
from mimo_plugin.router.parts import ApproximateIndex, EventReader
from mimo_plugin.router.probe import Source
from mimo_plugin.router.prompt import Prompt

log = logging.getLogger(__name__)

USUAL_HASH_TOKENS = 16
SMALLEST_HASH_TOKENS = 8
"""Below that a prompt has too many blocks for what it gains; such a worker is not exact."""


@dataclass(slots=True, eq=False)
class Reading:
    """The reader of one target's events."""

    source: Source
    reader: Any
    task: asyncio.Task[None]


class Knowledge:
    """All of it.

    Args:
        hash_tokens: block size; None: what the workers say.
        hybrid: the model has sliding windows.
    """

    def __init__(self, hash_tokens: int | None, *, hybrid: bool) -> None:
        self._set = hash_tokens
        self._sources: dict[str, Source] = {}
        self.readings: dict[str, Reading] = {}
        size = hash_tokens or USUAL_HASH_TOKENS
        self.reservations = Reservations(size, size, every_block=not hybrid)
        self._build(size)
        self.known = hash_tokens is not None

    def _build(self, hash_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self.hasher = PromptHasher(hash_tokens)
        self.index = ResidencyIndex(hash_tokens)
        self.approximate = ApproximateIndex(hash_tokens)
        self._aligned = hash_tokens
        self.reservations.align(hash_tokens, hash_tokens)

    # Targets

    def learn_size(self, said: int | None) -> None:
        """A worker with events hashes blocks of so many tokens."""
        if self._set is not None or said is None or (self.known and said % self.hash_tokens == 0):
            return
        size = gcd(self.hash_tokens, said) if self.known else said
        if size < SMALLEST_HASH_TOKENS:
            log.warning(
                "a worker's blocks have %d tokens, others' %d: it is not exact here; give all "
                "workers one block size",
                said,
                self.hash_tokens,
            )
            return
        if size == self.hash_tokens:
            self.known = True
            return
        sources = dict(self._sources)
        for target in sources:
            self.drop(target)
        self._build(size)
        self.known = True
        for target, source in sources.items():
            self.read(target, source)

    def read(self, target: str, source: Source | None) -> None:
        """Read a target's events from there, or no more."""
        if self._sources.get(target) == source:
            return
        self.drop(target)
        if source is None:
            return
        self._sources[target] = source
        reader = EventReader(
            target, source.events, source.replay, self.index, self.hash_tokens, topic=source.topic
        )
        task = asyncio.create_task(reader.run(), name=f"events {target}")
        task.add_done_callback(_report)
        self.readings[target] = Reading(source, reader, task)

    def drop(self, target: str) -> None:
        """Nothing is known of the target any more."""
        self._sources.pop(target, None)
        reading = self.readings.pop(target, None)
        if reading is not None:
            reading.task.cancel()
        self.index.remove(target)
        self.approximate.remove(target)

    def is_exact(self, target: str) -> bool:
        """Its events are read and none are missing."""
        reading = self.readings.get(target)
        return (
            reading is not None
            and bool(reading.reader.status.get("connected"))
            and self.index.is_trusted(target)
        )

    async def close(self) -> None:
        """Read no more."""
        tasks = [reading.task for reading in self.readings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Prompts

    def hashes(self, prompt: Prompt) -> Sequence[Hash]:
        """Of the prompt's whole blocks; none where its tokens are not known."""
        return self.hasher.hashes(prompt) if prompt.token_ids else ()

    def lookup(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        """Hits by target, as :class:`~mimo_plugin.core.routing.Router` asks for them."""
        if not hashes:
            return {}
        self.align()
        found = self.index.lookup(hashes, max_hit_tokens)
        for target, tokens in self.approximate.lookup(hashes, max_hit_tokens).items():
            if target not in self.readings:
                found[target] = max(tokens, found.get(target, 0))
        return found

    def full_prefixes(self, hashes: Sequence[Hash], max_hit_tokens: int) -> Mapping[str, int]:
        """The same for full attention alone."""
        return self.index.full_prefixes(hashes, max_hit_tokens) if hashes else {}

    def align(self) -> None:
        """Groups were heard of: what is on its way will hit at multiples of their blocks too."""
        if self.index.alignment_tokens != self._aligned:
            self._aligned = self.index.alignment_tokens
            self.reservations.align(self._aligned, self.hash_tokens)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("reading %s failed", task.get_name(), exc_info=task.exception())
