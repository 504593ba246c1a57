# SPDX-License-Identifier: Apache-2.0
"""Random histories on SGLang's own tree, pools and allocators. Run in SGLang's environment.

``python -m integration_tests.sglang_histories FIRST COUNT`` plays histories by seed: random pools,
windows, chunks and settings; chats that share prefixes, fork, resend and end at once; too little
memory. After each step every slot of both pools must be accounted for, and before a request grows
all it is going to read must be its own. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from benchmarks.sglang_pools import Pools
from benchmarks.sglang_sim import SglangSimulator

CLASSES = ["turn_end", "boundary", "junction", "prompt_end", "tail", "ladder"]


def settings_of(rng: random.Random) -> dict[str, Any]:
    """Random settings of the plugin."""
    settings: dict[str, Any] = {"message_start_token_ids": rng.choice([[], [1]])}
    if rng.random() < 0.5:
        settings["classes"] = rng.sample(CLASSES, rng.randint(1, len(CLASSES)))
    if rng.random() < 0.5:
        settings["ladder_min_tokens"] = rng.choice([1, 40, 500])
        settings["ladder_growth"] = rng.choice([0.05, 0.25, 1.0])
    return settings


def pools_of(rng: random.Random) -> Pools:
    """Random pools, from roomy to hardly enough for one request."""
    page = rng.choice([4, 16, 32])
    window = rng.choice([page - 1, 48, 64, 130])
    chunk = page * rng.choice([4, 10, 32])
    swa = 2 * (window + 160) + chunk + page * rng.choice([8, 40, 200])
    full = rng.choice([900, 1600, 3200, 8000])
    return Pools(
        full_tokens=-(-full // page) * page,
        swa_tokens=-(-swa // page) * page,
        page_tokens=page,
        window_tokens=max(1, window),
        chunk_tokens=chunk,
        max_running=rng.randint(1, 5),
        decode_tokens=rng.choice([1, 3, 16, 40]),
    )


class History:
    """One seed: prompts grow out of each other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pools = pools_of(self.rng)
        settings = None if seed % 8 == 0 else settings_of(self.rng)
        self.simulator = SglangSimulator(self.pools, settings, check=True)
        self.limit = min(900, self.pools.full_tokens // 3)
        self.contexts: list[list[int]] = [self._text(self.rng.randint(1, 200))]

    def _text(self, count: int) -> list[int]:
        return [self.rng.choice([1, *range(2, 60)]) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self.rng
        base = list(rng.choice(self.contexts))
        kind = rng.random()
        if kind < 0.3:  # an edit, or a fork
            base = base[: rng.randint(1, len(base))]
        elif kind < 0.4:
            base = []
        if kind > 0.15:  # else: the same again
            base += self._text(rng.randint(1, 160))
        return base[: self.limit] or [1]

    def play(self, requests: int) -> None:
        """Submit at random and step until all is done."""
        rng, simulator = self.rng, self.simulator
        left = requests
        while left or simulator.busy:
            while left and (rng.random() < 0.3 or not simulator.busy):
                simulator.submit(0, self._prompt(), self._text(rng.choice([1, 2, 20, 70, 200])))
                left -= 1
            for item in simulator.step():
                self.contexts.append([*item.req.origin_input_ids, *item.output])
                if len(self.contexts) > 12:
                    self.contexts.pop(rng.randrange(len(self.contexts)))
        simulator.finish()


def main(arguments: list[str]) -> int:
    """Play ``COUNT`` seeds from ``FIRST`` on."""
    os.environ.setdefault("SGLANG_DEBUG_MEMORY_POOL", "1")
    first, count = map(int, arguments)
    total = {"histories": 0, "requests": 0, "hit_tokens": 0, "retractions": 0, "checked": 0}
    for seed in range(first, first + count):
        history = History(seed)
        try:
            history.play(60)
        except BaseException:
            print(f"seed {seed}: {history.pools}", file=sys.stderr)
            raise
        totals = history.simulator.totals
        total["histories"] += 1
        total["requests"] += totals.requests
        total["hit_tokens"] += totals.hit_tokens
        total["retractions"] += totals.retractions
        contents = history.simulator._contents
        assert contents is not None
        total["checked"] += contents.checked
    print(json.dumps(total))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
