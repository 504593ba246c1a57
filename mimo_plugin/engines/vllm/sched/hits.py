# SPDX-License-Identifier: Apache-2.0
"""Hits of waiting requests, kept up to date by what happens in the block pool.

Looking up every waiting request at every step is what makes cache-aware queues expensive. Here the
map from block hash to block tells us when the first full-attention block that a request lacks is
cached: then its hit may have grown, and it is looked up again. That a hit has shrunk need not be
known before its request is first in line, where it is looked up anyway. Nothing is done for the
others, so a step costs the same whether ten or a thousand requests wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from mimo_plugin.core.affinity import Waiting
from mimo_plugin.core.probe import probe_full, probe_windows
from mimo_plugin.core.window import blocks_for_hit
from mimo_plugin.engines.vllm.kv.state import group_geometry


class _Watch:
    """Who waits for which block to be cached, and for whom that has happened."""

    __slots__ = ("dirty", "watchers")

    def __init__(self) -> None:
        # Insertion order, not a set's, so that the same history gives the same schedule.
        self.watchers: dict[bytes, dict[Waiting, None]] = {}
        self.dirty: dict[Waiting, None] = {}


@lru_cache(maxsize=4)
def _watched_class(base: Any) -> Any:
    """The pool's map class, with a note to those who wait for the block that is cached."""

    def insert(self: Any, key: Any, block: Any) -> None:
        base.insert(self, key, block)
        waiting = self.mimo_watch.watchers.get(key)
        if waiting:
            self.mimo_watch.dirty.update(waiting)

    return type(f"Watched{base.__name__}", (base,), {"insert": insert, "mimo_base": base})


