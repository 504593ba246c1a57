# SPDX-License-Identifier: Apache-2.0
"""Requests to a running server, and what a prefix cache could at best have given each of them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from tools.server import VllmServer

MESSAGE_START = 1
FIRST_TOKEN, LAST_TOKEN = 300, 1000


GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Answer:
    """One request's tokens and how many of its prompt tokens were reused."""

    prompt: list[int]
    output: list[int]
    cached: int

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


def tokens(rng: random.Random, count: int) -> list[int]:
    """``count`` random token ids that open no message."""
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def message(rng: random.Random, count: int) -> list[int]:
    """One chat message of ``count`` tokens, its start included."""
    return [MESSAGE_START, *tokens(rng, count - 1)]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


@dataclass
class Client:
    """Talks to one server, one request at a time unless ``at_once`` is used."""

    server: VllmServer
    answers: list[Answer] = field(default_factory=list)

    def complete(self, prompt: Sequence[int], max_tokens: int = 16) -> Answer:
        """A completion of token ids, greedy, of exactly ``max_tokens`` tokens."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens}
        return self._post("/v1/completions", body, list(prompt))

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 16) -> tuple[Answer, str]:
        """A chat completion; also the assistant's text."""
        body = {"messages": messages, "max_tokens": max_tokens}
        answer = self._post("/v1/chat/completions", body, None)
        return answer, self._last_text

    def _post(self, path: str, body: dict[str, Any], prompt: list[int] | None) -> Answer:
        reply = self.server.post(path, {**body, **GREEDY})
        choice = reply["choices"][0]
        details = reply["usage"]["prompt_tokens_details"] or {}
        answer = Answer(
            prompt if prompt is not None else reply["prompt_token_ids"],
            choice["token_ids"],
            details.get("cached_tokens") or 0,
        )
        assert reply["usage"]["prompt_tokens"] == len(answer.prompt)
        self._last_text = choice["message"]["content"] if "message" in choice else choice["text"]
        self.answers.append(answer)
        return answer

    def at_once(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """Completions of all ``prompts`` in flight together, answers in their order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def in_one_request(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[Sequence[int]]:
        """Tokens of greedy completions of all ``prompts``, sent as one request."""
        body = {"prompt": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        choices = self.server.post("/v1/completions", {**body, **GREEDY})["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]

    def reset_prefix_cache(self) -> None:
        """Drop the whole prefix cache (needs the development endpoints)."""
        connection, response = self.server._open("POST", "/reset_prefix_cache", {}, 60.0)
        response.read()
        connection.close()

    def idle(self, timeout_s: float = 60.0) -> None:
        """Wait until the server has nothing to do."""
        deadline = time.monotonic() + timeout_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while any(self.server.metric(name) for name in names):
            assert time.monotonic() < deadline, "the server never got idle"
            time.sleep(0.1)


def alignment_tokens(server: VllmServer) -> int:
    """Unit of a hit: the least common multiple of the block sizes, as the engine logged it."""
    found = re.search(r"kv lcm block sizes (\d+)", server.log_text())
    assert found, "the engine no longer logs its block sizes"
    return int(found[1])


class Oracle:
    """Longest reuse that the answers so far allow, if nothing were ever evicted."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self._known: list[list[int]] = []

    def align(self, count: int) -> int:
        """The hit boundary at or below ``count`` tokens."""
        return count // self.alignment * self.alignment

    def best(self, prompt: Sequence[int]) -> int:
        """Tokens of ``prompt`` that could come from the cache."""
        longest = max((common_prefix(prompt, known) for known in self._known), default=0)
        return self.align(min(longest, len(prompt) - 1))

    def learn(self, answer: Answer) -> None:
        """Remember what ``answer`` computed: all but its last token."""
        self._known.append(answer.tokens[:-1])


class KvEvents:
    """Subscriber to a server's KV events that keeps the cache's contents by them alone.

    Every fault in the stream is noted in ``faults``: a lost batch, a block that is removed but was
    never stored, or an event without its group.
    """

    def __init__(self, endpoint: str) -> None:
        self.copies: Counter[tuple[int, bytes]] = Counter()
        self.stored = self.removed = self.cleared = 0
        self.faults: list[str] = []
        self._next = 0
        self.endpoint = endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> KvEvents:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.subscribe("")
            socket.connect(self.endpoint)
            while not self._stop.is_set():
                if socket.poll(100):
                    _, sequence, payload = socket.recv_multipart()
                    self._batch(int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload))

    def _batch(self, sequence: int, batch: list[Any]) -> None:
        if sequence != self._next:
            self.faults.append(f"batch {sequence} came where {self._next} was due")
        self._next = sequence + 1
        for event in batch[1]:
            self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.cleared += 1
            self.copies.clear()
            return
        if event.get("group_idx") is None:
            self.faults.append(f"{kind} without group_idx")
            return
        for block_hash in event["block_hashes"]:
            key = (event["group_idx"], block_hash)
            if kind == "BlockStored":
                self.stored += 1
                self.copies[key] += 1
            elif self.copies[key] > 0:
                self.removed += 1
                self.copies[key] -= 1
            else:
                self.faults.append(f"removed, but not stored: {key}")

    def settle(self) -> None:
        """Wait until nothing arrives any more."""
        before = -1
        while before != self._next:
            before = self._next
            time.sleep(0.5)

    @property
    def live_blocks(self) -> int:
        """Cached blocks by the events."""
        return sum(self.copies.values())


class GaugeWatch:
    """Polls ``mimo:cached_blocks`` while requests run; keeps the lowest sample and highest sum."""

    def __init__(self, server: VllmServer, interval_s: float = 0.1) -> None:
        self.lowest = 0.0
        self.highest_sum = 0.0
        self.samples = 0
        self._server, self._interval_s = server, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GaugeWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            values = [value for _, value in self._server.metrics().get("mimo:cached_blocks", [])]
            if values:
                self.samples += 1
                self.lowest = min(self.lowest, *values)
                self.highest_sum = max(self.highest_sum, sum(values))
