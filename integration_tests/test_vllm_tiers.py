# SPDX-License-Identifier: Apache-2.0
"""The feature ``tiers`` on real engines and real stores: the answers of stock, and exact bytes.

The scripts are in ``tiers_probe.py``. Blocks are of 128 tokens, as the window, so that of a prompt
of 1500 tokens a hit has 1408, and needs 11 blocks of full attention and one of each of six groups
of windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from integration_tests.copy_draft import make_copy_draft
from integration_tests.tiers_runs import Runs, run_all

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LOGPROB_TOLERANCE = 1e-4
WINDOW_TOKENS = BLOCK_TOKENS = 128
FULL_LAYERS, WINDOW_LAYERS = 2, 12
GROUPS = 7
"""One of both full layers, six of two layers with windows."""
LAYER_BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 32 * 4
"""Keys and values, two heads of 32, fp32."""
BLOCK_BYTES = 2 * LAYER_BLOCK_BYTES
HIT_TOKENS, FULL_BLOCKS = 1408, 11
WINDOW_BLOCKS = GROUPS - 1
IDEAL_BYTES = 34 * LAYER_BLOCK_BYTES
"""Eleven blocks of two full layers, and one of twelve layers with windows."""
HITS = {"full": 1408, "div1024": 1024, "div500": 384, "ext": 1408}

LEFT = [1, 1, 0, 0]
"""Of requests; the last one goes with the step after it."""

D2H, H2D = "vllm:kv_offload_store_bytes", "vllm:kv_offload_load_bytes"
WRITTEN, READ = "vllm:kv_offload_tiering_write_bytes", "vllm:kv_offload_tiering_read_bytes"

Answer = Mapping[str, Any]


@pytest.fixture(scope="module")
def model(tiny_model_factory: Callable[..., Path]) -> Path:
    return tiny_model_factory(
        layers=14, full_every=7, window_tokens=WINDOW_TOKENS, full_kv_heads=2, swa_kv_heads=2
    )


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What all scripts found, by their names."""
    drafting = make_copy_draft(tmp_path_factory.mktemp("drafting"))
    return run_all(model, drafting, tmp_path_factory.mktemp("tiers"), BLOCK_BYTES)


@pytest.fixture(scope="module")
def stock(found: Runs) -> Any:
    return found["stock"]


def check(answer: Answer, expected: Answer) -> None:
    """The answer is stock's."""
    assert answer["tokens"] == expected["tokens"]
    assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)


def moved(answer: Answer, name: str) -> float:
    return float(answer["moved"].get(name, 0))


# --- what is stored -------------------------------------------------------------------------


def test_a_prompt_end_alone_costs_the_ideal(found: Runs) -> None:
    cold = found["files"]["cold"]
    assert moved(cold, D2H) == moved(cold, WRITTEN) == IDEAL_BYTES
    assert found["files"]["pages"] == FULL_BLOCKS + WINDOW_BLOCKS


