# SPDX-License-Identifier: Apache-2.0
"""The router's index against real engines: every hit is foretold, with eviction all the time.

The prediction is made before the request, from nothing but the engine's events; the truth is the
engine's own ``cached_tokens``. Servers differ in what their hashes depend on.
"""

from __future__ import annotations

import json
import random

import pytest

from integration_tests.kv_client import Client
from integration_tests.router_traffic import IndexThread, Traffic, events_config
from integration_tests.side_by_side import start_all
from tools.server import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL_BLOCKS = 300
REQUESTS = {"stock": 330, "kv": 150, "other": 0}
BURST_EVERY, BURST_SIZE = 30, 4


@pytest.fixture(scope="module")
def index():
    with IndexThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def clients(tiny_model, serve_module, index):
    """Clients by the names of their targets in the index."""

    def client(target, *arguments, plugin=None, seed=None, pool=POOL_BLOCKS):
        def start():
            endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            server = serve_module(
                tiny_model,
                f"--num-gpu-blocks-override={pool}",
                "--max-model-len=4096",
                "--max-num-batched-tokens=512",
                events_config(endpoint, replay),
                *arguments,
                plugin=plugin,
                environment={} if seed is None else {"PYTHONHASHSEED": seed},
            )
            index.follow(target, endpoint, replay)
            return Client(server)

        return start

    return start_all(
        {
            # PYTHONHASHSEED is not set: vLLM's default seed.
            "stock": client("stock"),
            "kv": client("kv", plugin="mimo:kv", seed="7"),
            "other": client("other", "--prefix-caching-hash-algo=sha256_cbor", seed="11"),
        }
    )


@pytest.mark.timeout(280)
@pytest.mark.parametrize("target", ["stock", "kv"])
def test_every_hit_is_foretold(clients, index, target):
    client, traffic = clients[target], Traffic(1)
    wrong, hits = [], 0
    for number in range(REQUESTS[target]):
        if number and number % BURST_EVERY == 0:
            prompts = [traffic.next() for _ in range(BURST_SIZE)]
            for answer in client.at_once([*prompts, prompts[0]], 8):
                traffic.learn(answer.tokens)
            index.settle(target, quiet_s=0.3)
        prompt = traffic.next()
        foretold = index.predict(target, prompt)
        answer = client.complete(prompt, traffic.rng.randrange(1, 33))
        traffic.learn(answer.tokens)
        if foretold != answer.cached:
            wrong.append((number, len(prompt), foretold, answer.cached))
        hits += answer.cached > 0
        index.settle(target)
    assert wrong == []
    assert hits > REQUESTS[target] / 3
    counts = index.index.name_counts(target)
    assert counts.contradictions == counts.open_places == counts.unknown_parents == 0
    assert index.index.unknown_removals == 0
    # Blocks were evicted: there were more of them than fit.
    assert 0 < index.index.blocks_of(target) < POOL_BLOCKS
    status = index.readers[target].status
    assert status["batches"] == status["next_seq"] and not status["gaps"]


def longest(index, prompt, targets=("stock", "other")):
    """The target with the longest foretold hit."""
    return max(targets, key=lambda target: index.predict(target, prompt))


def test_salts_keep_prompts_apart(clients, index):
    client, traffic = clients["other"], Traffic(2)
    prompt = traffic.message(300)

    def ask(salt):
        foretold = index.predict("other", prompt, salt)
        body = {"prompt": prompt, "max_tokens": 2, **({"cache_salt": salt} if salt else {})}
        usage = client.server.post("/v1/completions", body)["usage"]
        index.settle("other")
        return foretold, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    first = [ask(salt) for salt in (None, "a", "b")]
    assert first == [(0, 0)] * 3
    again = [ask(salt) for salt in (None, "a", "b")]
    assert all(foretold == real > 200 for foretold, real in again)


def test_the_right_worker_of_two(clients, index):
    """One has more of the prompt, with other names than the other's for the same blocks."""
    rng = random.Random(3)
    prompt = Traffic(4).message(700)
    short, long = prompt[: rng.randrange(200, 300)], prompt[:600]
    clients["other"].complete(long, 1)
    clients["stock"].complete(short, 1)
    index.settle("other")
    index.settle("stock")
    assert longest(index, prompt) == "other"
    for target in ("stock", "other"):
        assert index.predict(target, prompt) == clients[target].complete(prompt, 1).cached


def test_the_right_worker_when_one_of_two_copies_is_evicted(clients, index):
    """Two requests at once compute the same blocks twice; then pressure takes some copies."""
    traffic = Traffic(5)
    prompt = traffic.message(600)
    clients["other"].at_once([prompt, prompt, prompt[:500], prompt], 2)
    clients["stock"].complete(prompt[:200], 1)
    for target in ("stock", "other"):
        index.settle(target, quiet_s=0.3)
    for _ in range(14):
        clients["other"].complete(traffic.message(150), 1)
        index.settle("other")
        expected = {target: index.predict(target, prompt) for target in ("stock", "other")}
        probe = index.hasher
        assert probe.hash_block_tokens == 16
        if expected["other"] == 0:
            break
    for target in ("stock", "other"):
        assert index.predict(target, prompt) == clients[target].complete(prompt, 1).cached


def test_the_right_worker_when_the_window_at_the_end_is_evicted(clients, index):
    """All full-attention blocks are there and the window is not: the other worker hits more."""
    traffic = Traffic(6)
    prompt = traffic.message(700)
    clients["other"].complete(prompt[:650], 1)
    clients["stock"].complete(prompt[:200], 1)
    for target in ("stock", "other"):
        index.settle(target, quiet_s=0.3)
    assert longest(index, prompt) == "other"
    for _ in range(40):
        clients["other"].complete(traffic.message(150), 1)
        index.settle("other")
        full, hit = index.full_prefix("other", prompt), index.predict("other", prompt)
        if full > hit:
            break
    assert full > 200 and hit < full
    clients["stock"].complete(prompt[:300], 1)
    index.settle("stock")
    assert longest(index, prompt) == "stock"
    real = {target: clients[target].complete(prompt, 1).cached for target in ("stock", "other")}
    assert real["stock"] > real["other"] == hit


def test_events_carry_what_the_reader_wants(clients, index):
    """Names differ between workers, canonical hashes don't."""
    names = {
        target: set(index.index.named_snapshot(target).names) for target in ("stock", "kv", "other")
    }
    assert not names["stock"] & names["kv"] and not names["stock"] & names["other"]
    assert json.dumps(index.readers["stock"].status)
