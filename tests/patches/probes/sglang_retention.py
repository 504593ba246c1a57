# SPDX-License-Identifier: Apache-2.0
"""What prompts hit in SGLang's radix cache with two pools, without a model.

All that a request reads is checked to be its own; see ``benchmarks.sglang_sim``.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.sglang_sim import Pools, SglangSimulator
from integration_tests.sglang_histories import History

PAGE_TOKENS, CHUNK_TOKENS = 16, 512
LONG_TOKENS = 6000
CUTS = (500, 1000, 1500, 2500, 4000, 5999)
STOCK_HISTORIES = (0, 8)
"""Seeds of histories without the plugin."""
PLUGIN_HISTORIES = (1, 2)


def hits(prompts: list[list[int]], *, together: bool = False) -> list[int]:
    """Hits of prompts, one after the other or all waiting at once."""
    pools = Pools(
        full_tokens=32_768,
        swa_tokens=16_384,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
    )
    simulator = SglangSimulator(pools, None, check=True)
    ended: dict[int, int] = {}

    def drain() -> None:
        while simulator.waiting or simulator.running or simulator.chunked:
            for item in simulator.step():
                assert item.hit is not None
                ended[int(item.req.rid)] = item.hit

    for prompt in prompts:
        simulator.submit(0, prompt, [1, 2, 3])
        if not together:
            drain()
    drain()
    simulator.finish()
    return [ended[key] for key in sorted(ended)]


def totals(seed: int) -> list[int]:
    """Play a random history in too little memory; what it came to."""
    history = History(seed)
    history.play(40)
    found = history.simulator.totals
    return [found.requests, found.hit_tokens, found.computed_tokens, found.retractions]


def measure() -> dict[str, Any]:
    """Hits by case, and random histories."""
    rng = random.Random(1)

    def text(count: int) -> list[int]:
        return [rng.randrange(100_000) for _ in range(count)]

    short, middle, shared, long = text(300), text(600), text(400), text(LONG_TOKENS)
    return {
        "300 of 360": hits([short + text(60), short + text(60)])[1],
        "600 of 660": hits([middle + text(60), middle + text(60)])[1],
        "4 sharing 400": hits([shared + text(60) for _ in range(4)], together=True),
        "long": {str(cut): hits([long, long[:cut] + text(100)])[1] for cut in CUTS},
        "again": hits([long, long])[1],
        "histories": {str(seed): totals(seed) for seed in STOCK_HISTORIES},
        "plugin": {str(seed): totals(seed) for seed in PLUGIN_HISTORIES},
    }
