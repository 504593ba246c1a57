# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint in stock vLLM: it loads, chats, and its output depends on its context."""

import random

import pytest

pytestmark = pytest.mark.vllm

ANSWER_TOKENS = 64


@pytest.fixture(scope="module")
def server(tiny_model, serve_module):
    return serve_module(tiny_model, "--num-gpu-blocks-override=1000")


def complete(server, prompt, tokens=ANSWER_TOKENS):
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.post("/v1/completions", body)
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return answer["choices"][0]["token_ids"], cached


def prompt_of(seed, tokens=500):
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(tokens)]


def test_engine_builds_the_hybrid_architecture(server):
    log = server.log_text()
    assert "Resolved architecture: MiMoV2FlashForCausalLM" in log


def test_a_hit_gives_the_same_tokens_as_a_cold_run(server):
    prompt = prompt_of(1)
    cold, nothing = complete(server, prompt)
    warm, cached = complete(server, prompt)
    assert nothing == 0 and cached > 400
    assert warm == cold


def test_one_changed_early_token_changes_the_output(server):
    prompt = prompt_of(2)
    changed = [*prompt[:3], prompt[3] + 1, *prompt[4:]]
    assert complete(server, prompt)[0] != complete(server, changed)[0]


def test_outputs_differ_between_prompts_and_do_not_loop(server):
    answers = [complete(server, prompt_of(seed))[0] for seed in range(10, 16)]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for answer in answers:
        assert len(set(answer)) > ANSWER_TOKENS // 3


def test_chat_completions_use_the_template(server):
    body = {
        "messages": [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "Name a colour."},
        ],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"]
    assert answer["prompt_token_ids"][0] == 1
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
