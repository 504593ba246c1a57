# SPDX-License-Identifier: Apache-2.0
"""Feature ``dp_affinity`` on ``vllm serve --data-parallel-size 2`` with two API processes.

The model is dense: vLLM's MoE layer does not run under data parallelism on the CPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration_tests.refusal import Refusal, serve_until_end

pytestmark = pytest.mark.vllm

RANKS = ("--data-parallel-size=2", "--api-server-count=2")
TURNS = 6


@pytest.fixture(scope="module")
def dense(tiny_model_factory: Any) -> Any:
    """A tiny MiMo without experts."""
    return tiny_model_factory(layers=4, moe_layers=0, mtp_layers=0)


@pytest.fixture(scope="module")
def servers(dense: Any, serve_module: Any) -> dict[str, Any]:
    """One server with the plugin, one without."""
    return {
        "plugin": serve_module(dense, *RANKS, plugin="mimo"),
        "stock": serve_module(dense, *RANKS),
    }


def _words(chat: int, turn: int, count: int = 60) -> str:
    vowels = "aeiou"
    return " ".join(
        "ktmnsrl"[(chat * 5 + turn * 3 + i) % 7] + vowels[(chat + turn * i) % 5] + f"n{chat}"
        for i in range(count)
    )


def _by_rank(server: Any, name: str, label: str, **labels: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for given, value in server.metrics().get(name, []):
        if all(given.get(key) == wanted for key, wanted in labels.items()):
            found[given[label]] += int(value)
    return found


def _after(server: Any, requests: int, before: Counter[str], read: Callable[[], Any]) -> Any:
    """``read()`` minus ``before`` once it counts ``requests``, which takes a moment."""
    deadline = time.monotonic() + 20
    while True:
        found = read() - before
        if sum(found.values()) >= requests or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _finished(server: Any) -> Counter[str]:
    return _by_rank(server, "vllm:request_success_total", "engine")


def _chat(server: Any, chat: int, system: str, turns: int, **more: Any) -> dict[str, Any]:
    """Play one chat, a turn after the other: its ranks, hits and answers."""
    messages = [{"role": "system", "content": system}]
    hits, answers, prompts = [], [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": _words(chat, turn)})
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, **more}
        got = server.post("/v1/chat/completions", body)
        hits.append((got["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        prompts.append(got["usage"]["prompt_tokens"])
        answers.append(got["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return {"hits": hits, "answers": answers, "prompts": prompts}


def test_turns_stay_on_one_rank_and_hit(servers: dict[str, Any]) -> None:
    """B26: each turn finds what the turn before left, whichever API process takes it."""
    played, used = {}, {}
    for name, server in servers.items():
        before = _finished(server)
        played[name] = _chat(server, 0, _words(90, 0, 100), TURNS)
        used[name] = _after(server, TURNS, before, lambda s=server: _finished(s))
    print(played, used)
    assert list(used["plugin"].values()) == [TURNS]
    assert played["plugin"]["answers"] == played["stock"]["answers"]
    hits, prompts = played["plugin"]["hits"], played["plugin"]["prompts"]
    assert hits[0] == 0
    for turn in range(1, TURNS):
        # all of the turn before, up to its last whole blocks
        assert hits[turn] > prompts[turn - 1] - 64, hits
    assert sum(hits) >= sum(played["stock"]["hits"])


def test_unrelated_chats_spread_and_each_stays(servers: dict[str, Any]) -> None:
    """B27: chats with one head use both ranks, and the metric says that later turns stayed."""
    server, head = servers["plugin"], _words(91, 0, 300)
    before = _finished(server)
    outcomes = _by_rank(server, "mimo:dp_affinity_requests_total", "outcome")
    ranks = _by_rank(server, "mimo:dp_affinity_requests_total", "rank")
    played = [_chat(server, 1 + chat, head, 3) for chat in range(12)]
    used = _after(server, 36, before, lambda: _finished(server))
    print(used, [p["hits"] for p in played])
    assert set(used) == {"0", "1"} and min(used.values()) >= 6
    assert all(value % 3 == 0 for value in used.values())
    for one in played:
        assert all(one["hits"][t] > one["prompts"][t - 1] - 64 for t in (1, 2))
    name = "mimo:dp_affinity_requests_total"
    by_rank = _after(server, 36, ranks, lambda: _by_rank(server, name, "rank"))
    assert by_rank == used
    why = _by_rank(server, name, "outcome") - outcomes
    # A process counts a chat as new at its first turn there: two processes, one to two times.
    assert 12 <= why["new"] <= 24 and why["stayed"] == 36 - why["new"] and "moved" not in why


def test_a_named_session_stays_whatever_it_asks(servers: dict[str, Any]) -> None:
    server = servers["plugin"]
    before = _finished(server)
    for turn in range(8):
        body = {"prompt": _words(40 + turn, 3), "max_tokens": 2, "session_id": "agent-7"}
        server.post("/v1/completions", body)
    assert list(_after(server, 8, before, lambda: _finished(server)).values()) == [8]


def test_a_burst_on_one_chat_uses_the_other_rank_too(servers: dict[str, Any]) -> None:
    """Clearly less load wins: one session does not get what the other rank could do."""
    server = servers["plugin"]
    before = _finished(server)

    def one(index: int) -> None:
        body = {"prompt": _words(60 + index, 4), "max_tokens": 200, "ignore_eos": True}
        server.post("/v1/completions", {**body, "session_id": "burst"})

    with ThreadPoolExecutor(48) as pool:
        list(pool.map(one, range(48)))
    used = _after(server, 48, before, lambda: _finished(server))
    print(used)
    assert set(used) == {"0", "1"} and min(used.values()) >= 10


def test_without_ranks_the_feature_is_refused(dense: Any) -> None:
    done = serve_until_end(dense, Refusal(["--plugin", "mimo:dp_affinity"], []))
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode not in (0, None)
    assert "feature 'dp_affinity' can't run here: --data-parallel-size is 1" in line
    assert "EngineCore" not in done.stdout + done.stderr
