# SPDX-License-Identifier: Apache-2.0
"""What tells one chat from another, read off token ids alone and the same in every turn.

A turn's prompt begins with all of the earlier turn's prompt. So a key that depends on a prefix, and
on where that prefix ends only through the tokens before it, is the same in each turn, in whatever
process it is computed. Places where such a prefix may end are *anchors*:

* In a chat, before each answer: where the model was asked to speak. The first one ends the first
  question, so it differs between chats though they share a system prompt, and every turn has it.
* In text without such marks, at fixed places: every ``GRID_TOKENS``, from 2048 tokens on every
  32nd of the length.

The key of a prompt is the hash up to its first anchor behind what it shares with unrelated prompts.
A head is known to be shared once several ways to go on from it were seen (``Keys.shared_after``):
without that, chats with the same examples before the question, or texts with the same long head,
would be one. What has no anchor there is keyed by the whole prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

GRID_TOKENS = 64
"""Distance of the anchors of plain text up to 32 times as many tokens."""

MOST_ANSWERS = 64
"""Answers of a chat that are looked at; heads with more examples than that count as one chat."""

ANSWER_BRANCHES = 4
GRID_BRANCHES = 2
"""Ways to go on from a prefix that make it a shared one, in a chat and in plain text."""

TOKENS_A_BRANCH = 8192
"""As many tokens of the prefix allow one way more: what is shared is computed again elsewhere."""

Mark = tuple[int, bytes]
"""An image or other item: the place of its first token, and its content's hash."""


def answer_anchors(token_ids: Sequence[int], opening: Sequence[int]) -> list[int]:
    """Where ``opening`` begins in the prompt: the lengths of the prefixes that an answer follows.

    Args:
        token_ids: a list, whose ``index`` runs at C speed.
        opening: tokens that open an answer; () finds none.

    Returns:
        Ascending lengths > 0 in tokens, at most ``MOST_ANSWERS``.
    """
    found: list[int] = []
    if not opening:
        return found
    first, width, wanted = opening[0], len(opening), list(opening)
    at = 0
    while len(found) < MOST_ANSWERS:
        try:
            at = token_ids.index(first, at)
        except ValueError:
            break
        if at and list(token_ids[at : at + width]) == wanted:
            found.append(at)
        at += 1
    return found


def grid_anchors(num_tokens: int) -> list[int]:
    """The fixed places up to ``num_tokens``: lengths in tokens, ascending."""
    found, at = [], GRID_TOKENS
    while at <= num_tokens:
        found.append(at)
        at += max(GRID_TOKENS, at // 32)
    return found


def prefix_hashes(
    token_ids: Sequence[int], anchors: Sequence[int], marks: Sequence[Mark] = (), seed: bytes = b""
) -> Iterator[int]:
    """The hash of each prefix: 8 bytes as an int, the same in every process.

    Args:
        token_ids: the prompt.
        anchors: lengths of the prefixes, ascending, none beyond the prompt.
        marks: items whose tokens look alike, ascending by place; one counts from its first token.
        seed: what else decides whether KV can be shared.
    """
    digest = hashlib.blake2b(seed, digest_size=8, person=b"mimo-chat-key")
    encoded = memoryview(array("q", token_ids))
    done, mark = 0, 0
    for anchor in anchors:
        digest.update(encoded[done:anchor])
        while mark < len(marks) and marks[mark][0] < anchor:
            place, content = marks[mark]
            digest.update(b"item%d:%d:" % (place, len(content)) + content)
            mark += 1
        yield int.from_bytes(digest.digest(), "big")
        done = anchor


def named_key(name: str, seed: bytes = b"") -> int:
    """The key of a session that the client names."""
    digest = hashlib.blake2b(seed, digest_size=8, person=b"mimo-session")
    digest.update(name.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big")


def seed_of(*parts: str | None) -> bytes:
    """One seed of several names (LoRA adapter, cache salt), None for those that are not there."""
    return repr(parts).encode("utf-8", "surrogatepass") if any(parts) else b""


class Keys:
    """Finds keys of prompts, and learns which prefixes unrelated prompts share.

    What it learns is bounded and only moves a key to a later anchor, so processes that have seen
    different prompts differ for the first few that share a head.

    Args:
        opening: tokens that open an answer; () where the chat template has no such mark.
        max_prefixes: that are remembered, >= 1; those not seen for longest are forgotten.
    """

    def __init__(self, opening: Sequence[int] = (), max_prefixes: int = 65_536) -> None:
        assert max_prefixes >= 1
        self.opening = tuple(opening)
        self._max_prefixes = max_prefixes
        #: hash of a prefix -> hashes of the next anchors that were seen, not more than count
        self._next: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    @staticmethod
    def shared_after(num_tokens: int, chat: bool) -> int:
        """Ways to go on after which a prefix of ``num_tokens`` counts as shared."""
        return (ANSWER_BRANCHES if chat else GRID_BRANCHES) + num_tokens // TOKENS_A_BRANCH

    def find(
        self, token_ids: Sequence[int], marks: Sequence[Mark] = (), seed: bytes = b""
    ) -> tuple[int, list[int]]:
        """The key of a prompt, and keys that were its own until now.

        Args:
            token_ids: of the prompt, at least one.
            marks: see :func:`prefix_hashes`.
            seed: see :func:`prefix_hashes`.

        Returns:
            The key; and, where this prompt makes a prefix a shared one, the keys of the prompts
            seen so far that go on from it: they are chats of their own from now on, and
            were one with the key returned.
        """
        anchors = answer_anchors(token_ids, self.opening)
        chat = bool(anchors)
        if not chat:
            anchors = grid_anchors(len(token_ids))
        hashes = list(prefix_hashes(token_ids, [*anchors, len(token_ids)], marks, seed))
        whole = hashes.pop()
        shared = -1
        for index, prefix in enumerate(hashes):
            seen = self._next.get(prefix, ())
            if len(seen) >= self.shared_after(anchors[index], chat):
                shared = index
        key = hashes[shared + 1] if shared + 1 < len(hashes) else whole
        return key, self._learn(hashes, anchors, chat, shared)

    def _learn(
        self, hashes: Sequence[int], anchors: Sequence[int], chat: bool, shared: int
    ) -> list[int]:
        parted: list[int] = []
        for index, prefix in enumerate(hashes):
            seen = self._next.pop(prefix, ())
            most = self.shared_after(anchors[index], chat)
            if index + 1 < len(hashes) and hashes[index + 1] not in seen and len(seen) < most:
                seen = (*seen, hashes[index + 1])
                if len(seen) == most and index > shared:
                    parted = list(seen)
            self._next[prefix] = seen
        while len(self._next) > self._max_prefixes:
            self._next.popitem(last=False)
        return parted
