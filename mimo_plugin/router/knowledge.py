# SPDX-License-Identifier: Apache-2.0
"""What is known of the workers' caches, for prompts cut into blocks of one size.

vLLM's targets whose events are read are exact; of the others something or all is believed
(:mod:`mimo_plugin.core.lookups`). The block size is the greatest that all exact workers' blocks are
multiples of; it is not known before the first worker is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.block_hashes import PromptHasher
from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.lookups import Lookups
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.residency import ResidencyIndex
from mimo_plugin.core.sglang_names import block_tokens_of
from mimo_plugin.router import event_wire, sglang_events
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.kept import Saver, restore
from mimo_plugin.router.probe import Facts, Source
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.state import SharedState

log = logging.getLogger(__name__)

USUAL_HASH_TOKENS = 16
SMALLEST_HASH_TOKENS = 8
"""Below that a prompt has too many blocks for what it gains; such a worker is not exact."""


@dataclass(slots=True, eq=False)
class Reading:
    """The reader of one target's events."""

    source: Source
    reader: EventReader
    task: asyncio.Task[None]


@dataclass(slots=True, eq=False)
class _Known:
    facts: Facts
    source: Source | None


class Knowledge:
    """All of it.

    Args:
        hash_tokens: block size; None: what the workers say.
        window_tokens: the model's sliding window; None: it has none.
        state: shared with other routers.
    """

    def __init__(
        self, hash_tokens: int | None, window_tokens: int | None, state: SharedState
    ) -> None:
        self._set, self._window_tokens, self._state = hash_tokens, window_tokens, state
        self.saver = Saver(state, self._indexes)
        self._saving: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._said = hash_tokens is not None
        self._targets: dict[str, _Known] = {}
        self.readings: dict[str, Reading] = {}
        size = hash_tokens or USUAL_HASH_TOKENS
        self.reservations = Reservations(size, size, every_block=window_tokens is None)
        self._build(size)

    def _build(self, hash_tokens: int) -> None:
        self.hash_tokens = self._aligned = hash_tokens
        self.hasher = PromptHasher(hash_tokens)
        self.lookups = Lookups(hash_tokens, make_exact=lambda: NamedIndex(hash_tokens))
        self._exact: dict[int, ResidencyIndex] = {}
        self.reservations.align(hash_tokens, hash_tokens)

    # Targets

    def set_target(self, target: str, facts: Facts, source: Source | None) -> None:
        """A target is there, or has changed."""
        known = self._targets.get(target)
        if known is not None and known.facts == facts and known.source == source:
            return
        if known is not None and known.source != source:
            self.drop(target)
        self._targets[target] = _Known(facts, source)
        if source is not None and facts.engine == "vllm":
            self._learn_size(facts.hash_tokens)
        self._join(target)

    def _join(self, target: str) -> None:
        facts, source = self._targets[target].facts, self._targets[target].source
        if source is not None and facts.engine == "vllm":
            index = self.lookups.add_exact(target, facts.layout)
            self._exact[id(index)] = index
        else:
            try:
                block_tokens = block_tokens_of(
                    facts.hash_tokens or self.hash_tokens, self.hash_tokens
                )
            except ValueError as error:
                log.warning("%s: its events are not read: %s", target, error)
                source, block_tokens = None, self.hash_tokens
            rule = None
            if facts.engine == "sglang" and facts.keeps_windows and self._window_tokens:
                rule = sglang_events.retention_rule(self._window_tokens, block_tokens)
            cache = Cache(
                source is not None,
                facts.capacity_tokens,
                facts.window_capacity_tokens,
                facts.chunk_tokens,
                rule,
            )
            self.lookups.add_approximate(
                target,
                cache,
                block_tokens=block_tokens,
                window_tokens=self._window_tokens,
            )
        if source is not None and target not in self.readings:
            reader = EventReader(
                target,
                source.events,
                source.replay,
                self.lookups.index(target),
                topic=source.topic,
                decode=sglang_events.decode if facts.engine == "sglang" else event_wire.decode,
            )
            task = asyncio.create_task(self._read(target, reader), name=f"events {target}")
            task.add_done_callback(_report)
            self.readings[target] = Reading(source, reader, task)

    async def _read(self, target: str, reader: EventReader) -> None:
        await self._started.wait()
        if self._state.status["kind"] != "memory":
            await restore(self._state, self.lookups.index(target), reader)
        await reader.run()

    def _indexes(self) -> dict[str, tuple[NamedIndex, EventReader]]:
        return {
            name: (self.lookups.index(name), reading.reader)
            for name, reading in self.readings.items()
        }

    def start(self) -> None:
        """The shared state is there: read events, and keep in it what targets hold."""
        self._started.set()
        if self._state.status["kind"] != "memory":
            self._saving = asyncio.create_task(self.saver.run(), name="snapshots")
            self._saving.add_done_callback(_report)

    def _learn_size(self, said: int | None) -> None:
        """A worker with events hashes blocks of so many tokens."""
        if self._set is not None or said is None or (self._said and not said % self.hash_tokens):
            return
        size = gcd(self.hash_tokens, said) if self._said else said
        if size < SMALLEST_HASH_TOKENS:
            log.warning(
                "a worker's blocks have %d tokens, others' %d: little of it will be seen as "
                "resident; give all workers one block size, or --hash-block-tokens",
                said,
                self.hash_tokens,
            )
            return
        self._said = True
        if size == self.hash_tokens:
            return
        targets = dict(self._targets)
        for target in targets:
            self.drop(target)
        self._build(size)
        self._targets = targets
        for target in targets:
            self._join(target)

    def drop(self, target: str) -> None:
        """Nothing is known of the target any more."""
        self._targets.pop(target, None)
        reading = self.readings.pop(target, None)
        if reading is not None:
            reading.task.cancel()
        self.lookups.remove(target)

    def is_exact(self, target: str) -> bool:
        """Its events are read, none are missing, and they tell everything."""
        reading = self.readings.get(target)
        return (
            reading is not None
            and self.lookups.exactness(target).exact
            and bool(reading.reader.status["connected"])
            and self.lookups.index(target).is_trusted(target)
        )

    def how(self, target: str) -> dict[str, str]:
        """Where answers about a target come from."""
        found = self.lookups.exactness(target)
        return {"full": found.full, "windows": found.windows}

    def blocks_of(self, target: str) -> int:
        """Pairs of block and group that the target has."""
        return self.lookups.index(target).blocks_of(target)

    def is_trusted(self, target: str) -> bool:
        """False while events of the target are missing."""
        return self.lookups.index(target).is_trusted(target)

    async def close(self) -> None:
        """Read no more."""
        tasks = [reading.task for reading in self.readings.values()]
        tasks += [self._saving] if self._saving is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Prompts

    def hashes(self, prompt: Prompt) -> Sequence[Hash]:
        """Of the prompt's whole blocks; none where its tokens are not known."""
        return self.hasher.hashes(prompt) if prompt.token_ids else ()

    def align(self) -> None:
        """Groups were heard of: what is on its way will hit at multiples of their blocks too."""
        aligned = lcm(self.hash_tokens, *(i.alignment_tokens for i in self._exact.values()))
        if aligned != self._aligned:
            self._aligned = aligned
            self.reservations.align(aligned, self.hash_tokens)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("reading %s failed", task.get_name(), exc_info=task.exception())
