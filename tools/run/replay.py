# SPDX-License-Identifier: Apache-2.0
"""Closed-loop client: plays the sessions of a workload against one server and records each answer.

Requests start in the workload's order with a fixed number in flight; a session's next request
starts when its previous answer is complete. Both servers are therefore asked in the same order.
"""

from __future__ import annotations

import hashlib
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from tools.run.workload import Session, Turn
from tools.server import ServerError, VllmServer

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Record:
    """What one request asked and got. Times in seconds, lengths in tokens."""

    session: int
    turn: int
    kind: str
    prompt_hash: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    duration_s: float
    answer: list[int] = field(repr=False)
    prompt: list[int] = field(repr=False)

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were not taken from the cache."""
        return self.prompt_tokens - self.cached_tokens


def hash_tokens(ids: Iterable[int]) -> str:
    """Short content hash of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:16]


def ask(server: VllmServer, session: int, number: int, turn: Turn) -> Record:
    """Send one greedy completion request as token ids and time its stream."""
    body = {
        "prompt": turn.prompt,
        "max_tokens": turn.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    answer: list[int] = []
    usage: dict[str, Any] | None = None
    started = time.perf_counter()
    first = 0.0
    for chunk in server.stream("/v1/completions", body, timeout_s=REQUEST_TIMEOUT_S):
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ids and not answer:
                first = time.perf_counter()
            answer += ids
        usage = chunk.get("usage") or usage
    finished = time.perf_counter()
    if usage is None or len(answer) != turn.answer_tokens:
        raise ServerError(
            f"{server.name}: session {session} turn {number}: {len(answer)} answer tokens instead "
            f"of {turn.answer_tokens}, usage {usage}"
        )
    details = usage.get("prompt_tokens_details")
    if usage["prompt_tokens"] != len(turn.prompt) or details is None:
        raise ServerError(
            f"{server.name}: usage {usage} does not fit a prompt of {len(turn.prompt)} tokens; "
            "the server must run with --enable-prompt-tokens-details"
        )
    return Record(
        session=session,
        turn=number,
        kind=turn.kind,
        prompt_hash=hash_tokens(turn.prompt),
        prompt_tokens=len(turn.prompt),
        cached_tokens=details.get("cached_tokens") or 0,
        ttft_s=first - started,
        duration_s=finished - started,
        answer=answer,
        prompt=turn.prompt,
    )


def warm_up(server: VllmServer, tokens: Sequence[int]) -> None:
    """Run a few short requests so that first-use costs fall on no measured request."""
    for length in (1, len(tokens) // 2, len(tokens)):
        ask(server, -1, 0, Turn(list(tokens[:length]), 8, "warm-up"))


def replay(
    server: VllmServer,
    sessions: Sequence[Session],
    order: Sequence[int],
    concurrency: int,
    label: str,
) -> list[Record]:
    """Play ``order`` (session numbers) with ``concurrency`` requests in flight.

    Returns one record per request in the order of submission. Raises ServerError when a request
    fails; nothing is retried.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    futures: list[Future[Record]] = []
    last: dict[int, Future[Record]] = {}
    running: set[Future[Record]] = set()
    turns = dict.fromkeys(range(len(sessions)), 0)
    interactive = sys.stderr.isatty()
    bar = tqdm(
        total=len(order),
        desc=label,
        unit="request",
        mininterval=0.2 if interactive else 10.0,
        ascii=not interactive,
    )
    prompt = cached = 0

    def settle(allowed: int) -> None:
        """Wait until at most ``allowed`` requests are in flight."""
        nonlocal running, prompt, cached
        while len(running) > allowed:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for record in (future.result() for future in done):
                prompt += record.prompt_tokens
                cached += record.cached_tokens
                bar.set_postfix_str(f"cached {cached / prompt:.1%}", refresh=False)
                bar.update()

    with bar, ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            for number in order:
                previous = last.get(number)
                turn = (
                    next(sessions[number])
                    if previous is None
                    else sessions[number].send(previous.result().answer)
                )
                settle(concurrency - 1)
                last[number] = pool.submit(ask, server, number, turns[number], turn)
                turns[number] += 1
                running.add(last[number])
                futures.append(last[number])
            settle(0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            server.stop()
            raise
    return [future.result() for future in futures]
