# SPDX-License-Identifier: Apache-2.0
"""KV that outlives a real SGLang server: from its host pool to the page store and back.

The model's keys are wider than its values, which SGLang's own file backend can't store.
"""

from __future__ import annotations

import json
import time

import pytest

from integration_tests.sglang_local import STRICT
from integration_tests.test_sglang_stock import WINDOW_TOKENS, generate, logprobs, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WAIT_S = 60.0
PROMPT_TOKENS, WHOLE_TOKENS = 700, 688
"""A prompt, and its whole pages."""
CAPACITY_BYTES = 13_000_000
"""Six or seven of the prompts; one takes about 2 MB with a window at every page."""


def arguments(folder):
    extra = {
        "backend_name": "mimo",
        "interface_v1": 1,
        "module_path": "mimo_plugin.engines.sglang.storage.backend",
        "class_name": "MimoStorage",
        "path": str(folder),
        "capacity_gib": CAPACITY_BYTES / (1 << 30),
        "prefetch_threshold": 16,
    }
    return (
        "--enable-hierarchical-cache",
        "--hicache-ratio=2",
        "--hicache-write-policy=write_through",
        "--hicache-io-backend=direct",
        "--hicache-mem-layout=page_first_direct",
        "--hicache-storage-prefetch-policy=wait_complete",
        "--hicache-storage-backend=dynamic",
        f"--hicache-storage-backend-extra-config={json.dumps(extra)}",
    )


def settled(folder):
    """Wait until no more pages are written; how many there are."""
    before, deadline = -1, time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        now = len(list(folder.rglob("*.page")))
        if now == before and now:
            return now
        before = now
        time.sleep(1.0)
    raise AssertionError(f"no pages, or no end of them, after {WAIT_S} s: {before}")


def cached(answer):
    return answer["meta_info"]["cached_tokens"]


def newest_window_page(folder):
    """The window page written last; pages of the window layers are the larger ones here."""
    pages = list(folder.rglob("*.page"))
    largest = max(path.stat().st_size for path in pages)
    windows = [path for path in pages if path.stat().st_size == largest]
    assert len(windows) < len(pages)
    return max(windows, key=lambda path: path.stat().st_mtime_ns)


def store(server, folder, *seeds):
    """Answers to cold prompts, each stored before the next is asked."""
    answers = []
    for seed in seeds:
        answers.append(generate(server, prompt(seed, PROMPT_TOKENS)))
        settled(folder)
    return answers


def same(warm, cold):
    assert warm["output_ids"] == cold["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)


def test_prompts_survive_the_server(serve_sglang, tiny_model_factory, tmp_path):
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW_TOKENS)
    hot, cold, holed = 11, 12, 13
    first = serve_sglang(model, *arguments(tmp_path), plugin="mimo:kv", environment=STRICT)
    (hot_answer, cold_answer) = store(first, tmp_path, hot, cold)
    store(first, tmp_path, 21, 22, 23)
    # The device answers with the hot prompt, which renews it in the store.
    assert cached(generate(first, prompt(hot, PROMPT_TOKENS))) == WHOLE_TOKENS
    store(first, tmp_path, 31, 32, 33)
    (holed_answer,) = store(first, tmp_path, holed)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= CAPACITY_BYTES
    first.stop()

    newest_window_page(tmp_path).unlink()
    second = serve_sglang(model, *arguments(tmp_path), plugin="mimo:kv", environment=STRICT)
    warm = generate(second, prompt(hot, PROMPT_TOKENS))
    assert warm["meta_info"]["cached_tokens_details"]["storage"] == WHOLE_TOKENS
    same(warm, hot_answer)
    # Written after it, and never asked for again: it made room.
    gone = generate(second, prompt(cold, PROMPT_TOKENS))
    assert cached(gone) == 0
    same(gone, cold_answer)
    # One window page is missing: the hit ends where the windows before it do.
    warm = generate(second, prompt(holed, PROMPT_TOKENS))
    assert WHOLE_TOKENS - WINDOW_TOKENS - 16 <= cached(warm) < WHOLE_TOKENS
    same(warm, holed_answer)
