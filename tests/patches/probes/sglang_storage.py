# SPDX-License-Identifier: Apache-2.0
"""What SGLang's file storage gives back: pages of unequal widths, and a hot prompt's pages."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from sglang_chain import K_DIM, PAGE_TOKENS, Chain

PROMPT_TOKENS = 400
WHOLE_TOKENS = 384
HOT_PROMPTS = 4
"""Prompts that the storage holds before it evicts; one is hot."""


def flat_pages(layout: str) -> bool:
    """Whether flat pages carry K and V of unequal widths from one host pool to another."""
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost

    pools = []
    for _ in range(2):
        pool = object.__new__(AsymmetricMHATokenToKVPoolHost)
        pool.layout, pool.page_size, pool.dtype = layout, 4, torch.float32
        pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim = 3, 2, 6, 4
        pool.device, pool.pin_memory = "cpu", False
        shape = (20, 3, 2) if layout == "page_first" else (5, 3, 4, 2)
        pool.kv_buffer = (torch.randn(*shape, 6), torch.randn(*shape, 4))
        pools.append(pool)
    source, target = pools
    before = [buffer.clone() for buffer in target.kv_buffer]
    try:
        page = source.get_data_page(8)
        target.set_from_flat_data_page(12, page)
        sizes = page.numel() == target.get_dummy_flat_data_page().numel()
    except NotImplementedError:
        return False
    if layout == "page_first":
        taken, given, width = slice(8, 12), slice(12, 16), 4
    else:
        taken, given, width = slice(2, 3), slice(3, 4), 1
    moved = all(
        torch.equal(to[given], of[taken])
        for to, of in zip(target.kv_buffer, source.kv_buffer, strict=True)
    )
    for old, now in zip(before, target.kv_buffer, strict=True):
        old[given] = now[given]
    untouched = all(map(torch.equal, before, target.kv_buffer))
    assert given.stop - given.start == width
    return sizes and moved and untouched


def restored(v_dim: int) -> list[Any]:
    """Hit of a prompt in a second engine over the folder of a first, and whether its KV is same."""
    rng = random.Random(v_dim)
    prompt = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        first = Chain(Path(folder), v_dim, 1 << 24)
        first.serve(prompt)
        stored = first.stored(prompt)
        cached, wanted = first.cached(prompt)
        first.close()
        second = Chain(Path(folder), v_dim, 1 << 24)
        loaded, found = second.restore(prompt)
        second.close()
    assert cached == WHOLE_TOKENS
    same = loaded == cached and all(map(torch.equal, wanted, found))
    return [stored, loaded, same]


def survivor(asked_again: bool) -> list[int]:
    """Tokens of a prompt left in the storage after cold ones; and of the oldest of those.

    Args:
        asked_again: the device answers with the prompt while the storage fills.
    """
    rng = random.Random(7)

    def text() -> list[int]:
        return [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]

    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(Path(folder), K_DIM, 1 << 24)
        hot = text()
        chain.serve(hot)
        prompt_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.bin"))
        chain.cache.cache_controller.storage_backend._evictor.max_size_bytes = (
            HOT_PROMPTS * prompt_bytes
        )
        colds = [text() for _ in range(HOT_PROMPTS + 1)]
        for cold in colds[: HOT_PROMPTS - 1]:
            chain.serve(cold)
        if asked_again:
            assert chain.serve(hot) == WHOLE_TOKENS
        for cold in colds[HOT_PROMPTS - 1 :]:
            chain.serve(cold)
        left = [chain.stored(hot), chain.stored(colds[0])]
        chain.close()
    return left


def injected() -> bool:
    """Whether a proxy that injects failures passes a touch on."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageFailureInjector

    seen: list[Any] = []

    class Recorder:
        def touch(self, *arguments: Any) -> None:
            seen.append(arguments)

    if not hasattr(HiCacheStorage, "touch"):
        return False
    HiCacheStorageFailureInjector(Recorder(), 0.0, 0.0).touch(["key"])  # type: ignore[arg-type]
    return seen == [(["key"], None)]


def measure() -> dict[str, Any]:
    """All of it."""
    assert PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS == PROMPT_TOKENS
    return {
        "flat": [flat_pages("page_first"), flat_pages("page_first_direct")],
        "equal widths": restored(K_DIM),
        "unequal widths": restored(K_DIM - 2),
        "hot": survivor(True),
        "never asked again": survivor(False),
        "injected": injected(),
    }
