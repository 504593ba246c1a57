# SPDX-License-Identifier: Apache-2.0
"""SGLang's names of pages become canonical ones: for pages of any size, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.block_hashes import block_hashes
from mimo_plugin.core.kv_events import BlockRemoved
from mimo_plugin.core.residency import ResidencyIndex
from mimo_plugin.core.sglang_names import SglangNames, block_tokens_of

HASH = 8  # tokens of a canonical block
PROMPTS = [
    [*range(64)],
    [*range(40), *range(200, 224)],
    [*range(21), *range(300, 343)],
    [*range(400, 464)],
]


def engine_names(tokens, page, extra=""):
    """Any chain over pages that is not ours."""
    found, last = [], hash(extra)
    for start in range(0, len(tokens) - page + 1, page):
        last = hash((last, *tokens[start : start + page]))
        found.append(last)
    return found


class Tree:
    """A radix tree's pages, and what it publishes."""

    def __init__(self, page):
        self.page, self.held = page, {}  # name -> parent
        self.names, self.index, self.seq = SglangNames(HASH), ResidencyIndex(HASH), 0
        self.apply(None)

    def apply(self, event):
        self.index.apply("w", self.seq, [event] if event is not None else [])
        self.seq += 1

    def store(self, tokens, until, **keys):
        pages = engine_names(tokens[: until * self.page], self.page, str(keys))
        new = [name for name in pages if name not in self.held]
        if not new:
            return
        first = pages.index(new[0])
        parent = pages[first - 1] if first else None
        for before, name in zip([parent, *new], new, strict=False):
            self.held[name] = before
        tokens = tokens[first * self.page : until * self.page]
        self.apply(self.names.stored(new, parent, tokens, self.page, medium="GPU", **keys))

    def remove(self, tokens, first):
        """From a page on, with all that follows in any prompt."""
        gone = {engine_names(tokens, self.page, "{}")[first]} & self.held.keys()
        while True:
            more = {name for name, before in self.held.items() if before in gone} - gone
            if not more:
                break
            gone |= more
        for name in gone:
            del self.held[name]
        self.apply(self.names.removed(list(gone), medium="GPU"))

    def resident(self, tokens):
        """Whole canonical blocks of the prompt, in tokens."""
        count = 0
        for name in engine_names(tokens, self.page, "{}"):
            if name not in self.held:
                break
            count += self.page
        size = block_tokens_of(self.page, HASH)
        return count // size * size


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 63)), max_size=25),
)
def test_what_is_found_is_what_is_there(page, steps):
    tree = Tree(page)
    for store, which, amount in steps:
        tokens = PROMPTS[which]
        at = amount % (len(tokens) // page)
        if store:
            tree.store(tokens, at + 1)
        else:
            tree.remove(tokens, at)
        for prompt in PROMPTS:
            found = tree.index.lookup(block_hashes(prompt, HASH), len(prompt))
            assert found.get("w", 0) == tree.resident(prompt)
    assert len(tree.names) == len(tree.held)
    assert tree.names.counts.unknown_parents == 0
    assert tree.index.unknown_removals == 0


@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_salt_and_adapter_tell_prompts_apart(page):
    tree, tokens = Tree(page), PROMPTS[0]
    tree.store(tokens, 16 // page, salt="s", lora="l")
    tree.store(tokens, 64 // page, salt="s", lora="l")
    keys = {0: (("lora", "l"), ("salt", "s"))}
    assert tree.index.lookup(block_hashes(tokens, HASH, keys), 64) == {"w": 64}
    assert tree.index.lookup(block_hashes(tokens, HASH), 64) == {}


def test_pages_after_an_unknown_one_stay_unknown():
    names = SglangNames(HASH)
    assert names.stored([2], 1, [*range(8)], 8) is None
    assert names.stored([3], 2, [*range(8)], 8) is None
    assert names.removed([2, 3]) is None
    assert (names.counts.unknown_parents, len(names)) == (2, 0)


def test_keys_of_media_are_left_out():
    names = SglangNames(HASH)
    assert names.stored([1], None, [*range(8)], 8) is not None
    assert names.stored([2], 1, [1 << 40] * 8, 8) is None
    assert names.stored([3], 2, [*range(8)], 8) is None
    assert names.counts.unknown_parents == 2


def test_a_copy_on_the_host_keeps_the_name():
    names = SglangNames(HASH)
    names.stored([1], None, [*range(8)], 8, medium="GPU")
    names.stored([1], None, [*range(8)], 8, medium="CPU_PINNED")
    names.stored([1], None, [*range(8)], 8, medium="GPU")
    for _ in range(2):
        assert names.removed([1], medium="GPU") == BlockRemoved(
            block_hashes([*range(8)], HASH), medium="GPU"
        )
    assert len(names) == 1
    assert names.removed([1]) is not None
    assert names.removed([1]) is None


@pytest.mark.parametrize("page", [3, 12, 0, -8])
def test_sizes_that_do_not_fit(page):
    with pytest.raises(ValueError, match="page size: found"):
        SglangNames(HASH).stored([1], None, [*range(40)], page)


def test_too_few_tokens():
    with pytest.raises(ValueError, match="token_ids: found 15"):
        SglangNames(HASH).stored([1, 2], None, [*range(15)], 8)
