# SPDX-License-Identifier: Apache-2.0
"""What is believed of workers that don't tell all: against plain lists, and case by case."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.approximate import ApproximateIndex
from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from mimo_plugin.core.retention import CLASSES, Ladder, RetentionRule
from mimo_plugin.core.window import GroupGeometry, longest_valid_hit
from tests.core.residency_model import UNIT, chain

WINDOW = 3 * UNIT  # two blocks and a bit: a hit needs the last two blocks
LENGTH = 20
PROMPTS = [
    chain(range(LENGTH)),
    chain([*range(10), *range(100, 110)]),
    chain([*range(5), *range(200, 215)]),
    chain(range(300, 300 + LENGTH)),
]
RULE = RetentionRule(UNIT, 0, frozenset(CLASSES), Ladder(4 * UNIT, 0.25, UNIT))


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def tick(self):
        self.now_s += 1.0
        return self.now_s


def index_for(cache=None, *, window=WINDOW, target="a", clock=None, block=UNIT, **settings):
    index = ApproximateIndex(
        UNIT, block_tokens=block, window_tokens=window, clock=clock or Clock(), **settings
    )
    index.set_target(target, cache or Cache())
    return index


def stored(hashes, first, last, medium="GPU"):
    return BlockStored(
        hashes[first:last],
        hashes[first - 1] if first else None,
        (last - first) * UNIT,
        UNIT,
        medium=medium,
    )


class Plain:
    """The same beliefs about one worker as lists that are searched, and the definition of a hit."""

    def __init__(self, cache, window):
        self.cache, self.window = cache, window
        self.geometry = GroupGeometry(UNIT, window) if window else None
        self.clear()

    def clear(self):
        self.told, self.parents = Counter(), {}
        self.full, self.windows = [], []  # [name, size] and [name, time], next victim first

    def holds(self, block):
        return self.told[block] > 0 or any(block == name for name, _ in self.full)

    def touch_full(self, hashes, first=0):
        for block in reversed(hashes[first:]):
            self.full = [entry for entry in self.full if entry[0] != block] + [[block, 1]]
            at = hashes.index(block)
            self.parents.setdefault(block, hashes[at - 1] if at else None)
        self.trim()

    def trim(self):
        most = (self.cache.capacity_tokens or 1_000_000) // UNIT
        while sum(size for _, size in self.full) > most and self.full:
            name, _ = self.full.pop(0)
            if not self.told[name]:
                self.windows = [entry for entry in self.windows if entry[0] != name]

    def touch_window(self, block, now_s, new=True):
        found = [entry for entry in self.windows if entry[0] == block]
        if found or new:
            self.windows = [entry for entry in self.windows if entry[0] != block]
            self.windows.append([block, found[0][1] if found else now_s])

    def room(self, tokens):
        most = self.cache.window_capacity_tokens or self.cache.capacity_tokens or 1_000_000
        left = max(0, most - tokens) // UNIT
        self.windows = self.windows[max(0, len(self.windows) - left) :]

    def span(self, end):
        return range(max(0, end // UNIT - self.geometry.window_blocks), end // UNIT)

    def hit(self, hashes, limit):
        groups = (GroupGeometry(UNIT), *([self.geometry] if self.window else []))
        live = {name for name, _ in self.windows}

        def resident(group, block):
            if block >= len(hashes):
                return False
            return hashes[block] in live if group else self.holds(hashes[block])

        limit = min(limit, len(hashes) * UNIT)
        return longest_valid_hit(groups, UNIT, limit, resident)

    def record(self, hashes, now_s, hit=None, full=0):
        length = len(hashes) * UNIT
        hit = self.hit(hashes, length - 1) if hit is None else hit
        if not self.cache.told:
            self.touch_full(hashes)
        if not self.window:
            return
        ends = {length, length - UNIT} | ({full} if full > hit else set())
        if self.cache.chunk_tokens and not self.cache.told:
            ends |= set(range(hit + self.cache.chunk_tokens, length, self.cache.chunk_tokens))
        for block in self.span(hit):
            self.touch_window(hashes[block], now_s, new=False)
        self.room(min(self.cache.chunk_tokens or length, length - hit))
        for end in sorted(ends - {0}):
            for block in self.span(end):
                self.touch_window(hashes[block], now_s)
        self.room(0)

    def correct(self, hashes, cached, now_s, since_s, output=0):
        length = len(hashes) * UNIT
        hit = min(cached, length - 1) // UNIT * UNIT
        beyond = set(hashes[hit // UNIT : (length - 1) // UNIT])
        if self.window:
            self.windows = [
                [name, came] for name, came in self.windows if name not in beyond or came > since_s
            ]
        if output and not self.cache.told:
            self.full.append([object(), -(-output // UNIT)])
        told = next((at for at, block in enumerate(hashes) if not self.holds(block)), len(hashes))
        if self.cache.told and told * UNIT < hit:
            self.touch_full(hashes, told)
        if self.window and hit:
            for block in self.span(hit):
                self.touch_window(hashes[block], now_s)
        self.record(hashes, now_s, hit)

    def store(self, hashes, first, last, now_s):
        for at in range(first, last):
            self.told[hashes[at]] += 1
            self.parents[hashes[at]] = hashes[at - 1] if at else None
        if not self.window:
            return
        span, block = [], hashes[last - 1]
        while block is not None and len(span) < self.geometry.window_blocks:
            span.append(block)
            block = self.parents[block] if self.holds(block) else None
        for block in reversed(span):
            self.touch_window(block, now_s)
        self.room(0)

    def lose(self, block):
        self.told[block] = max(0, self.told[block] - 1)
        if not self.holds(block):
            self.windows = [entry for entry in self.windows if entry[0] != block]


CACHES = st.builds(
    Cache,
    told=st.booleans(),
    capacity_tokens=st.sampled_from([None, 8 * UNIT, 25 * UNIT, 60 * UNIT]),
    window_capacity_tokens=st.sampled_from([None, 2 * UNIT, 5 * UNIT, 12 * UNIT]),
    chunk_tokens=st.sampled_from([None, 4 * UNIT, 7 * UNIT]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["record", "correct", "store", "lose", "cut", "clear", "forget"]),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, LENGTH),
        st.integers(0, LENGTH),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(CACHES, STEPS, st.sampled_from([None, WINDOW, UNIT + 1]))
def test_any_history_gives_what_plain_lists_give(cache, steps, window):
    clock = Clock()
    index, plain = index_for(cache, window=window, clock=clock), Plain(cache, window)
    index.set_target("b", Cache())  # another worker, which must not change anything
    seq = 0
    for step, (what, which, length, amount, extra) in enumerate(steps):
        now_s, hashes = clock.tick(), PROMPTS[which][:length]
        first = min(amount, length - 1)
        if step % 3 == 0:
            index.record("b", PROMPTS[(which + 1) % len(PROMPTS)], now_s)
        if what == "record":
            full = first * UNIT
            index.record("a", hashes, now_s, full_tokens=full)
            plain.record(hashes, now_s, full=full)
        elif what == "correct":
            since_s = now_s - extra
            index.correct("a", hashes, amount * UNIT, now_s, since_s=since_s, output_tokens=extra)
            plain.correct(hashes, amount * UNIT, now_s, since_s, extra)
        elif what == "clear":
            assert cache.told or not plain.told
            if cache.told:
                index.apply("a", seq, [AllBlocksCleared()])
                seq += 1
                plain.clear()
        elif what == "forget":
            index.forget("a")
            plain.clear()
            seq = 0
        elif cache.told:
            if what == "store":
                # As engines do, only what comes after something stored.
                while first and not plain.told[hashes[first - 1]]:
                    first -= 1
                index.apply("a", seq, [stored(hashes, first, length)])
                plain.store(hashes, first, length, now_s)
            else:
                gone = [block for block in hashes[first:] if plain.told[block]]
                index.apply("a", seq, [BlockRemoved(gone if what == "cut" else gone[:1])])
                for block in gone if what == "cut" else gone[:1]:
                    plain.lose(block)
            seq += 1
        for prompt in PROMPTS:
            for limit in (LENGTH * UNIT, LENGTH * UNIT - 1, 7 * UNIT):
                assert index.lookup(prompt, limit).get("a", 0) == plain.hit(prompt, limit)
        belief = index._beliefs["a"]
        assert len(belief.windows) <= (cache.window_capacity_tokens or 10**9) // UNIT
        assert belief.full_blocks <= (cache.capacity_tokens or 10**9) // UNIT
        # What the index holds is what is believed, and no more.
        full = {block for block in plain.parents if plain.holds(block)}
        assert index.blocks_of("a") == len(full) + len(plain.windows)
    assert index.unknown_removals == 0
