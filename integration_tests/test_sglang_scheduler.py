# SPDX-License-Identifier: Apache-2.0
"""The affinity order in a real SGLang: the tokens of stock, a burst that shares what it can, and no
request that waits for ever."""

from __future__ import annotations

import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.sglang_local import STRICT
from integration_tests.side_by_side import start_all
from integration_tests.test_sglang_stock import generate, logprobs, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ARGUMENTS = ("--max-total-tokens=8192", "--chunked-prefill-size=2048", "--max-running-requests=32")
GROUPS, MEMBERS = 5, 5
SHARED_TOKENS, OWN_TOKENS = 200, 20
STREAMS, WARM_TOKENS, COLD_TOKENS = 6, 400, 600
PASSED_BY = 40
BOUND_S = 3
#: one place, for which a stream of warm requests and a cold one compete
QUEUED = ("--max-total-tokens=8192", "--max-running-requests=1")


@pytest.fixture(scope="module")
def servers(serve_sglang, tiny_model_factory):
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=128)
    return start_all(
        {
            "stock": lambda: serve_sglang(model, *ARGUMENTS),
            "plugin": lambda: serve_sglang(model, *ARGUMENTS, plugin="mimo", environment=STRICT),
            "lpm": lambda: serve_sglang(model, *QUEUED, "--schedule-policy=lpm"),
            "bounded": lambda: serve_sglang(
                model,
                *QUEUED,
                plugin="mimo:scheduler",
                environment={
                    "MIMO_CONFIG": json.dumps(
                        {"scheduler": {"max_wait_s": BOUND_S, "age_credit": 0}}
                    )
                },
            ),
        }
    )


def burst():
    """Prompts of several groups, each with a prefix that its members share, in mixed order."""
    prompts = [
        prompt(group, SHARED_TOKENS) + prompt(1000 + group * 50 + member, OWN_TOKENS)
        for group in range(GROUPS)
        for member in range(MEMBERS)
    ]
    random.Random(5).shuffle(prompts)
    return prompts


def at_once(server, prompts):
    """All prompts while a long one keeps the server busy, so that they wait together."""
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        first = pool.submit(generate, server, prompt(77, 1900), 2)
        answers = list(pool.map(lambda ids: generate(server, ids), prompts))
        first.result()
    return answers


def cached(answers):
    return sum(answer["meta_info"]["cached_tokens"] for answer in answers)


def test_a_burst_gives_the_same_tokens_and_shares_its_prefixes(servers):
    prompts = burst()
    stock, mine = (at_once(servers[name], prompts) for name in ("stock", "plugin"))
    for theirs, ours in zip(stock, mine, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
    print("cached tokens, stock and plugin:", cached(stock), cached(mine))
    # The first of each group computes the prefix, in whole pages; the others wait for it.
    assert cached(mine) >= GROUPS * (MEMBERS - 1) * (SHARED_TOKENS // 16 * 16)
    assert cached(stock) < cached(mine) / 2


def passed_by(server, limit):
    """Warm requests answered after a cold one arrived and before it was, at most ``limit``.

    The warm ones come without end and always wait together, so there is always one to prefer.
    """
    shared, numbers, stop = prompt(1, WARM_TOKENS), itertools.count(2000), threading.Event()
    generate(server, shared)
    answered = []

    def stream():
        while not stop.is_set():
            generate(server, shared + prompt(next(numbers), OWN_TOKENS))
            answered.append(1)
            if counting.is_set() and len(answered) - before >= limit:
                stop.set()

    counting, before = threading.Event(), 0
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        streams = [pool.submit(stream) for _ in range(STREAMS)]
        while len(answered) < STREAMS:
            stop.wait(0.01)
        before = len(answered)
        counting.set()
        generate(server, prompt(99, COLD_TOKENS))
        passed = len(answered) - before
        stop.set()
        for one in streams:
            one.result()
    return passed


def test_a_cold_request_is_served_within_its_bound(servers):
    """Stock's longest-prefix order leaves it until the stream ends."""
    assert passed_by(servers["lpm"], PASSED_BY) >= PASSED_BY
    server = servers["bounded"]
    # Far more than are answered in its longest wait: only the bound ends it.
    assert passed_by(server, 25 * PASSED_BY) < 25 * PASSED_BY
    assert server.metric("mimo:scheduler_admissions_total", reason="max_wait") >= 1


def test_the_metrics_say_why_requests_started(servers):
    metric = servers["plugin"].metric
    started = metric("mimo:scheduler_admissions_total")
    assert started == metric("mimo:queue_wait_s_count") >= GROUPS * MEMBERS + 1
    assert metric("mimo:scheduler_admissions_total", reason="affinity") > 0
    assert metric("mimo:scheduler_deferrals_total", reason="duplicate") >= GROUPS
    assert "mimo:" not in servers["lpm"].text("/metrics")


def test_the_log_says_what_is_active(servers):
    log = servers["plugin"].log_text()
    assert "process=scheduler | features=kv,scheduler" in log
    assert "mimo scheduler: mode cost, longest wait 300 s" in log
    assert "mimo scheduler" not in servers["stock"].log_text()


def test_each_process_says_so(servers):
    """B85: the record brings the section, and the hook behind ``publish`` reads it."""
    log = servers["plugin"].log_text()
    for role in ("tokenizer", "scheduler", "detokenizer"):
        assert log.count(f"process={role} | features=kv,scheduler | contracts ok") == 1, role


def test_requests_that_leave_are_forgotten(servers):
    """After the burst the server serves on, and its own checks find nothing wrong."""
    server = servers["plugin"]
    generate(server, prompt(5, 300))
    assert server.alive()
    assert "leak" not in server.log_text().lower()