def test_the_ladder_has_the_hits_of_a_window_everywhere_for_less(found: Runs, stock: Any) -> None:
    ladder, dense = found["host"], found["dense"]
    assert moved(dense["cold"], D2H) == FULL_BLOCKS * GROUPS * BLOCK_BYTES
    assert moved(ladder["cold"], D2H) <= 0.65 * moved(dense["cold"], D2H)
    for name, tokens in HITS.items():
        for each in (ladder, dense, found["host kv"]):
            answer = each["hits"][name]
            check(answer, stock[name])
            assert answer["cached"] == tokens
            assert moved(answer, H2D) == (tokens // BLOCK_TOKENS + WINDOW_BLOCKS) * BLOCK_BYTES
            assert moved(answer, "mimo:tier_host_hit_tokens") == tokens


def test_a_row_of_host_memory_is_what_a_group_fills(found: Runs) -> None:
    """B21: bytes used are those of the groups, and what is stored is loaded after a rotation."""
    host = found["host"]
    stored = moved(host["cold"], D2H)
    assert host["used_bytes"] == stored == sum(host["chunks"].values()) * BLOCK_BYTES

    turned = found["rotation"]
    assert turned["groups"] == GROUPS and turned["rows"] == 40
    need = 900 // BLOCK_TOKENS + WINDOW_BLOCKS
    for at, (used_bytes, chunks) in enumerate(turned["rounds"]):
        assert used_bytes == min(40, need * (at + 1)) * BLOCK_BYTES
        assert sum(chunks.values()) * BLOCK_BYTES == used_bytes
    last = turned["last"]
    assert last["cached"] == 896 and moved(last, H2D) == need * BLOCK_BYTES
    assert turned["first"]["cached"] == 0, "it made room"


# --- a restart, then each store -------------------------------------------------------------


def check_restart(run: Runs, stock: Any) -> None:
    """Stored by one engine, found by another: full attention and one window, nothing else."""
    check(run["cold"], stock["full"])
    answer = run["restart"]
    check(answer, stock["full"])
    assert answer["cached"] == HIT_TOKENS
    assert moved(answer, READ) == moved(answer, H2D) == IDEAL_BYTES
    assert moved(answer, "mimo:tier_hit_tokens") == HIT_TOKENS
    assert moved(answer, "mimo:tier_host_hit_tokens") == 0


@pytest.mark.parametrize("store", ["files", "folders", "redis", "mooncake"])
def test_a_restart_is_answered_from_the_store(found: Runs, stock: Any, store: str) -> None:
    check_restart(found[store], stock)


def test_pages_spread_over_folders_of_which_one_may_go(found: Runs, stock: Any) -> None:
    run = found["folders"]
    assert min(run["pages"]) > 0 and sum(run["pages"]) * BLOCK_BYTES == moved(run["cold"], WRITTEN)
    check(run["one lost"], stock["full"])
    assert run["one lost"]["cached"] < HIT_TOKENS


# --- repairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["host", "host kv"])
def test_what_host_memory_lost_is_written_from_the_device(
    found: Runs, stock: Any, run: str
) -> None:
    """Repair A: the windows went, the device has all."""
    host = found[run]
    assert host["A lost"] >= WINDOW_BLOCKS
    check(host["A"], stock["full"])
    assert host["A"]["cached"] == HIT_TOKENS and moved(host["A"], H2D) == 0
    assert moved(host["A"], D2H) == WINDOW_BLOCKS * BLOCK_BYTES
    check(host["A then from host"], stock["full"])
    assert host["A then from host"]["cached"] == HIT_TOKENS


def test_what_the_store_lost_is_written_again(found: Runs, stock: Any) -> None:
    """Repair B: found missing when the device or host memory answers."""
    run = found["files"]
    for name in ("B device", "B host"):
        check(run[name], stock["full"])
        assert run[name]["cached"] == HIT_TOKENS
        assert moved(run[name], WRITTEN) == IDEAL_BYTES
        assert moved(run[name], READ) == moved(run[name], D2H) == 0
        assert moved(run[name], "mimo:tier_pages[repaired]") == FULL_BLOCKS + WINDOW_BLOCKS
        assert run[f"{name} pages"] == FULL_BLOCKS + WINDOW_BLOCKS
    assert moved(run["B device"], H2D) == 0 and moved(run["B host"], H2D) == IDEAL_BYTES
    assert moved(run["B some"], WRITTEN) == 5 * BLOCK_BYTES
    assert moved(run["B some again"], WRITTEN) == 0


@pytest.mark.parametrize("run", ["host", "host kv"])
def test_only_what_the_device_lost_is_loaded(found: Runs, stock: Any, run: str) -> None:
    """Repair C: windows; and a hole in full attention."""
    host = found[run]
    for name in ("C", "C again", "hole", "hole again"):
        check(host[name], stock["full"])
        assert host[name]["cached"] == HIT_TOKENS, name
    assert host["C lost"] == WINDOW_BLOCKS and host["hole lost"] == 3
    assert moved(host["C"], H2D) == WINDOW_BLOCKS * BLOCK_BYTES
    assert moved(host["C"], "mimo:tier_adopted_bytes[full]") == FULL_BLOCKS * BLOCK_BYTES
    # The tree of the feature kv keeps or loses a span as a whole.
    hole = FULL_BLOCKS if run == "host kv" else 3
    assert moved(host["hole"], H2D) == hole * BLOCK_BYTES
    assert moved(host["C again"], H2D) == moved(host["hole again"], H2D) == 0


def test_device_and_host_memory_complete_each_other(found: Runs, stock: Any) -> None:
    """Each has lost what the other has; the next hit on the device mends host memory."""
    host = found["host"]
    assert host["mixed lost"] == [3, 5]
    for name in ("mixed", "mixed again", "mixed then from host"):
        check(host[name], stock["full"])
        assert host[name]["cached"] == HIT_TOKENS, name
    assert moved(host["mixed"], H2D) == 5 * BLOCK_BYTES
    assert moved(host["mixed again"], H2D) == 0
    assert moved(host["mixed again"], D2H) == 3 * BLOCK_BYTES


# --- what may not be a hit ------------------------------------------------------------------


@pytest.mark.parametrize("run", ["host", "host kv"])
@pytest.mark.parametrize("name", ["B69 no windows", "B69 one group", "B69 no full"])
def test_a_hit_is_what_all_groups_have(found: Runs, stock: Any, run: str, name: str) -> None:
    """B69: host memory holds some of the groups only."""
    answer = found[run][name]
    check(answer, stock["full"])
    assert answer["cached"] == 0 and moved(answer, H2D) == 0


def test_a_damaged_page_is_a_miss(found: Runs, stock: Any) -> None:
    run = found["files"]
    for answer in run["damaged"]:
        check(answer, stock["full"])
        assert answer["cached"] < HIT_TOKENS
        assert moved(answer, "mimo:tier_pages[damaged]") == 1
    check(run["mended"], stock["full"])
    assert run["mended"]["cached"] == HIT_TOKENS


def test_what_is_restored_is_what_was_stored(found: Runs) -> None:
    """B67: the blocks are overwritten as soon as the store has been submitted."""
    assert found["copies"]["wrong_bytes"] == 0 < found["copies"]["moved_bytes"]


# --- keeping alive --------------------------------------------------------------------------


def test_what_is_hot_on_the_device_outlives_cold_prompts_in_the_store(
    found: Runs, stock: Any
) -> None:
    kept, control = found["keep_alive"]["kept"], found["keep_alive"]["not kept"]
    for run in (kept, control):
        assert set(run["hits"]) == {HIT_TOKENS} and run["evicted"] > 0
        check(run["restart"], stock["full"])
    assert kept["restart"]["cached"] == HIT_TOKENS
    assert control["restart"]["cached"] == 0
    assert kept["calls"]["touch"] == [5, 5 * (FULL_BLOCKS + WINDOW_BLOCKS)]
    assert "touch" not in control["calls"]


# --- a store that dies ----------------------------------------------------------------------


def test_a_killed_redis_costs_hits_and_no_request(found: Runs, stock: Any) -> None:
    run = found["redis"]
    assert len(run["answers"]) == 40 and run["kills"] > 3 and run["failed calls"] > 0
    assert run["dead"] > 5, "requests while it was dead"
    assert sum(answer["cached"] > 0 for _, answer in run["answers"]) > 5
    for which, answer in run["answers"]:
        check(answer, stock[f"short{which}"])
    # The breaker's period is 1 s here; what comes after it stores, and the next request hits.
    assert run["recovered_s"] is not None and run["recovered_s"] < 1 + 3
    assert run["leftovers"] == LEFT


# --- chats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["host", "host kv"])
def test_the_next_turn_finds_the_end_of_the_last(found: Runs, stock: Any, run: str) -> None:
    mine, other = found[run]["chat"], stock["chat"]
    check(mine["first"], other["first"])
    check(mine["second"], other["second"])
    end = (700 + 300 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert mine["second"]["cached"] == end == moved(mine["second"], "mimo:tier_host_hit_tokens")
    assert found[run]["leftovers"] == LEFT


@pytest.mark.parametrize("run", ["pressed", "pressed kv"])
def test_streams_in_a_small_pool_answer_as_stock_does(found: Runs, stock: Any, run: str) -> None:
    mine = found[run]
    for answers, expected in zip(mine["streams"], stock["streams"], strict=True):
        for answer, other in zip(answers, expected, strict=True):
            check(answer, other)
    assert mine["moved"]["vllm:num_preemptions"] > 0
    assert mine["moved"]["mimo:tier_host_hit_tokens"] > 0
    assert mine["moved"][H2D] > 0
    assert mine["leftovers"] == LEFT
    ours = mine["coordinator"].startswith("mimo_plugin")
    assert ours == (run == "pressed kv")


# --- drafts ---------------------------------------------------------------------------------


def test_with_drafts_device_and_host_memory_agree_on_hits(found: Runs) -> None:
    """B68: a look-up for drafts needs a block more, in host memory as on the device."""
    run = found["mtp"]
    assert max(run["lookahead"]) == 1
    for at, expected in enumerate(run["stock"]):
        cold, device, host = (run[name][at] for name in ("cold", "device", "host"))
        for answer in (cold, device, host):
            check(answer, expected)
        assert cold["cached"] == 0
        assert host["cached"] == device["cached"] > 0
        assert moved(host, "mimo:tier_host_hit_tokens") == host["cached"]
    assert run["leftovers"] == LEFT


# --- off ------------------------------------------------------------------------------------


def test_nothing_is_set_where_it_was_not_asked_for(found: Runs) -> None:
    assert found["unasked"] == [False, False, False]
    assert not found["stock"]["connector"]


REFUSALS = {
    "no host memory": ("mimo.tiers.host_gib: found None", 'fix: set "host_gib": 64'),
    "no capacity": ("mimo.tiers.capacity_gib: found None", "fix: say how much"),
    "no such server": ("Redis URL", "redis://HOST:PORT/DB"),
    "no such folder": ("page store /proc/kv", "a folder that can be written to"),
    "of the other engine": ("mimo.tiers.host_swa_share: found 0.5", "fix: remove it"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(found: Runs, name: str) -> None:
    said = found["refusals"][name]
    assert "\n" not in said and all(word in said for word in REFUSALS[name]), said
