# SPDX-License-Identifier: Apache-2.0
"""The KV feature in real servers: the same answers, and what is reused.

Every script runs on a stock server and on one with the plugin, either without memory pressure
(``kv``, hits are judged against what was computable) or in a pool so small that checkpoints die and
requests are preempted (``tight``). Answers must be the same token for token (fp32, greedy).
"""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from integration_tests.kv_client import (
    MESSAGE_START,
    Client,
    GaugeWatch,
    KvEvents,
    Oracle,
    alignment_tokens,
    message,
)
from integration_tests.kv_scripts import (
    branches,
    chat_users,
    disconnects,
    edits,
    growing_chat,
    long_answers,
    pressed_chats,
    spoken_chat,
    token_users,
)
from integration_tests.side_by_side import start_all
from tools.server import engine_environment, free_port, vllm_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
REFUSAL_TIMEOUT_S = 120
TIGHT_POOL_BLOCKS = 140


@pytest.fixture(scope="module")
def events():
    with KvEvents(f"tcp://127.0.0.1:{free_port()}") as watcher:
        yield watcher


@pytest.fixture(scope="module")
def clients(tiny_model, serve_module, events):
    """Clients of all servers of the module, by the names of the fixtures below."""
    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.endpoint.replace("127.0.0.1", "*"),
    }

    def client(*arguments, plugin=None):
        return lambda: Client(
            serve_module(tiny_model, *arguments, plugin=plugin, environment=DEVELOPMENT)
        )

    return start_all(
        {
            "stock": client(),
            "kv": client(plugin="mimo:kv"),
            "tight": client(
                f"--num-gpu-blocks-override={TIGHT_POOL_BLOCKS}",
                "--max-model-len=2048",
                "--max-num-batched-tokens=256",
                f"--kv-events-config={json.dumps(publish)}",
                f"--additional-config={json.dumps({'mimo': {'features': ['kv']}})}",
            ),
        }
    )


@pytest.fixture(scope="module")
def stock(clients):
    return clients["stock"]


@pytest.fixture(scope="module")
def kv(clients):
    return clients["kv"]


@pytest.fixture(scope="module")
def tight(clients):
    """A small pool, small prefill chunks, KV events on; switched on by the configuration."""
    return clients["tight"]


@pytest.fixture(scope="module")
def unit(kv):
    return alignment_tokens(kv.server)


def both(script, stock, kv, *args):
    """Run a script on both servers; the answers must agree. Returns (stock's, plugin's)."""
    one, two = script(stock, *args), script(kv, *args)
    assert [answer.output for answer in one] == [answer.output for answer in two]
    assert [answer.prompt for answer in one] == [answer.prompt for answer in two]
    return one, two


# --- shared system prompts ------------------------------------------------------------------


def test_chat_users_share_the_whole_system_prompt(stock, kv, unit):
    _, answers = both(chat_users, stock, kv)
    system_end = answers[0].prompt.index(MESSAGE_START, 1)
    assert system_end > 6 * unit
    assert answers[0].cached == 0
    for answer in answers[1:]:
        assert answer.prompt.index(MESSAGE_START, 1) == system_end
        assert answer.cached >= system_end // unit * unit
    assert kv.server.metric("mimo:checkpoints_created_total", cls="boundary") > 0


