# SPDX-License-Identifier: Apache-2.0
"""An index fed by a real engine's events, and requests whose hits it must foretell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mimo_plugin.core.block_hashes import PromptHasher
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.prompt import Prompt

UNIT = 16
FIRST_TOKEN, LAST_TOKEN = 300, 1000
MESSAGE_START = 1
SETTLE_S = 0.06
SETTLE_LIMIT_S = 10.0


def events_config(endpoint: str, replay: str | None) -> str:
    """The server's argument: publish to these addresses, given as one connects to them."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
    }
    if replay is not None:
        config["replay_endpoint"] = replay.replace("127.0.0.1", "*")
    return f"--kv-events-config={json.dumps(config)}"


class IndexThread:
    """A running loop with one index and the readers of some servers."""

    def __init__(self) -> None:
        self.index = NamedIndex(UNIT)
        self.hasher = PromptHasher(UNIT)
        self.readers: dict[str, EventReader] = {}
        self._tasks: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> IndexThread:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for target in list(self._tasks):
            self.forget(target)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def follow(self, target: str, endpoint: str, replay: str | None) -> EventReader:
        """Read a server's events from now on."""
        reader = EventReader(target, endpoint, replay, self.index, UNIT)
        self.readers[target] = reader

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(reader.run())

        begun = asyncio.run_coroutine_threadsafe(begin(), self._loop)
        self._tasks[target] = begun.result(10)
        return reader

    def forget(self, target: str) -> None:
        """Stop reading them."""
        task = self._tasks.pop(target)

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)

    def settle(self, target: str, quiet_s: float = SETTLE_S) -> None:
        """Wait until nothing has come for a moment (a request may have caused nothing at all)."""
        reader = self.readers[target]
        began = time.monotonic()
        while True:
            time.sleep(0.005)
            status, now_s = reader.status, time.monotonic()
            age_s = status["last_event_age_s"]
            still_s = now_s - began if age_s is None else min(now_s - began, age_s)
            if still_s > quiet_s and status["trusted"]:
                return
            assert now_s < began + SETTLE_LIMIT_S, status

    def predict(self, target: str, prompt: Sequence[int], salt: str | None = None) -> int:
        """The hit that the index foretells."""
        hashes = self.hasher.hashes(Prompt(prompt, len(prompt), salt=salt))
        asked = asyncio.run_coroutine_threadsafe(self._lookup(hashes, len(prompt) - 1), self._loop)
        return asked.result(10).get(target, 0)

    def full_prefix(self, target: str, prompt: Sequence[int]) -> int:
        """The same for full attention alone."""
        hashes = self.hasher.hashes(Prompt(prompt, len(prompt)))

        async def ask() -> dict[str, int]:
            return self.index.full_prefixes(hashes, len(prompt) - 1)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(10).get(target, 0)

    async def _lookup(self, hashes: list[int], max_hit_tokens: int) -> dict[str, int]:
        return self.index.lookup(hashes, max_hit_tokens)


@dataclass
class Traffic:
    """Chats that grow, forks, and prompts that share a beginning; the same for one seed."""

    seed: int
    longest: int = 1100
    rng: random.Random = field(init=False)
    chats: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.systems = [self.message(n) for n in (90, 260, 515)]

    def message(self, count: int) -> list[int]:
        """One chat message."""
        tokens = [self.rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count - 1)]
        return [MESSAGE_START, *tokens]

    def next(self) -> list[int]:
        """The next prompt."""
        rng, chats = self.rng, self.chats
        kind = rng.random()
        if chats and kind < 0.45:
            at = rng.randrange(len(chats))
            prompt = chats[at] + self.message(rng.randrange(4, 150))
        elif chats and kind < 0.65:
            old = rng.choice(chats)
            prompt = old[: rng.randrange(1, len(old))] + self.message(rng.randrange(4, 90))
        elif kind < 0.9:
            prompt = rng.choice(self.systems) + self.message(rng.randrange(4, 120))
        else:
            prompt = self.message(rng.randrange(8, 300))
        if len(prompt) > self.longest:
            prompt = self.message(rng.randrange(8, 300))
        return prompt

    def learn(self, tokens: list[int]) -> None:
        """A chat may go on from here."""
        self.chats.append(tokens)
        if len(self.chats) > 12:
            del self.chats[self.rng.randrange(6)]
