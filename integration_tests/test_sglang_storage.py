# SPDX-License-Identifier: Apache-2.0
"""KV that outlives a real SGLang server: device, host memory, page store and back, against stock.

The model's keys are wider than its values, which SGLang's own file backend can't store.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from integration_tests.conftest import ModelFactory, ServerFactory
from integration_tests.sglang_local import STRICT
from integration_tests.side_by_side import start_all
from integration_tests.test_sglang_stock import WINDOW_TOKENS, generate, logprobs, prompt
from mimo_plugin.tiers.file_store import HEADER_BYTES
from tools.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WAIT_S = 60.0
PAGE_TOKENS, WINDOW_PAGES = 16, WINDOW_TOKENS // 16
PROMPT_TOKENS, WHOLE_TOKENS = 700, 688
"""A prompt, and its whole pages."""
LONG_TOKENS, LONG_WHOLE_TOKENS = 1000, 992
CAPACITY_BYTES = 15_000_000
"""Seven of the prompts; one takes about 2 MB with a window at every page."""
SMALL_HOST_TOKENS = 832
"""Host memory of the last server: 0.4 of the device's 2048 tokens, and a page."""
HOT, COLD, HOLED, LONG = 11, 12, 13, 14
FLOODS, LATER_FLOODS = (21, 22, 23), (31, 32)

HOST = (
    "--enable-hierarchical-cache",
    "--hicache-write-policy=write_through",
    "--hicache-io-backend=direct",
    "--hicache-mem-layout=page_first_direct",
    "--hicache-storage-prefetch-policy=wait_complete",
)


@pytest.fixture(scope="module")
def model(tiny_model_factory: ModelFactory) -> Path:
    return tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=WINDOW_TOKENS)


class Tiers:
    """Servers that share a store, the answers of one without, and what was counted."""

    def __init__(self, serve: ServerFactory, model: Path, folder: Path) -> None:
        tiers = {
            "path": str(folder),
            "capacity_gib": CAPACITY_BYTES / (1 << 30),
            "prefetch_tokens": PAGE_TOKENS,
        }
        self.environment = {**STRICT, "MIMO_CONFIG": json.dumps({"tiers": tiers})}
        self.serve, self.model, self.folder = serve, model, folder
        servers = start_all(
            {
                "stock": lambda: serve(model),
                "plugin": lambda: self.start("mimo:kv,tiers", "--hicache-ratio=4"),
            }
        )
        prompts = (HOT, COLD, HOLED, LONG)
        self.cold = {seed: generate(servers["stock"], tokens_of(seed)) for seed in prompts}
        servers["stock"].stop()
        self.server: SglangServer = servers["plugin"]

    def start(self, plugin: str, *arguments: str) -> Any:
        """A server with the store."""
        return self.serve(
            self.model, *HOST, *arguments, plugin=plugin, environment=self.environment
        )

    def ask(self, seed: int) -> dict[str, int]:
        """Cached tokens of a prompt by the tier that had them; the answer is stock's."""
        answer = generate(self.server, tokens_of(seed))
        if seed in self.cold:
            assert answer["output_ids"] == self.cold[seed]["output_ids"]
            assert logprobs(answer) == pytest.approx(logprobs(self.cold[seed]), abs=1e-4)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        names = ("device", "host", "storage")
        return {name: details[name] for name in names if details.get(name)}

    def store(self, *seeds: int) -> None:
        """Ask cold prompts, and wait until each is stored."""
        for seed in seeds:
            assert self.ask(seed) == {}
            before, same, deadline = -1, 0, time.monotonic() + WAIT_S
            while same < 3:
                assert time.monotonic() < deadline, "no end of pages"
                time.sleep(0.3)
                now = len(list(self.folder.rglob("*.page")))
                same = same + 1 if now == before and now else 0
                before = now

    def counted(self, name: str, **labels: str) -> float:
        """Of the plugin's store, or of SGLang."""
        return self.server.metric(name, **labels) or 0.0

    def settle(self) -> None:
        """What was counted is written a second after the event at the latest."""
        time.sleep(1.5)


