# SPDX-License-Identifier: Apache-2.0
"""KV that outlives a real SGLang server: from its host pool to the page store and back.

The model's keys are wider than its values, which SGLang's own file backend can't store.
"""

from __future__ import annotations

import json
import time

import pytest

from integration_tests.test_sglang_stock import WINDOW_TOKENS, generate, logprobs, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WAIT_S = 60.0


def arguments(folder):
    extra = {
        "backend_name": "mimo",
        "interface_v1": 1,
        "module_path": "mimo_plugin.engines.sglang.storage.backend",
        "class_name": "MimoStorage",
        "path": str(folder),
        "capacity_gib": 1,
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


def test_prompts_survive_the_server(serve_sglang, tiny_model_factory, tmp_path):
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW_TOKENS)
    whole, holed = prompt(11, 700), prompt(12, 700)
    first = serve_sglang(model, *arguments(tmp_path))
    cold = generate(first, whole)
    settled(tmp_path)
    cold_holed = generate(first, holed)
    settled(tmp_path)
    first.stop()
    assert cached(cold) == cached(cold_holed) == 0

    newest_window_page(tmp_path).unlink()
    second = serve_sglang(model, *arguments(tmp_path))
    warm = generate(second, whole)
    assert cached(warm) == 688
    assert warm["meta_info"]["cached_tokens_details"]["storage"] == 688
    assert warm["output_ids"] == cold["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)

    # The last window lacks a page: the hit ends with the window before it, at the first chunk.
    warm = generate(second, holed)
    assert cached(warm) == 512
    assert warm["output_ids"] == cold_holed["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold_holed), abs=1e-4)
