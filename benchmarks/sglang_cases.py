# SPDX-License-Identifier: Apache-2.0
"""Prefixes of a cached prompt: how far they are hit, stock and plugin, on SGLang's own cache.

Pages of 16, chunks of 512, a window of 128; nothing is short of memory. A prompt of 700 tokens is
in the cache. Then comes one that shares its first 300 or 600 tokens, or four together that share
400.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.sglang_pools import Pools
from benchmarks.sglang_sim import SglangSimulator
from benchmarks.workloads import tokens

POOLS = Pools(full_tokens=8192, swa_tokens=4096, chunk_tokens=512)
PROMPT_TOKENS = 700
#: name -> (tokens shared, own tokens of each request, requests at once)
CASES = {
    "shared_300": (300, 60, 1),
    "shared_600": (600, 60, 1),
    "batch4": (400, 50, 4),
}


def ask(simulator: SglangSimulator, prompts: Sequence[list[int]], count: int = 2) -> list[int]:
    """Hits in tokens of requests that arrive together, once all have ended."""
    for number, prompt in enumerate(prompts):
        simulator.submit(number, prompt, [number + 2] * count)
    hits: dict[int, int] = {}
    while simulator.busy:
        hits.update({item.session: item.hit or 0 for item in simulator.step()})
    return [hits[number] for number in range(len(prompts))]


def case_hits(name: str, settings: dict[str, Any] | None) -> list[int]:
    """Hits of one of ``CASES``; ``settings`` is the plugin's section ``kv``, None stock."""
    shared_tokens, own_tokens, requests = CASES[name]
    rng = random.Random(1)
    base = tokens(rng, PROMPT_TOKENS)
    simulator = SglangSimulator(POOLS, settings, check=True)
    ask(simulator, [base])
    prompts = [base[:shared_tokens] + tokens(rng, own_tokens) for _ in range(requests)]
    hits = ask(simulator, prompts)
    simulator.finish()
    return hits
