# SPDX-License-Identifier: Apache-2.0
"""What one engine of the tiers benchmark is asked to do; each gives what goes into the file."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tiers_engine import LOADED, STORED, WRITTEN, Answer, Job, Probe
from benchmarks.tiers_services import Redis, redis_servers
from mimo_plugin.tiers.breaker import Breaker

FIRST_TOKEN, LAST_TOKEN = 300, 1000
MESSAGE_START = 1
PROMPT_TOKENS, TAIL_TOKENS = 1500, 150
CHAT_TURNS, CHAT_SYSTEMS, FORK = 5, 2, 0.2
STORES = 3
KILL_OUTPUTS = 6
#: the killed store is started again after so long
DEAD_S = 1.0
#: seconds of the breaker's clock in a second; its period of 30 s is 1.5 s then
BREAKER_PACE = 20.0


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random tokens that open no message."""
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def prompts(seed: int) -> dict[str, list[int]]:
    """A prompt, two that part from it, and one that goes on."""
    full = tokens(random.Random(seed), PROMPT_TOKENS)
    tail = tokens(random.Random(seed + 7), TAIL_TOKENS)
    return {
        "full": full,
        "div1024": full[:1024] + tail,
        "div500": full[:500] + tail,
        "ext": full + tail,
    }


# -- bytes and hits ----------------------------------------------------------------------------


def sizes(job: Job) -> dict[str, Any]:
    """Bytes that are stored, and hits from host memory alone."""
    probe = Probe(job)
    found = {
        "prompts": [_four_prompts(probe, seed) for seed in job.options["seeds"]],
        "chats": [
            _chats(probe, seed, job.options["chats"]) for seed in job.options.get("chat_seeds", ())
        ],
    }
    probe.close()
    return found


def _four_prompts(probe: Probe, seed: int) -> dict[str, Any]:
    probe.forget_host()
    given = prompts(seed)
    _, moved = probe.during(lambda: probe.ask(given["full"]))
    hits, answers = {}, {}
    for name, prompt in given.items():
        probe.forget_device()
        answer = probe.ask(prompt)
        probe.settle()
        hits[name], answers[name] = answer.cached_tokens, answer.tokens
    return {"seed": seed, "stored_bytes": moved[STORED], "hits": hits, "answers": answers}


def _chats(probe: Probe, seed: int, count: int) -> dict[str, Any]:
    """Chats that take turns; some users go back to before an earlier message of theirs."""
    probe.forget_host()
    rng = random.Random(seed)
    systems = [[MESSAGE_START, *tokens(rng, 330 + 90 * i)] for i in range(CHAT_SYSTEMS)]
    contexts = [list(systems[i % CHAT_SYSTEMS]) for i in range(count)]
    before: list[list[list[int]]] = [[] for _ in range(count)]
    hits, answers, prompt_tokens = [], [], 0

    def play() -> None:
        nonlocal prompt_tokens
        for _ in range(CHAT_TURNS):
            for chat in range(count):
                if before[chat] and rng.random() < FORK:
                    contexts[chat] = list(rng.choice(before[chat]))
                before[chat].append(list(contexts[chat]))
                message = [MESSAGE_START, *tokens(rng, rng.randint(40, 300)), MESSAGE_START]
                prompt = contexts[chat] + message
                probe.forget_device()
                answer = probe.ask(prompt, rng.randint(16, 60))
                probe.settle()
                contexts[chat] = [*prompt, *answer.tokens]
                hits.append(answer.cached_tokens)
                answers.append(answer.tokens)
                prompt_tokens += len(prompt)

    _, moved = probe.during(play)
    return {
        "seed": seed,
        "stored_bytes": moved[STORED],
        "prompt_tokens": prompt_tokens,
        "hits": hits,
        "answers": answers,
    }


# -- repairs -----------------------------------------------------------------------------------


