# SPDX-License-Identifier: Apache-2.0
"""KV that outlives a real SGLang server: device, host memory, page store and back, against stock.

The model's keys are wider than its values, which SGLang's own file backend can't store.
"""

from __future__ import annotations

import json
import re
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
HOST_SWA_SHARE = 0.8
"""Of the first server's host memory; 0.75 of the device's is theirs."""
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
        self.settings = {
            "path": str(folder),
            "capacity_gib": CAPACITY_BYTES / (1 << 30),
            "prefetch_tokens": PAGE_TOKENS,
        }
        self.serve, self.model, self.folder = serve, model, folder
        servers = start_all(
            {
                "stock": lambda: serve(model),
                "plugin": lambda: self.start(
                    "mimo:kv,tiers", "--hicache-ratio=4", host_swa_share=HOST_SWA_SHARE
                ),
            }
        )
        prompts = (HOT, COLD, HOLED, LONG)
        self.cold = {seed: generate(servers["stock"], tokens_of(seed)) for seed in prompts}
        servers["stock"].stop()
        self.server: SglangServer = servers["plugin"]

    def start(self, plugin: str, *arguments: str, **settings: float) -> Any:
        """A server with the store."""
        config = json.dumps({"tiers": {**self.settings, **settings}})
        environment = {**STRICT, "MIMO_CONFIG": config}
        return self.serve(self.model, *HOST, *arguments, plugin=plugin, environment=environment)

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
        """Of the plugin's store, or of SGLang; written about a second after the event."""
        return self.server.metric(name, **labels) or 0.0

    def reach(self, wanted: float, name: str, **labels: str) -> None:
        """Wait until that much was counted; what was counted before is written with it."""
        deadline = time.monotonic() + WAIT_S
        while (found := self.counted(name, **labels)) < wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        assert found == wanted, (name, labels)


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
    counted, reach = tiers.counted, tiers.reach
    log = tiers.server.log_text()
    assert "process=scheduler | features=kv,tiers | contracts ok" in log
    slots = dict(re.findall(r"Allocating (\w+) hierarchical KV host pool: (\d+) tokens", log))
    prefix_pages = WHOLE_TOKENS // PAGE_TOKENS
    needed_pages = prefix_pages + WINDOW_PAGES

    tiers.store(HOT, COLD, *FLOODS)
    # Flooded out of the device: host memory answers, with all of full attention and one window.
    # Which renews it in the store, whose pages are not read.
    assert tiers.ask(HOT) == {"host": WHOLE_TOKENS}
    reach(WHOLE_TOKENS, LOADED, pool="kv")
    reach(WINDOW_TOKENS, LOADED, pool="swa")
    reach(needed_pages, PAGES, what="touched")
    assert tiers.ask(HOT) == {"device": WHOLE_TOKENS}
    tiers.store(*LATER_FLOODS, LONG, HOLED)
    assert counted(PAGES, what="read") == 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= CAPACITY_BYTES
    newest_window_page(tmp_path).unlink()
    tiers.server.flush()
    assert tiers.ask(HOT) == {"storage": WHOLE_TOKENS}
    # Of the windows one is read, the one at the end.
    window_bytes = newest_window_page(tmp_path).stat().st_size - HEADER_BYTES
    reach(WINDOW_PAGES * window_bytes, BYTES, direction="read", kind="swa")
    reach(needed_pages, PAGES, what="read")
    assert counted(PAGES, what="damaged") == counted(PAGES, what="dropped") == 0
    full_bytes = counted(BYTES, direction="read", kind="full") / prefix_pages
    shares = int(slots["full"]) * full_bytes, int(slots["swa"]) * window_bytes
    assert shares[1] / sum(shares) == pytest.approx(HOST_SWA_SHARE, abs=0.01)
    tiers.server.stop()

    # Another server, with stock's tree and little host memory.
    tiers.server = tiers.start("mimo:tiers", "--hicache-ratio=0.4")
    assert tiers.ask(HOT) == {"storage": WHOLE_TOKENS}
    reach(needed_pages, PAGES, what="touched")
    assert counted(MISSED) == 0
    # Never asked for again, it made room in the store.
    tiers.server.flush()
    assert tiers.ask(COLD) == {}
    reach(WHOLE_TOKENS, MISSED, reason="absent")
    # A window page is missing: the hit ends where the window before it does.
    tiers.server.flush()
    assert tiers.ask(HOLED) == {"storage": WHOLE_TOKENS - PAGE_TOKENS}
    reach(PAGE_TOKENS, MISSED, reason="no_window")
    # Host memory has no room for all of it, and at the length that fits no window is stored.
    tiers.server.flush()
    (kept,) = tiers.ask(LONG).values()
    assert WHOLE_TOKENS < kept < SMALL_HOST_TOKENS
    cut = LONG_WHOLE_TOKENS - kept
    reach(cut, MISSED, reason="host_capacity")
    reach(cut, "sglang:storage_prefetch_unfulfilled_tokens_total", reason="host_capacity")
