# SPDX-License-Identifier: Apache-2.0
"""Snapshots of what targets hold, in a Redis server: compressed, in pieces, written by one process.

``snapshot:TARGET`` is a hash: pieces by number, and a header. It is written under another name and
then renamed, so a reader sees one as a whole or, where it is replaced meanwhile, none.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec

from mimo_plugin.router.state_limits import StateLimits

_PIECE_BYTES = 1 << 20  # a server serves nobody else meanwhile
_HEAD = b"head"


class _Head(msgspec.Struct, array_like=True):
    pieces: int
    data_bytes: int
    checksum: int  # of the data, adler32


class Snapshots:
    """See the module.

    Args:
        client: of the server.
        prefix: of all keys.
        process: this one.
        limits: of sizes and times.
    """

    def __init__(self, client: Any, prefix: str, process: str, limits: StateLimits) -> None:
        self._client, self._prefix, self._process, self._limits = client, prefix, process, limits

    async def save(self, target: str, data: bytes) -> bool:
        """Write one, unless another process did lately; False: it was not written.

        Raises:
            RedisError, OSError, TimeoutError: the server fails.
        """
        lease = f"{self._prefix}snapshot-lease:{target}"
        lease_ms = round(self._limits.snapshot_lease_s * 1000)
        if not await self._client.set(lease, self._process, nx=True, px=lease_ms):
            holder = await self._client.get(lease)
            if holder != self._process.encode():
                return False
            await self._client.pexpire(lease, lease_ms)
        packed, checksum = await asyncio.to_thread(_pack, data)
        if len(packed) > self._limits.snapshot_bytes:
            return False
        key = f"{self._prefix}snapshot:{target}"
        fresh = f"{key}:new:{self._process}"
        ttl_ms = round(self._limits.snapshot_ttl_s * 1000)
        starts = range(0, len(packed), _PIECE_BYTES)
        await self._client.unlink(fresh)
        for number, start in enumerate(starts):
            await self._client.hset(fresh, str(number), packed[start : start + _PIECE_BYTES])
            await self._client.pexpire(fresh, ttl_ms)
        head = msgspec.msgpack.encode(_Head(len(starts), len(data), checksum))
        async with self._client.pipeline(transaction=True) as batch:
            batch.hset(fresh, _HEAD, head)
            batch.pexpire(fresh, ttl_ms)
            batch.rename(fresh, key)
            await batch.execute()
        return True

    async def load(self, target: str) -> bytes | None:
        """The last one; None: there is none.

        Raises:
            RedisError, OSError, TimeoutError: the server fails.
        """
        key = f"{self._prefix}snapshot:{target}"
        for _ in range(3):  # it is replaced seldom
            packed = await self._client.hget(key, _HEAD)
            if packed is None:
                return None
            try:
                head = msgspec.msgpack.decode(packed, type=_Head)
            except msgspec.MsgspecError:
                return None
            pieces = [await self._client.hget(key, str(n)) for n in range(head.pieces)]
            if None in pieces:
                continue
            data = await asyncio.to_thread(_unpack, b"".join(pieces), head)
            if data is not None:
                return data
        return None


def _pack(data: bytes) -> tuple[bytes, int]:
    return zlib.compress(data, 1), zlib.adler32(data)


def _unpack(packed: bytes, head: _Head) -> bytes | None:
    """The data; None: the pieces are not of one snapshot."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, max(1, head.data_bytes))
    except zlib.error:
        return None
    whole = unpacker.eof or len(data) == head.data_bytes
    return data if whole and zlib.adler32(data) == head.checksum else None