def repairs(job: Job) -> dict[str, Any]:
    """Take something away from one tier, ask again, and compare what moves with what is missing.

    Missing is what the hit needs: its prefix in full attention, one window of each other group.
    """
    probe = Probe(job)
    folder, pattern = Path(job.options["folder"]), job.options["pattern"]
    prompt = prompts(job.options["seed"])["full"]
    windows = [g.group_idx for g in probe.groups() if g.sliding_window_size_in_chunks is not None]
    (full,) = [g.group_idx for g in probe.groups() if g.group_idx not in windows]
    first = probe.ask(prompt)
    probe.settle()
    found: dict[str, Any] = {}

    def repair(name: str, missing_rows: int, counter: str) -> None:
        answer, moved = probe.during(lambda: probe.ask(prompt))
        found[name] = {
            "missing_bytes": missing_rows * probe.row_bytes,
            "moved_bytes": moved[counter],
            "hit_tokens": answer.cached_tokens,
            "right": answer.same(first),
            "moved": moved,
        }

    prefix = len(probe.device_blocks(full))
    probe.drop_host(lambda group: group in windows)
    repair("A: host memory lost the windows", len(windows), STORED)
    files = list(folder.rglob(pattern))
    for file in files:
        file.unlink()
    repair("B: the store lost everything", prefix + len(windows), WRITTEN)
    for group in windows:
        assert probe.drop_device(probe.device_blocks(group))
    repair("C: the device lost the windows", len(windows), LOADED)
    repair("C again: nothing is missing", 0, LOADED)
    probe.drop_device(probe.device_blocks(full, range(3, 6)))
    repair("D: the device's prefix has a hole", 3, LOADED)
    probe.close()
    return {"repairs": found, "files": len(files)}


# -- a store that fails ------------------------------------------------------------------------


