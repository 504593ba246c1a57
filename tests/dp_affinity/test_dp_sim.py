# SPDX-License-Identifier: Apache-2.0
"""Chats on ranks and API processes without a model: the rule against vLLM's own.

``-s`` prints the numbers. See ``dp_sim.py`` for what is simulated.
"""

from __future__ import annotations

from statistics import mean

import pytest

from tests.dp_affinity import dp_sim

SEEDS = (1, 2, 3)
CASES = {
    # one chat at a time, and nobody else
    "idle": {
        "num_ranks": 4, "num_processes": 4, "chats": 12, "turns": 6, "head_tokens": 1000,
        "arrivals_per_s": 0.02, "think_s": 2,
    },
    # sixteen chats with a common head, at once
    "common head": {
        "num_ranks": 4, "num_processes": 4, "chats": 16, "turns": 6, "head_tokens": 4096,
        "arrivals_per_s": 2, "think_s": 5,
    },
    "common head, one process": {
        "num_ranks": 4, "num_processes": 1, "chats": 16, "turns": 6, "head_tokens": 4096,
        "arrivals_per_s": 2, "think_s": 5,
    },
    # prefill keeps the ranks busy
    "busy": {
        "num_ranks": 8, "num_processes": 8, "chats": 100, "turns": 5, "head_tokens": 2000,
        "arrivals_per_s": 6, "think_s": 4, "question_tokens": 2000,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_more_hits_and_shorter_waits_than_stock(case):
    values = CASES[case]
    runs = {
        name: [dp_sim.run(affinity=name == "ours", seed=seed, **values) for seed in SEEDS]
        for name in ("stock", "ours")
    }
    for name, results in runs.items():
        print(
            f"\n{case}, {name}: stayed {mean(r.stayed for r in results):.2f}, hits "
            f"{mean(r.hit_share for r in results):.3f} of possible, prefill "
            f"{mean(r.prefill_tokens for r in results) / 1e3:.0f}k tokens, TTFT mean "
            f"{mean(mean(r.ttft_s) for r in results) * 1e3:.0f} ms, max/mean requests "
            f"{max(r.max_over_mean(values['num_ranks']) for r in results):.2f}",
            end="",
        )
    for stock, ours in zip(runs["stock"], runs["ours"], strict=True):
        assert stock.stayed < 0.4 and ours.stayed > (0.75 if case == "busy" else 0.95)
        assert ours.prefill_tokens < 0.75 * stock.prefill_tokens
        assert mean(ours.ttft_s) < 0.75 * mean(stock.ttft_s)
        assert len(ours.requests) == values["num_ranks"]
        if values["num_processes"] == 1:
            assert ours.max_over_mean(values["num_ranks"]) <= 1.25
