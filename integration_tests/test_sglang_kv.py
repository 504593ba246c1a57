# SPDX-License-Identifier: Apache-2.0
"""The radix backend ``mimo`` in the real SGLang on CPU: hits, exactness, pressure, against stock.

A tiny MiMo in fp32 with keys and values of unequal width, unequal KV heads and sinks; pages of 16,
chunks of 512, a window of 128. SGLang's own checks run after every step and whenever it is idle.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.conftest import ModelFactory, ServerFactory
from integration_tests.sglang_local import STRICT, refused
from integration_tests.sglang_script import LONG_PREFIXES, Player, Record, Reply
from integration_tests.side_by_side import start_all

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGE, WINDOW = 16, 128
POOLS = ("--max-total-tokens=4096",)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_model_factory: ModelFactory) -> Path:
    return tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW)


@pytest.fixture(scope="module")
def records(model: Path, serve_sglang: ServerFactory) -> dict[str, Record]:
    """What stock and plugin answered to the same script, one after the other."""
    servers = start_all(
        {
            "stock": lambda: serve_sglang(model, *POOLS, environment=STRICT),
            "plugin": lambda: serve_sglang(model, *POOLS, plugin="mimo:kv", environment=STRICT),
        }
    )
    found = {}
    for name, server in servers.items():
        player = Player(server)
        player.play()
        player.press()
        found[name] = player.finish()
    return found


@pytest.fixture(scope="module")
def stock(records: dict[str, Record]) -> Record:
    return records["stock"]


@pytest.fixture(scope="module")
def plugin(records: dict[str, Record]) -> Record:
    return records["plugin"]


def distance(one: Reply, other: Reply) -> float:
    assert one.output == other.output
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def test_stock_is_stock_and_the_plugin_says_it_acts(stock: Record, plugin: Record) -> None:
    assert "mimo-plugin" not in stock.log
    assert stock.metrics["mimo:checkpoints_created_total"] == 0
    for role in ("tokenizer", "scheduler", "detokenizer"):
        assert plugin.log.count(f"process={role} | features=kv | contracts ok") == 1, role
    assert "impl=MimoRadixCache" in plugin.log
    assert "Tree Core: RustUnifiedTreeCore" in plugin.log


@pytest.mark.parametrize(
    ("name", "stock_hit", "least"), [("shared_300", 0, 288), ("shared_600", 512, 592)]
)
def test_a_prefix_of_a_cached_prompt(
    stock: Record, plugin: Record, name: str, stock_hit: int, least: int
) -> None:
    assert stock.warm[name].cached == stock_hit
    assert plugin.warm[name].cached >= least
    assert plugin.cold[name].cached == 0
    assert distance(plugin.warm[name], plugin.cold[name]) <= TOLERANCE
    assert distance(plugin.warm[name], stock.cold[name]) <= TOLERANCE


def test_requests_that_arrive_together(stock: Record, plugin: Record) -> None:
    # How many of them stock computes again depends on how many make it into the first step.
    assert stock.batch[0] == 0
    assert sum(stock.batch) < 4 * 400
    assert plugin.batch == plugin.batch_again == [400] * 4


def test_a_chat_goes_on_from_the_end_of_the_output(stock: Record, plugin: Record) -> None:
    for before, reply in zip(plugin.chat, plugin.chat[1:], strict=False):
        # The last token's KV is computed when the next one is, which never comes.
        end = (len(before.tokens) - 1) // PAGE * PAGE
        assert reply.cached >= end
    assert [r.output for r in plugin.chat] == [r.output for r in stock.chat]
    assert plugin.chat_cold is not None
    assert plugin.chat_cold.cached == 0
    assert distance(plugin.chat[-1], plugin.chat_cold) <= TOLERANCE


def test_the_ladder_bounds_the_loss_of_a_long_prompt(stock: Record, plugin: Record) -> None:
    for length in LONG_PREFIXES:
        lost = length // PAGE * PAGE - plugin.long[length]
        assert 0 <= lost <= max(WINDOW, 0.25 * length) + PAGE, length
        if length <= 4 * WINDOW:
            assert lost == 0, length
    assert sum(plugin.long.values()) > sum(stock.long.values())


def test_pressure_retracts_nobody_and_loses_nothing(stock: Record, plugin: Record) -> None:
    assert plugin.metrics["mimo:evicted_blocks_total"] > 0, "no pressure"
    assert plugin.metrics["sglang:num_retracted_requests_total"] == 0
    assert len(plugin.pressed) == len(stock.pressed)
    assert plugin.alive
    assert "leak" not in plugin.log.lower().replace("check_leak", "")


def test_metrics_are_what_clients_were_told(plugin: Record) -> None:
    metrics = plugin.metrics
    assert metrics["mimo:window_safe_hit_tokens_total"] == plugin.cached_total
    assert metrics["mimo:full_hit_tokens_total"] == (
        plugin.cached_total + metrics["mimo:trimmed_tokens_total"]
    )
    assert metrics["mimo:checkpoints_created_total"] > 0


# --- the switch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "extra", "words"),
    [
        (("--plugin", "mimo:kv", "--radix-cache-backend", "other"), {}, "fix: drop it"),
        ((), {"MIMO_CONFIG": '{"kv": {"swa_shar": 1}}'}, "did you mean 'swa_share'?"),
    ],
)
def test_what_cannot_be_done_ends_the_command_with_one_line(
    model: Path, arguments: tuple[str, ...], extra: dict[str, str], words: str
) -> None:
    status, line = refused(model, arguments, extra)
    assert status == 1
    assert line.startswith("mimo-plugin: error: ")
    assert words in line
