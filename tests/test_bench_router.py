# SPDX-License-Identifier: Apache-2.0
"""The router's simulation: its claims are all there, and its index is held against the nodes."""

import json

from benchmarks import router_sim
from benchmarks.router_nodes import BLOCK, Arrival, Cache, synthetic_trace


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
    assert target.with_suffix(".png").stat().st_size > 1000
