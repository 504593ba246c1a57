# SPDX-License-Identifier: Apache-2.0
"""Real ``mimo router`` processes before real ``vllm serve`` ones, sharing state in a real Redis.

Two workers that tell their KV events, two routers. What was asked through a router must be what the
worker itself answers; chats stay and hit as predicted; workers, Redis and routers are killed.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router_peers import RouterServer, session_headers
from benchmarks.router_replay import words
from benchmarks.router_workers import TinyWorker, tiny_workers
from benchmarks.tiers_services import Redis, redis_servers
from examples.cluster import router_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PATIENCE_S = 30.0
#: of a pool; a few chats fit, and what comes on top is evicted
BLOCKS = 180
CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    """An answer: its headers, chunks or whole body, and what ended it."""

    headers: dict[str, str]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(
            choice.get("delta", {}).get("content") or choice.get("text") or ""
            for chunk in self.chunks
            for choice in chunk["choices"]
        )

    @property
    def token_ids(self) -> list[int]:
        return [
            token
            for chunk in self.chunks
            for choice in chunk["choices"]
            for token in choice.get("token_ids") or ()
        ]

    @property
    def usage(self) -> dict[str, Any]:
        return next(chunk["usage"] for chunk in reversed(self.chunks) if chunk.get("usage"))

    @property
    def cached(self) -> int:
        return (self.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    @property
    def worker(self) -> str:
        return self.headers["X-Mimo-Worker"]

    @property
    def predicted(self) -> int:
        return int(self.headers["X-Mimo-Predicted-Hit"])


def stream(
    port: int,
    path: str,
    body: dict[str, Any],
    session: str = "",
    on_chunk: Callable[[Reply], None] = lambda reply: None,
) -> Reply:
    """A streamed, greedy request; it must end within ``PATIENCE_S`` after the last byte."""
    full = {
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    headers = {"Content-Type": "application/json", **(session_headers(session) if session else {})}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(full), headers)
        response = connection.getresponse()
        reply = Reply(dict(response.headers))
        if response.status != 200:
            raise AssertionError(f"HTTP {response.status}: {response.read()!r}")
        for line in response:
            data = line.strip()
            if data == b"data: [DONE]":
                reply.done = True
            elif data.startswith(b"data: "):
                chunk = json.loads(data[len(b"data: ") :])
                if "error" in chunk:
                    reply.error = chunk["error"]
                else:
                    reply.chunks.append(chunk)
                    on_chunk(reply)
        return reply
    finally:
        connection.close()


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200, (path, response.status)
        return json.loads(response.read())
    finally:
        connection.close()


def until(said: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not said():
        assert time.monotonic() < end_s, f"not within {patience_s} s: {what}"
        time.sleep(0.05)


class Cluster:
    """Workers, routers and Redis of the module."""

    def __init__(
        self, model: str, workers: list[TinyWorker], routers: list[RouterServer], redis: Redis
    ) -> None:
        self.model, self.workers, self.routers, self.redis = model, workers, routers, redis

    def worker(self, name: str) -> TinyWorker:
        """By its address."""
        return next(worker for worker in self.workers if worker.base_url == name)

    def ask(
        self,
        router: int,
        messages: list[dict[str, str]],
        session: str,
        output_tokens: int = 20,
        **options: Any,
    ) -> Reply:
        """A turn through a router, when both know what the workers have."""
        self.settle()
        body = {"model": self.model, "messages": messages, "max_tokens": output_tokens}
        return stream(self.routers[router].port, CHAT, body, session, **options)

    def direct(self, worker: TinyWorker, messages: list[dict[str, str]], **more: Any) -> Reply:
        """The same, past the routers."""
        body = {"model": self.model, "messages": messages, "max_tokens": 20, **more}
        return stream(worker.port, CHAT, body)

    def targets(self, router: int) -> dict[str, Any]:
        """What ``/workers`` says, by address; every worker is one target."""
        found = get(self.routers[router].port, "/workers")["workers"]
        return {worker["url"]: {**worker, **worker["targets"][0]} for worker in found}

    def settle(self) -> None:
        """Until both routers have read as far as each other, and that stays so."""

        def seen() -> list[tuple[Any, ...]]:
            return [
                tuple((url, t["events"].get("next_seq")) for url, t in sorted(targets.items()))
                for targets in (self.targets(0), self.targets(1))
            ]

        last: list[tuple[Any, ...]] = []

        def same() -> bool:
            nonlocal last
            before, last = last, seen()
            time.sleep(0.1)
            return last == before and last[0] == last[1]

        until(same, "both routers read all events")

    def outcome(self, router: int, name: str) -> float:
        """Requests that ended so."""
        return self.routers[router].metric("mimo_router:requests_total", outcome=name) or 0.0


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("router")
    with ExitStack() as started:
        sockets = started.enter_context(_short_folder())
        (redis,) = started.enter_context(redis_servers(1))
        workers = started.enter_context(
            tiny_workers(
                tiny_model,
                2,
                logs=logs,
                blocks=BLOCKS,
                sockets=sockets,
                more=["--max-model-len=3072"],
            )
        )
        routers = []
        for number in range(2):
            # Both listen before any request; the next look at a worker is soon.
            command = [*router_command(str(tiny_model), workers, redis.url)]
            command += ["--health-interval", "0.5"]
            log = logs / f"router{number}.log"
            router = RouterServer(command, str(tiny_model), log, f"router{number}")
            routers.append(started.enter_context(router))
        found = Cluster(str(tiny_model), workers, routers, redis)
        for number in range(2):
            until(
                lambda number=number: all(
                    t["state"] == "ready" and t["exact"] for t in found.targets(number).values()
                ),
                "all workers are ready and exact",
            )
        yield found


def _short_folder() -> Any:
    """Names of sockets have 107 bytes at most, and pytest's folders are long."""
    import tempfile

    class Folder(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> Path:  # type: ignore[override]
            return Path(super().__enter__())

    return Folder(prefix="mimo-it-")


def system(seed: int, count: int = 150) -> dict[str, str]:
    return {"role": "system", "content": words(random.Random(seed), count)}


def user(seed: int, count: int = 40) -> dict[str, str]:
    return {"role": "user", "content": words(random.Random(1000 + seed), count)}


def test_an_answer_is_the_workers_own(cluster: Cluster) -> None:
    for seed in range(3):
        messages = [system(100 + seed), user(seed)]
        routed = cluster.ask(seed % 2, messages, f"same-{seed}", 40)
        direct = cluster.direct(cluster.worker(routed.worker), messages, max_tokens=40)
        assert routed.done and direct.done
        assert len(routed.token_ids) == 40
        assert (routed.token_ids, routed.text) == (direct.token_ids, direct.text)
        assert routed.usage["prompt_tokens"] == direct.usage["prompt_tokens"]
        # How many tokens come in one chunk depends on the machine; what a chunk says does not.
        fields = [{frozenset(chunk) for chunk in reply.chunks} for reply in (routed, direct)]
        assert fields[0] == fields[1]
    # Prompts given as tokens, and an answer that is not streamed.
    prompt = [*range(300, 500)]
    routed = stream(
        cluster.routers[0].port,
        "/v1/completions",
        {"model": cluster.model, "prompt": prompt, "max_tokens": 10},
    )
    whole = cluster.routers[1].post(
        "/v1/completions",
        {"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True},
    )
    assert routed.text == whole["choices"][0]["text"]


def test_chats_stay_and_hit_as_predicted(cluster: Cluster) -> None:
    shared = system(1, 250)
    chats = [[shared] for _ in range(4)]
    homes: list[set[str]] = [set() for _ in chats]
    before = [
        [router.metric(f"mimo_router:{name}_total") or 0.0 for router in cluster.routers]
        for name in ("hit_tokens_predicted", "hit_tokens_actual")
    ]
    told = reused = 0
    for turn in range(4):
        for chat, messages in enumerate(chats):
            messages.append(user(10 * chat + turn))
            # Each turn of a chat comes to the other router.
            reply = cluster.ask((turn + chat) % 2, messages, f"chat-{chat}")
            messages.append({"role": "assistant", "content": reply.text})
            homes[chat].add(reply.worker)
            assert reply.cached == reply.predicted, (chat, turn, reply.headers)
            told, reused = told + reply.predicted, reused + reply.cached
            if turn:
                # All whole blocks of the turn before are there.
                assert reply.cached >= reply.usage["prompt_tokens"] // 2
    assert all(len(home) == 1 for home in homes), homes
    assert len(set().union(*homes)) == 2, "the chats share a system prompt, not one worker"
    after = [
        [router.metric(f"mimo_router:{name}_total") or 0.0 for router in cluster.routers]
        for name in ("hit_tokens_predicted", "hit_tokens_actual")
    ]
    for first, then, expected in zip(before, after, (told, reused), strict=True):
        assert sum(then) - sum(first) == expected > 0
    assert cluster.targets(0).keys() == {worker.base_url for worker in cluster.workers}
    for number in range(2):
        assert all(t["exact"] and t["blocks"] > 0 for t in cluster.targets(number).values())


def test_predictions_hold_under_eviction(cluster: Cluster) -> None:
    """Prompts come to more than the pools hold; forks and old chats are asked for again."""
    rnd = random.Random(7)
    evicted, wrong = 0, []
    chats: list[list[dict[str, str]]] = []
    longest: dict[int, int] = {}
    for number in range(50):
        if chats and rnd.random() < 0.5:
            chat = rnd.randrange(len(chats))
            messages = chats[chat]
        else:
            chat = len(chats)
            start = (
                list(rnd.choice(chats))[:3] if chats and rnd.random() < 0.4 else [system(chat, 300)]
            )
            messages = start
            chats.append(messages)
        messages.append(user(2000 + number, rnd.randint(20, 150)))
        reply = cluster.ask(number % 2, messages, f"evict-{chat}", 4)
        messages.append({"role": "assistant", "content": reply.text})
        if reply.cached != reply.predicted:
            last = get(cluster.routers[number % 2].port, "/decisions?limit=1")["decisions"][0]
            wrong.append((number, longest.get(chat), reply.cached, last))
        evicted += chat in longest and reply.cached + 64 < longest[chat]
        longest[chat] = reply.usage["prompt_tokens"]
    assert not wrong, json.dumps(wrong)
    assert evicted, "the pools are too large for this test to show anything"


def test_what_one_router_sends_is_load_to_the_other(cluster: Cluster) -> None:
    _check_shared_load(cluster, "load")


def _check_shared_load(cluster: Cluster, name: str) -> None:
    """A stream through the first router is seen by the second, while it lasts."""
    seen = threading.Event()

    def look(reply: Reply) -> None:
        if seen.is_set() or len(reply.chunks) < 5:
            return
        target = cluster.targets(1)[reply.worker]
        if target["in_flight"] + target["decoding"] > 0:
            seen.set()

    reply = cluster.ask(0, [system(50), user(50)], name, 150, on_chunk=look)
    assert reply.done and seen.is_set()
    until(
        lambda: cluster.targets(1)[reply.worker]["decoding"] == 0,
        "the second router learns of the end",
    )


def test_a_killed_worker(cluster: Cluster) -> None:
    messages = [system(60), user(60)]
    first = cluster.ask(0, messages, "killed")
    killed = cluster.worker(first.worker)
    other = next(worker for worker in cluster.workers if worker is not killed)
    messages += [{"role": "assistant", "content": first.text}, user(61)]
    broken = cluster.outcome(0, "broken")
    once = threading.Event()

    def kill(reply: Reply) -> None:
        # A busy server sends many tokens in one chunk, so this is early.
        if reply.text and not once.is_set():
            once.set()
            assert killed.pid is not None
            os.killpg(killed.pid, signal.SIGKILL)

    started_s = time.monotonic()
    reply = cluster.ask(0, messages, "killed", 2500, on_chunk=kill)
    assert once.is_set() and reply.worker == killed.base_url
    assert reply.error is not None, "the client is told"
    assert set(reply.error) >= {"message", "type"}
    assert time.monotonic() - started_s < PATIENCE_S
    assert cluster.outcome(0, "broken") == broken + 1
    # At once, through both routers, though nobody has told the second one.
    body = {"model": cluster.model, "messages": messages, "max_tokens": 8}
    for router in cluster.routers:
        again = stream(router.port, CHAT, body, "killed")
        assert again.done and again.worker == other.base_url
    for number in range(2):
        until(
            lambda number=number: cluster.targets(number)[killed.base_url]["state"] == "down",
            "the worker is down",
        )
        assert get(cluster.routers[number].port, "/health")["ready_workers"] == 1
    # It comes back, empty: what it had is not believed any more.
    killed.stop()
    killed.start()
    for number in range(2):
        until(
            lambda number=number: cluster.targets(number)[killed.base_url]["state"] == "ready",
            "the worker is back",
        )
    for number in range(6):
        reply = cluster.ask(number % 2, [system(70 + number), user(number)], f"back-{number}")
        turn = cluster.ask(
            (number + 1) % 2,
            [
                system(70 + number),
                user(number),
                {"role": "assistant", "content": reply.text},
                user(80 + number),
            ],
            f"back-{number}",
        )
        assert turn.worker == reply.worker
        assert (reply.cached, turn.cached) == (reply.predicted, turn.predicted)
    assert cluster.targets(0)[killed.base_url]["requests"] > 0, "it gets requests again"


def test_a_killed_redis(cluster: Cluster) -> None:
    messages = [system(90), user(90)]
    first = cluster.ask(0, messages, "redis")
    messages += [{"role": "assistant", "content": first.text}, user(91)]
    cluster.redis.kill()
    started_s = time.monotonic()
    for number in range(4):
        # What is cached comes from the workers, not from Redis.
        reply = cluster.ask(number % 2, messages, "redis")
        assert reply.done and reply.worker == first.worker
        assert reply.cached == reply.predicted > 0
    assert time.monotonic() - started_s < PATIENCE_S
    cluster.redis.start()

    def shared() -> bool:
        try:
            _check_shared_load(cluster, "redis again")
        except AssertionError:
            return False
        return True

    until(shared, "load is shared again", 2 * PATIENCE_S)
    assert all(
        t["in_flight"] == 0 and t["decoding"] == 0
        for number in range(2)
        for t in cluster.targets(number).values()
    )


def test_a_router_that_starts_again(cluster: Cluster) -> None:
    messages = [system(110), user(110)]
    first = cluster.ask(1, messages, "restart")
    messages += [{"role": "assistant", "content": first.text}]
    cluster.settle()
    router = cluster.routers[1]
    router.stop()
    # Meanwhile the workers go on, and nobody tells this router: a fork on the other worker.
    other = next(w for w in cluster.workers if w.base_url != first.worker)
    fork = [*messages, user(111, 120)]
    cluster.direct(other, fork)
    router.start()
    until(
        lambda: all(t["state"] == "ready" and t["exact"] for t in cluster.targets(1).values()),
        "the router knows the workers again",
    )
    longer = [*messages, user(112)]
    reply = cluster.ask(1, longer, "restart")
    assert reply.worker == first.worker and reply.cached == reply.predicted > 0
    again = [*fork, {"role": "assistant", "content": "bo"}, user(113)]
    reply = cluster.ask(1, again, "a fork")
    assert reply.worker == other.base_url, "it knows what was asked past it"
    assert reply.cached == reply.predicted > 0


def test_many_at_once(cluster: Cluster) -> None:
    """Both routers, both workers, forty streams; all answered, and then nothing is in flight."""

    def one(number: int) -> Reply:
        messages = [system(number % 5), user(3000 + number)]
        body = {"model": cluster.model, "messages": messages, "max_tokens": 8}
        return stream(cluster.routers[number % 2].port, CHAT, body, f"many-{number}")

    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(one, range(40)))
    assert all(reply.done and reply.error is None for reply in replies)
    by_worker = [sum(r.worker == w.base_url for r in replies) for w in cluster.workers]
    # Workers' measured speeds differ on a busy machine; that both are used is what must hold.
    assert min(by_worker) >= 4, by_worker
    cluster.settle()
    for number in range(2):
        until(
            lambda number=number: all(
                t["in_flight"] == 0 and t["decoding"] == 0 for t in cluster.targets(number).values()
            ),
            "nothing is in flight",
        )
    assert sum(cluster.outcome(number, "internal") for number in range(2)) == 0
