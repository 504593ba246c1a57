# SPDX-License-Identifier: Apache-2.0
"""What the router predicts of a real SGLang's hits, from its events and its answers.

A tiny MiMo with pages of 16, chunks of 512 and a window of 128. Two look-ups follow the same
requests: one is told full attention by events, one knows nothing but what it sent and what was
answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration_tests.conftest import ModelFactory, ServerFactory
from mimo_plugin.core.block_hashes import PromptHasher
from mimo_plugin.core.lookups import Lookups
from mimo_plugin.core.targets import Request
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.sglang_events import decode, sglang_cache, sglang_sizes
from tools.server import EngineServer, SglangServer, free_port

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGE, WINDOW = 16, 128
TARGET = "worker"
REQUESTS = 70
SETTLE_S = 0.05  # from an answer until its events are here


class RouterServer(EngineServer):
    """One ``mimo router`` process."""

    def _serve(self) -> list[str]:
        return [sys.executable, "-m", "mimo_plugin.cli", "router", "--model", self.model]


class Loop:
    """An event loop in a thread of its own, as the router has one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.tasks: list[Any] = []

    def start(self, reader: EventReader) -> None:
        self.tasks.append(asyncio.run_coroutine_threadsafe(reader.run(), self.loop))

    def call(self, function: Any, *args: Any, **named: Any) -> Any:
        """Run in the loop's thread, where the readers change the indexes."""

        async def run() -> Any:
            return function(*args, **named)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        time.sleep(0.2)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@dataclass
class Asked:
    """One request: what was predicted and what the engine said, in tokens."""

    full: int
    told: int
    blind: int
    cached: int


@dataclass
class Chat:
    """Token ids so far, and where its messages start."""

    ids: list[int]
    starts: list[int] = field(default_factory=list)


class Follower:
    """Sends requests, and follows them with both look-ups."""

    def __init__(self, server: SglangServer, endpoint: str, replay: str, loop: Loop) -> None:
        self.server, self.loop = server, loop
        self.endpoint, self.replay = endpoint, replay
        self.info = json.loads(server.text("/server_info"))
        self.hasher = PromptHasher(PAGE)
        self.told, self.reader = self.follow(told=True)
        self.blind, _ = self.follow(told=False)
        self.count = 0
        self.wait_for_events(1)

    def follow(self, *, told: bool) -> tuple[Lookups, EventReader | None]:
        lookups = Lookups(PAGE)
        cache = sglang_cache(sglang_sizes(self.info), PAGE, told=told, window_tokens=WINDOW)
        index = lookups.add_approximate(TARGET, cache, block_tokens=PAGE, window_tokens=WINDOW)
        if not told:
            return lookups, None
        reader = EventReader(TARGET, self.endpoint, self.replay, index, topic="kv", decode=decode)
        self.loop.start(reader)
        return lookups, reader

    def wait_for_events(self, connects: int) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            status = self.reader.status
            if status["connects"] >= connects and status["trusted"]:
                return
            time.sleep(0.05)
        raise AssertionError(f"no events: {self.reader.status}")

    def ask(
        self, ids: list[int], outputs: int = 4, starts: Sequence[int] = (), **body: Any
    ) -> Asked:
        """One request; its output is added to ``ids``."""
        self.count += 1
        hashes = self.hasher.hashes(Prompt(ids, len(ids), salt=body.get("cache_salt")))
        request = Request(str(self.count), hashes, len(ids), kept_tokens=tuple(starts))
        limit = len(ids) - 1
        time.sleep(SETTLE_S)
        call, both = self.loop.call, (self.told, self.blind)
        full = call(self.told.prefixes, hashes, limit).get(TARGET, 0)
        told, blind = (call(x.lookup, hashes, limit).get(TARGET, 0) for x in both)
        for lookups in both:
            call(lookups.sent, request, TARGET, time.monotonic())
        sampling = {"max_new_tokens": outputs, "temperature": 0, "ignore_eos": True}
        answer = self.server.post(
            "/generate", {"input_ids": ids, "sampling_params": sampling, **body}
        )
        cached = answer["meta_info"]["cached_tokens"]
        for lookups in both:
            call(lookups.first_token, request, time.monotonic())
            facts = {"cached_tokens": cached, "output_tokens": outputs}
            call(lookups.done, request, time.monotonic(), **facts)
        ids.extend(answer["output_ids"])
        return Asked(full, told, blind, cached)


