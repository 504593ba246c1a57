# SPDX-License-Identifier: Apache-2.0
"""The workload: chats, tool loops, forks and regenerations over shared system prompts.

A session is a generator that yields the next request and receives the tokens of its answer, so
that every later prompt continues what the server really said. Everything else (messages, lengths,
who forks when, the order in which sessions take turns) depends on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, replace

from tools.run.text import ChatText

KINDS = ("first turn", "chat", "fork", "regenerate", "tool loop")


@dataclass(frozen=True)
class Turn:
    """One request: prompt token ids, length of the answer in tokens, and what it stands for."""

    prompt: list[int]
    answer_tokens: int
    kind: str


Session = Generator[Turn, list[int], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many sessions there are, and the ranges (in tokens) their lengths are drawn from."""

    seed: int = 0
    chats: int = 24
    chat_turns: int = 6
    agents: int = 6
    agent_steps: int = 12
    systems: int = 3
    system_tokens: int = 3000
    message_tokens: tuple[int, int] = (60, 400)
    answer_tokens: tuple[int, int] = (150, 900)
    tool_tokens: tuple[int, int] = (300, 1500)
    tool_answer_tokens: tuple[int, int] = (60, 250)
    fork_share: float = 0.15
    regenerate_share: float = 0.1

    def scaled(self, factor: float) -> Shape:
        """The same traffic with all lengths in tokens multiplied by ``factor``."""

        def scale(pair: tuple[int, int]) -> tuple[int, int]:
            return max(1, round(pair[0] * factor)), max(1, round(pair[1] * factor))

        return replace(
            self,
            system_tokens=max(1, round(self.system_tokens * factor)),
            message_tokens=scale(self.message_tokens),
            answer_tokens=scale(self.answer_tokens),
            tool_tokens=scale(self.tool_tokens),
            tool_answer_tokens=scale(self.tool_answer_tokens),
        )

    def quick(self) -> Shape:
        """A quarter of the sessions."""
        return replace(
            self,
            chats=max(2, self.chats // 4),
            agents=max(1, self.agents // 4),
            chat_turns=max(2, self.chat_turns - 1),
            agent_steps=max(2, self.agent_steps // 2),
        )


def build_sessions(shape: Shape, text: ChatText) -> list[Session]:
    """All sessions of ``shape``, chats first; nothing runs until they are advanced."""
    rng = random.Random(f"{shape.seed}:systems")
    systems = [
        text.message("system", text.prose(rng, shape.system_tokens + 37 * i))
        for i in range(shape.systems)
    ]
    agent_system = text.message("system", text.prose(rng, 2 * shape.system_tokens))
    chats = [_chat(shape, text, i, systems[i % shape.systems]) for i in range(shape.chats)]
    agents = [_tool_loop(shape, text, i, agent_system) for i in range(shape.agents)]
    return [*chats, *agents]


def _chat(shape: Shape, text: ChatText, number: int, system: list[int]) -> Session:
    """A chat that now and then edits an earlier message or asks for another answer."""
    rng = random.Random(f"{shape.seed}:chat:{number}")
    context = list(system)
    starts: list[list[int]] = []
    for turn in range(shape.chat_turns):
        kind = "chat" if turn else "first turn"
        if starts and rng.random() < shape.fork_share:
            context = list(starts[rng.randrange(len(starts))])
            kind = "fork"
        starts.append(list(context))
        content = text.prose(rng, rng.randint(*shape.message_tokens))
        prompt = [*context, *text.message("user", content), *text.open_message("assistant")]
        answer = yield Turn(prompt, rng.randint(*shape.answer_tokens), kind)
        if rng.random() < shape.regenerate_share:
            answer = yield Turn(prompt, rng.randint(*shape.answer_tokens), "regenerate")
        context = [*prompt, *answer, *text.close_message()]


def _tool_loop(shape: Shape, text: ChatText, number: int, system: list[int]) -> Session:
    """An agent that calls a tool at each step and reads a longer result."""
    rng = random.Random(f"{shape.seed}:agent:{number}")
    task = text.prose(rng, rng.randint(*shape.message_tokens))
    prompt = [*system, *text.message("user", task), *text.open_message("assistant")]
    for step in range(shape.agent_steps):
        kind = "tool loop" if step else "first turn"
        answer = yield Turn(prompt, rng.randint(*shape.tool_answer_tokens), kind)
        result = text.prose(rng, rng.randint(*shape.tool_tokens))
        prompt = [
            *prompt,
            *answer,
            *text.close_message(),
            *text.message("tool", result),
            *text.open_message("assistant"),
        ]


def lengths(shape: Shape, text: ChatText) -> list[int]:
    """Number of requests of each session (it does not depend on the answers)."""
    counts = []
    for session in build_sessions(shape, text):
        count = 0
        try:
            turn = next(session)
            while True:
                count += 1
                turn = session.send([0] * turn.answer_tokens)
        except StopIteration:
            counts.append(count)
    return counts


def turn_order(counts: list[int], seed: int, spacing: int) -> list[int]:
    """Which session takes each turn: random, but ``spacing`` turns apart where that is possible."""
    rng = random.Random(f"{seed}:order")
    left = dict(enumerate(counts))
    order: list[int] = []
    while any(left.values()):
        recent = set(order[-spacing:]) if spacing > 0 else set()
        waiting = [i for i, n in left.items() if n]
        chosen = rng.choice([i for i in waiting if i not in recent] or waiting)
        left[chosen] -= 1
        order.append(chosen)
    return order
