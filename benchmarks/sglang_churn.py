# SPDX-License-Identifier: Apache-2.0
"""A random walk over SGLang's cache and allocators that accounts for every slot after each step.

Steps: a request comes, the engine works, KV of either kind is evicted, somebody takes slots of his
own and gives back sliding-window KV in the middle of them. The last two leave holes: full-attention
slots that have no sliding-window slot any more. Freeing these must free none.

Run: ``.venv-sglang/bin/python -m benchmarks.sglang_churn SEED STEPS``
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.sglang_check import check_mapping, check_pools
from benchmarks.sglang_pools import Pools
from benchmarks.sglang_sim import SglangSimulator

POOLS = Pools(
    full_tokens=1600,
    swa_tokens=800,
    window_tokens=48,
    chunk_tokens=160,
    max_running=4,
    decode_tokens=8,
)
#: steps of the long walk
STEPS = 100_000
#: steps after which the owners of all sliding-window slots, and the whole tree, are looked at
_MAPPING_EVERY, _TREE_EVERY = 16, 512
_MAX_WAITING, _MAX_HELD, _MAX_CONTEXTS = 4, 3, 12


@dataclass
class Walked:
    """What a walk did, in steps and tokens."""

    steps: int = 0
    requests: int = 0
    hit_tokens: int = 0
    retractions: int = 0
    evicted_full_tokens: int = 0
    evicted_swa_tokens: int = 0
    hole_tokens: int = 0


class Walk:
    """One walk; ``settings`` is the plugin's section ``kv``, None is stock."""

    def __init__(self, seed: int, settings: dict[str, Any] | None) -> None:
        self.rng = random.Random(seed)
        self.simulator = SglangSimulator(POOLS, settings)
        self.contexts: list[list[int]] = [self._text(100)]
        #: slots of somebody else, and how many of them have sliding-window KV
        self.held: list[tuple[Any, int]] = []
        self.walked = Walked()

    def _text(self, count: int) -> list[int]:
        return [self.rng.choice([1, *range(2, 40)]) for _ in range(count)]

    def step(self) -> None:
        """One random step, and the books."""
        (action,) = self.rng.choices(
            (self._come, self._work, self._evict, self._take, self._give_back),
            (0.2, 0.5, 0.15, 0.08, 0.07),
        )
        action()
        self.walked.steps += 1
        check_pools(
            self.simulator,
            other_full=sum(len(slots) for slots, _ in self.held),
            other_swa=sum(with_swa for _, with_swa in self.held),
        )
        if self.walked.steps % _MAPPING_EVERY == 0:
            check_mapping(self.simulator)
        if self.walked.steps % _TREE_EVERY == 0:
            self.simulator.cache.sanity_check()

    def _come(self) -> None:
        rng = self.rng
        if len(self.simulator.waiting) >= _MAX_WAITING:
            return
        base = rng.choice(self.contexts)
        if rng.random() < 0.5:
            base = base[: rng.randint(1, len(base))]
        prompt = [*base[:300], *self._text(rng.randint(0, 80))]
        self.simulator.submit(0, prompt, self._text(rng.choice([1, 9, 40])))

    def _work(self) -> None:
        for item in self.simulator.step():
            self.contexts.append([*item.req.origin_input_ids, *item.output])
            if len(self.contexts) > _MAX_CONTEXTS:
                self.contexts.pop(self.rng.randrange(len(self.contexts)))

    def _evict(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        full, swa = self.rng.choice([(0, 1), (1, 0), (1, 1)])
        count = self.rng.randint(1, 20) * POOLS.page_tokens
        done = self.simulator.cache.evict(
            EvictParams(num_tokens=full * count, swa_num_tokens=swa * count)
        )
        self.walked.evicted_full_tokens += done.num_tokens_evicted
        self.walked.evicted_swa_tokens += done.swa_num_tokens_evicted

    def _take(self) -> None:
        import torch

        allocator, page = self.simulator.allocator, POOLS.page_tokens
        if len(self.held) >= _MAX_HELD:
            return
        pages = self.rng.randint(1, 8)
        start, end = torch.tensor([0]), torch.tensor([pages * page])
        slots = allocator.alloc_extend(start, start, end, end, torch.tensor([-1]), pages * page)
        if slots is None:
            return
        first = self.rng.randrange(pages)
        last = self.rng.randint(first, pages)
        hole = slots[first * page : last * page]
        self._freed(lambda: allocator.free_swa_segment(hole, start_pos=first * page), 0, len(hole))
        self.walked.hole_tokens += len(hole)
        # As the tree gives back a node in which there may be a hole.
        self._freed(lambda: allocator.free_swa(hole), 0, 0)
        self.held.append((slots, len(slots) - len(hole)))

    def _give_back(self) -> None:
        if self.held:
            slots, with_swa = self.held.pop(self.rng.randrange(len(self.held)))
            free = self.simulator.allocator.free
            self._freed(lambda: free(slots), len(slots), with_swa)

    def _freed(self, action: Any, full: int, swa: int) -> None:
        allocator = self.simulator.allocator
        before = allocator.full_available_size(), allocator.swa_available_size()
        action()
        after = allocator.full_available_size(), allocator.swa_available_size()
        assert (after[0] - before[0], after[1] - before[1]) == (full, swa)

    def finish(self) -> Walked:
        """Give everything back, let all end, and look at it once more."""
        while self.held:
            self._give_back()
        while self.simulator.busy:
            self._work()
        self.simulator.finish()
        check_mapping(self.simulator)
        totals = self.simulator.totals
        self.walked.requests = totals.requests
        self.walked.hit_tokens = totals.hit_tokens
        self.walked.retractions = totals.retractions
        return self.walked


def churn(seed: int, steps: int, settings: dict[str, Any] | None) -> Walked:
    """Walk ``steps`` steps; ``settings`` as for :class:`Walk`."""
    walk = Walk(seed, settings)
    for _ in range(steps):
        walk.step()
    return walk.finish()


if __name__ == "__main__":
    print(churn(int(sys.argv[1]), int(sys.argv[2]), {"message_start_token_ids": [1]}))
