# SPDX-License-Identifier: Apache-2.0
"""What the SGLang tests ask of a server: the same requests for stock and plugin."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tools.server import SglangServer

MESSAGE_START = 1
FIRST_TOKEN, LAST_TOKEN = 300, 1000
#: prefix lengths that are tried after one long prompt
LONG_PREFIXES = (200, 500, 640, 900, 1300, 1800)


@dataclass(frozen=True)
class Reply:
    """Tokens and their log probabilities, and how many prompt tokens were reused."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


@dataclass
class Record:
    """Everything one server answered."""

    cold: dict[str, Reply] = field(default_factory=dict)
    warm: dict[str, Reply] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    batch_again: list[int] = field(default_factory=list)
    chat: list[Reply] = field(default_factory=list)
    chat_cold: Reply | None = None
    long: dict[int, int] = field(default_factory=dict)
    pressed: list[Reply] = field(default_factory=list)
    cached_total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    log: str = ""
    alive: bool = False


def tokens(seed: int, count: int) -> list[int]:
    """``count`` random token ids that open no message."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


class Player:
    """Plays the script on one server."""

    def __init__(self, server: SglangServer) -> None:
        self.server = server
        self.record = Record()

    def _generate(self, prompts: Any, count: int) -> Any:
        return self.server.post(
            "/generate",
            {
                "input_ids": prompts,
                "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
                "return_logprob": True,
            },
        )

    def _reply(self, prompt: list[int], answer: Any) -> Reply:
        meta = answer["meta_info"]
        self.record.cached_total += meta["cached_tokens"]
        return Reply(
            tuple(prompt),
            tuple(answer["output_ids"]),
            tuple(pair[0] for pair in meta["output_token_logprobs"]),
            meta["cached_tokens"],
        )

    def ask(self, prompt: list[int], count: int = 4) -> Reply:
        """One request."""
        return self._reply(prompt, self._generate(prompt, count))

    def ask_batch(self, prompts: list[list[int]]) -> list[int]:
        """Requests that arrive together; their hits."""
        answers = self._generate(prompts, 2)
        pairs = zip(prompts, answers, strict=True)
        return [self._reply(prompt, answer).cached for prompt, answer in pairs]

    def play(self) -> Record:
        """Everything but pressure."""
        record, server = self.record, self.server
        base = tokens(1, 700)
        prompts = {
            "shared_300": base[:300] + tokens(9, 60),
            "shared_600": base[:600] + tokens(10, 60),
        }
        for name, prompt in prompts.items():
            record.cold[name] = self.ask(prompt)
            server.flush()
        self.ask(base)
        for name, prompt in prompts.items():
            record.warm[name] = self.ask(prompt)

        server.flush()
        self.ask(base)
        shared = [base[:400] + tokens(40 + i, 50) for i in range(4)]
        record.batch = self.ask_batch(shared)
        record.batch_again = self.ask_batch([base[:400] + tokens(50 + i, 50) for i in range(4)])

        server.flush()
        chat = [MESSAGE_START, *tokens(3, 209)]
        for turn in range(4):
            reply = self.ask(chat, 140 + 20 * turn)
            record.chat.append(reply)
            chat = [*reply.tokens, MESSAGE_START, *tokens(60 + turn, 39)]
        server.flush()
        record.chat_cold = self.ask(list(record.chat[-1].prompt), len(record.chat[-1].output))

        server.flush()
        long = tokens(5, 1900)
        self.ask(long, 2)
        for length in LONG_PREFIXES:
            record.long[length] = self.ask([*long[:length], *tokens(length, 30)], 1).cached
        return record

    def press(self, chats: int = 4, turns: int = 6) -> None:
        """Concurrent chats on one system prompt, in pools that don't hold them all."""
        rng = random.Random(5)
        system = [MESSAGE_START, *tokens(77, 300)]
        contexts = [[*system, MESSAGE_START, *tokens(100 + i, 60)] for i in range(chats)]
        floods = [[MESSAGE_START, *tokens(500 + i, 500)] for i in range(turns)]

        def turn(index: int) -> tuple[int, Any, list[int]]:
            prompt = contexts[index] if index < chats else floods[index - chats]
            return index, self._generate(prompt, 40 + 9 * (index % chats)), prompt

        self.server.flush()
        with ThreadPoolExecutor(chats) as pool:
            for round_ in range(turns):
                order = [*rng.sample(range(chats), chats), chats + round_]
                for index, answer, prompt in pool.map(turn, order):
                    reply = self._reply(prompt, answer)
                    self.record.pressed.append(reply)
                    if index < chats:
                        more = tokens(1000 * round_ + index, 30)
                        contexts[index] = [*reply.tokens, MESSAGE_START, *more]

    def finish(self) -> Record:
        """What the server says of itself in the end."""
        record, server = self.record, self.server
        for name in (
            "sglang:num_retracted_requests_total",
            "mimo:window_safe_hit_tokens_total",
            "mimo:full_hit_tokens_total",
            "mimo:trimmed_tokens_total",
            "mimo:evicted_blocks_total",
            "mimo:checkpoints_created_total",
        ):
            record.metrics[name] = server.metric(name) or 0.0
        # Checked while idle: leaks, double frees and the tree itself end the process.
        server.flush()
        record.alive = server.alive()
        record.log = server.log_text()
        return record
