# SPDX-License-Identifier: Apache-2.0
"""What SGLang publishes of its cache and says of itself, where that differs from vLLM.

Frames, sequence numbers, replay and ranks' ports are vLLM's, and events are maps with a ``type``
too (``sglang.srt.disaggregation.kv_events``). An event tells a page's tokens, adapter and salt, and
the tier that it lies in; it tells of the radix tree, that is of full attention. Pages whose
sliding-window KV is given up ("tombstones") are told by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mimo_plugin.config import KvConfig
from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.engine_events import EngineEvent, EngineStored
from mimo_plugin.core.retention import Ladder, RetentionRule
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.router.event_wire import events_of, wires_of

PLUGIN_BACKEND = "mimo"
"""``radix_cache_backend`` of a worker with the plugin's feature ``kv``."""


class _Wire(msgspec.Struct, gc=False):
    """Fields of all events; those that a type lacks keep their defaults."""

    type: str
    block_hashes: list[int] = []
    parent_block_hash: int | None = None
    token_ids: list[int | tuple[int, int]] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Wire]


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode(payload: bytes) -> tuple[list[EngineEvent], int]:
    """Events of a batch, and how many were of unknown types (left out).

    With speculative decoding SGLang's pages hold pairs of tokens, each with the one that follows;
    the first ones are taken. The salt becomes the extra key of an event's first page.

    Raises:
        PayloadError: it is not what a publisher sends. What it told is lost.
    """
    return events_of(wires_of(_decoder, payload), _stored, lambda wire: None)


def _stored(wire: _Wire) -> EngineStored:
    tokens = [token if isinstance(token, int) else token[0] for token in wire.token_ids]
    return EngineStored(
        block_hashes=wire.block_hashes,
        parent_block_hash=wire.parent_block_hash,
        token_ids=tokens,
        block_size=wire.block_size,
        extra_keys=[(wire.cache_salt,)] if wire.cache_salt else None,
        lora_name=wire.lora_name,
        medium=wire.medium,
    )


@dataclass(frozen=True, slots=True)
class SglangSizes:
    """What a worker's ``/server_info`` says of the cache of one rank; None: it does not say.

    Attributes:
        page_tokens: of a page, the unit of its hits and events.
        capacity_tokens, window_capacity_tokens: of the pools for full attention and windows, and of
            the host's copies of them where there are any.
        chunk_tokens: of one prefill step; a window is kept at its end.
        keeps_windows: the worker runs the plugin's feature ``kv``.
    """

    page_tokens: int | None
    capacity_tokens: int | None
    window_capacity_tokens: int | None
    chunk_tokens: int | None
    keeps_windows: bool


def sglang_sizes(info: Mapping[str, Any], rank: int = 0) -> SglangSizes:
    """Read the answer of ``/server_info``.

    Args:
        info: the answer.
        rank: data-parallel rank.
    """
    states = info.get("internal_states")
    state = states[rank] if isinstance(states, list) and rank < len(states) else {}
    usage = state.get("memory_usage") if isinstance(state, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    full = _positive(usage.get("token_capacity")) or _positive(info.get("max_total_num_tokens"))
    windows = _positive(usage.get("token_capacity_swa"))
    ratio = info.get("hicache_ratio")
    if info.get("enable_hierarchical_cache") and isinstance(ratio, int | float) and ratio > 0:
        # What leaves the device stays on the host for a while, and is loaded back on a hit.
        full = int(full * (1 + ratio)) if full else None
        windows = int(windows * (1 + ratio)) if windows else None
    return SglangSizes(
        _positive(info.get("page_size")),
        full,
        windows,
        _positive(info.get("chunked_prefill_size")),
        info.get("radix_cache_backend") == PLUGIN_BACKEND,
    )


def sglang_cache(
    sizes: SglangSizes, block_tokens: int, *, told: bool, window_tokens: int | None
) -> Cache:
    """What is known of a rank's cache.

    Args:
        sizes: of the rank.
        block_tokens: of the blocks that count (see ``block_tokens_of`` in
            :mod:`mimo_plugin.core.sglang_names`).
        told: its events are read.
        window_tokens: sliding window of the model, the query's own token included; None: it has
            none.
    """
    rule = None
    if sizes.keeps_windows and window_tokens is not None:
        rule = retention_rule(window_tokens, block_tokens)
    return Cache(
        told, sizes.capacity_tokens, sizes.window_capacity_tokens, sizes.chunk_tokens, rule
    )


def retention_rule(window_tokens: int, block_tokens: int) -> RetentionRule:
    """The plugin's rule on SGLang with its default settings (``engines/sglang/kv/settings.py``).

    A worker does not tell its settings; where they differ, its answers correct what is believed.
    """
    config = KvConfig()
    group = GroupGeometry(block_tokens, window_tokens)
    smallest = config.ladder_min_tokens or max(group.window_blocks * block_tokens, block_tokens)
    return RetentionRule(
        alignment_tokens=block_tokens,
        lookahead_tokens=0,
        classes=frozenset(config.classes),
        ladder=Ladder(smallest, config.ladder_growth, block_tokens),
    )


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
