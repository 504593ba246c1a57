# SPDX-License-Identifier: Apache-2.0
"""One target's residency as bytes: its blocks, the engine's names of them, its last batch.

A reader goes on from that batch if the publisher still has it, and forgets all where it has not
(:meth:`mimo_plugin.router.events.EventReader.resume`); so an old snapshot does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import msgspec

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.named_index import NamedIndex, NamedSnapshot
from mimo_plugin.core.residency import Snapshot
from mimo_plugin.core.window import GroupGeometry

VERSION = 1

_Block = tuple[Hash, int, bool, Hash | None]


class _Group(msgspec.Struct, array_like=True):
    group: int
    geometry: tuple[int, int | None, int]
    blocks: list[_Block]


class _Kept(msgspec.Struct, array_like=True):
    version: int
    hash_tokens: int
    next_seq: int
    digest: bytes
    groups: list[_Group]
    names: list[tuple[Hash, int | None, int]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def pack(index: NamedIndex, target: str, digest: bytes) -> bytes | None:
    """All that is known of a target; None: no batch of it was applied.

    Args:
        digest: of the batch that was applied last.
    """
    snapshot = index.named_snapshot(target)
    if snapshot.blocks.next_seq is None:
        return None
    groups = []
    for group, (geometry, blocks) in snapshot.blocks.groups.items():
        size, window, lookahead = astuple(geometry)
        packed = [(block, *values) for block, values in blocks.items()]
        groups.append(_Group(group, (size, window, lookahead), packed))
    names = [(name, *values) for name, values in snapshot.names.items()]
    next_seq = snapshot.blocks.next_seq
    return _encode(_Kept(VERSION, index.hash_block_tokens, next_seq, digest, groups, names))


def unpack(data: bytes, hash_tokens: int) -> tuple[NamedSnapshot, bytes] | None:
    """A snapshot and the digest of its last batch; None: it is of another version or block size."""
    try:
        kept = _decode(data)
        if kept.version != VERSION or kept.hash_tokens != hash_tokens:
            return None
        groups: dict[int, tuple[GroupGeometry, Mapping[Hash, tuple[int, bool, Hash | None]]]] = {}
        for group in kept.groups:
            blocks = {block: (count, known, parent) for block, count, known, parent in group.blocks}
            groups[group.group] = GroupGeometry(*group.geometry), blocks
    except (msgspec.MsgspecError, ValueError):
        return None
    names = {name: (canonical, copies) for name, canonical, copies in kept.names}
    return NamedSnapshot(Snapshot(kept.next_seq, groups), names), kept.digest
