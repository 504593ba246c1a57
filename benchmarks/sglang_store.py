# SPDX-License-Identifier: Apache-2.0
"""Does a hot prefix outlive cold traffic in L3? SGLang's HiCache over the plugin's file store.

A hot prompt is asked for again and again while cold ones come in. The device answers for the hot
one, so nobody reads it from the store, where pages die by age; the store has room for a few
prompts. Then the engine is started again, with nothing but the store. Real: the radix cache, host
pools, HiCache's threads and queues, the store. Stock: SGLang's radix cache over the same store,
which it never touches: its backends have no method for that.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sglang_cases import ask
from benchmarks.sglang_pools import Pools, Store
from benchmarks.sglang_sim import SglangSimulator
from benchmarks.workloads import tokens

POOLS = Pools(full_tokens=8192, swa_tokens=4096, chunk_tokens=512)
PROMPT_TOKENS = 700
#: prompts for which the store has room
STORE_PROMPTS = 6
#: cold prompts between two requests for the hot one, and how often that is repeated
COLD, ROUNDS = 4, 4
_WAIT_S = 60.0


@dataclass(frozen=True)
class Kept:
    """What is left of the hot prompt after a new start, in tokens of whole pages."""

    policy: str
    seed: int
    hot_tokens: int
    restored_tokens: int
    #: hits of the hot prompt before, all on the device
    device_hits: tuple[int, ...]
    pages_touched: int
    pages_evicted: int

    @property
    def fraction(self) -> float:
        """Part of the hot prompt that the store gives back."""
        return self.restored_tokens / self.hot_tokens


def keep_hot(
    policy: str,
    settings: dict[str, Any] | None,
    seed: int,
    store: Store,
    *,
    cold: int = COLD,
) -> Kept:
    """Play one seed.

    Args:
        policy: a name for the result.
        settings: the plugin's section ``kv``; None is stock.
        seed: of the prompts.
        store: empty.
        cold: cold prompts between two requests for the hot one.
    """
    rng = random.Random(seed)
    hot = tokens(rng, PROMPT_TOKENS)
    engine = _Engine(settings, store)
    engine.ask(hot)
    hits = []
    for _ in range(ROUNDS):
        for _ in range(cold):
            engine.ask(tokens(rng, PROMPT_TOKENS))
        hits.append(engine.ask(hot))
    for _ in range(cold):
        engine.ask(tokens(rng, PROMPT_TOKENS))
    stats = engine.close()
    again = _Engine(settings, store)
    restored_tokens = again.restored(hot)
    again.close()
    return Kept(
        policy=policy,
        seed=seed,
        hot_tokens=(PROMPT_TOKENS - 1) // POOLS.page_tokens * POOLS.page_tokens,
        restored_tokens=restored_tokens,
        device_hits=tuple(hits),
        pages_touched=stats.pages_touched,
        pages_evicted=stats.pages_evicted,
    )


def room_bytes(settings: dict[str, Any], folder: Path) -> int:
    """What ``STORE_PROMPTS`` prompts take in a store, with the plugin's windows."""
    engine = _Engine(settings, Store(folder, 1 << 30))
    engine.ask(tokens(random.Random(0), PROMPT_TOKENS))
    taken: int = engine.close().bytes_held
    return STORE_PROMPTS * taken


class _Engine:
    """A simulator over a store that waits until what was asked for is stored."""

    def __init__(self, settings: dict[str, Any] | None, store: Store) -> None:
        from mimo_plugin.engines.sglang.storage.keepalive import INTERVAL_S, KeepAlive

        self.simulator = SglangSimulator(POOLS, settings, store=store)
        self.cache = self.simulator.cache
        storage = self.cache.cache_controller.storage_backend
        self.store = storage.store
        if settings is None:
            storage.keep_alive = lambda *_: None
        # Traffic of minutes is played in seconds: nothing is too soon to be touched again.
        clock = itertools.count(0.0, INTERVAL_S)
        self.keeper = KeepAlive(storage._touch, clock_s=lambda: next(clock))
        self._asked_pages = 0
        add = self.keeper.add

        def counted(pages: Any) -> None:
            self._asked_pages += sum(map(len, pages.values()))
            add(pages)

        self.keeper.add = counted  # type: ignore[method-assign]
        storage.keeper = self.keeper

    def ask(self, prompt: list[int]) -> int:
        """The device's hit of one request, which is in the store when this returns."""
        (hit,) = ask(self.simulator, [prompt])
        self._until(lambda: not (self.cache.ongoing_write_through or self.cache.ongoing_backup))
        # Each request is waited for, so no two prefixes share a touch.
        self._until(lambda: self.keeper.pages >= self._asked_pages)
        self._until(self._still)
        return hit

    def _still(self) -> bool:
        before = self.store.stats()
        time.sleep(0.02)
        return bool(before == self.store.stats())

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        self.cache.check_hicache_events()
        while not done():
            assert time.monotonic() < deadline, f"HiCache was not done after {_WAIT_S} s"
            time.sleep(0.002)
            self.cache.check_hicache_events()

    def restored(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the store brings into the host pool, window included."""
        self.simulator.submit(0, prompt, [2])
        req, cache = self.simulator.waiting.pop().req, self.cache
        req.init_next_round_input(cache)
        assert req.prefix_len == 0
        asked = array("q", list(req.full_untruncated_fill_ids)[: len(prompt) - 1])
        cache.prefetch_from_storage(
            req.cache_request_handle, req.last_host_node, asked, matched_prefix_tokens=array("q")
        )
        self._until(lambda: bool(cache.check_prefetch_progress(req.cache_request_handle)))
        cache.pop_prefetch_loaded_span(req.cache_request_handle)
        req.init_next_round_input(cache)
        return int(req.host_hit_length)

    def close(self) -> Any:
        """Stop the threads; counters of the store."""
        stats = self.store.stats()
        self.cache.shutdown()
        return stats
