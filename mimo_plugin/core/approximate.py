# SPDX-License-Identifier: Apache-2.0
"""What workers hold that don't tell all of it: believed from what was sent to them and answered.

Two kinds of worker are served, both by the same index and look-up as exact ones:

* *told*: events tell full attention truly, but not sliding windows (SGLang). Full attention comes
  from the events; where a window is kept is believed.
* not told: a worker without events. What was routed there is believed to be resident, the tail of
  the least recently used prompt goes first, up to the capacity that the worker says it has.

Where an engine keeps windows is known by rule: at the end of a prompt, where two prompts part, at
the end of a prefill chunk, at the end of what it has just stored (an output, mostly), and with the
plugin's feature ``kv`` where :class:`~mimo_plugin.core.retention.RetentionRule` says so. Windows
have a pool of their own and die least recently used first. What is believed wrongly heals: an
answer's number of cached tokens says where a window was, and where none was.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from mimo_plugin.core.beliefs import Belief, Cache
from mimo_plugin.core.kv_events import BlockRemoved, BlockStored, Hash
from mimo_plugin.core.residency import ResidencyIndex, Snapshot, _Worker
from mimo_plugin.core.window import GroupGeometry, blocks_for_hit

BYTES_PER_BELIEF = 320
"""Bound of memory for one block that is believed of one worker, beside what the index itself needs
(:data:`mimo_plugin.core.residency.BYTES_PER_BLOCK` for all workers together)."""

FULL_GROUP, WINDOW_GROUP = 0, 1


class ApproximateIndex(ResidencyIndex):
    """Blocks of workers that serve one model with one KV layout, as far as they can be believed.

    Readers of events treat it as any other :class:`ResidencyIndex`. Answers may be wrong in both
    directions, but never beyond what the events of a *told* worker say of full attention.

    Args:
        hash_block_tokens: tokens that each of a prompt's hashes stands for.
        block_tokens: tokens of one block (page) of the worker, a multiple of it.
        window_tokens: sliding window of the model, the query's own token included; None: it has
            none.
        default_capacity_tokens: of workers that don't say how much they hold.
        media: where a copy counts. SGLang's host tier counts as well: it is loaded back on a hit.
        max_blocks_per_worker: see :class:`ResidencyIndex`.
        clock: gives the time in seconds when an event is applied; ``now_s`` and ``since_s`` are of
            the same clock.
    """

    def __init__(
        self,
        hash_block_tokens: int,
        *,
        block_tokens: int | None = None,
        window_tokens: int | None = None,
        default_capacity_tokens: int = 1_000_000,
        media: Iterable[str | None] = ("GPU", "CPU_PINNED", None),
        max_blocks_per_worker: int = 8_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.block_tokens = block_tokens or hash_block_tokens
        self.window_tokens = window_tokens
        if self.block_tokens % hash_block_tokens:
            raise ValueError(
                f"block_tokens: found {block_tokens}; allowed: a multiple of hash_block_tokens "
                f"({hash_block_tokens})"
            )
        super().__init__(
            hash_block_tokens,
            num_groups=1 if window_tokens is None else 2,
            media=media,
            max_blocks_per_worker=max_blocks_per_worker,
        )
        self.default_capacity_tokens = default_capacity_tokens
        #: answers that said less, as much, and more than was believed
        self.corrections = {"less": 0, "same": 0, "more": 0}
        self._full = GroupGeometry(self.block_tokens)
        self._declare(FULL_GROUP, self._full)
        self._window: GroupGeometry | None = None
        if window_tokens is not None:
            self._window = GroupGeometry(self.block_tokens, window_tokens)
            self._declare(WINDOW_GROUP, self._window)
        self._beliefs: dict[str, Belief] = {}

    # What is known of workers

    def set_target(self, target: str, cache: Cache) -> None:
        """The target is there, or has changed; with other events than before it starts anew."""
        belief = self._beliefs.get(target)
        if belief is None:
            self._beliefs[target] = Belief(cache)
            self._state(target)
            return
        if belief.cache.told != cache.told:
            self.forget(target)
        belief.cache = cache
        self._trim(self._state(target), belief)

    def remove(self, worker: str) -> None:
        """The worker does not exist any more."""
        super().remove(worker)
        self._beliefs.pop(worker, None)

    def snapshot(self, worker: str) -> Snapshot:
        """What events told, or what is believed of a worker without them."""
        taken = super().snapshot(worker)
        belief = self._beliefs.get(worker)
        if belief is None or not belief.cache.told or not belief.full:
            return taken
        geometry, blocks = taken.groups[FULL_GROUP]
        told = {
            block: (count - (block in belief.full), known, parent)
            for block, (count, known, parent) in blocks.items()
            if count > (block in belief.full)
        }
        return Snapshot(taken.next_seq, {**taken.groups, FULL_GROUP: (geometry, told)})

    def restore(self, worker: str, snapshot: Snapshot) -> None:
        """The worker has what the snapshot says; in which order it will go is not known."""
        super().restore(worker, snapshot)
        state, belief = self._state(worker), self._belief(worker)
        if self._window is not None:
            for block, _ in self._copies[WINDOW_GROUP].of(state.slot):
                belief.windows[block] = 0.0
        if not belief.cache.told:
            blocks = [block for block, _ in self._copies[FULL_GROUP].of(state.slot)]
            belief.full = OrderedDict.fromkeys(blocks, 1)
            belief.full_blocks = len(blocks)
        self._trim(state, belief)

    # What happens

    def record(
        self,
        target: str,
        hashes: Sequence[Hash],
        now_s: float,
        *,
        prompt_tokens: int | None = None,
        hit_tokens: int | None = None,
        full_tokens: int | None = None,
        kept_tokens: Iterable[int] = (),
    ) -> None:
        """A prompt was computed there: its first token has come.

        Args:
            target: name of the target.
            hashes: of the prompt's blocks of ``hash_block_tokens``.
            now_s: the caller's clock.
            prompt_tokens: length of the prompt; None: what the hashes stand for.
            hit_tokens: what of it was a hit; None: what is believed now.
            full_tokens: what of it was resident in full attention when it was sent: where that is
                more than the hit, the engine learns that prompts part there. None: not known.
            kept_tokens: starts of chat messages, for workers with a retention rule.
        """
        blocks = self._blocks(hashes)
        if not blocks:
            return
        state, belief = self._state(target), self._belief(target)
        length = max(prompt_tokens or 0, len(hashes) * self.hash_block_tokens)
        if hit_tokens is None:
            hit_tokens = self.lookup(hashes, length - 1).get(target, 0)
        hit = self._aligned(hit_tokens, blocks)
        if not belief.cache.told:
            self._touch_full(state, belief, blocks, 0)
        if self._window is None:
            return
        ends = self._ends(belief.cache, blocks, hit, length, full_tokens, kept_tokens)
        self._touch_windows(state, belief, blocks, [hit] if hit else [], now_s, new=False)
        step = belief.cache.chunk_tokens or length
        self._make_room(state, belief, min(step, length - hit))
        self._touch_windows(state, belief, blocks, ends, now_s)
        self._make_room(state, belief, 0)

    def correct(
        self,
        target: str,
        hashes: Sequence[Hash],
        cached_tokens: int,
        now_s: float | None = None,
        *,
        since_s: float | None = None,
        prompt_tokens: int | None = None,
        full_tokens: int | None = None,
        kept_tokens: Iterable[int] = (),
        output_tokens: int = 0,
    ) -> None:
        """The answer says how much of the prompt was a hit. Takes :meth:`record` in, too.

        A hit beyond what events told is of blocks that they don't tell in a way that is understood
        here: the worker was met late, or has names of its own for an image. They are believed then
        as those of a worker without events are.

        Args:
            cached_tokens: what the answer says.
            since_s: when the prompt was sent: what came to be believed later stays; None: nothing
                stays.
            output_tokens: length of the output, which takes room whatever its tokens are.

        The others are :meth:`record`'s.
        """
        blocks = self._blocks(hashes)
        if not blocks:
            return
        now_s = now_s if now_s is not None else since_s or 0.0
        state, belief = self._state(target), self._belief(target)
        length = max(prompt_tokens or 0, len(hashes) * self.hash_block_tokens)
        hit = self._aligned(min(cached_tokens, length - 1), blocks)
        if self._window is not None:
            reach = length - 1 if full_tokens is None else min(full_tokens, length - 1)
            for block in self._refuted(belief, blocks, hit, reach, since_s):
                self._lose_window(state, belief, block)
        if output_tokens and not belief.cache.told:
            belief.spares += 1
            size = -(-output_tokens // self.block_tokens)
            belief.full["output", belief.spares] = size
            belief.full_blocks += size
        if belief.cache.told:
            told = self.full_prefixes(hashes, length).get(target, 0)
            if told < hit:
                self._touch_full(state, belief, blocks, told // self.block_tokens)
        if self._window is not None and hit:
            self._touch_windows(state, belief, blocks, [hit], now_s)
        self.record(
            target,
            hashes,
            now_s,
            prompt_tokens=prompt_tokens,
            hit_tokens=hit,
            full_tokens=full_tokens,
            kept_tokens=kept_tokens,
        )

    def noted(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Count how a prediction compares with the answer, rounded to blocks."""
        found = cached_tokens // self.block_tokens - predicted_tokens // self.block_tokens
        self.corrections["less" if found < 0 else "more" if found else "same"] += 1

    # Rules

    def _ends(
        self,
        cache: Cache,
        blocks: Sequence[Hash],
        hit: int,
        length: int,
        full_tokens: int | None,
        kept_tokens: Iterable[int],
    ) -> list[int]:
        """Where the engine keeps windows of a prompt that it computes from ``hit`` on; ascending.

        The last ones are the last to be evicted.
        """
        size, whole = self.block_tokens, len(blocks) * self.block_tokens
        parted = self._aligned(full_tokens or 0, blocks)
        ends = {(length - 1) // size * size, length // size * size}
        if parted > hit:
            ends.add(parted)
        if cache.rule is not None:
            starts = sorted(start for start in kept_tokens if hit < start <= length)
            kept = cache.rule.thin_boundaries(starts, hit)
            ends.update(end for end, _ in cache.rule.plan(hit, whole, length, (), kept))
        elif cache.chunk_tokens and not cache.told:
            # With several requests in a step its chunks end elsewhere; the answer will tell.
            ends.update(range(hit + cache.chunk_tokens, length, cache.chunk_tokens))
        return sorted(end // size * size for end in ends if 0 < end <= whole)

    def _refuted(
        self,
        belief: Belief,
        blocks: Sequence[Hash],
        hit: int,
        reach: int,
        since_s: float | None,
    ) -> set[Hash]:
        """Blocks of windows that were believed and can't have been: they would have been hits.

        Args:
            hit: the longest hit that there was.
            reach: tokens of full attention that were there.
            since_s: windows with a block that came later are not spoken of.
        """
        assert self._window is not None
        wrong: set[Hash] = set()
        first, width = hit // self.block_tokens, self._window.window_blocks
        run = 0  # of believed blocks
        for at in range(max(0, first - width), min(reach // self.block_tokens, len(blocks))):
            came_s = belief.windows.get(blocks[at])
            run = run + 1 if came_s is not None and (since_s is None or came_s <= since_s) else 0
            if at >= first and (run >= width or run == at + 1):
                wrong.update(blocks[max(first, at + 1 - width) : at + 1])
        return wrong

    # Full attention

    def _touch_full(
        self, state: _Worker, belief: Belief, blocks: Sequence[Hash], first: int
    ) -> None:
        """Blocks from ``first`` on are resident, and the last ones of a prompt go first."""
        full = belief.full
        for at in range(first, len(blocks)):
            block = blocks[at]
            if block not in full:
                self._store(state, FULL_GROUP, block, blocks[at - 1] if at else None, True)
                if self._has(state, FULL_GROUP, block):  # no overflow
                    full[block] = 1
                    belief.full_blocks += 1
        for at in range(len(blocks) - 1, first - 1, -1):
            if blocks[at] in full:
                full.move_to_end(blocks[at])
        self._trim_full(state, belief)

    def _trim_full(self, state: _Worker, belief: Belief) -> None:
        most = (belief.cache.capacity_tokens or self.default_capacity_tokens) // self.block_tokens
        gone: list[Hash] = []
        while belief.full_blocks > most and belief.full:
            block, count = belief.full.popitem(last=False)
            belief.full_blocks -= count
            if not isinstance(block, tuple):
                gone.append(block)
        for block in gone:
            self._lose(state, FULL_GROUP, block)
            if not self._has(state, FULL_GROUP, block):
                self._lose_window(state, belief, block)

    # Windows

    def _touch_windows(
        self,
        state: _Worker,
        belief: Belief,
        blocks: Sequence[Hash],
        ends: Iterable[int],
        now_s: float,
        *,
        new: bool = True,
    ) -> None:
        """Windows before these lengths are used; those that are not there come, where ``new``."""
        assert self._window is not None
        for end in ends:
            for at in blocks_for_hit(self._window, end):
                self._touch_window(state, belief, blocks[at], now_s, new)

    def _touch_window(
        self, state: _Worker, belief: Belief, block: Hash, now_s: float, new: bool = True
    ) -> None:
        if block in belief.windows:
            belief.windows.move_to_end(block)
        elif new:
            self._store(state, WINDOW_GROUP, block, None, False)
            if self._has(state, WINDOW_GROUP, block):
                belief.windows[block] = now_s

    def _make_room(self, state: _Worker, belief: Belief, tokens: int) -> None:
        """The pool for windows must hold so much beside what is believed to be in it."""
        cache = belief.cache
        most = cache.window_capacity_tokens or cache.capacity_tokens or self.default_capacity_tokens
        left = max(0, most - tokens) // self.block_tokens
        while len(belief.windows) > left:
            block, _ = belief.windows.popitem(last=False)
            self._lose(state, WINDOW_GROUP, block)

    def _lose_window(self, state: _Worker, belief: Belief, block: Hash) -> None:
        if belief.windows.pop(block, None) is not None:
            self._lose(state, WINDOW_GROUP, block)

    def _trim(self, state: _Worker, belief: Belief) -> None:
        self._trim_full(state, belief)
        if self._window is not None:
            self._make_room(state, belief, 0)

    # Events of full attention, and what follows from them for windows

    def _stored(self, state: _Worker, event: BlockStored) -> None:
        super()._stored(state, event)
        if self._window is None or (event.group_idx or 0) != FULL_GROUP or not event.block_hashes:
            return
        belief = self._belief(self._names[state.slot] or "")
        # The engine hands over what it has computed so far, and goes on from there.
        came_s = self._clock()
        for block in reversed(list(self._before(event.block_hashes[-1], self._window))):
            self._touch_window(state, belief, block, came_s)
        self._make_room(state, belief, 0)

    def _removed(self, state: _Worker, event: BlockRemoved) -> None:
        super()._removed(state, event)
        if self._window is None or (event.group_idx or 0) != FULL_GROUP:
            return
        belief = self._belief(self._names[state.slot] or "")
        for block in event.block_hashes:
            if not self._has(state, FULL_GROUP, block):
                self._lose_window(state, belief, block)

    def _before(self, block: Hash, window: GroupGeometry) -> Iterator[Hash]:
        """The blocks of the window that ends with ``block``, last one first."""
        links = self._chains[self._full].links
        for _ in range(window.window_blocks):
            link = links.get(block)
            yield block
            if link is None or not link.known or link.parent is None:
                return
            block = link.parent

    def _clear(self, state: _Worker) -> None:
        super()._clear(state)
        name = self._names[state.slot]
        if name in self._beliefs:
            self._beliefs[name].clear()

    # Helpers

    def _belief(self, target: str) -> Belief:
        belief = self._beliefs.get(target)
        if belief is None:
            belief = self._beliefs[target] = Belief(Cache())
        return belief

    def _blocks(self, hashes: Sequence[Hash]) -> Sequence[Hash]:
        """Hashes of whole blocks: the last one of each block's."""
        step = self.block_tokens // self.hash_block_tokens
        return hashes if step == 1 else hashes[step - 1 :: step]

    def _aligned(self, tokens: int, blocks: Sequence[Hash]) -> int:
        whole = min(max(0, tokens) // self.block_tokens, len(blocks))
        return whole * self.block_tokens

    def _lose(self, state: _Worker, group: int, block: Hash) -> None:
        if self._has(state, group, block):
            super()._removed(state, BlockRemoved([block], group, None))

    def _has(self, state: _Worker, group: int, block: Hash) -> bool:
        return bool(self._copies[group].masks.get(block, 0) >> state.slot & 1)
