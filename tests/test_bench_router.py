# SPDX-License-Identifier: Apache-2.0
"""The router's benchmarks: their claims are all there, and the index is held against the nodes."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks import router_real, router_sim
from benchmarks.router_nodes import BLOCK, Arrival, Cache, synthetic_trace
from benchmarks.router_peers import (
    SGLANG_POLICIES,
    VLLM_POLICIES,
    Worker,
    sglang_router,
    vllm_router,
)
from benchmarks.router_replay import QUICK, Answer, Replay, Session, Sizes, Turn, plan
from benchmarks.router_workers import Counters


def test_the_index_says_what_the_nodes_have(monkeypatch):
    trace = synthetic_trace(400, seed=1)
    monkeypatch.setattr(router_sim, "NODE_BLOCKS", 300)
    hybrid = router_sim.simulate(trace, "ours", 3.0, True, 0)
    full = router_sim.simulate(trace, "ours", 3.0, False, 0)
    assert (hybrid.wrong, full.wrong) == (0, 0)
    assert 0 < hybrid.hit < full.hit
    assert min(hybrid.ttft_s) > 0


def test_a_nodes_hit_ends_at_a_window():
    cache = Cache(40, hybrid=True)
    first = Arrival(0.0, 10 * BLOCK + 1, list(range(10)))
    cache.store(first, 0)
    longer = Arrival(0.0, 13 * BLOCK, [*range(10), 20, 21, 22])
    other = Arrival(0.0, 13 * BLOCK, [*range(6), *range(30, 37)])
    assert (cache.hit(longer), cache.full(other), cache.hit(other)) == (10, 6, 0)
    cache.store(other, 6)
    assert cache.hit(Arrival(0.0, 13 * BLOCK, [*range(6), *range(50, 57)])) == 6
    cache.store(Arrival(0.0, 30 * BLOCK, list(range(100, 130))), 0)
    assert cache.hit(longer) == 0  # the end of what was used longest ago goes first


def test_claims(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(router_sim, "synthetic_trace", lambda requests: synthetic_trace(150))
    monkeypatch.setattr(router_sim, "lookup_ms", lambda: {"none": 1.0})
    target = tmp_path / "router.json"
    assert router_sim.main(["--quick", "--json", str(target)]) == 0
    claims = {claim["id"]: claim for claim in json.loads(target.read_text())["claims"]}
    assert set(claims) == {
        "index_wrong",
        "lookup_ms_1m_64w",
        *(f"conv_x{x}_{f}_vs_best_other" for x in (3, 4) for f in ("mean", "p90", "p99")),
    }
    assert claims["index_wrong"]["value"] == 0
    assert all(
        {"value", "stock", "bound", "unit", "seeds", "how"} <= set(c) for c in claims.values()
    )
    assert claims["conv_x3_p90_vs_best_other"]["seeds"] == [0, 1]
    assert all(len(c["per_seed"]) == 2 for name, c in claims.items() if name != "lookup_ms_1m_64w")
    assert target.with_suffix(".png").stat().st_size > 1000


def test_one_seed_is_too_few(capsys):
    with pytest.raises(SystemExit):
        router_sim.main(["--seeds", "1"])
    assert "--seeds: found 1; allowed: 2 or more" in capsys.readouterr().err


# --- real workers: plan, peers' commands, replay and claims


def test_a_seed_makes_one_plan():
    for sizes in (QUICK, Sizes()):
        assert plan(3, sizes) == plan(3, sizes) != plan(4, sizes)
        roots = plan(3, sizes)
        every = [session for root in roots for session in root.all()]
        assert len({session.name for session in every}) == len(every) > len(roots)
        assert len({root.system for root in roots}) <= sizes.kinds
        assert [root.start_s for root in roots] == sorted(root.start_s for root in roots)
        for session in every:
            # Forks start behind an answer that is not the last one.
            assert all(0 <= turn < len(session.turns) - 1 for turn in session.forks)


def test_peers_are_told_all_they_can_use():
    workers = [Worker(f"http://h:{n}", f"tcp://h:1{n}", f"tcp://h:2{n}") for n in (1, 2)]
    for policy in VLLM_POLICIES:
        command = vllm_router(Path("/p"), policy, workers, "m", 16)
        urls = command[command.index("--worker-urls") + 1 :][:2]
        assert urls == ["http://h:1", "http://h:2"]
        assert f"--policy={policy.split()[0]}" in command
        told = {word for word in command if "event" in word}
        if policy.startswith("kv_aware"):
            assert "--kv-event-source=http://h:2=tcp://h:12" in told
            assert "--kv-event-replay-source=http://h:2=tcp://h:22" in told
            assert {"--kv-event-block-size=16", "--kv-event-model=m"} <= told
        else:
            assert not told
    for policy in SGLANG_POLICIES:
        command = sglang_router(Path("/p"), policy, workers)
        assert command[command.index("--worker-urls") + 1 :][:2] == ["http://h:1", "http://h:2"]
        assert ("--balance-abs-threshold=2" in command) == policy.endswith("tight")


def test_a_replay_says_what_became_of_each_turn():
    """Chats grow by their answers, forks start from a copy, failures are told."""
    asked = []

    async def answer(request):
        body = await request.json()
        session = request.headers["X-Session-ID"]
        assert request.headers["X-SMG-Routing-Key"] == session
        asked.append((session, [message["content"] for message in body["messages"]]))
        if session == "bad":
            return web.json_response({"error": "no"}, status=503)
        headers = {"X-Mimo-Worker": "w", "X-Mimo-Predicted-Hit": "7"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        chunks = [{"choices": [{"delta": {"content": part}}]} for part in ("a", "b")]
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        chunks.append({"choices": [], "usage": usage})
        if session == "broken":
            chunks = [chunks[0], {"error": {"message": "gone"}}]
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    fork = Session("fork", 0.0, "", (Turn(0.0, "f", 1),))
    chat = Session("chat", 0.0, "s", (Turn(0.0, "1", 1), Turn(0.2, "2", 1)), {0: (fork,)})
    bad, broken = (Session(name, 0.0, "s", (Turn(0.0, "1", 1),) * 2) for name in ("bad", "broken"))

    async def play():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            return await Replay(f"http://127.0.0.1:{port}", "m").run([chat, bad, broken])
        finally:
            await runner.cleanup()

    answers = {(a.session, a.error): a for a in asyncio.run(play())}
    by_session = {name: messages for name, messages in asked if name == "fork"}
    assert by_session["fork"] == ["s", "1", "ab", "f"]
    assert [m for name, m in asked if name == "chat"] == [["s", "1"], ["s", "1", "ab", "2"]]
    # What failed is not asked again.
    assert [name for name, _ in asked].count("bad") == 1
    assert {name for name, error in answers if error} == {"bad", "broken"}
    good = answers["chat", None]
    assert (good.prompt_tokens, good.cached_tokens, good.predicted_tokens) == (9, 4, 7)
    assert good.ttft_s > 0


def run_of(policy, seed, hits, computed, requests, error=None):
    workers = [
        Counters(hit + new, hit, count)
        for hit, new, count in zip(hits, computed, requests, strict=True)
    ]
    answers = [Answer("s", 0.0, 0.1 * n, 10, 5, error) for n in range(1, 5)]
    return router_real.Run(policy, seed, answers, workers, 0.02, 1.0)


def test_claims_of_real_workers():
    first, second = "vllm-router kv_aware", "sglang-router manual"
    runs = [
        run_of(router_real.ROUND_ROBIN, 0, (40, 40), (60, 60), (5, 5)),
        run_of(first, 0, (60, 60), (40, 40), (5, 5)),
        run_of(second, 0, (50, 50), (40, 40), (5, 5)),
        run_of(router_real.OURS, 0, (70, 50), (30, 50), (5, 5)),
        run_of(router_real.ROUND_ROBIN, 1, (40, 40), (60, 60), (5, 5)),
        run_of(first, 1, (40, 40), (40, 40), (5, 5)),
        run_of(second, 1, (70, 50), (40, 40), (5, 5)),
        run_of(router_real.OURS, 1, (80, 80), (20, 20), (8, 2)),
    ]
    cpu = {"ms": 2.0, "prompt_tokens": 3000.0, "requests": 9}
    claims = {claim["id"]: claim for claim in router_real.claims(runs, cpu, "how")}
    assert set(claims) == {
        "hit_vs_round_robin",
        "hit_vs_best_peer",
        "max_over_mean_load",
        "router_cpu_ms_per_request",
    }
    assert claims["hit_vs_round_robin"]["per_seed"] == [1.5, 2.0]
    # Of each seed, the peer that was best in it.
    assert claims["hit_vs_best_peer"]["per_seed"] == [1.0, 1.333]
    assert claims["hit_vs_best_peer"]["others"] == {first: 1.4, second: 1.273}
    # The worse of tokens and requests.
    assert claims["max_over_mean_load"]["per_seed"] == [1.25, 1.6]
    assert claims["router_cpu_ms_per_request"]["value"] == 2.0
    for claim in claims.values():
        assert {"value", "stock", "bound", "unit", "seeds", "how"} <= set(claim)
        assert claim["seeds"] == [0, 1] and len(claim["per_seed"]) in (1, 2)


def test_the_picture_of_real_workers(tmp_path):
    runs = [run_of(p, 0, (1, 1), (1, 1), (1, 1)) for p in (router_real.ROUND_ROBIN, "mimo router")]
    router_real.plot(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
