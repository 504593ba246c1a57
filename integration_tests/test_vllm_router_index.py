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
from mimo_plugin.router.prompt import Prompt
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


def copies(index, target, prompt):
    """Copies of each full-attention block of a prompt that the index knows of."""
    groups = index.index.named_snapshot(target).blocks.groups
    geometry, blocks = groups[0]
    step = geometry.block_size_tokens // index.hasher.hash_block_tokens
    hashes = index.hasher.hashes(Prompt(prompt, len(prompt)))[step - 1 :: step]
    return [blocks[block][0] if block in blocks else 0 for block in hashes]


def press(client, index, traffic, tokens, done):
    """Fill the cache of "other" with other prompts, until ``done`` says so."""
    for _ in range(80):
        client.complete(traffic.message(tokens), 1)
        index.settle("other")
        if done():
            return
    raise AssertionError("it never came to that")


def test_the_right_worker_when_one_of_two_copies_is_evicted(clients, index):
    """A fork without a window computes its beginning again; pressure takes the first copy."""
    client, traffic = clients["other"], Traffic(5)
    first = traffic.message(600)
    fork = first[:400] + traffic.message(60)
    prompt = fork + traffic.message(30)
    client.complete(first, 1)
    assert client.complete(fork, 1).cached == 0
    clients["stock"].complete(prompt[:200], 1)
    for target in ("stock", "other"):
        index.settle(target, quiet_s=0.3)
    shared = prompt[:384]
    assert set(copies(index, "other", shared)) == {2}

    def one_is_gone():
        return set(copies(index, "other", shared)) == {1}

    press(client, index, traffic, 70, one_is_gone)
    assert longest(index, prompt) == "other" and index.predict("other", prompt) > 400
    for target in ("stock", "other"):
        assert index.predict(target, prompt) == clients[target].complete(prompt, 1).cached


def test_the_right_worker_when_the_window_at_the_end_is_evicted(clients, index):
    """All full-attention blocks are there and the window is not: the other worker hits more."""
    client, traffic = clients["other"], Traffic(6)
    beginning = traffic.message(650)
    prompt = beginning + traffic.message(60)
    client.complete(beginning, 1)
    # Its window is freed while this one decodes, before the blocks that both go on from.
    client.complete(beginning + traffic.message(200), 8)
    clients["stock"].complete(prompt[:300], 1)
    for target in ("stock", "other"):
        index.settle(target, quiet_s=0.3)
    assert longest(index, prompt) == "other"

    def window_is_gone():
        return index.predict("other", prompt) < 200

    press(client, index, traffic, 70, window_is_gone)
    assert index.full_prefix("other", prompt) > 500
    assert longest(index, prompt) == "stock"
    hit = index.predict("other", prompt)
    real = {target: clients[target].complete(prompt, 1).cached for target in ("stock", "other")}
    assert real["stock"] > real["other"] == hit


def test_events_carry_what_the_reader_wants(clients, index):
    """Names differ between workers, canonical hashes don't."""
    names = {
        target: set(index.index.named_snapshot(target).names) for target in ("stock", "kv", "other")
    }
    assert not names["stock"] & names["kv"] and not names["stock"] & names["other"]
    assert json.dumps(index.readers["stock"].status)