def tokens_of(seed: int) -> list[int]:
    return prompt(seed, LONG_TOKENS if seed == LONG else PROMPT_TOKENS)


def newest_window_page(folder: Path) -> Path:
    """The window page written last; pages of the window layers are the larger ones here."""
    pages = list(folder.rglob("*.page"))
    largest = max(path.stat().st_size for path in pages)
    windows = [path for path in pages if path.stat().st_size == largest]
    assert len(windows) < len(pages)
    return max(windows, key=lambda path: path.stat().st_mtime_ns)


LOADED = "sglang:load_back_tokens_total"
PAGES, BYTES = "mimo:tier_pages_total", "mimo:tier_bytes_total"
MISSED = "mimo:tier_missed_tokens_total"


def test_every_tier_answers_as_stock_does(
    serve_sglang: ServerFactory, model: Path, tmp_path: Path
) -> None:
    tiers = Tiers(serve_sglang, model, tmp_path)
    counted = tiers.counted
    assert "process=scheduler | features=kv,tiers | contracts ok" in tiers.server.log_text()
    tiers.store(HOT, COLD, *FLOODS)
    tiers.settle()
    assert counted(PAGES, what="read") == 0
    touched = counted(PAGES, what="touched")
    loaded = {pool: counted(LOADED, pool=pool) for pool in ("kv", "swa")}

    # Flooded out of the device: host memory answers, with all of full attention and one window.
    assert tiers.ask(HOT) == {"host": WHOLE_TOKENS}
    tiers.settle()
    assert counted(LOADED, pool="kv") - loaded["kv"] == WHOLE_TOKENS
    assert counted(LOADED, pool="swa") - loaded["swa"] == WINDOW_TOKENS
    assert tiers.ask(HOT) == {"device": WHOLE_TOKENS}
    # Which renews it in the store, whose pages are not read.
    tiers.settle()
    prefix_pages = WHOLE_TOKENS // PAGE_TOKENS
    assert counted(PAGES, what="touched") - touched == prefix_pages + WINDOW_PAGES
    assert counted(PAGES, what="read") == 0

    tiers.store(*LATER_FLOODS, LONG, HOLED)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= CAPACITY_BYTES
    newest_window_page(tmp_path).unlink()
    tiers.server.flush()
    assert tiers.ask(HOT) == {"storage": WHOLE_TOKENS}
    tiers.settle()
    # Of the windows one is read, the one at the end.
    window_bytes = newest_window_page(tmp_path).stat().st_size - HEADER_BYTES
    assert counted(BYTES, direction="read", kind="swa") == WINDOW_PAGES * window_bytes
    assert counted(PAGES, what="read") == prefix_pages + WINDOW_PAGES
    assert counted(PAGES, what="damaged") == counted(PAGES, what="dropped") == 0
    tiers.server.stop()

    # Another server, with stock's tree and little host memory.
    tiers.server = tiers.start("mimo:tiers", "--hicache-ratio=0.4")
    assert tiers.ask(HOT) == {"storage": WHOLE_TOKENS}
    tiers.settle()
    assert counted(PAGES, what="touched") == prefix_pages + WINDOW_PAGES
    assert counted(MISSED) == 0
    # Never asked for again, it made room in the store.
    tiers.server.flush()
    assert tiers.ask(COLD) == {}
    tiers.settle()
    assert counted(MISSED, reason="absent") == WHOLE_TOKENS
    # A window page is missing: the hit ends where the window before it does.
    tiers.server.flush()
    assert tiers.ask(HOLED) == {"storage": WHOLE_TOKENS - PAGE_TOKENS}
    # Host memory has no room for all of it, and at the length that fits no window is stored.
    tiers.server.flush()
    (kept,) = tiers.ask(LONG).values()
    assert WHOLE_TOKENS < kept < SMALL_HOST_TOKENS
    tiers.settle()
    assert counted(MISSED, reason="no_window") == PAGE_TOKENS
    assert counted(MISSED, reason="host_capacity") == LONG_WHOLE_TOKENS - kept
    assert counted(
        "sglang:storage_prefetch_unfulfilled_tokens_total", reason="host_capacity"
    ) == counted(MISSED, reason="host_capacity")
