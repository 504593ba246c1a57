# SPDX-License-Identifier: Apache-2.0
"""SGLang's names of cached pages, translated to canonical block hashes.

SGLang chains SHA-256 over pages (``sglang.srt.mem_cache.utils.get_hash_str``) and publishes the
first 64 bits with each page's token ids. The canonical hash of a page follows from the one of the
page before it and its tokens, so names are translated in the order of the events, and those of a
page that comes after an unknown one (the worker was met late) stay unknown.

Pages may be smaller than a canonical block (one token is usual). A block is there then with the
page that ends it: a radix tree has no page without those before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mimo_plugin.core.approximate import ApproximateIndex
from mimo_plugin.core.block_hashes import block_hashes
from mimo_plugin.core.engine_events import EngineEvent, EngineStored
from mimo_plugin.core.kv_events import BlockRemoved, BlockStored, Hash, KvEvent
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.core.range_names import NameCounts

Place: TypeAlias = "tuple[int | None, tuple[int, ...]]"
"""Hash of the last whole block up to a page's end (None: there is none), and the tokens behind."""

_START: Place = (None, ())


def block_tokens_of(page_tokens: int, hash_block_tokens: int) -> int:
    """Tokens of the blocks that an index counts for pages of this size.

    Raises:
        ValueError: neither size is a multiple of the other one.
    """
    small, large = sorted((page_tokens, hash_block_tokens))
    if small <= 0 or large % small:
        raise ValueError(
            f"page size: found {page_tokens} tokens; allowed: a multiple or a divisor of the "
            f"prompt hashes' block of {hash_block_tokens} tokens"
        )
    return large


class SglangNames:
    """Translates the events of one worker (or data-parallel rank), in their order.

    Memory: one table entry for each page that the worker has, with at most
    ``hash_block_tokens - 1`` token ids where pages are smaller than blocks.

    Args:
        hash_block_tokens: tokens of a canonical block.
    """

    def __init__(self, hash_block_tokens: int) -> None:
        self.hash_block_tokens = hash_block_tokens
        #: ``unknown_parents`` are of pages after unknown ones, and of those with keys of media
        self.counts = NameCounts()
        self._places: dict[Hash, Place] = {}
        # Copies beside the first one: in another medium, or of another namespace.
        self._further: dict[Hash, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        """The worker has nothing any more, or nothing is known of it."""
        self._places.clear()
        self._further.clear()

    def translate(self, batch: Sequence[EngineEvent]) -> list[KvEvent]:
        """A batch in canonical names; ``extra_keys`` of an event's first page may hold the salt.

        A batch with sizes that don't fit, or with too few tokens, tells nothing of these pages.
        """
        found: list[KvEvent] = []
        for event in batch:
            told: KvEvent | None
            if isinstance(event, EngineStored):
                told = self._translated(event)
            elif isinstance(event, BlockRemoved):
                told = self.removed(event.block_hashes, medium=event.medium)
            else:
                self.clear()
                told = event
            if told is not None:
                found.append(told)
        return found

    def _translated(self, event: EngineStored) -> BlockStored | None:
        salt = event.extra_keys[0] if event.extra_keys else None
        try:
            return self.stored(
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                lora=event.lora_name,
                salt=salt[0] if salt else None,
                medium=event.medium,
            )
        except ValueError:
            self.counts.ignored_events += 1
            return None

    def snapshot(self) -> dict[Hash, tuple[int | None, int]]:
        """Of each page that ends with a block: canonical hash, and number of copies."""
        return {
            page: (name, 1 + self._further.get(page, 0))
            for page, (name, behind) in self._places.items()
            if not behind
        }

    def restore(self, saved: Mapping[Hash, tuple[int | None, int]], _groups: object = None) -> None:
        """Have what :meth:`snapshot` gave; what comes after other pages is unknown from now on."""
        self.clear()
        for page, (name, copies) in saved.items():
            self._places[page] = name, ()
            if copies > 1:
                self._further[page] = copies - 1

    def stored(
        self,
        pages: Sequence[Hash],
        parent: Hash | None,
        token_ids: Sequence[int],
        page_tokens: int,
        *,
        lora: str | None = None,
        salt: str | None = None,
        medium: str | None = None,
    ) -> BlockStored | None:
        """What was stored, in canonical names; None: no whole block, or an unknown place.

        Args:
            pages: names of the pages, in order.
            parent: of the page before them; None: the prompt starts with them.
            token_ids: of all pages.
            page_tokens: tokens of a page.
            lora: name of the adapter.
            salt: the requests' ``cache_salt``.
            medium: as the event has it.

        Raises:
            ValueError: page and block sizes don't fit, or there are fewer tokens than pages need.
        """
        size = block_tokens_of(page_tokens, self.hash_block_tokens)
        if len(token_ids) < len(pages) * page_tokens:
            raise ValueError(
                f"token_ids: found {len(token_ids)}; allowed: {page_tokens} for each page"
            )
        place = _START if parent is None else self._places.get(parent)
        if place is None:
            self.counts.unknown_parents += 1
            return None
        tokens = [*place[1], *token_ids]
        last, offset = place[0], len(place[1])
        keys = [("lora", lora)] if lora else []
        keys += [("salt", salt)] if salt else []
        extra = {0: tuple(keys)} if keys and last is None else None
        try:
            hashes = block_hashes(tokens, self.hash_block_tokens, extra, parent=last)
        except ValueError:  # keys of media are no token ids
            self.counts.unknown_parents += 1
            return None
        ended: list[int] = []
        for number, page in enumerate(pages, 1):
            whole, behind = divmod(offset + number * page_tokens, self.hash_block_tokens)
            end = whole * self.hash_block_tokens
            name = hashes[whole - 1] if whole else last
            if page in self._places:
                self._further[page] = self._further.get(page, 0) + 1
            else:
                self._places[page] = name, tuple(tokens[end : end + behind])
            if not behind and name is not None:
                ended.append(name)
        if not ended:
            return None
        return BlockStored(ended, last, len(ended) * size, size, medium=medium)

    def removed(self, pages: Sequence[Hash], *, medium: str | None = None) -> BlockRemoved | None:
        """What was removed, in canonical names; None: nothing that is known."""
        ended: list[int] = []
        for page in pages:
            place = self._places.get(page)
            if place is None:
                continue
            further = self._further.get(page, 0)
            if further > 1:
                self._further[page] = further - 1
            elif further:
                del self._further[page]
            else:
                del self._places[page]
            name, behind = place
            if not behind and name is not None:
                ended.append(name)
        return BlockRemoved(ended, medium=medium) if ended else None


class SglangIndex(ApproximateIndex, NamedIndex):
    """An :class:`ApproximateIndex` whose batches hold SGLang's own events.

    Memory of its names: see :class:`SglangNames`.
    """

    def _naming(self, state: Any) -> Any:
        naming = self._namings.get(state.slot)
        if naming is None:
            made: Any = SglangNames(self.hash_block_tokens)
            naming = self._namings[state.slot] = made
        return naming
