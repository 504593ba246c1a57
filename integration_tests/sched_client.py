# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in a known order, and what the engine's log says became of them.

A line of waiting requests must not depend on how fast a machine is. So the engine is paused (a
development endpoint), requests are sent one after the other, each as soon as the log names the one
before it as added, and only then the engine resumes. Servers need ``VLLM_SERVER_DEV_MODE=1`` and
``--enable-log-requests``; :meth:`LineClient.starts` needs ``VLLM_LOGGING_LEVEL=DEBUG`` as well.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tools.server import VllmServer

REQUEST = r"cmpl-(\S+)-0-[0-9a-f]{8}"
START = re.compile(
    rf"mimo scheduler: start {REQUEST} \((\w+)\): waited ([\d.]+) s, hit (\d+) of (\d+) tokens"
)
PATIENCE_S = 60.0
"""How long to wait for what must happen; only a broken engine takes that long."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One completion request; ``name`` is unique on its server."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 8
    priority: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Greedy, exactly ``max_tokens`` long unless ``more`` says otherwise."""
        body = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": self.name,
            **self.more,
        }
        return {**body, "priority": self.priority} if self.priority else body


@dataclass(frozen=True)
class Reply:
    """What a request got."""

    output: list[int]
    text: str
    cached: int
    prompt_tokens: int

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached


@dataclass(frozen=True)
class Start:
    """A debug line of the plugin: a request leaves the line, and why it was its turn."""

    name: str
    reason: str
    waited_s: float
    hit: int
    tokens: int


class LineClient:
    """Talks to one server; knows its log."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.sent = 0

    # -- requests ----------------------------------------------------------------------------

    def ask(self, job: Job) -> Reply:
        """Send a request and wait for its answer."""
        self.sent += 1
        reply = self.server.post("/v1/completions", job.body())
        choice, usage = reply["choices"][0], reply["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Reply(choice["token_ids"], choice["text"], cached, usage["prompt_tokens"])

    @contextlib.contextmanager
    def line(self, jobs: Sequence[Job]) -> Iterator[dict[str, Future[Reply]]]:
        """Inside: the engine is paused, ``jobs`` wait in this order. After: all are answered."""
        with ThreadPoolExecutor(len(jobs)) as pool:
            self.pause()
            try:
                futures: dict[str, Future[Reply]] = {}
                for job in jobs:
                    mark = self.mark()
                    futures[job.name] = pool.submit(self.ask, job)
                    self.until(rf"Added request cmpl-{re.escape(job.name)}-0-", mark)
                yield futures
            finally:
                self.resume()
            for future in futures.values():
                future.result(timeout=PATIENCE_S)

    def run(self, jobs: Sequence[Job]) -> dict[str, Reply]:
        """Answers of ``jobs`` that waited in this order when the engine began with them."""
        with self.line(jobs) as futures:
            pass
        return {name: future.result() for name, future in futures.items()}

    def send_and_hold(self, job: Job) -> http.client.HTTPConnection:
        """Send a request and return its connection; closing that is the client's leaving."""
        self.sent += 1
        mark = self.mark()
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        body = json.dumps({"model": self.server.model, **job.body()})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        self.until(rf"Added request cmpl-{re.escape(job.name)}-0-", mark)
        return connection

    def leave(self, name: str, connection: http.client.HTTPConnection) -> None:
        """Close the connection of request ``name`` and wait until the server has noticed."""
        mark = self.mark()
        connection.close()
        self.until(rf"Request cmpl-{re.escape(name)}-0\S* aborted", mark)

    # -- the engine --------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop after the step at hand; requests and cache stay as they are."""
        assert self.server.post("/pause?mode=keep&clear_cache=false", {}) == {"status": "paused"}

    def resume(self) -> None:
        """Go on."""
        assert self.server.post("/resume", {}) == {"status": "resumed"}

    def reset_prefix_cache(self) -> None:
        """Drop the whole prefix cache."""
        assert self.server.post("/reset_prefix_cache", {}) == {"success": True}

    def idle(self) -> None:
        """Wait until the metrics show no request."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        self._poll("an idle server", lambda: not any(self.server.metric(name) for name in names))

    def counts(self, name: str, label: str) -> dict[str, float]:
        """A counter's values by one of its labels."""
        return {labels[label]: value for labels, value in self.server.metrics().get(name, [])}

    # -- the log -----------------------------------------------------------------------------

    def mark(self) -> int:
        """Where the log ends now, in bytes."""
        return self.server.log.stat().st_size

    def since(self, mark: int) -> str:
        """What was logged after ``mark``."""
        with open(self.server.log, "rb") as log:
            log.seek(mark)
            return log.read().decode(errors="replace")

    def until(self, pattern: str, mark: int) -> None:
        """Wait for a line of the log."""
        found = re.compile(pattern)
        self._poll(f"log line {pattern}", lambda: found.search(self.since(mark)) is not None)

    def starts(self, mark: int) -> list[Start]:
        """Requests that left the line after ``mark``, in order."""
        return [
            Start(name, reason, float(waited), int(hit), int(tokens))
            for name, reason, waited, hit, tokens in START.findall(self.since(mark))
        ]

    def _poll(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self.server.alive(), f"the server ended while waiting for {what}"
            assert time.monotonic() < deadline, f"never saw {what}"
            time.sleep(0.005)
