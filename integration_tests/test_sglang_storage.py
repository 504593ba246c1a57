# SPDX-License-Identifier: Apache-2.0
"""KV that outlives a real SGLang server: device, host memory, page store and back, against stock.

The model's keys are wider than its values, which SGLang's own file backend can't store.
"""

from __future__ import annotations

import json
import time

import pytest

from integration_tests.sglang_local import STRICT, refused
from integration_tests.side_by_side import start_all
from integration_tests.test_sglang_stock import WINDOW_TOKENS, generate, logprobs, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WAIT_S = 60.0
PAGE_TOKENS = 16
PROMPT_TOKENS, WHOLE_TOKENS = 700, 688
"""A prompt, and its whole pages."""
LONG_TOKENS, LONG_WHOLE_TOKENS = 1000, 992
CAPACITY_BYTES = 15_000_000
"""Six or seven of the prompts; one takes about 2 MB with a window at every page."""
HOT, COLD, HOLED, LONG = 11, 12, 13, 14
FLOODS, LATER_FLOODS = (21, 22, 23), (31, 32)
SMALL_HOST_TOKENS = 832
"""Host memory of the second server: 0.4 of the device's 2048 tokens, and a page."""

L2 = (
    "--enable-hierarchical-cache",
    "--hicache-write-policy=write_through",
    "--hicache-io-backend=direct",
    "--hicache-mem-layout=page_first_direct",
    "--hicache-storage-prefetch-policy=wait_complete",
)


@pytest.fixture(scope="module")
def model(tiny_model_factory):
    return tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW_TOKENS)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """For servers that share a store."""
    tiers = {
        "path": str(tmp_path_factory.mktemp("store")),
        "capacity_gib": CAPACITY_BYTES / (1 << 30),
        "prefetch_tokens": PAGE_TOKENS,
    }
    return {**STRICT, "MIMO_CONFIG": json.dumps({"tiers": tiers})}


def tokens_of(seed):
    return prompt(seed, LONG_TOKENS if seed == LONG else PROMPT_TOKENS)


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


def tier(answer):
    """Cached tokens by the tier that had them; those with none are left out."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    names = ("device", "host", "storage")
    return {name: details[name] for name in names if details.get(name)}


def newest_window_page(folder):
    """The window page written last; pages of the window layers are the larger ones here."""
    pages = list(folder.rglob("*.page"))
    largest = max(path.stat().st_size for path in pages)
    windows = [path for path in pages if path.stat().st_size == largest]
    assert len(windows) < len(pages)
    return max(windows, key=lambda path: path.stat().st_mtime_ns)


def same(warm, cold):
    assert warm["output_ids"] == cold["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)


def metric(server, name, **labels):
    """Of the plugin or of SGLang; both write a little after the event."""
    time.sleep(1.5)
    return server.metric(name, **labels) or 0.0


def test_every_tier_answers_as_stock_does(serve_sglang, model, environment):
    folder = __import__("pathlib").Path(json.loads(environment["MIMO_CONFIG"])["tiers"]["path"])
    servers = start_all(
        {
            "stock": lambda: serve_sglang(model),
            "first": lambda: serve_sglang(
                model, *L2, "--hicache-ratio=2", plugin="mimo:kv,tiers", environment=environment
            ),
        }
    )
    stock, first = servers["stock"], servers["first"]
    cold = {seed: generate(stock, tokens_of(seed)) for seed in (HOT, COLD, HOLED, LONG)}
    stock.stop()
    assert "process=scheduler | features=kv,tiers | contracts ok" in first.log_text()

    def ask(server, seed, **expected):
        answer = generate(server, tokens_of(seed))
        print("ASK", seed, tier(answer), cached(answer))
        assert tier(answer) == expected, (seed, tier(answer))
        if seed in cold:
            same(answer, cold[seed])
        return answer

    for seed in (HOT, COLD, *FLOODS):
        ask(first, seed)
        settled(folder)
    loaded = {
        pool: metric(first, "sglang:load_back_tokens_total", pool=pool) for pool in ("kv", "swa")
    }
    print("LOADED", loaded)
    ask(first, HOT, host=WHOLE_TOKENS)
    print("LOADED", {
        pool: metric(first, "sglang:load_back_tokens_total", pool=pool) for pool in ("kv", "swa")
    })
    ask(first, HOT, device=WHOLE_TOKENS)
    for seed in (*LATER_FLOODS, LONG, HOLED):
        ask(first, seed)
        settled(folder)
    newest_window_page(folder).unlink()
    print(sum(path.stat().st_size for path in folder.rglob("*.page")))
    first.flush()
    ask(first, HOT, storage=WHOLE_TOKENS)
    print([line for line in first.text("/metrics").splitlines() if "mimo:tier" in line and line[0] != "#"])
    print([line for line in first.text("/metrics").splitlines() if "storage" in line and line[0] != "#" and "unful" in line])
    first.stop()

    second = serve_sglang(
        model, *L2, "--hicache-ratio=0.4", plugin="mimo:tiers", environment=environment
    )
    ask(second, HOT, storage=WHOLE_TOKENS)
    print([line for line in second.text("/metrics").splitlines() if "mimo:tier" in line and line[0] != "#"])
    second.flush()
    ask(second, COLD)
    second.flush()
    print("HOLED", tier(generate(second, tokens_of(HOLED))))
    second.flush()
    print("LONG", tier(generate(second, tokens_of(LONG))))
    time.sleep(1.5)
    print([line for line in second.text("/metrics").splitlines() if "mimo:tier" in line and line[0] != "#"])
    print([line for line in second.text("/metrics").splitlines() if "storage" in line and line[0] != "#" and "unful" in line])
