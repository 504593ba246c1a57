# SPDX-License-Identifier: Apache-2.0
"""One target's residency as bytes: its blocks, the engine's names of them, its place in the stream.

Whoever restores it goes on from the batch after the last one in it, if the publisher still has that
one (:class:`mimo_plugin.router.events.EventReader`); so a wrong or old snapshot does no harm.
"""

from __future__ import annotations

import msgspec

from mimo_plugin.core.kv_events import Hash
from mimo_plugin.core.named_index import NamedSnapshot
from mimo_plugin.core.residency import Snapshot
from mimo_plugin.core.window import GroupGeometry

VERSION = 1


class SnapshotError(ValueError):
    """The bytes are no snapshot, or one of another version."""


class _Block(msgspec.Struct, array_like=True, gc=False):
    block: int
    copies: int
    known: bool
    parent: int | None


class _Group(msgspec.Struct, array_like=True):
    group: int
    block_size_tokens: int
    window_tokens: int | None
    lookahead_blocks: int
    blocks: list[_Block]


class _Name(msgspec.Struct, array_like=True, gc=False):
    engine: int | bytes
    name: int | None
    copies: bytes
    before: tuple[int, ...]


class _Saved(msgspec.Struct, array_like=True):
    version: int
    hash_block_tokens: int
    next_seq: int | None
    digest: bytes | None
    groups: list[_Group]
    names: list[_Name]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


def to_bytes(snapshot: NamedSnapshot, hash_block_tokens: int, digest: bytes | None) -> bytes:
    """Bytes of a snapshot.

    Args:
        snapshot: from :meth:`NamedIndex.named_snapshot`.
        hash_block_tokens: of that index.
        digest: of the last batch in it.
    """
    groups = [
        _Group(
            group,
            geometry.block_size_tokens,
            geometry.window_tokens,
            geometry.lookahead_blocks,
            [
                _Block(int(block), copies, known, None if parent is None else int(parent))
                for block, (copies, known, parent) in blocks.items()
            ],
        )
        for group, (geometry, blocks) in snapshot.blocks.groups.items()
    ]
    names = [
        _Name(engine, name, copies.to_bytes((copies.bit_length() + 7) // 8, "big"), before)
        for engine, (name, copies, before) in snapshot.names.items()
    ]
    return _encoder.encode(
        _Saved(VERSION, hash_block_tokens, snapshot.blocks.next_seq, digest, groups, names)
    )


def from_bytes(data: bytes, hash_block_tokens: int) -> tuple[NamedSnapshot, bytes | None]:
    """A snapshot and the digest of its last batch.

    Raises:
        SnapshotError: it is none, or not of an index with ``hash_block_tokens``.
    """
    try:
        saved = _decoder.decode(data)
        groups: dict[int, tuple[GroupGeometry, dict[Hash, tuple[int, bool, Hash | None]]]] = {
            saved_group.group: (
                GroupGeometry(
                    saved_group.block_size_tokens,
                    saved_group.window_tokens,
                    saved_group.lookahead_blocks,
                ),
                {b.block: (b.copies, b.known, b.parent) for b in saved_group.blocks},
            )
            for saved_group in saved.groups
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"not a snapshot: {error}") from error
    if saved.version != VERSION or saved.hash_block_tokens != hash_block_tokens:
        raise SnapshotError(
            f"a snapshot of version {saved.version} with {saved.hash_block_tokens} tokens a hash; "
            f"allowed: {VERSION} and {hash_block_tokens}"
        )
    names = {
        name.engine: (name.name, int.from_bytes(name.copies, "big"), name.before)
        for name in saved.names
    }
    return NamedSnapshot(Snapshot(saved.next_seq, groups), names), saved.digest
