# SPDX-License-Identifier: Apache-2.0
"""Request sequences for the model-free benchmarks.

A session is a generator: it yields ``(prompt token ids, number of output tokens)`` and is sent the
output token ids. Every message starts with :data:`MESSAGE_START`, as a chat template makes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MESSAGE_START = 1
FIRST_TOKEN, LAST_TOKEN = 2, 150_000

Session = Generator[tuple[list[int], int], list[int], None]


@dataclass(frozen=True)
class Mix:
    """Chats on shared system prompts with edits and regenerations, beside agent tool loops.

    Lengths are in tokens and uniform in the given range; ``fork`` is the chance that a turn goes
    back to before an earlier user message, ``regenerate`` that an answer is asked for again.
    """

    chats: int = 24
    agents: int = 6
    turns: int = 6
    steps: int = 12
    systems: int = 3
    system_tokens: int = 3000
    fork: float = 0.15
    regenerate: float = 0.1
    message_tokens: tuple[int, int] = (60, 400)
    output_tokens: tuple[int, int] = (150, 900)
    tool_tokens: tuple[int, int] = (300, 1500)
    tool_output_tokens: tuple[int, int] = (60, 250)


MIX = Mix()
#: contexts that grow to about 50 thousand tokens
LONG = Mix(chats=4, agents=8, steps=25, tool_tokens=(800, 3000))


def tokens(rng: random.Random, count: int) -> list[int]:
    """``count`` random token ids without the message start."""
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def message(rng: random.Random, count: int) -> list[int]:
    """One message of ``count`` tokens, its start included."""
    return [MESSAGE_START, *tokens(rng, count - 1)]


def sessions(mix: Mix, seed: int) -> list[Session]:
    """The sessions of one seed."""
    rng = random.Random(seed)
    systems = [message(rng, mix.system_tokens + 37 * i) for i in range(mix.systems)]
    agent_system = message(rng, mix.system_tokens * 2)

    def chat(index: int) -> Session:
        own = random.Random(seed * 1000 + index)
        context = list(systems[index % mix.systems])
        before_user: list[list[int]] = []
        for _ in range(mix.turns):
            if before_user and own.random() < mix.fork:
                context = list(before_user[own.randrange(len(before_user))])
            before_user.append(list(context))
            prompt = [*context, *message(own, own.randint(*mix.message_tokens)), MESSAGE_START]
            output = yield prompt, own.randint(*mix.output_tokens)
            if own.random() < mix.regenerate:
                output = yield prompt, own.randint(*mix.output_tokens)
            context = prompt + output

    def agent(index: int) -> Session:
        own = random.Random(seed * 1000 + 500 + index)
        context = [*agent_system, *message(own, own.randint(100, 500)), MESSAGE_START]
        for _ in range(mix.steps):
            output = yield context, own.randint(*mix.tool_output_tokens)
            tool = message(own, own.randint(*mix.tool_tokens))
            context = [*context, *output, *tool, MESSAGE_START]

    return [chat(i) for i in range(mix.chats)] + [agent(i) for i in range(mix.agents)]


@dataclass(frozen=True)
class TraceRequest:
    """One line of a Mooncake-style trace."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Requests of a JSON-lines trace with ``timestamp, input_length, output_length, hash_ids``."""
    with path.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            if limit is not None and index >= limit:
                return
            row = json.loads(line)
            yield TraceRequest(
                timestamp_ms=int(row["timestamp"]),
                input_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                block_ids=tuple(row["hash_ids"]),
            )


def trace_prompt(request: TraceRequest, block_tokens: int = 512) -> list[int]:
    """Token ids that repeat exactly where the trace's block ids repeat."""
    prompt: list[int] = []
    for block_id in request.block_ids:
        prompt.extend(tokens(random.Random(block_id), block_tokens))
    return prompt[: request.input_tokens]


def block_id_prompt(request: TraceRequest, block_tokens: int = 512) -> list[int]:
    """As :func:`trace_prompt` at no cost: every token of a block is the block's id."""
    prompt: list[int] = []
    for block_id in request.block_ids:
        prompt.extend([block_id] * block_tokens)
    return prompt[: request.input_tokens]


def unlimited_cache_uncached_tokens(
    requests: Sequence[TraceRequest], block_tokens: int = 512
) -> list[int]:
    """Tokens that each request would compute if nothing before it had ever been evicted."""
    seen: set[int] = set()
    out = []
    for request in requests:
        hit = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            hit += block_tokens
        out.append(request.input_tokens - min(hit, request.input_tokens - 1))
        seen.update(request.block_ids)
    return out


def prefix_groups(seed: int, requests: int, groups: int = 6) -> list[list[int]]:
    """Prompts of which 85 % start with one of a few shared prefixes; the rest stand alone.

    Prefixes have 1536 to 3072 tokens, what follows them 32 to 256, a lone prompt 256 to 3000.
    """
    rng = random.Random(seed)

    def text(count: int) -> list[int]:
        return [rng.randrange(2, 1000) for _ in range(count)]

    prefixes = [text(rng.choice([1536, 2048, 3072])) for _ in range(groups)]
    prompts = []
    for _ in range(requests):
        if rng.random() < 0.85:
            prefix = prefixes[rng.randrange(groups)]
            prompts.append(prefix + text(rng.choice([32, 64, 128, 256])))
        else:
            prompts.append(text(rng.choice([256, 1024, 3000])))
    return prompts
