# SPDX-License-Identifier: Apache-2.0
"""LMCache's MP mode under a hybrid model: what holds, what does not, and what our parts change.

A real ``lmcache server`` and a real ``vllm serve``, on the CPU. The window is 128 tokens as in the
published models, chunks are LMCache's own 256. Needs LMCache; see :mod:`lmcache_server`.
"""

from __future__ import annotations

import json
import random
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration_tests.kv_client import tokens
from integration_tests.lmcache_server import (
    CHUNK_TOKENS,
    LMCACHE_VERSION,
    LmcacheServer,
    lmcache_folder,
    patched_lmcache,
    python_path,
)
from tools.server import ServerError, VllmServer

if lmcache_folder() is None:
    pytest.skip(
        f"LMCache is not here: pip install --no-deps lmcache=={LMCACHE_VERSION} "
        "opentelemetry-exporter-prometheus==0.60b1, or set MIMO_LMCACHE to a folder with both",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOW_TOKENS = 128
LOGPROB_TOLERANCE = 1e-4
PROMPT_TOKENS = 1650
DEVICE_HIT, LMCACHE_HIT = 1600, 1536
"""Of a prompt that was served: vLLM hits whole blocks of 64 tokens, LMCache whole chunks."""
FULL_BYTES = 2 * CHUNK_TOKENS * 1 * 2 * 32 * 4
"""A chunk's object of full attention: layers, tokens, heads, K and V, head size, fp32."""
WINDOW_BYTES = 6 * CHUNK_TOKENS * 2 * 2 * 32 * 4
"""A chunk's object of sliding-window layers. Only the last window of it is filled, but without a
GPU LMCache makes it as large as if all were."""
HEADER_BYTES = 32
SLOW_COPY = """
import sys, time
import lmcache.v1.multiprocess.modules.lmcache_driven_transfer as transfer
copy = transfer.transfer_kv_per_object_group
def slowly(*arguments, **named):
    if named.get("direction") == transfer.lmcache_native.TransferDirection.D2H:
        time.sleep(0.4)
    return copy(*arguments, **named)
transfer.transfer_kv_per_object_group = slowly
from lmcache.cli.main import main
sys.exit(main())
"""
"""A server that is slow to copy, as one that serves many engines is."""


@dataclass
class Pair:
    """A server of LMCache and an engine that uses it."""

    lmcache: LmcacheServer
    engine: VllmServer
    rng: random.Random
    store: Path | None = None

    def ask(self, prompt: Sequence[int], salt: str = "") -> tuple[list[int], list[float], int]:
        """Tokens, their logprobs and the cached tokens of one request."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
        }
        reply = self.engine.post(
            "/v1/completions", {**body, **({"cache_salt": salt} if salt else {})}
        )
        choice = reply["choices"][0]
        details = reply["usage"].get("prompt_tokens_details") or {}
        logprobs = choice["logprobs"]["token_logprobs"]
        return choice["token_ids"], logprobs, details.get("cached_tokens") or 0

    def check(self, prompt: Sequence[int]) -> tuple[int, float]:
        """Cached tokens of a request, and how far its logprobs are from those without any cache;
        infinity where the tokens differ."""
        mine, logprobs, cached = self.ask(prompt)
        cold, wanted, none = self.ask(prompt, salt=f"cold-{self.rng.random()}")
        assert none == 0, "a salt of its own shares nothing"
        if mine != cold:
            return cached, float("inf")
        return cached, max(abs(a - b) for a, b in zip(logprobs, wanted, strict=True))

    def forget(self) -> None:
        """The engine drops its own cache, once what is stored is stored."""
        self.settle()
        url = f"{self.engine.base_url}/reset_prefix_cache"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST")) as reply:
            assert reply.status == 200

    def settle(self) -> None:
        """Wait until nothing more arrives in LMCache and in the store below."""
        seen, same = None, 0
        for _ in range(100):
            now = (self.lmcache.held(), self.pages())
            same = same + 1 if now == seen else 0
            if same == 3:
                return
            seen = now
            time.sleep(0.2)
        raise AssertionError("LMCache never came to rest")

    def pages(self) -> list[Path]:
        """Files of the store below LMCache."""
        return sorted(self.store.glob("*/*.page")) if self.store else []

    def status(self) -> dict[str, Any]:
        """What our adapter reports through LMCache's status."""
        found = _find(self.lmcache.status(), "pages_touched")
        assert found is not None, "no adapter of ours in the status"
        return found


def _find(tree: Any, key: str) -> dict[str, Any] | None:
    """The mapping that holds ``key``, anywhere."""
    if isinstance(tree, dict):
        if key in tree:
            return tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            found = _find(item, key)
            if found is not None:
                return found
    return None


@pytest.fixture(scope="module")
def model(tiny_model_factory: Callable[..., Path]) -> Path:
    return tiny_model_factory(window_tokens=WINDOW_TOKENS)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_lmcache(tmp_path_factory.mktemp("lmcache-patched"))


def run_engine(
    model: Path, lmcache: LmcacheServer, log: Path, *arguments: str, before: Sequence[Path] = ()
) -> VllmServer:
    """An engine that isn't started yet."""
    return VllmServer(
        model,
        arguments=[
            "--enforce-eager",
            "--max-model-len=8192",
            "--block-size=16",
            "--max-num-batched-tokens=512",
            "--max-num-seqs=16",
            "--enable-prompt-tokens-details",
            "--dtype=float32",
            "--kv-transfer-config",
            lmcache.connector(),
            *arguments,
        ],
        environment={**python_path(*before), "VLLM_SERVER_DEV_MODE": "1"},
        log=log,
        name="vllm",
    )


@pytest.fixture(scope="module")
def pair(model: Path, patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """LMCache with our patches and our store below it, and an engine with our features."""
    folder = tmp_path_factory.mktemp("pair")
    adapter = {
        "type": "plugin",
        "module_path": "mimo_plugin.tiers.lmcache_adapter",
        "class_name": "MimoL2Adapter",
        "adapter_params": {
            "path": str(folder / "kv"),
            "capacity_gib": 1,
            "touch_interval_s": 0,
            "window_chunks": {"1": 1},
        },
    }
    arguments = ["--separate-object-groups", "--l2-adapter", json.dumps(adapter)]
    lmcache = LmcacheServer(arguments=arguments, log=folder / "lmcache.log", before=[patched])
    plugin = ("--plugin", "mimo:kv,scheduler")
    engine = run_engine(model, lmcache, folder / "vllm.log", *plugin, before=[patched])
    with lmcache, engine:
        yield Pair(lmcache, engine, random.Random(7), folder / "kv")


def served(pair: Pair) -> list[int]:
    """A new prompt that was served once, and is in LMCache and below, but not in the engine."""
    prompt = tokens(pair.rng, PROMPT_TOKENS)
    assert pair.ask(prompt)[2] == 0
    pair.forget()
    return prompt


def test_a_chunk_is_one_object_of_full_attention_and_one_of_a_window(pair: Pair) -> None:
    before_objects, before_bytes = pair.lmcache.held()
    pages = set(pair.pages())
    served(pair)
    objects, held = pair.lmcache.held()
    chunks = PROMPT_TOKENS // CHUNK_TOKENS
    assert objects - before_objects == 2 * chunks
    assert held - before_bytes == chunks * (FULL_BYTES + WINDOW_BYTES)
    sizes = sorted(page.stat().st_size - HEADER_BYTES for page in set(pair.pages()) - pages)
    assert sizes == [FULL_BYTES] * chunks + [WINDOW_BYTES] * chunks


def test_a_hit_in_its_host_memory_is_right(pair: Pair) -> None:
    cached, off = pair.check(served(pair))
    assert cached == LMCACHE_HIT and off <= LOGPROB_TOLERANCE


def test_prompts_that_part_earlier_hit_whole_chunks_and_are_right(pair: Pair) -> None:
    prompt = served(pair)
    for shared in (1536, 1000, 300):
        cached, off = pair.check([*prompt[:shared], *tokens(pair.rng, 60)])
        assert cached == shared // CHUNK_TOKENS * CHUNK_TOKENS and off <= LOGPROB_TOLERANCE
        pair.forget()


def test_hits_of_the_engine_and_of_host_memory_keep_the_store_alive(pair: Pair) -> None:
    """All chunks of full attention and the window of the last; nothing is read there."""
    prompt = served(pair)
    before = pair.status()
    assert pair.ask(prompt)[2] == LMCACHE_HIT
    assert pair.ask(prompt)[2] >= LMCACHE_HIT
    time.sleep(1)
    after = pair.status()
    assert after["pages_touched"] - before["pages_touched"] == 2 * (6 + 1)
    assert after["pages_got"] == before["pages_got"]


def test_lost_or_damaged_objects_shorten_the_hit(pair: Pair) -> None:
    """The hit is the least over all groups that hold state."""
    known = set(pair.pages())
    prompt = served(pair)
    mine = [page for page in pair.pages() if page not in known]
    kept = [(page, page.read_bytes()) for page in mine]
    windows = [page for page in mine if page.stat().st_size == WINDOW_BYTES + HEADER_BYTES]
    full = [page for page in mine if page not in windows]

    def lmcache_has_only_the_store() -> None:
        pair.forget()
        pair.lmcache.clear()

    for page in windows:
        page.unlink()
    lmcache_has_only_the_store()
    cached, off = pair.check(prompt)
    assert cached == 0 and off <= LOGPROB_TOLERANCE, "full attention alone is no hit"
    for page, data in kept:
        page.write_bytes(data)
    lmcache_has_only_the_store()
    cached, off = pair.check(prompt)
    assert cached == LMCACHE_HIT and off <= LOGPROB_TOLERANCE
    pair.settle()
    for page, data in kept:
        page.write_bytes(data)
    damaged = bytearray(full[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    full[0].write_bytes(damaged)
    lmcache_has_only_the_store()
    cached, off = pair.check(prompt)
    assert cached < LMCACHE_HIT and cached % CHUNK_TOKENS == 0 and off <= LOGPROB_TOLERANCE


def test_a_server_that_is_gone_costs_hits_and_the_next_reads_the_store(pair: Pair) -> None:
    prompt = served(pair)
    pair.lmcache.stop()
    mine = pair.ask(prompt)
    assert mine[2] == 0
    pair.lmcache.start()
    url = f"{pair.engine.base_url}/reset_prefix_cache"
    cached = 0
    for _ in range(20):  # the engine notices by its heartbeat
        time.sleep(2)
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()
        again = pair.ask(prompt)
        cached = again[2]
        if cached:
            break
    assert cached == LMCACHE_HIT
    assert again[0] == mine[0]
    assert max(abs(a - b) for a, b in zip(again[1], mine[1], strict=True)) <= LOGPROB_TOLERANCE


# --- what is wrong in LMCache itself, and mended by the patches -----------------------------------


def lost_by_the_server(pair: Pair) -> dict[int, tuple[int, float]]:
    """Prompts that part from one that the server had lost, but the engine had not: for the tokens
    they share, what :meth:`Pair.check` says."""
    prompt = tokens(pair.rng, PROMPT_TOKENS)
    pair.ask(prompt)
    pair.settle()
    pair.lmcache.clear()
    assert pair.ask([*prompt, *tokens(pair.rng, 100)])[2] == DEVICE_HIT
    found = {}
    for shared in (1536, 1024):
        pair.forget()
        found[shared] = pair.check([*prompt[:shared], *tokens(pair.rng, 60)])
    return found


def stored_slowly(pair: Pair) -> list[tuple[int, float]]:
    """Prompts that part from stored ones."""
    found = []
    for _ in range(2):
        prompt = served(pair)
        for shared in (1024, 512, 256):
            found.append(pair.check([*prompt[:shared], *tokens(pair.rng, 60)]))
            pair.forget()
    return found


@pytest.mark.parametrize("with_patches", [False, True], ids=["published", "patched"])
def test_garbage_of_the_null_block_and_of_blocks_used_again(
    model: Path, patched: Path, tmp_path: Path, with_patches: bool
) -> None:
    before = [patched] if with_patches else []
    with ExitStack() as stack:
        lmcache = LmcacheServer(
            arguments=["--separate-object-groups"],
            log=tmp_path / "lmcache.log",
            main=SLOW_COPY,
            before=before,
        )
        engine = run_engine(
            model,
            lmcache,
            tmp_path / "vllm.log",
            "--num-gpu-blocks-override=400",
            before=before,
        )
        stack.enter_context(lmcache)
        stack.enter_context(engine)
        pair = Pair(lmcache, engine, random.Random(4))
        slow = stored_slowly(pair)
        lost = lost_by_the_server(pair)
    assert [cached for cached, _ in slow] == [1024, 512, 256] * 2
    if with_patches:
        assert all(off <= LOGPROB_TOLERANCE for _, off in [*slow, *lost.values()])
        assert lost[1536][0] == 0, "a chunk without its window is no hit"
    else:
        assert any(off > 1e-2 for _, off in slow), "stores keep blocks from being used again: drop"
        assert lost[1536][0] == 1536 and lost[1536][1] > 1e-2, "no null block is stored: drop"


def test_the_connector_without_groups_is_refused_with_kv(model: Path, tmp_path: Path) -> None:
    """LMCacheConnectorV1 switches the hybrid manager off: one line says so, with the way out."""
    engine = VllmServer(
        model,
        arguments=[
            "--dtype=float32",
            "--max-model-len=2048",
            "--plugin",
            "mimo:kv",
            "--kv-transfer-config",
            json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}),
        ],
        environment=python_path(),
        log=tmp_path / "vllm.log",
        name="vllm",
    )
    with pytest.raises(ServerError, match="ended with status"), engine:
        pass
    text = engine.log_text()
    assert "KV connector LMCacheConnectorV1, which does not support it" in text
    shutil.rmtree(tmp_path, ignore_errors=True)
