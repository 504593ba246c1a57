# SPDX-License-Identifier: Apache-2.0
"""SGLang's own cache, pools and allocators with the plugin's retention; no model, no server."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang_cases import CASES, ask, case_hits
from benchmarks.sglang_churn import Walk
from benchmarks.sglang_pools import Pools, Store
from benchmarks.sglang_sim import SglangSimulator
from benchmarks.sglang_store import keep_hot, room_bytes
from benchmarks.workloads import MESSAGE_START, message

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PLUGIN: dict[str, Any] = {"message_start_token_ids": [MESSAGE_START]}
SETTINGS = [pytest.param(None, id="stock"), pytest.param(PLUGIN, id="plugin")]


@pytest.mark.parametrize(
    ("name", "stock", "plugin"),
    [
        ("shared_300", [0], [288]),
        ("shared_600", [512], [592]),
        ("batch4", [0, 0, 400, 400], [400, 400, 400, 400]),
    ],
)
def test_prefixes_of_a_cached_prompt(name: str, stock: list[int], plugin: list[int]) -> None:
    assert name in CASES
    assert case_hits(name, None) == stock
    assert case_hits(name, PLUGIN) == plugin


# ------------------------------------------------------------------- an idle branch keeps its end


def hit_of_idle_branch(settings: dict[str, Any] | None, short_prompts: int) -> tuple[int, int]:
    """Hit of a long chat that goes on after short prompts, and where its last turn had ended.

    The pool for windows holds about 25 of them; the other one holds everything.
    """
    rng = random.Random(3)
    pools = Pools(full_tokens=40_000, swa_tokens=3200, chunk_tokens=512)
    simulator = SglangSimulator(pools, settings, check=True)
    chat = message(rng, 6000)
    ask(simulator, [chat], 40)
    ended = [*chat, *[2] * 40]
    for _ in range(short_prompts):
        ask(simulator, [message(rng, 200)], 20)
    (hit,) = ask(simulator, [[*ended, *message(rng, 300)]])
    simulator.finish()
    return hit, (len(ended) - 1) // pools.page_tokens * pools.page_tokens


def test_an_idle_branch_keeps_its_last_window() -> None:
    """B10: short prompts take as many windows as the pool has, and more; stock computes it all."""
    stock, _ = hit_of_idle_branch(None, 60)
    assert stock == 0
    hit, end = hit_of_idle_branch(PLUGIN, 60)
    assert hit == end


# ------------------------------------------------------------------- admission by window, not pool


def most_running(
    settings: dict[str, Any] | None, prompt_tokens: int, swa_tokens: int
) -> tuple[int, int]:
    """How many of 64 requests run at once in a pool for windows that is full of old ones.

    And how many were sent back to the queue.
    """
    rng = random.Random(4)
    pools = Pools(full_tokens=100_000, swa_tokens=swa_tokens, chunk_tokens=512, max_running=64)
    simulator = SglangSimulator(pools, settings)
    for _ in range(40):
        ask(simulator, [message(rng, 400)])
    for number in range(64):
        simulator.submit(number, message(rng, prompt_tokens), [2] * 48)
    most = 0
    while simulator.busy:
        simulator.step()
        most = max(most, len(simulator.running))
    simulator.finish()
    return most, simulator.totals.retractions


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("prompt_tokens", [100, 1000])
def test_a_request_is_charged_its_window(
    settings: dict[str, Any] | None, prompt_tokens: int
) -> None:
    """B12: at most ``min(length, window + chunk) + page`` each, whatever the other pool holds."""
    pools = Pools()
    length_tokens = prompt_tokens + 48
    each = min(length_tokens, pools.window_tokens + 512) + pools.page_tokens
    assert most_running(settings, prompt_tokens, 64 * each // 16 * 16) == (64, 0)
    # A check of the check: there is a size at which they don't all fit.
    most, _ = most_running(settings, prompt_tokens, 64 * 64)
    assert most < 64


# ------------------------------------------------------------------------------- books and methods


@pytest.mark.parametrize("settings", SETTINGS)
def test_random_walk_loses_no_slot(settings: dict[str, Any] | None) -> None:
    """B60: 10^4 steps, half of them for stock; ``benchmarks/sglang_retention.py`` takes 10^5."""
    walk = Walk(0, settings)
    for _ in range(3000 if settings is None else 7000):
        walk.step()
    walked = walk.finish()
    assert walked.requests > 300
    assert walked.hit_tokens > 10_000
    assert walked.hole_tokens > 2000
    assert min(walked.evicted_full_tokens, walked.evicted_swa_tokens) > 10_000


def test_a_hot_prefix_outlives_cold_ones_in_the_store(tmp_path: Path) -> None:
    room = room_bytes(PLUGIN, tmp_path / "size")
    rest = {}
    for name, settings in (("stock", None), ("plugin", PLUGIN)):
        kept = keep_hot(name, settings, 0, Store(tmp_path / name, room))
        assert set(kept.device_hits) == {kept.hot_tokens}, "the device must answer"
        assert kept.pages_evicted > 0, "the store must be short of room"
        rest[name] = kept.fraction
    assert rest == {"stock": 0.0, "plugin": 1.0}
    quiet = keep_hot("quiet", None, 0, Store(tmp_path / "quiet", room), cold=0)
    assert quiet.fraction == 1.0
