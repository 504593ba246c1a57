# SPDX-License-Identifier: Apache-2.0
"""From results to claims: SGLang's retention benchmark, without SGLang."""

from __future__ import annotations

from benchmarks.sglang_claims import Result, claims, ratios, table
from benchmarks.sglang_store import Kept

CLAIMS = [
    "shared_300_hit",
    "shared_600_hit",
    "batch4_hit_total",
    "recomputed_ratio",
    "worst_seed_ratio",
    "l3_keepalive_fraction",
]


def result(pool: tuple[int, int], policy: str, seed: int, recomputed: int) -> Result:
    return Result(
        full_tokens=pool[0],
        swa_tokens=pool[1],
        policy=policy,
        seed=seed,
        requests=10,
        prompt_tokens=1000,
        recomputed_tokens=recomputed,
        retractions=0,
    )


RESULTS = [
    result(pool, policy, seed, recomputed)
    for pool, seed, counts in (
        ((100, 10), 0, (400, 100, 40)),
        ((100, 10), 1, (200, 150, 20)),
        ((50, 10), 0, (500, 400, 300)),
        ((50, 10), 1, (400, 420, 200)),
    )
    for policy, recomputed in zip(("stock", "plugin", "bound"), counts, strict=True)
]
HITS = {
    "stock": {"shared_300": [0], "shared_600": [512], "batch4": [0, 0, 400, 400]},
    "plugin": {"shared_300": [288], "shared_600": [592], "batch4": [400] * 4},
}
KEPT = [
    Kept("stock", 0, 688, 0, (688,), 0, 9),
    Kept("plugin", 0, 688, 688, (688,), 9, 9),
    Kept("stock", 1, 688, 0, (688,), 0, 9),
    Kept("plugin", 1, 688, 344, (688,), 9, 9),
]


def test_every_claim_is_written_with_its_figures() -> None:
    found = {claim["id"]: claim for claim in claims(RESULTS, HITS, KEPT, "how")}
    assert list(found) == CLAIMS
    for claim in found.values():
        assert {"id", "value", "stock", "bound", "unit", "seeds", "how"} <= set(claim)
    assert found["batch4_hit_total"]["value"] == 1600
    assert found["batch4_hit_total"]["stock"] == 800
    # The mean of the seeds' ratios, not the ratio of sums.
    assert found["recomputed_ratio"]["value"] == round((0.25 + 0.75 + 0.8 + 1.05) / 4, 3)
    assert found["recomputed_ratio"]["per_pool"] == {"100/10": 0.5, "50/10": 0.925}
    assert found["recomputed_ratio"]["bound_per_pool"] == {"100/10": 0.1, "50/10": 0.55}
    assert found["worst_seed_ratio"]["value"] == 1.05
    assert found["l3_keepalive_fraction"]["value"] == 0.75
    assert found["l3_keepalive_fraction"]["worst"] == 0.5
    assert found["l3_keepalive_fraction"]["stock"] == 0.0


def test_ratios_stay_with_their_pool_and_seed() -> None:
    assert ratios(RESULTS) == {(100, 10): [0.25, 0.75], (50, 10): [0.8, 1.05]}
    lines = list(table(RESULTS))
    assert len(lines) == 3
    assert "0.50 (0.25..0.75)" in lines[1]
