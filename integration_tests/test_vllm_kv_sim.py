# SPDX-License-Identifier: Apache-2.0
"""The KV feature in in-process engines under memory pressure, alone and beside other features.

The same requests run on stock vLLM, with the plugin, and with the plugin beside speculation
or a KV connector: the answers must be the same token for token (fp32, greedy). The model-free
simulator that the benchmarks use must give the engine's hits, request by request.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from integration_tests.side_by_side import start_all
from tools.server import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
PROBE = Path(__file__).with_name("kv_probe.py")
TIMEOUT_S = 240
POOL_BLOCKS = 90
"""Little enough that checkpoints die and running requests are preempted."""
KV = {"mimo": {"features": ["kv"]}}
LOGPROB_TOLERANCE = 1e-4
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
NGRAM_BATCHES = 8
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "integration_tests.host_offload",
        "cpu_bytes_to_use": 50_000_000,
    },
}


@pytest.fixture(scope="module")
def run(tiny_model):
    """Run the probe with options of ``LLM``; one engine for each set of options."""

    def start(probe, environment=None, **options):
        options = {"probe": probe, "num_gpu_blocks_override": POOL_BLOCKS, **options}
        done = subprocess.run(
            [sys.executable, str(PROBE), str(tiny_model), json.dumps(options)],
            env=engine_environment({"PYTHONPATH": str(ROOT), **(environment or {})}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return start


@pytest.fixture(scope="module")
def results(run):
    """What all engines of the module found, by the names of the fixtures below."""
    starts = {"message_start_token_ids": [5, 7]}
    one_draft = {"method": "mtp", "num_speculative_tokens": 1}
    return start_all(
        {
            "stock": partial(run, {"simulate": True}),
            "kv": partial(run, {"simulate": True, "logprobs": True}, additional_config=KV),
            "ngram": partial(
                run,
                {"batches": NGRAM_BATCHES},  # a step with drafts to verify is slow on the CPU
                environment={"NUMBA_DISABLE_JIT": "1"},  # the proposer compiles half a minute
                additional_config={"mimo": {"features": ["kv"], "kv": starts}},
                speculative_config=NGRAM,
            ),
            "mtp": partial(run, {}, additional_config=KV, speculative_config=one_draft),
            "offloading": partial(
                run, {"restart_at": 6}, additional_config=KV, kv_transfer_config=OFFLOADING
            ),
        }
    )


@pytest.fixture(scope="module")
def stock(results):
    return results["stock"]


@pytest.fixture(scope="module")
def kv(results):
    return results["kv"]


@pytest.fixture(scope="module")
def kv_ngram(results):
    return results["ngram"]


@pytest.fixture(scope="module")
def kv_mtp(results):
    return results["mtp"]


@pytest.fixture(scope="module")
def kv_offloading(results):
    return results["offloading"]


def reused(result):
    return sum(map(sum, result["engine_hits"]))


def test_the_workload_presses(stock, kv):
    for result in (stock, kv):
        assert result["engine_preemptions"] > 0
        assert result["block_sizes"] == sorted(result["block_sizes"], reverse=True)
    assert kv["metrics"]["mimo:evicted_blocks_total"] > POOL_BLOCKS
    assert stock["kv_module"].startswith("vllm.")
    assert kv["kv_module"].startswith("mimo_plugin.")


def test_answers_are_the_same_and_more_is_reused(stock, kv):
    assert kv["outputs"] == stock["outputs"]
    assert kv["prompts"] == stock["prompts"]
    assert reused(kv) > reused(stock)


@pytest.mark.parametrize("engine", ["stock", "kv"])
def test_simulator_gives_the_engine_s_hits(engine, request):
    result = request.getfixturevalue(engine)
    assert result["simulator_hits"] == result["engine_hits"]
    assert result["simulator_live"] == result["engine_live"]
    assert result["simulator_preemptions"] == result["engine_preemptions"]


def test_logprobs_after_a_hit_are_those_of_a_cold_run(kv):
    assert kv["logprobs"]["same_tokens"]
    assert all(hit > 0 for hit in kv["logprobs"]["hits"])
    assert kv["logprobs"]["worst_logprob_gap"] <= LOGPROB_TOLERANCE


def test_message_starts_come_from_the_chat_template(kv):
    """The tiny tokenizer's template opens a message with ``<|im_start|>``, id 1."""
    assert kv["message_starts"] == [1]


def test_message_starts_can_be_given(kv_ngram):
    assert kv_ngram["message_starts"] == [5, 7]


