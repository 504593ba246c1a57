# SPDX-License-Identifier: Apache-2.0
"""What is believed of workers that don't tell all: against plain lists, and case by case."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.approximate import BYTES_PER_BELIEF, ApproximateIndex
from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from mimo_plugin.core.residency import BYTES_PER_BLOCK
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
        ends = {length, length - UNIT} | ({min(full, length)} if min(full, length) > hit else set())
        if self.cache.chunk_tokens and not self.cache.told:
            ends |= set(range(hit + self.cache.chunk_tokens, length, self.cache.chunk_tokens))
        for block in self.span(hit):
            self.touch_window(hashes[block], now_s, new=False)
        self.room(min(self.cache.chunk_tokens or length, length - hit))
        for end in sorted(ends - {0}):
            for block in self.span(end):
                self.touch_window(hashes[block], now_s)
        self.room(0)

    def correct(self, hashes, cached, now_s, since_s, full, output=0):
        length = len(hashes) * UNIT
        hit = min(cached, length - 1) // UNIT * UNIT
        if self.window:
            old = {name for name, came in self.windows if came <= since_s}
            wrong = set()
            for end in range(hit + UNIT, min(full, length - 1) + 1, UNIT):
                window = [hashes[block] for block in self.span(end)]
                if old.issuperset(window):
                    wrong.update(window[-(end - hit) // UNIT :])
            self.windows = [entry for entry in self.windows if entry[0] not in wrong]
        if output and not self.cache.told:
            self.full.append([object(), -(-output // UNIT)])
        told = next((at for at, block in enumerate(hashes) if not self.holds(block)), len(hashes))
        if self.cache.told and told * UNIT < hit:
            self.touch_full(hashes, told)
        if self.window and hit:
            for block in self.span(hit):
                self.touch_window(hashes[block], now_s)
        self.record(hashes, now_s, hit, full)

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
            full = (LENGTH if extra % 2 else amount) * UNIT
            facts = {"since_s": since_s, "output_tokens": extra, "full_tokens": full}
            index.correct("a", hashes, amount * UNIT, now_s, **facts)
            plain.correct(hashes, amount * UNIT, now_s, since_s, full, extra)
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


# The rules, one by one; SGLang 0.5.23 with pages of 16, chunks of 512 and a window of 128 answered
# with these numbers of cached tokens.

PAGE = UNIT


def prompt(seed, tokens):
    """Hashes of the whole pages of a prompt, and its length."""
    return chain((seed, at) for at in range(tokens // PAGE)), tokens


def forked(base, seed, tokens, total):
    """A prompt that shares ``tokens`` with another one."""
    shared = tokens // PAGE
    hashes = [(base, at) if at < shared else (seed, at) for at in range(total // PAGE)]
    return chain(hashes), total


class Worker:
    """A told worker as it is routed to: its events, requests and answers."""

    def __init__(self, **cache):
        self.clock = Clock()
        self.cache = Cache(told=True, capacity_tokens=4096, **cache)
        self.index = ApproximateIndex(PAGE, window_tokens=128, clock=self.clock)
        self.index.set_target("w", self.cache)
        self.seq, self.held = 0, set()

    def store(self, hashes, until):
        """An insert of the prompt up to ``until`` tokens; pages that are there are not told."""
        pages = until // PAGE
        new = next((at for at in range(pages) if hashes[at] not in self.held), None)
        if new is not None:
            self.index.apply("w", self.seq, [stored(hashes, new, pages)])
            self.seq += 1
            self.held.update(hashes[new:pages])

    def ask(self, wanted, hashes, length, *ends, **record):
        """A request that the engine answered with ``wanted`` cached tokens."""
        full = self.index.full_prefixes(hashes, length - 1).get("w", 0)
        found = self.index.lookup(hashes, length - 1).get("w", 0)
        sent_s = self.clock.tick()
        for end in (*ends, length):
            self.store(hashes, end)
        facts = {"prompt_tokens": length, "full_tokens": full, **record}
        self.index.record("w", hashes, self.clock.tick(), hit_tokens=found, **facts)
        self.index.correct("w", hashes, wanted, self.clock.tick(), since_s=sent_s, **facts)
        return found


def test_a_resent_prompt_a_shorter_one_and_one_that_goes_on():
    worker = Worker(window_capacity_tokens=2048)
    long = prompt(1, 700)
    assert worker.ask(0, *long, 512) == 0
    assert worker.ask(688, *long) == 688
    short = long[0][: 300 // PAGE], 300
    assert worker.ask(0, *short) == 0  # full attention is there, the window is not
    assert worker.ask(288, *forked(1, 2, 300, 350)) == 288  # but from then on
    assert worker.ask(688, *forked(1, 3, 688, 804)) == 688


def test_a_window_comes_where_prompts_part():
    worker = Worker(window_capacity_tokens=2048)
    worker.ask(0, *prompt(1, 700), 512)
    fork = forked(1, 2, 400, 700)
    assert worker.ask(0, *fork) == 0
    assert worker.ask(400, *forked(1, 3, 400, 500)) == 400
    assert worker.ask(688, *fork) == 688
    assert worker.ask(512, *forked(1, 4, 520, 540)) == 512  # the end of the first one's chunk


def test_an_output_ends_with_a_window_that_only_events_tell():
    worker = Worker(window_capacity_tokens=2048)
    whole = prompt(1, 500)
    worker.ask(0, whole[0][: 300 // PAGE], 300)
    worker.store(whole[0], 496)
    assert worker.ask(496, *forked(1, 2, 496, 600)) == 496


def test_least_recently_used_windows_die_and_full_attention_stays():
    worker = Worker(window_capacity_tokens=512)
    first = prompt(1, 400)
    worker.ask(0, *first)
    for seed in (2, 3, 4, 5):
        worker.ask(0, *prompt(seed, 400))
    assert worker.index.full_prefixes(first[0], 399) == {"w": 384}
    assert worker.ask(0, *first) == 0


def test_an_answer_takes_back_windows_and_brings_others():
    worker = Worker(window_capacity_tokens=2048)
    long = prompt(1, 700)
    worker.ask(0, *long, 512)
    assert worker.index.lookup(long[0], 699) == {"w": 688}
    # A longer prompt hit nothing: none of the windows on its way is there.
    longer = forked(1, 2, 688, 900)
    assert worker.ask(0, *longer) == 688
    assert worker.index.lookup(long[0], 687) == {}
    assert worker.index.lookup(long[0], 688) == {"w": 688}  # where it parted from the first one
    # One hit more than was believed.
    other = forked(1, 3, 256, 700)
    assert worker.ask(256, *other) == 0
    assert worker.index.lookup(other[0], 300) == {"w": 256}


def test_an_answer_takes_back_a_window_that_the_start_cuts_off():
    worker = Worker(window_capacity_tokens=2048)
    hashes, length = prompt(1, 700)
    worker.store(hashes, 32)
    assert worker.index.lookup(hashes, 40) == {"w": 32}
    worker.index.correct("w", hashes, 0, worker.clock.tick(), prompt_tokens=length)
    assert worker.index.lookup(hashes, 40) == {}


def test_what_came_while_a_request_was_on_its_way_stays():
    worker = Worker(window_capacity_tokens=2048)
    long, short = prompt(1, 700), prompt(1, 300)
    worker.store(long[0], 700)
    sent_s = worker.clock.tick()
    worker.index.record("w", *short[:1], worker.clock.tick(), prompt_tokens=300)
    worker.index.correct("w", long[0], 0, worker.clock.tick(), since_s=sent_s, prompt_tokens=700)
    assert worker.index.lookup(short[0], 299) == {"w": 288}
    worker.index.correct("w", long[0], 0, worker.clock.tick(), prompt_tokens=700)
    assert worker.index.lookup(short[0], 299) == {}


def test_removed_pages_take_their_windows_along():
    worker = Worker(window_capacity_tokens=2048)
    hashes, length = prompt(1, 400)
    worker.ask(0, hashes, length)
    worker.index.apply("w", worker.seq, [BlockRemoved(hashes[10:])])
    worker.index.apply("w", worker.seq + 1, [stored(hashes, 10, 25)])
    assert worker.index.lookup(hashes, 400) == {"w": 400}  # the end of what came
    assert worker.index.lookup(hashes, 399) == {}


def test_a_rule_keeps_windows_at_messages_and_rungs():
    worker = Worker(window_capacity_tokens=2048, rule=RULE)
    hashes, length = prompt(1, 700)
    worker.ask(0, hashes, length, kept_tokens=(33, 402))
    found = {t for t in range(0, 700, PAGE) if worker.index.lookup(hashes, t).get("w", 0) == t}
    wanted = {end for end, _ in RULE.plan(0, 688, 700, (), (402,))}
    assert wanted <= found and 400 in wanted
    plain = Worker(window_capacity_tokens=2048)
    plain.ask(0, hashes, length, kept_tokens=(33, 402))
    assert plain.index.lookup(hashes, 500) == {}


def test_a_hit_that_no_event_told_is_believed_until_it_is_evicted():
    worker = Worker(window_capacity_tokens=2048)
    hashes, length = prompt(1, 400)
    worker.index.correct("w", hashes, 384, worker.clock.tick(), prompt_tokens=length)
    assert worker.index.lookup(hashes, 399) == {"w": 384}
    saved = worker.index.snapshot("w")
    worker.index.set_target("w", Cache(told=True, capacity_tokens=256))
    assert worker.index.full_prefixes(hashes, 399) == {"w": 256}
    worker.index.restore("w", saved)  # what was told, that is nothing
    assert worker.index.full_prefixes(hashes, 399) == {}


# Workers without events


def test_what_was_sent_is_believed_and_the_oldest_tail_goes_first():
    index = index_for(Cache(capacity_tokens=30 * UNIT), window=None)
    first, second = PROMPTS[0], PROMPTS[3]
    index.record("a", first, 1.0)
    index.record("a", second, 2.0)
    assert index.lookup(first, LENGTH * UNIT) == {"a": 10 * UNIT}
    assert index.lookup(second, LENGTH * UNIT) == {"a": LENGTH * UNIT}
    index.record("a", first[:5], 3.0)
    index.record("a", PROMPTS[1], 4.0)
    assert index.lookup(first, LENGTH * UNIT) == {"a": 10 * UNIT}
    assert index.lookup(second, LENGTH * UNIT) == {"a": 10 * UNIT}


def test_outputs_take_room():
    index = index_for(Cache(capacity_tokens=30 * UNIT), window=None)
    index.correct("a", PROMPTS[0], 0, 1.0, output_tokens=20 * UNIT - 1)
    assert index.lookup(PROMPTS[0], LENGTH * UNIT) == {"a": LENGTH * UNIT}
    index.record("a", PROMPTS[3], 2.0)
    assert index.lookup(PROMPTS[0], LENGTH * UNIT) == {"a": 10 * UNIT}


def test_chunks_end_with_windows():
    index = index_for(Cache(chunk_tokens=6 * UNIT))
    index.record("a", PROMPTS[0], 1.0)
    ends = {
        t for t in range(1, LENGTH + 1) if index.lookup(PROMPTS[0], t * UNIT) == {"a": t * UNIT}
    }
    assert ends == {6, 12, 18, 19, 20}


def test_blocks_larger_than_hashes():
    index = index_for(Cache(), block=2 * UNIT, window=4 * UNIT)
    index.record("a", PROMPTS[0][:19], 1.0)
    assert index.lookup(PROMPTS[0], LENGTH * UNIT) == {"a": 18 * UNIT}
    assert index.lookup(PROMPTS[0], 18 * UNIT - 1) == {}
    assert index.full_prefixes(PROMPTS[0], 18 * UNIT - 1) == {"a": 16 * UNIT}


def test_a_restored_worker_goes_on():
    index, other = index_for(Cache(capacity_tokens=30 * UNIT)), index_for(target="x")
    index.record("a", PROMPTS[0], 1.0)
    other.set_target("a", Cache(capacity_tokens=30 * UNIT))
    other.restore("a", index.snapshot("a"))
    assert other.lookup(PROMPTS[0], LENGTH * UNIT) == {"a": LENGTH * UNIT}
    other.record("a", PROMPTS[3], 2.0)
    assert other.blocks_of("a") <= 60
    other.remove("a")
    assert other.lookup(PROMPTS[0], LENGTH * UNIT) == {} and other.workers == ("x",)


def test_more_blocks_than_allowed_start_anew():
    index = index_for(Cache(), window=None, max_blocks_per_worker=12)
    for now_s, hashes in enumerate(PROMPTS):
        index.record("a", hashes, float(now_s))
        assert index.blocks_of("a") == len(index._beliefs["a"].full) <= 12
    assert index.overflows


@pytest.mark.parametrize("name", ["capacity_tokens", "window_capacity_tokens", "chunk_tokens"])
def test_sizes_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}: found 0"):
        Cache(**{name: 0})


def test_block_size_is_a_multiple_of_a_hash():
    with pytest.raises(ValueError, match="block_tokens: found 24"):
        ApproximateIndex(16, block_tokens=24)


# Size and speed

WORKERS = 64


def test_memory_for_each_block():
    """64 workers that all were sent the same prompts, with windows everywhere."""
    blocks = 400
    hashes = chain(range(blocks))
    names = [f"http://worker-{i}:8000" for i in range(WORKERS)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = index_for(Cache(), target=names[0])
        for name in names:
            index.set_target(name, Cache(chunk_tokens=2 * UNIT))
            index.record(name, hashes, 1.0)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    entries = sum(index.blocks_of(name) for name in names)
    assert entries == 2 * blocks * WORKERS
    assert used <= 2 * blocks * BYTES_PER_BLOCK + entries * BYTES_PER_BELIEF


def test_a_look_up_of_a_million_tokens_is_quick():
    hashes = chain(range(1_000_000 // UNIT))
    index = index_for(target="0", window=128)
    for worker in range(WORKERS):
        index.set_target(str(worker), Cache())
        length = (worker + 1) * 15_000 if worker < 4 else 100
        index.record(str(worker), hashes[:length], 1.0)
    took_s = []
    for _ in range(5):
        start = time.perf_counter()
        found = index.lookup(hashes, 999_999)
        took_s.append(time.perf_counter() - start)
    assert found["3"] == 60_000 * UNIT and found["0"] == 15_000 * UNIT
    assert min(took_s) < 0.05