class Counted:
    """A store whose calls are counted.

    Attributes:
        calls: by method.
        keys: that they named.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls = dict.fromkeys(("exists", "get", "put", "touch"), 0)
        self.keys = dict(self.calls)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in self.calls:
            return found

        def counted(keys: Sequence[str], *args: Any) -> Any:
            self.calls[name] += 1
            self.keys[name] += len(keys)
            return found(keys, *args)

        return counted


def _store_tier(probe: Probe) -> Any:
    (tier,) = probe.manager.secondary_tiers
    return tier


def ring(job: Job) -> dict[str, Any]:
    """Fill three stores, lose one, and see which keys and which tokens are left."""
    with tempfile.TemporaryDirectory(prefix="mimo-ring-") as name, ExitStack() as stack:
        assert job.settings is not None
        if job.options["store"] == "redis":
            servers = stack.enter_context(redis_servers(STORES))
            place: dict[str, Any] = {"store": "redis", "path": [s.url for s in servers]}
            lose = servers[1].kill
        else:
            folders = [Path(name) / str(number) for number in range(STORES)]
            place = {"path": [str(folder) for folder in folders], "capacity_gib": 1.0}

            def lose() -> None:
                folders[1].rename(Path(name) / "gone")

        return _ring(replace(job, settings={**job.settings, **place}), lose)


def _ring(job: Job, lose: Callable[[], None]) -> dict[str, Any]:
    probe = Probe(job)
    tier = _store_tier(probe)
    given = [
        tokens(random.Random(1000 * job.options["seed"] + number), PROMPT_TOKENS)
        for number in range(job.options["prompts"])
    ]
    first = [probe.ask(prompt) for prompt in given]
    probe.settle()
    keys = tier.texts(probe.host_keys())
    before = sum(tier.store.exists(keys))
    probe.forget_host()
    whole = [probe.ask(prompt) for prompt in given]
    probe.settle()
    lose()
    after = sum(tier.store.exists(keys))
    probe.forget_host()
    left = [probe.ask(prompt) for prompt in given]
    stats = tier.stats()
    probe.close()
    return {
        "keys": len(keys),
        "keys_before": before,
        "keys_after": after,
        "tokens_before": sum(answer.cached_tokens for answer in whole),
        "tokens_after": sum(answer.cached_tokens for answer in left),
        "hits_after": [answer.cached_tokens for answer in left],
        "wrong": _wrong(first, whole) + _wrong(first, left),
        "calls_failed": stats.calls_failed,
        "stores_down": stats.stores_down,
    }


def _wrong(wanted: Sequence[Answer], given: Sequence[Answer]) -> int:
    return sum(not b.same(a) for a, b in zip(wanted, given, strict=True))


def streams(job: Job) -> Iterator[list[list[int]]]:
    """Requests of the kill test, some at a time: prompts that share prefixes with earlier ones."""
    rng = random.Random(job.options["seed"])
    prefixes = [tokens(rng, rng.choice((400, 700, 1000))) for _ in range(job.options["prefixes"])]
    left = job.options["requests"]
    while left:
        count = min(left, rng.randint(1, 3))
        left -= count
        yield [rng.choice(prefixes) + tokens(rng, rng.randint(5, 60)) for _ in range(count)]


def reference(job: Job) -> dict[str, Any]:
    """The same requests without any lower tier."""
    probe = Probe(job)
    answers = [answer for batch in streams(job) for answer in probe.ask_all(batch, KILL_OUTPUTS)]
    probe.close()
    return {"answers": [[list(a.tokens), list(a.logprobs)] for a in answers]}


def kills(job: Job) -> dict[str, Any]:
    """kill -9 of the store at random times while requests run; it comes back, empty.

    The clock of the store's breaker runs faster, so that it is used again before the next kill.
    """
    with redis_servers(1) as (server,):
        assert job.settings is not None
        place = {"store": "redis", "path": server.url}
        return _kills(replace(job, settings={**job.settings, **place}), server)


def _kills(job: Job, server: Redis) -> dict[str, Any]:
    probe = Probe(job)
    tier = _store_tier(probe)
    (breaker,) = tier.store.stores.values()
    assert isinstance(breaker, Breaker)
    breaker._clock_s = lambda: BREAKER_PACE * time.monotonic()
    batches = list(streams(job))
    rng = random.Random(job.options["seed"] + 1)
    killed_at = set(rng.sample(range(1, len(batches)), job.options["kills"]))
    answers: list[Answer] = []
    failed = 0

    one_by_one = threading.Lock()
    killers: list[threading.Timer] = []

    got_before: list[int] = []

    def kill() -> None:
        with one_by_one:
            server.kill()
            got_before.append(tier.stats().pages_got)
            time.sleep(DEAD_S)
            server.start()

    for number, batch in enumerate(batches):
        if number in killed_at:
            killers.append(threading.Timer(rng.uniform(0.0, 0.4), kill))
            killers[-1].start()
        probe.llm.reset_prefix_cache()
        try:
            answers += probe.ask_all(batch, KILL_OUTPUTS)
        except Exception as error:
            failed += len(batch)
            answers += [Answer(0, (), ())] * len(batch)
            print(f"a request failed: {error!r}", flush=True)
    for killer in killers:
        killer.join()
    stats = tier.stats()
    found = {
        "answers": [[list(a.tokens), list(a.logprobs)] for a in answers],
        "cached_tokens": [a.cached_tokens for a in answers],
        "failed": failed,
        "kills": len(killed_at),
        "pages_got": stats.pages_got,
        "pages_got_after_kills": [b - a for a, b in pairwise([*got_before, stats.pages_got])],
        "pages_put": stats.pages_put,
        "pages_dropped": stats.pages_dropped,
        "calls_failed": stats.calls_failed,
    }
    probe.close()
    return found


# -- keep-alive --------------------------------------------------------------------------------


def traffic(job: Job) -> dict[str, Any]:
    """A hot prompt, which the device answers for, between cold ones that fill the store."""
    probe = Probe(job)
    tier = _store_tier(probe)
    counted = tier.store = Counted(tier.store)
    rng = random.Random(job.options["seed"])
    hot = tokens(rng, PROMPT_TOKENS)
    first = probe.ask(hot)
    probe.settle()
    hits, requests = [], 1
    started_s = time.monotonic()
    for number in range(job.options["cold"]):
        probe.ask(tokens(rng, PROMPT_TOKENS))
        probe.settle()
        requests += 1
        if not number % 2:
            hits.append(probe.ask(hot).cached_tokens)
            probe.settle()
            requests += 1
    stats = tier.stats()
    found = {
        "device_hits": hits,
        "requests": requests,
        "seconds": time.monotonic() - started_s,
        "calls": counted.calls,
        "keys": counted.keys,
        "pages_put": stats.pages_put,
        "pages_touched": stats.pages_touched,
        "pages_dropped": stats.pages_dropped,
        "answer": list(first.tokens),
    }
    probe.close()
    return found


def restarted(job: Job) -> dict[str, Any]:
    """What is left of the hot prompt for an engine that has nothing but the store."""
    probe = Probe(job)
    hot = tokens(random.Random(job.options["seed"]), PROMPT_TOKENS)
    answer = probe.ask(hot)
    found = {"hit_tokens": answer.cached_tokens, "answer": list(answer.tokens)}
    probe.close()
    return found


SCENARIOS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "sizes": sizes,
    "repairs": repairs,
    "ring": ring,
    "reference": reference,
    "kills": kills,
    "traffic": traffic,
    "restarted": restarted,
}
