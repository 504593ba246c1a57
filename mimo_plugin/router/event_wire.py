# SPDX-License-Identifier: Apache-2.0
"""What vLLM's event publisher sends: frames, payloads and addresses.

A message is topic, sequence number (8 bytes, big endian) and payload (msgpack; see
``vllm.distributed.kv_events``). Events are maps with a ``type``; unknown fields are skipped, so
that versions with more of them are read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from mimo_plugin.core.engine_events import EngineEvent, EngineStored
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved
from mimo_plugin.errors import setting_error

END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends a replay."""
SEQ_BYTES = 8


class _Wire(msgspec.Struct, gc=False):
    """Fields of all events; those that a type lacks keep their defaults."""

    type: str
    block_hashes: list[int | bytes] = []
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Wire]


_decoder = msgspec.msgpack.Decoder(_Batch)


class PayloadError(Exception):
    """A payload that can't be read."""


def decode(payload: bytes) -> tuple[list[EngineEvent], int]:
    """Events of a batch, and how many were of unknown types (left out).

    Raises:
        PayloadError: it is not what a publisher sends. What it told is lost.
    """
    wires = wires_of(_decoder, payload)
    here = [wire for wire in wires if wire.locality != "REMOTE"]  # others' blocks lie elsewhere
    return events_of(here, _stored, lambda wire: wire.group_idx)


def wires_of(decoder: Any, payload: bytes) -> list[Any]:
    """What ``decoder`` makes of the events of a payload.

    Raises:
        PayloadError: it can make nothing of it.
    """
    try:
        events: list[Any] = decoder.decode(payload).events
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PayloadError(str(error)) from error
    return events


def events_of(
    wires: Iterable[Any],
    stored: Callable[[Any], EngineStored],
    group_of: Callable[[Any], int | None],
) -> tuple[list[EngineEvent], int]:
    """Events as the index takes them, and how many were of unknown types (left out).

    Args:
        wires: with ``type``, ``block_hashes`` and ``medium``.
        stored: makes the event that blocks are there.
        group_of: KV cache group of the event that blocks are gone.
    """
    events: list[EngineEvent] = []
    unknown = 0
    for wire in wires:
        if wire.type == "BlockStored":
            events.append(stored(wire))
        elif wire.type == "BlockRemoved":
            events.append(BlockRemoved(wire.block_hashes, group_of(wire), wire.medium))
        elif wire.type == "AllBlocksCleared":
            events.append(AllBlocksCleared())
        else:
            unknown += 1
    return events, unknown


def _is_key(key: object) -> bool:
    if isinstance(key, list):
        return len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int)
    return isinstance(key, str | bytes)


def _stored(wire: _Wire) -> EngineStored:
    if wire.token_ids and not 0 <= min(wire.token_ids) <= max(wire.token_ids) < 1 << 32:
        raise PayloadError("token ids are not numbers of 32 bits")
    if not all(_is_key(key) for keys in wire.extra_keys or () for key in keys or ()):
        raise PayloadError("extra keys of another form than adapter, media, salt, embeds")
    return EngineStored(
        block_hashes=wire.block_hashes,
        parent_block_hash=wire.parent_block_hash,
        token_ids=wire.token_ids,
        block_size=wire.block_size,
        extra_keys=wire.extra_keys,
        lora_name=wire.lora_name,
        group_idx=wire.group_idx,
        kv_cache_spec_kind=wire.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=wire.kv_cache_spec_sliding_window,
        medium=wire.medium,
    )


def parse(frames: Sequence[Any]) -> tuple[int, bytes] | None:
    """Sequence number and payload of a message; None when it has another form."""
    if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
        return None
    return int.from_bytes(frames[-2], "big", signed=True), bytes(frames[-1])


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Address of the publisher of one data-parallel rank, given that of rank 0.

    The rule is that of vLLM's ``ZmqEventPublisher.offset_endpoint_port``.

    Raises:
        ConfigError: ranks share this address.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc:"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp:") or not port.isdecimal() or int(port) + rank > 65535:
        raise setting_error(
            "events endpoint",
            endpoint,
            "tcp://host:port with room for one port for each data-parallel rank",
            "give the address of rank 0's publisher",
        )
    return f"{host}:{int(port) + rank}"
