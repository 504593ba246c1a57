# SPDX-License-Identifier: Apache-2.0
"""The real SGLang serves the tiny MiMo checkpoint here, on its reference platform without a GPU.

What the tests of the plugin rest on: values narrower than keys, unequal KV heads, sinks, two pools,
a prefix cache that gives the same answer as a cold run; and an installed plugin that stays out.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tools.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WINDOW_TOKENS = 128


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of plain text, the same for each seed."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(tokens)]


def generate(server: SglangServer, ids: list[int], outputs: int = 4) -> dict[str, Any]:
    """A greedy answer with the logprobs of its tokens."""
    sampling = {"max_new_tokens": outputs, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    answer: dict[str, Any] = server.post("/generate", body)
    return answer


def logprobs(answer: dict[str, Any]) -> list[float]:
    """Of the tokens of an answer."""
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@pytest.fixture(scope="module")
def server(serve_sglang, tiny_model_factory):
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW_TOKENS)
    return serve_sglang(model)


def test_two_pools_and_the_stock_tree(server):
    log = server.log_text()
    assert "impl=UnifiedRadixCache hybrid_swa=True" in log
    assert "source=default" in log


def test_a_hit_gives_what_a_cold_run_gives(server):
    ids = prompt(1, 700)
    cold, warm = generate(server, ids), generate(server, ids)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] >= 512
    assert warm["output_ids"] == cold["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)


def test_early_tokens_matter(server):
    """Control: an answer that did not depend on what is far away would prove nothing."""
    ids = prompt(2, 400)
    other = [ids[0] + 1, *ids[1:]]
    assert logprobs(generate(server, ids)) != logprobs(generate(server, other))


def test_an_installed_plugin_stays_out(server):
    assert "mimo_plugin" not in server.log_text().replace("mimo_plugin.entrypoints", "")
    assert "mimo:" not in server.text("/metrics")