def play(follower: Follower, seed: int, requests: int) -> list[Asked]:
    """Chats that share system prompts, forks, and prompts sent again; more than the cache holds."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(300, 1000) for _ in range(count)]

    systems = [words(rng.randrange(150, 500)) for _ in range(3)]
    chats: list[Chat] = []
    asked = []
    while len(asked) < requests:
        dice = rng.random()
        if dice < 0.35 or not chats:
            system = rng.choice(systems)
            chat = Chat(system + words(rng.randrange(20, 200)), [len(system)])
            chats.append(chat)
        elif dice < 0.85:
            chat = rng.choice(chats[-6:])
            chat.starts.append(len(chat.ids))
            chat.ids = chat.ids + words(rng.randrange(10, 120))
        elif dice < 0.95:
            old = rng.choice(chats[-8:])
            cut = rng.randrange(len(old.ids) // 2, len(old.ids))
            starts = [start for start in old.starts if start < cut]
            chat = Chat(old.ids[:cut] + words(rng.randrange(10, 80)), starts)
            chats.append(chat)
        else:
            chat = rng.choice(chats[-8:])
        if len(chat.ids) > 1500:
            chats.remove(chat)
            continue
        outputs = rng.choice([2, 4, 8, 20])
        asked.append(follower.ask(chat.ids, outputs, chat.starts))
    return asked


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def follow(serve: ServerFactory, model: Any, loop: Loop, tokens: int, **options: Any) -> Follower:
    events, replay = free_port(), free_port()
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{events}",
        "bind": True,
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": "kv",
    }
    server = serve(
        model,
        f"--max-total-tokens={tokens}",
        f"--kv-events-config={json.dumps(config)}",
        "--enable-cache-report",
        **options,
    )
    return Follower(server, config["endpoint"], config["replay_endpoint"], loop)


@pytest.fixture(scope="module")
def follower(serve_sglang: ServerFactory, tiny_model_factory: ModelFactory, loop: Loop) -> Follower:
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW)
    return follow(serve_sglang, model, loop, 6144)


@pytest.fixture(scope="module")
def asked(follower: Follower) -> list[Asked]:
    found = play(follower, 5, REQUESTS)
    print(report(found))
    return found


def report(asked: Sequence[Asked]) -> str:
    """Share of predictions that are exact, and the mean error beside the mean hit."""
    hits = sum(a.cached for a in asked)
    lines = []
    for name in ("told", "blind"):
        found = [getattr(a, name) for a in asked]
        exact = sum(f == a.cached for f, a in zip(found, asked, strict=True)) / len(asked)
        wrong = sum(abs(f - a.cached) for f, a in zip(found, asked, strict=True))
        lines.append(f"{name}: exact {exact:.2f}, error {wrong / hits:.3f} of {hits} hit tokens")
    return "; ".join(lines)


def error(asked: Sequence[Asked], name: str) -> float:
    """Tokens predicted wrongly, as a share of the tokens hit."""
    wrong = sum(abs(getattr(a, name) - a.cached) for a in asked)
    return wrong / sum(a.cached for a in asked)


def test_there_was_something_to_predict(follower: Follower, asked: list[Asked]) -> None:
    """Control: hits, prompts without a hit, windows that were lacking, and evictions."""
    assert sum(a.cached > 0 for a in asked) > REQUESTS // 2
    assert sum(a.cached == 0 for a in asked) > 3
    assert any(a.cached < a.full for a in asked)
    status = follower.reader.status
    assert status["decode_errors"] == status["unknown_events"] == status["gaps"] == 0
    usage = follower.info["internal_states"][0]["memory_usage"]
    index = follower.told.index(TARGET)
    assert (
        sum(a.full for a in asked)
        and index.blocks_of(TARGET)
        <= (usage["token_capacity"] + usage["token_capacity_swa"]) // PAGE
    )


def test_events_tell_full_attention_truly(asked: list[Asked]) -> None:
    """No hit is longer than what was told, and no prediction."""
    assert all(a.told <= a.full and a.cached <= a.full for a in asked)


def test_most_predictions_are_exact(asked: list[Asked]) -> None:
    text = report(asked)
    assert sum(a.told == a.cached for a in asked) >= 0.9 * len(asked), text
    assert error(asked, "told") <= 0.05, text
    assert error(asked, "blind") <= 0.12, text


def test_the_same_prompt_again_is_predicted_right(follower: Follower) -> None:
    """Whatever was believed before, after one answer it is right."""
    rng = random.Random(9)
    for length in (130, 400, 700, 1024):
        ids = [rng.randrange(300, 1000) for _ in range(length)]
        follower.ask(list(ids))
        again = follower.ask(list(ids))
        assert again.told == again.blind == again.cached == (length - 1) // PAGE * PAGE


def test_a_salt_is_another_prompt(follower: Follower) -> None:
    ids = [random.Random(10).randrange(300, 1000) for _ in range(300)]
    salted = follower.hasher.hashes(Prompt(ids, 300, salt="s"))
    plain = follower.hasher.hashes(Prompt(ids, 300))
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "cache_salt": "s"}
    follower.server.post("/v1/completions", body)
    time.sleep(0.5)
    found = [follower.loop.call(follower.told.prefixes, hashes, 299) for hashes in (salted, plain)]
    assert found == [{TARGET: 288}, {}]


def test_who_comes_late_has_the_past_replayed(follower: Follower) -> None:
    ids = [random.Random(11).randrange(300, 1000) for _ in range(300)]
    follower.ask(list(ids))
    late, reader = follower.follow(told=True)
    deadline = time.monotonic() + 20
    while not reader.status["trusted"] or not reader.status["batches"]:
        assert time.monotonic() < deadline, reader.status
        time.sleep(0.05)
    hashes = follower.hasher.hashes(Prompt(ids, 300))
    time.sleep(SETTLE_S)
    assert follower.loop.call(late.prefixes, hashes, 299) == {TARGET: 288}
    assert follower.loop.call(late.lookup, hashes, 299) == {TARGET: 288}
    exact = late.exactness(TARGET)
    assert (exact.full, exact.windows, exact.exact) == ("events", "believed", False)


def test_an_emptied_cache_is_empty(follower: Follower) -> None:
    ids = [random.Random(12).randrange(300, 1000) for _ in range(300)]
    follower.ask(list(ids))
    follower.server.flush()
    time.sleep(0.5)
    assert follower.loop.call(follower.told.index(TARGET).blocks_of, TARGET) == 0
    again = follower.ask(list(ids))
    assert (again.full, again.told, again.cached) == (0, 0, 0)


def text_of(chunks: list[dict[str, Any]]) -> str:
    """What a streamed chat answer says."""
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def test_the_router_serves_an_sglang_worker(follower: Follower, tmp_path: Path) -> None:
    """Text, hits and what is said of the worker, through the real process; it comes late, too."""
    server = follower.server
    system = {"role": "system", "content": "You are a patient and thorough assistant. " * 30}
    user = {"role": "user", "content": "Tell me about rivers and the sea. " * 10}
    body = {
        "messages": [system, user],
        "max_tokens": 16,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    router = RouterServer(
        server.model,
        arguments=["--worker", server.base_url, "--trust-remote-code"],
        log=tmp_path / "router.log",
        ready_timeout_s=60,
    )
    with router:
        deadline = time.monotonic() + 20
        while True:
            (worker,) = json.loads(router.text("/workers"))["workers"]
            (target,) = worker["targets"]
            if target["trusted"] and (target["events"] or {}).get("connected"):
                break
            assert time.monotonic() < deadline, worker
            time.sleep(0.1)
        assert (worker["engine"], worker["exact"]) == ("sglang", False)
        assert target["known_from"] == {"full": "events", "windows": "believed"}

        first = text_of(list(router.stream("/v1/chat/completions", body)))
        time.sleep(1)  # until its reservation has ended too
        again = list(router.stream("/v1/chat/completions", body))
        said = {"role": "assistant", "content": first}
        body["messages"] = [system, user, said, {"role": "user", "content": "And lakes?"}]
        time.sleep(1)
        turn = text_of(list(router.stream("/v1/chat/completions", body)))
        direct = text_of(list(server.stream("/v1/chat/completions", body)))
        time.sleep(0.5)
        decisions = json.loads(router.text("/decisions?limit=3"))["decisions"]
        (worker,) = json.loads(router.text("/workers"))["workers"]
    assert first and text_of(again) == first
    assert turn == direct
    decisions.sort(key=lambda decision: decision["time_s"])
    hits = [decision["actual_hit_tokens"] for decision in decisions]
    assert None not in hits, decisions
    assert again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == hits[1] > 300
    assert [d["predicted_hit_tokens"] for d in decisions] == hits, decisions
    assert hits[0] == 0 and hits[2] >= hits[1]
    assert worker["targets"][0]["requests"] == 3
