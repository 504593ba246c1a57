# SPDX-License-Identifier: Apache-2.0
"""A hit is a promise: random histories against brute force, on vLLM's own manager and pool.

Each history mixes requests that share, extend, edit and fork prefixes with chunked prefill, drafts,
ends, aborts, preemptions, cache resets, and blocks invalidated by a connector, on a pool so small
that something is evicted all the time. After every look-up the hit is compared with brute force
over the resident blocks, with stock's look-up on the same blocks, and with what the blocks
contain; after every operation the pool is counted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.engines.vllm.kv.settings import KvSettings
from tests.kv.harness import Group, KvHarness, full, swa

MESSAGE_START = 1
#: histories per geometry; 13 geometries make 7,800 in all
HISTORIES = 600
OPERATIONS = 70


@dataclass(frozen=True)
class Case:
    """A group geometry and the settings to run it with."""

    groups: tuple[Group, ...]
    blocks: int
    use_eagle: bool = False
    prefill_lookahead: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    stock_equal: bool = True


CASES = {
    "plain": Case((full(4), swa(4, 6)), 24),
    "window-of-one-block": Case((full(4), swa(4, 5)), 18),
    "mimo-shape": Case((full(4), swa(2, 6), swa(2, 6), swa(2, 6)), 60),
    "wide-window": Case((full(4), swa(4, 15)), 30),
    "swa-block-larger": Case((full(2), swa(4, 7)), 40),
    "two-windows": Case((full(4), swa(2, 4), swa(4, 10)), 50),
    "two-full-groups": Case((full(4), full(4), swa(2, 5)), 60),
    "eagle-all-groups": Case((full(4), swa(4, 6)), 28, use_eagle=True),
    "eagle-unequal": Case((full(4), swa(2, 6)), 40, use_eagle=True),
    "eagle-draft-group": Case((full(4), swa(2, 6), swa(2, 4, draft=True)), 56, use_eagle=True),
    "multi-module-mtp": Case(
        (full(4), swa(2, 6), swa(2, 4, draft=True)), 56, use_eagle=True, prefill_lookahead=3
    ),
    "strict-split": Case(
        (full(4), swa(2, 6)), 40, settings={"swa_share": 0.4, "strict_split": True}
    ),
    "few-classes": Case(
        (full(4), swa(2, 6)), 36, settings={"classes": ("turn_end", "boundary"), "swa_share": 0.2}
    ),
}

OPERATION = st.tuples(
    st.sampled_from(
        ("new", "extend", "edit", "resend", "fork")
        + ("look", "admit", "admit", "load", "step", "step", "step", "decode", "decode")
        + ("finish", "finish", "abort", "preempt", "reset", "invalidate")
    ),
    st.integers(0, 7),
    st.integers(1, 24),
)


class History:
    """Plays operations and checks every promise on the way."""

    def __init__(self, case: Case, *, with_counts: bool = False) -> None:
        defaults: dict[str, Any] = {
            "message_start_token_ids": frozenset({MESSAGE_START}),
            "ladder_min_tokens": 12,
        }
        self.case = case
        self.with_counts = with_counts
        self.kv = KvHarness(
            case.groups,
            case.blocks,
            plugin=KvSettings(**{**defaults, **case.settings}),
            use_eagle=case.use_eagle,
            num_prefill_lookahead=case.prefill_lookahead,
            max_in_flight_tokens=24,
        )
        self.drafts = 2 if case.use_eagle else 0
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.known: list[list[int]] = []
        self._next_token = 100
        self.lookups = 0

    def fresh(self, count: int) -> list[int]:
        """New tokens, some of which open a message."""
        first = self._next_token
        self._next_token += count
        return [MESSAGE_START if t % 7 == 0 else t for t in range(first, first + count)]

    def play(self, name: str, which: int, amount: int) -> None:
        """One operation; one that makes no sense now does nothing."""
        getattr(self, f"_{name}")(which, amount)
        self.check_pool()

    # -- operations --------------------------------------------------------------------------

    def _queue(self, tokens: list[int]) -> None:
        if len(self.waiting) < 3 and tokens:
            self.waiting.append(self.kv.request(tokens))

    def _base(self, which: int) -> list[int]:
        return self.known[-1 - which % len(self.known)] if self.known else []

    def _new(self, which: int, amount: int) -> None:
        self._queue(self.fresh(amount + 1))

    def _extend(self, which: int, amount: int) -> None:
        self._queue([*self._base(which)[:80], *self.fresh(amount)])

    def _edit(self, which: int, amount: int) -> None:
        base = self._base(which)
        self._queue([*base[: max(0, len(base) - amount)], *self.fresh(amount + which)])

    def _fork(self, which: int, amount: int) -> None:
        self._queue([*self._base(which)[: 2 * amount], *self.fresh(3 + which)])

    def _resend(self, which: int, amount: int) -> None:
        self._queue(list(self._base(which)))

    def _look(self, which: int, amount: int) -> None:
        if self.waiting:
            self.check_lookup(self.waiting[which % len(self.waiting)])

    def _admit(self, which: int, amount: int, external: int = 0) -> None:
        if not self.waiting or len(self.running) >= 3:
            return
        request = self.waiting[which % len(self.waiting)]
        self.check_lookup(request)
        hit = self.kv.admit(request, amount, external_tokens=external, draft_tokens=self.drafts)
        if hit is not None:
            self.waiting.remove(request)
            self.running.append(request)

    def _load(self, which: int, amount: int) -> None:
        """A connector brings whole blocks past the local hit."""
        align = self.kv.alignment_tokens
        self._admit(which, amount, external=amount // align * align)

    def _step(self, which: int, amount: int) -> None:
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        while not self.kv.step(request, amount, draft_tokens=self.drafts):
            victim = self.running[-1]
            self._stop(victim)
            self.kv.preempt(victim)
            self.waiting.insert(0, victim)
            if victim is request:
                return

    def _decode(self, which: int, amount: int) -> None:
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        for _ in range(1 + amount // 4):
            if request not in self.running:
                return
            if request.num_computed_tokens >= request.num_tokens:
                accepted = 1 + (amount % (self.drafts + 1) if self.drafts else 0)
                self.kv.append(request, self.fresh(accepted))
            self._step(self.running.index(request), 24)

    def _stop(self, request: Any) -> None:
        self.running.remove(request)
        self.known.append(list(request.all_token_ids))
        del self.known[:-8]

    def _finish(self, which: int, amount: int) -> None:
        """End of a request: as often as not mid-prefill or mid-decode, then it is an abort."""
        done = [r for r in self.running if r.num_computed_tokens >= r.num_prompt_tokens]
        if done:
            request = done[which % len(done)]
            self._stop(request)
            self.kv.finish(request)

    def _abort(self, which: int, amount: int) -> None:
        requests = self.running + self.waiting
        if not requests:
            return
        request = requests[which % len(requests)]
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._stop(request)
        self.kv.finish(request)

    def _preempt(self, which: int, amount: int) -> None:
        if self.running:
            request = self.running[-1]
            self._stop(request)
            self.kv.preempt(request)
            self.waiting.insert(0, request)

    def _reset(self, which: int, amount: int) -> None:
        if which or amount % 4:
            return
        for request in list(reversed(self.running)):
            self._stop(request)
            self.kv.preempt(request)
            self.waiting.insert(0, request)
        assert self.kv.manager.reset_prefix_cache()
        assert not self.kv.hashed()

    def _invalidate(self, which: int, amount: int) -> None:
        cached = self.kv.hashed()
        if cached and which < 4:
            rng = random.Random(which * 100 + amount)
            self.kv.manager.evict_blocks(set(rng.sample(cached, min(len(cached), 1 + which // 2))))

    # -- promises ----------------------------------------------------------------------------

    def check_lookup(self, request: Any) -> None:
        """The hit is backed, is stock's or longer, is a fresh look-up's, and holds the right KV."""
        kv = self.kv
        blocks, hit, _ = kv.look_up(request)
        self.lookups += 1
        assert hit % kv.alignment_tokens == 0
        assert hit < request.num_tokens
        assert kv.is_valid(request, hit), f"hit {hit} is not backed by resident blocks"
        kv.check_contents(request, blocks, hit)
        stock = kv.stock_hit(request)
        assert hit >= stock, f"hit {hit} is below stock's {stock} on the same residency"
        best = kv.longest_valid(request)
        assert hit <= best
        if not kv.lookahead_groups:
            assert hit == best
        kv.manager._lookups.clear()
        # (The junction may be one seen earlier: it says where a checkpoint would help, not a hit.)
        fresh_blocks, fresh_hit, _ = kv.look_up(request)
        assert hit == fresh_hit, f"the memo says {hit}, a fresh look-up {fresh_hit}"
        for memo_group, fresh_group in zip(blocks.blocks, fresh_blocks.blocks, strict=True):
            assert [b.block_id for b in memo_group] == [b.block_id for b in fresh_group]

    def check_pool(self) -> None:
        """Free blocks are exactly the unreferenced ones; counts are recounts; budgets hold."""
        kv = self.kv
        ids = [b.block_id for b in kv.pool.free_block_queue.get_all_free_blocks()]
        unreferenced = kv.free_by_reference()
        assert len(ids) == len(set(ids)), "a block is free twice"
        assert set(ids) >= unreferenced, f"lost blocks {unreferenced - set(ids)}"
        assert set(ids) <= unreferenced, f"referenced blocks are free: {set(ids) - unreferenced}"
        assert kv.pool.get_num_free_blocks() == len(ids), "the number of free blocks is wrong"
        if self.with_counts:
            self.check_counts()

    def check_handing_out(self) -> None:
        """With every request gone, each block of the pool can be handed out, once."""
        for request in list(self.running):
            self._stop(request)
            self.kv.finish(request)
        self.check_pool()
        count = self.kv.pool.get_num_free_blocks()
        assert count == self.case.blocks - 1
        blocks = self.kv.pool.get_new_blocks(count)
        assert len({b.block_id for b in blocks}) == count

    def check_counts(self) -> None:
        """The gauges of cached blocks equal a recount of the pool, and none is negative."""
        kv = self.kv
        counted = {"full": 0, "swa": 0}
        for gid, count in kv.cached_by_group().items():
            counted["full" if kv.groups[gid].window_tokens is None else "swa"] += count
        claimed = {"full": 0, "swa": 0}
        for (kind, _), count in kv.coordinator.order.cached.items():
            claimed[kind] += count
        assert claimed == counted, f"gauges and pool differ: {claimed}, {counted}"
        for key, count in kv.coordinator.order.cached.items():
            assert count >= 0, f"negative gauge {key}: {count}"


HISTORY = st.lists(OPERATION, min_size=30, max_size=OPERATIONS)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=HISTORIES)
@given(operations=HISTORY)
def test_every_hit_is_backed(name: str, operations: list[tuple[str, int, int]]) -> None:
    history = History(CASES[name])
    for operation in operations:
        history.play(*operation)
    history.check_handing_out()


@pytest.mark.parametrize("name", ["mimo-shape", "two-full-groups", "eagle-draft-group"])
@settings(max_examples=100)
@given(operations=HISTORY)
def test_gauges_are_recounts(name: str, operations: list[tuple[str, int, int]]) -> None:
    history = History(CASES[name], with_counts=True)
    for operation in operations:
        history.play(*operation)