def test_token_id_users_share_the_whole_system_prompt(stock, kv, unit):
    theirs, answers = both(token_users, stock, kv)
    assert [answer.cached for answer in answers] == [0, *[777 // unit * unit] * 3]
    # Stock reuses nothing for the second user: it keeps no SWA KV at the end of the system prompt.
    assert theirs[1].cached == 0


# --- chats ----------------------------------------------------------------------------------


def test_next_turn_reuses_up_to_the_end_of_the_output(stock, kv, unit):
    theirs, answers = both(growing_chat, stock, kv)
    oracle = Oracle(unit)
    for answer in answers:
        assert answer.cached == oracle.best(answer.prompt)
        oracle.learn(answer)
    assert sum(a.cached for a in answers) > sum(a.cached for a in theirs)


def test_next_turn_of_a_spoken_chat_reuses_all_that_is_the_same(stock, kv, unit):
    """The text of an output may be tokenised in another way; the rest of the prompt is equal."""
    _, answers = both(spoken_chat, stock, kv)
    oracle = Oracle(unit)
    for before, answer in zip([None, *answers], answers, strict=False):
        assert answer.cached <= oracle.best(answer.prompt)
        if before is not None:
            assert answer.cached >= (len(before.prompt) - 1) // unit * unit
            same_output = answer.prompt[: len(before.tokens)] == before.tokens
            if same_output:
                assert answer.cached >= (len(before.tokens) - 1) // unit * unit
        oracle.learn(answer)


# --- forks, regenerations, edits ------------------------------------------------------------


def test_regenerations_and_forks_reach_what_is_possible(stock, kv, unit):
    theirs, answers = both(branches, stock, kv)
    oracle = Oracle(unit)
    for at, answer in enumerate(answers):
        best = oracle.best(answer.prompt)
        assert answer.cached == best, f"request {at}"
        oracle.learn(answer)
    # Stock loses on forks; only what a fork itself taught it can be reused.
    assert sum(a.cached for a in answers) > sum(a.cached for a in theirs)


def test_edits_lose_a_unit_at_the_end_and_a_message_in_the_middle(stock, kv, unit):
    _, answers = both(edits, stock, kv)
    first, tail, *middle = answers
    assert first.cached == 0
    assert tail.cached >= (len(tail.prompt) - 5) // unit * unit - unit
    # The first edit at a place falls back to the message's start, or a rung; it is remembered.
    assert middle[0].cached >= 260 // unit * unit
    assert [answer.cached for answer in middle[1:]] == [600 // unit * unit] * 2


def test_an_early_changed_token_changes_the_output(stock, kv):
    """The control: equal answers say something, because answers depend on far context."""
    rng = random.Random(15)
    prompt = message(rng, 700)
    changed = [*prompt[:5], prompt[5] + 1, *prompt[6:]]

    def script(client):
        return [client.complete(prompt, 32), client.complete(changed, 32)]

    _, (one, other) = both(script, stock, kv)
    assert one.output != other.output
    assert other.cached == 0


# --- what the operator sees -----------------------------------------------------------------


def test_hit_counter_is_the_sum_of_what_requests_were_told(kv):
    """Runs after the tests above: every request of the module is in the sums."""
    kv.idle()
    cached = sum(answer.cached for answer in kv.answers)
    asked = sum(len(answer.prompt) for answer in kv.answers)
    metric = kv.server.metric
    assert metric("mimo:window_safe_hit_tokens_total") == cached > 0
    assert metric("mimo:prompt_lookup_tokens_total") == asked
    assert metric("vllm:prefix_cache_hits_total") == cached
    assert metric("mimo:hit_length_tokens_count") == len(kv.answers)
    assert metric("mimo:hit_length_tokens_sum") == cached
    trimmed = metric("mimo:trimmed_tokens_total") or 0
    assert metric("mimo:full_hit_tokens_total") == cached + trimmed
    assert metric("mimo:evicted_blocks_total") in (None, 0)


def test_reset_empties_the_cache_and_nothing_else(stock, kv, unit):
    rng = random.Random(16)
    prompt = message(rng, 400)

    def script(client):
        answers = [client.complete(prompt, 16), client.complete(prompt, 16)]
        client.idle()
        client.reset_prefix_cache()
        return [*answers, client.complete(prompt, 16), client.complete(prompt, 16)]

    _, answers = both(script, stock, kv)
    hit = 399 // unit * unit
    assert [answer.cached for answer in answers] == [0, hit, 0, hit]
    assert answers[2].output == answers[0].output
    kv.idle()
    blocks = kv.server.metric("mimo:cached_blocks")
    assert 0 < blocks < 40, "cached blocks of one prompt of 400 tokens"


# --- a small pool ---------------------------------------------------------------------------


def test_under_pressure_answers_stay_and_every_token_is_accounted(stock, tight):
    with GaugeWatch(tight.server) as gauges:
        _, answers = both(pressed_chats, stock, tight)
    tight.idle()
    metric = tight.server.metric
    cached = sum(answer.cached for answer in answers)
    assert metric("vllm:num_preemptions_total") == 0
    assert metric("mimo:window_safe_hit_tokens_total") == cached > 0
    assert metric("vllm:prefix_cache_hits_total") == cached
    # Which windows die first depends on how the chats interleave; mostly some are missing.
    trimmed = tight.server.metrics().get("mimo:trimmed_tokens_total", [])
    assert all(labels["reason"] for labels, _ in trimmed)
    full = metric("mimo:full_hit_tokens_total")
    assert full == cached + sum(value for _, value in trimmed)
    assert metric("mimo:evicted_blocks_total", kind="full") > 0
    assert metric("mimo:evicted_blocks_total", kind="swa") > 0
    for cls in ("turn_end", "boundary", "prompt_end"):
        assert metric("mimo:checkpoints_created_total", cls=cls) > 0, cls
    lived = metric("mimo:residence_s_count")
    assert 0 < lived <= metric("mimo:evicted_blocks_total", kind="swa")
    assert gauges.samples > 5 and gauges.lowest >= 0
    assert 0 < gauges.highest_sum <= metric("mimo:pool_blocks") == TIGHT_POOL_BLOCKS


def test_preempted_requests_give_the_same_answers(stock, tight):
    before = tight.server.metric("vllm:num_preemptions_total")
    assert long_answers(tight) == long_answers(stock)
    assert tight.server.metric("vllm:num_preemptions_total") > before


def test_clients_that_leave_cost_no_block_and_leave_their_prompt(stock, tight):
    # What other tests have left would compete; an empty pool holds these requests to their ends.
    tight.idle()
    tight.reset_prefix_cache()
    _, answers = both(disconnects, stock, tight)
    unit = alignment_tokens(tight.server)
    for answer in answers:
        assert answer.cached == (len(answer.prompt) - 1) // unit * unit
    tight.idle()
    assert tight.server.metric("vllm:kv_cache_usage_perc") == 0


def test_kv_events_tell_what_is_cached(tight, events):
    """A router that follows the events knows the cache: all that was stored and not removed."""
    tight.complete([MESSAGE_START, *range(300, 340)], 4)  # a step that carries the last gauges
    tight.idle()
    events.settle()
    assert events.faults == []
    assert events.removed > 0
    assert events.live_blocks == tight.server.metric("mimo:cached_blocks") > 0


def test_reset_under_pressure_starts_anew(stock, tight, events):
    events.settle()
    cleared = events.cleared
    tight.reset_prefix_cache()
    rng = random.Random(20)
    prompt = message(rng, 500)
    _, (first, second) = both(
        lambda c: [c.complete(prompt, 8), c.complete(prompt, 8)], stock, tight
    )
    assert first.cached == 0 < second.cached
    tight.idle()
    events.settle()
    assert events.cleared == cleared + 1 and events.faults == []
    assert events.live_blocks == tight.server.metric("mimo:cached_blocks")


# --- refusals -------------------------------------------------------------------------------


def test_a_connector_without_hybrid_support_is_refused_in_one_line(tiny_model, tmp_path):
    transfer = (
        '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", '
        f'"kv_connector_extra_config": {{"shared_storage_path": "{tmp_path}"}}}}'
    )
    done = subprocess.run(
        [
            *vllm_command(),
            "serve",
            str(tiny_model),
            f"--port={free_port()}",
            "--enforce-eager",
            "--plugin=mimo:kv",
            f"--kv-transfer-config={transfer}",
        ],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=REFUSAL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode not in (0, None)
    line = done.stderr.strip().splitlines()[-1]
    assert "ExampleConnector" in line and "hybrid KV cache manager" in line
    assert "Traceback" not in done.stdout + done.stderr