class HitIndex:
    """Look-ups for scoring, and the requests whose last look-up may be out of date.

    Args:
        manager: the scheduler's KV cache manager, stock or the plugin's.

    Nothing may be looked up before :meth:`attach`.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.coordinator = manager.coordinator
        self.pool = manager.block_pool
        self._watch = _Watch()
        self._keys: dict[Waiting, tuple[bytes, ...]] = {}
        #: requests whose hit may get longer without a word from the blocks that are watched
        self._unsure: dict[Waiting, None] = {}
        #: windows found since the last :meth:`new_batch`, by prefix
        self._answers: dict[Any, int] = {}
        #: where prefixes ended, by the block that they lacked before
        self._guesses: dict[tuple[bytes, ...], int] = {}
        self._map: Any = None
        #: whether the manager remembers look-ups, so that asking it costs nothing twice
        self._memoised = bool(getattr(manager, "memoise", False))
        managers = self.coordinator.single_type_managers
        specs = [m.kv_cache_spec for m in managers]
        #: all groups are full or sliding-window attention
        self.understands_groups = bool(
            specs
            and all(isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) for spec in specs)
            and any(isinstance(spec, FullAttentionSpec) for spec in specs)
            and not getattr(self.coordinator, "enable_partial_hash_hits", False)
            and getattr(self.coordinator, "dcp_world_size", 1) == 1
        )
        self.hash_tokens: int = self.pool.hash_block_size
        self.geometry = group_geometry(self.coordinator) if self.understands_groups else ()
        #: hits are multiples of this
        self.alignment_tokens: int = self.coordinator.scheduler_block_size
        self.full_ids = tuple(i for i, g in enumerate(self.geometry) if g.is_full)
        #: every block boundary of a cached prefix can be resumed from
        self.only_full = self.understands_groups and all(g.is_full for g in self.geometry)
        self.lookahead_tokens = max(
            (g.lookahead_blocks * g.block_size_tokens for g in self.geometry), default=0
        )

    # -- events ------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Watch the pool's map; True when it is another one than before (the cache was reset)."""
        current = self.pool.cached_block_hash_to_block
        if current is self._map:
            return False
        current.__class__ = _watched_class(_unwatched(current.__class__))
        current.mimo_watch = self._watch
        self._map = current
        self._watch.dirty.update(dict.fromkeys(self._keys))
        return True

    def detach(self) -> None:
        """Give the map its own class back."""
        if self._map is not None:
            self._map.__class__ = _unwatched(type(self._map))
            del self._map.mimo_watch
            self._map = None

    def new_batch(self) -> None:
        """The cache may have changed since the last look-ups."""
        self._answers.clear()
        self._guesses.clear()

    def take_dirty(self, most: int) -> list[Waiting]:
        """Up to ``most`` requests whose look-up is out of date; they no longer count as that."""
        self.new_batch()
        dirty = self._watch.dirty
        out: list[Waiting] = []
        while dirty and len(out) < most:
            entry = next(iter(dirty))
            del dirty[entry]
            out.append(entry)
        return out

    def take_unsure(self) -> Waiting | None:
        """One of the requests whose hit could have grown unseen, each in its turn."""
        for entry in self._unsure:
            del self._unsure[entry]
            self._unsure[entry] = None
            return entry
        return None

    def call_dirty(self, entry: Waiting) -> None:
        """Have ``entry`` looked up again."""
        self._watch.dirty[entry] = None

    def is_dirty(self, entry: Waiting) -> bool:
        """Whether the look-up of ``entry`` is out of date."""
        return entry in self._watch.dirty

    def forget(self, entry: Waiting) -> None:
        """Stop watching for a request."""
        self._unsure.pop(entry, None)
        for key in self._keys.pop(entry, ()):
            interested = self._watch.watchers.get(key)
            if interested is not None:
                interested.pop(entry, None)
                if not interested:
                    del self._watch.watchers[key]
        self._watch.dirty.pop(entry, None)

    def watch(self, entry: Waiting, keys: tuple[bytes, ...]) -> None:
        """Call ``entry`` dirty when one of ``keys`` is cached, instead of the former ones."""
        self.forget(entry)
        self._keys[entry] = keys
        watchers = self._watch.watchers
        for key in keys:
            interested = watchers.get(key)
            if interested is None:
                watchers[key] = {entry: None}
            else:
                interested[entry] = None

    # -- look-ups ----------------------------------------------------------------------------

    def look_up(self, entry: Waiting, *, anew: bool = False) -> int:
        """The hit of a waiting request now, in tokens; watches the block that it lacks.

        Args:
            anew: search windows everywhere, not only past where the last look-up ended.
        """
        request = entry.item
        if request.num_computed_tokens > 0:
            return int(request.num_computed_tokens)
        if not self.manager.prefix_cache_lookup_enabled(request):
            return 0
        if not self.understands_groups:
            self._unsure[entry] = None
            return self._stock(request)
        hashes = self.hashes_of(request)
        get_block = self._map.get_one_block

        def resident(group: int, index: int) -> bool:
            of_group = hashes[group]
            return (
                index < len(of_group)
                and get_block(make_block_hash_with_group_id(of_group[index], group)) is not None
            )

        before = (0, 0) if anew else (entry.hit_tokens, entry.full_tokens)
        groups, align = self.geometry, self.alignment_tokens
        # Requests that lacked the same block most often get the same answer now.
        lacked = self._keys.get(entry, ())[:1]
        guess = self._guesses.get(lacked, entry.full_tokens)
        full = probe_full(groups, align, request.num_tokens - 1, resident, guess_tokens=guess)
        if lacked:
            self._guesses[lacked] = full
        if self.only_full or not full:
            hit = full
        else:
            # Requests with the same prefix have the same windows.
            question = (self.full_key(request, full), before)
            known = self._answers.get(question)
            if known is None:
                known = self._answers[question] = probe_windows(
                    groups, align, full, resident, before=before
                )
            hit = known
        entry.full_tokens = full
        self.watch(entry, self._missing(hashes, full))
        if hit < full:
            # A window anywhere between the two would do; too many blocks to watch.
            self._unsure[entry] = None
        return hit

    def exact(self, entry: Waiting) -> int | None:
        """The hit that the engine would find, where it is remembered anyway; else None."""
        request = entry.item
        if not self._memoised or request.num_computed_tokens > 0:
            return None
        return int(self.manager.get_computed_blocks(request)[1])

    def _stock(self, request: Any) -> int:
        result: tuple[Any, int, int] = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return result[1]

    def hashes_of(self, request: Any) -> list[Any]:
        """Block hashes of a request at each group's block size."""
        blocks = request.block_hashes
        return [
            resolve_block_hashes(blocks, self.hash_tokens, g.block_size_tokens)
            for g in self.geometry
        ]

    def _missing(self, hashes: list[Any], full_tokens: int) -> tuple[bytes, ...]:
        """Keys of the first full-attention blocks that a prefix of ``full_tokens`` lacks."""
        keys: list[bytes] = []
        for group in self.full_ids:
            geometry, of_group = self.geometry[group], hashes[group]
            index = blocks_for_hit(geometry, full_tokens)[-1] + 1 if full_tokens else 0
            if index < len(of_group):
                keys.append(make_block_hash_with_group_id(of_group[index], group))
        return tuple(keys)

    def full_key(self, request: Any, tokens: int) -> bytes | None:
        """Key of the full-attention block that ends a prefix of ``tokens``, look-ahead included."""
        group = self.full_ids[0]
        geometry = self.geometry[group]
        index = blocks_for_hit(geometry, tokens)[-1]
        hashes = resolve_block_hashes(
            request.block_hashes, self.hash_tokens, geometry.block_size_tokens
        )
        if index >= len(hashes):
            return None
        key: bytes = make_block_hash_with_group_id(hashes[index], group)
        return key

    def block_of(self, key: bytes) -> Any | None:
        """A block that is cached under ``key``, None when there is none."""
        return self._map.get_one_block(key)

    def is_cached(self, key: bytes) -> bool:
        """Whether a block with this key is in the cache."""
        return self.block_of(key) is not None


def _unwatched(cls: Any) -> Any:
    return getattr(cls, "mimo_base", cls)