def test_turn_ends_are_kept_whatever_the_lengths():
    """Model-free: every output length across two alignment units ends in a full hit."""
    from benchmarks.sim import PLUGIN, Simulator
    from benchmarks.workloads import message

    simulator = Simulator(20_000, plugin=PLUGIN)
    unit = simulator.geometry.alignment_tokens
    for output in range(unit, 3 * unit):
        rng = random.Random(output)
        prompt = message(rng, 10 * unit + 7)
        _, answer = simulator.generate(prompt, output)
        history = [*prompt, *answer]
        record, _ = simulator.generate([*history, *message(rng, 2 * unit)], 1)
        assert record.hit_tokens == (len(history) - 1) // unit * unit, output


def test_a_waiting_request_s_memo_and_checkpoints_longer_than_its_prompt():
    """With a draft group another request's checkpoint may reach past a waiting request's end.

    Without an engine; in one an error here ends the EngineCore: MTP on, short prompts waiting
    while longer ones with the same start are served in a small pool.
    """
    from mimo_plugin.engines.vllm.kv.lookup import Lookup

    unit, num_tokens, full_tokens, lookahead_tokens = 32, 100, 64, 64
    hashes = [bytes([at]) for at in range(num_tokens // unit)]
    request = SimpleNamespace(num_tokens=num_tokens, block_hashes=hashes)
    coordinator = SimpleNamespace(
        block_pool=None,
        num_sealed=1,
        sealed=[(full_tokens + lookahead_tokens, b"another's")],
        hash_block_size=unit,
        rule=SimpleNamespace(lookahead_tokens=lookahead_tokens),
    )
    memo = Lookup(
        result=(None, 0, 0),
        num_tokens=num_tokens,
        max_hit_tokens=num_tokens - 1,
        full_tokens=full_tokens,
        node=None,
        swa=None,
        next_key=None,
        num_sealed=0,
        reusable=True,
    )
    assert memo.still_valid(request, num_tokens - 1, coordinator)


def test_turn_ends_survive_a_full_pool():
    """Model-free: eight long answers at once in a pool that holds them without preemption."""
    from benchmarks.sim import PLUGIN, Geometry, Simulator
    from benchmarks.workloads import message

    sizes = {"full_block_tokens": 64, "swa_block_tokens": 32, "window_tokens": 64}
    simulator = Simulator(140, plugin=PLUGIN, geometry=Geometry(swa_groups=3, **sizes))
    rng = random.Random(3)
    prompts = [message(rng, 40 + at) for at in range(8)]
    chats = {simulator.submit(prompt, 260): prompt for prompt in prompts}
    waiting = set(chats)
    while waiting:
        waiting -= simulator.step()
    hits = []
    for number, prompt in chats.items():
        following = [*prompt, *simulator.output_of(number), *message(rng, 30)]
        hits.append(simulator.generate(following, 1)[0].hit_tokens)
    assert sum(hits) > 0


def test_with_ngram_speculation(stock, kv_ngram):
    assert kv_ngram["outputs"] == stock["outputs"][:NGRAM_BATCHES]
    assert kv_ngram["metrics"]["vllm:spec_decode_num_draft_tokens_total"] > 0
    # Drafts take blocks too, and no message start is known; it still reuses what stock does.
    assert reused(kv_ngram) >= 0.9 * sum(map(sum, stock["engine_hits"][:NGRAM_BATCHES]))


def test_with_the_model_s_own_draft_layer(stock, kv_mtp):
    """A draft layer adds a KV group and needs one block past a hit."""
    assert kv_mtp["outputs"] == stock["outputs"]
    assert len(kv_mtp["block_sizes"]) > len(stock["block_sizes"])
    assert kv_mtp["metrics"]["vllm:spec_decode_num_draft_tokens_total"] > 0
    # Requests that were preempted are admitted again, and counted again.
    assert kv_mtp["metrics"]["mimo:window_safe_hit_tokens_total"] >= reused(kv_mtp) > 0


def test_with_a_connector_that_supports_the_hybrid_manager(stock, kv, kv_offloading):
    """The cache is dropped half-way; the connector's copies serve, and all of it is accounted."""
    assert kv_offloading["outputs"] == stock["outputs"]
    counted = kv_offloading["metrics"]
    assert counted["vllm:external_prefix_cache_hits_total"] > 0
    assert counted["mimo:window_safe_hit_tokens_total"] > 0
    assert kv_offloading["kv_module"] == kv["kv_module"]
