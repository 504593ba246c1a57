# SPDX-License-Identifier: Apache-2.0
"""What the router benchmark asks: agents that share system prompts, chats that grow, and forks.

A seed makes one plan. Sessions arrive as a Poisson process; each sends its next turn some time
after the answer to the last one, with that answer in it. After some turns one or two sub-agents
go on from a copy of the chat. The plan says when and what, not where: every router gets the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.router_peers import session_headers

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One question: seconds after the answer before it, and tokens of the answer."""

    after_s: float
    text: str
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """One chat.

    Attributes:
        name: unique.
        start_s: when it comes; of a fork, after its parent's answer.
        system: its system prompt; of a fork, empty.
        turns: its questions.
        forks: sub-agents by the number of the turn whose answer they start behind.
    """

    name: str
    start_s: float
    system: str
    turns: tuple[Turn, ...]
    forks: Mapping[int, tuple[Session, ...]] = field(default_factory=dict)

    def all(self) -> Iterator[Session]:
        """It and its forks."""
        yield self
        for forks in self.forks.values():
            for fork in forks:
                yield from fork.all()


@dataclass(frozen=True)
class Sizes:
    """How much is asked. Words of the plan are about two tokens of the tiny model each."""

    sessions: int = 44
    kinds: int = 4
    gap_s: float = 0.9
    think_s: float = 1.5
    system_words: tuple[int, int] = (200, 450)
    user_words: tuple[int, int] = (15, 120)
    output_tokens: tuple[int, int] = (8, 24)
    turns: tuple[int, int] = (2, 6)
    fork_share: float = 0.4


QUICK = Sizes(sessions=9, kinds=3, gap_s=0.5, think_s=0.4, turns=(2, 4))


def words(rnd: random.Random, count: int) -> str:
    """Made-up words, which no two prompts have in common by chance."""
    return " ".join(
        "".join(rnd.choice(CONSONANTS) + rnd.choice(VOWELS) for _ in range(2)) for _ in range(count)
    )


def plan(seed: int, sizes: Sizes) -> list[Session]:
    """The sessions of a seed, in the order that they come."""
    rnd = random.Random(seed)
    systems = [words(rnd, rnd.randint(*sizes.system_words)) for _ in range(sizes.kinds)]
    # Some kinds of agents are asked much more often than others.
    weights = [1 / (1 + rank) for rank in range(sizes.kinds)]
    found, now_s = [], 0.0

    def turns(least: int, most: int) -> tuple[Turn, ...]:
        return tuple(
            Turn(
                rnd.expovariate(1 / sizes.think_s),
                words(rnd, rnd.randint(*sizes.user_words)),
                rnd.randint(*sizes.output_tokens),
            )
            for _ in range(rnd.randint(least, most))
        )

    for number in range(sizes.sessions):
        now_s += rnd.expovariate(1 / sizes.gap_s)
        system = rnd.choices(systems, weights)[0]
        asked = turns(*sizes.turns)
        forks: dict[int, tuple[Session, ...]] = {}
        if rnd.random() < sizes.fork_share and len(asked) > 1:
            behind = rnd.randrange(len(asked) - 1)
            forks[behind] = tuple(
                Session(f"agent{number}.{child}", rnd.expovariate(2.0), "", turns(1, 3))
                for child in range(rnd.randint(1, 2))
            )
        found.append(Session(f"agent{number}", now_s, system, asked, forks))
    return found


@dataclass(frozen=True)
class Answer:
    """One request's end. Times in seconds; ``ttft_s`` is None where it failed, ``error`` why."""

    session: str
    sent_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    target: str | None = None
    reason: str | None = None
    predicted_tokens: int | None = None


class Replay:
    """Plays a plan against one address of the OpenAI API.

    Args:
        url: of the server.
        model: its name there.
    """

    def __init__(self, url: str, model: str) -> None:
        self.answers: list[Answer] = []
        self._url, self._model = url, model
        self._client: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_s = 0.0

    async def run(self, sessions: list[Session]) -> list[Answer]:
        """All answers, in the order of their ends."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._client:
            self._started_s = time.monotonic()
            for session in sessions:
                self._begin(session, [{"role": "system", "content": session.system}])
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                for task in done:
                    task.result()
        return self.answers

    def _begin(self, session: Session, messages: list[dict[str, str]]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._play(session, messages)))

    async def _play(self, session: Session, messages: list[dict[str, str]]) -> None:
        await asyncio.sleep(session.start_s)
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.after_s)
            messages.append({"role": "user", "content": turn.text})
            text = await self._ask(session.name, messages, turn.output_tokens)
            if text is None:
                return
            messages.append({"role": "assistant", "content": text})
            for fork in session.forks.get(number, ()):
                self._begin(fork, list(messages))

    async def _ask(
        self, session: str, messages: list[dict[str, str]], output_tokens: int
    ) -> str | None:
        """The answer's text, None where it failed; what happened goes to ``answers``."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        import aiohttp

        sent_s = time.monotonic()
        ttft_s: float | None = None
        error: str | None = None
        text: list[str] = []
        usage: dict[str, Any] = {}
        headers: Mapping[str, str] = {}
        try:
            async with self._client.post(
                f"{self._url}/v1/chat/completions", json=body, headers=session_headers(session)
            ) as response:
                headers = response.headers
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:200]}"
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    chunk = json.loads(line[len(b"data: ") :])
                    if "error" in chunk:
                        error = str(chunk["error"])[:200]
                        break
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", ()):
                        said = choice["delta"].get("content")
                        if said:
                            ttft_s = ttft_s or time.monotonic() - sent_s
                            text.append(said)
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:200]
        if error is None and not usage:
            error = "the stream ended early"
        details = usage.get("prompt_tokens_details") or {}
        predicted = headers.get("X-Mimo-Predicted-Hit")
        self.answers.append(
            Answer(
                session,
                sent_s - self._started_s,
                ttft_s,
                int(usage.get("prompt_tokens") or 0),
                int(details.get("cached_tokens") or 0),
                error,
                headers.get("X-Mimo-Worker"),
                headers.get("X-Mimo-Reason"),
                None if predicted is None else int(predicted),
            )
        )
        return None if error else "".join(text)


def replay(url: str, model: str, sessions: list[Session]) -> list[Answer]:
    """See :class:`Replay`."""
    return asyncio.run(Replay(url, model).run(sessions))
