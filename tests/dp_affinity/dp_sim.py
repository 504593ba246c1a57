# SPDX-License-Identifier: Apache-2.0
"""Chats on data-parallel ranks without a model: several API processes, counts that lag.

Each process runs vLLM's balancer, stock or with the hook. A rank prefills one prompt after the
other and decodes all of them at once; it keeps every prefix that it computed. The coordinator's
counts reach all processes every 100 ms, as in vLLM. Virtual time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.dp_affinity import clients

PREFILL_TOKENS_PER_S = 20_000.0
DECODE_TOKEN_S = 0.02
PUBLISH_S = 0.1


@dataclass
class Result:
    """What a run gave.

    Attributes:
        hit_tokens: prompt tokens that the chosen rank had.
        best_tokens: those that a rank with everything would have had.
        requests: of each rank.
        ranks: that each chat used, in order of its turns.
        ttft_s: from arrival to the first token, of every request.
        prefill_tokens: computed.
    """

    hit_tokens: int = 0
    best_tokens: int = 0
    requests: Counter[int] = field(default_factory=Counter)
    ranks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ttft_s: list[float] = field(default_factory=list)
    prefill_tokens: int = 0

    @property
    def hit_share(self) -> float:
        """Part of the possible hits."""
        return self.hit_tokens / self.best_tokens

    def max_over_mean(self, num_ranks: int) -> float:
        """Requests of the busiest rank, relative to the mean."""
        return max(self.requests.values()) * num_ranks / sum(self.requests.values())

    @property
    def stayed(self) -> float:
        """Part of the turns after the first that went to the rank of the turn before."""
        pairs = [p for ranks in self.ranks.values() for p in itertools.pairwise(ranks)]
        return sum(a == b for a, b in pairs) / len(pairs)


class _Rank:
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.prefilling: Any = None
        self.decoding = 0
        self.has: dict[int, int] = {}
        self.head_tokens = 0


def run(
    *,
    affinity: bool,
    num_ranks: int,
    num_processes: int,
    chats: int,
    turns: int,
    head_tokens: int,
    arrivals_per_s: float,
    think_s: float,
    question_tokens: int = 200,
    answer_tokens: int = 100,
    raw: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Result:
    """Play chats that share a head; each turn goes to a process by chance, as connections do.

    Args:
        raw: prompts without marks of messages.
    """
    rng = random.Random(seed)
    clock = [0.0]
    processes = [
        clients.client(
            num_ranks,
            affinity=affinity,
            client_count=num_processes,
            client_index=index,
            clock=lambda: clock[0],
            **settings,
        )
        for index in range(num_processes)
    ]
    ranks = [_Rank() for _ in range(num_ranks)]
    head = clients.system(head_tokens)
    if raw:
        head = [token + 10 for token in head]
    result = Result()
    events: list[tuple[float, int, str, Any]] = []
    number = itertools.count()

    def at(time_s: float, what: str, data: Any = None) -> None:
        heapq.heappush(events, (time_s, next(number), what, data))

    start_s = 0.0
    for chat in range(chats):
        start_s += rng.expovariate(arrivals_per_s)
        at(start_s, "turn", (seed * 1009 + chat, 0, list(head)))
    at(PUBLISH_S, "publish")
    left = chats * turns

    def step(rank: _Rank) -> None:
        if rank.prefilling is None and rank.waiting:
            job = rank.prefilling = rank.waiting.pop(0)
            chat, prompt = job["chat"], job["prompt"]
            hit = max(rank.has.get(chat, 0), min(rank.head_tokens, len(head)))
            best = max((r.has.get(chat, 0) for r in ranks), default=0)
            result.hit_tokens += hit
            result.best_tokens += max(best, min(max(r.head_tokens for r in ranks), len(head)))
            result.prefill_tokens += len(prompt) - hit
            at(clock[0] + (len(prompt) - hit) / PREFILL_TOKENS_PER_S, "first", (rank, job))

    while left:
        clock[0], _, what, data = heapq.heappop(events)
        if what == "publish":
            for process in processes:
                process.lb_engines = [
                    [len(r.waiting), r.decoding + (r.prefilling is not None), 0.2] for r in ranks
                ]
            at(clock[0] + PUBLISH_S, "publish")
        elif what == "turn":
            chat, turn, before = data
            asked = clients.question(chat, turn, question_tokens)
            prompt = [*before, *(token + 10 for token in asked)] if raw else [*before, *asked]
            process = rng.choice(processes)
            name = f"{chat}-{turn}"
            chosen = clients.send(process, clients.request(name, prompt))
            result.requests[chosen] += 1
            result.ranks[chat].append(chosen)
            job = {"chat": chat, "turn": turn, "prompt": prompt, "process": process}
            job |= {"name": name, "at_s": clock[0]}
            ranks[chosen].waiting.append(job)
            step(ranks[chosen])
        elif what == "first":
            rank, job = data
            result.ttft_s.append(clock[0] - job["at_s"])
            rank.prefilling = None
            rank.decoding += 1
            rank.head_tokens = len(head)
            rank.has[job["chat"]] = len(job["prompt"])
            at(clock[0] + answer_tokens * DECODE_TOKEN_S, "done", (rank, job))
            step(rank)
        else:
            rank, job = data
            rank.decoding -= 1
            left -= 1
            process = job["process"]
            engine = process.reqs_in_flight.pop(job["name"])
            process.engine_inflight[engine] -= 1
            said = [*job["prompt"], *clients.answer(job["chat"], job["turn"], answer_tokens)]
            rank.has[job["chat"]] = len(said)
            if job["turn"] + 1 < turns:
                pause_s = think_s * rng.uniform(0.5, 1.5)
                at(clock[0] + pause_s, "turn", (job["chat"], job["turn"] + 1, said))
    return result
