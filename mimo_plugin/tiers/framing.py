# SPDX-License-Identifier: Apache-2.0
"""How a page is kept by any store: a header of its length and checksum, then its bytes.

So a page that was cut off, damaged or put there by something else is found out when it is read.
"""

from __future__ import annotations

import struct
import zlib

from mimo_plugin.tiers.store import Parts

_HEADER = struct.Struct("<8sQI12x")
_MAGIC = b"MIMOKV01"
HEADER_BYTES = _HEADER.size


def size_of(page: Parts) -> int:
    """Bytes of a page without its header."""
    return sum(part.nbytes for part in page)


def header_of(page: Parts) -> bytes:
    """What goes before a page."""
    return _HEADER.pack(_MAGIC, size_of(page), checksum_of(page))


def checksum_in(header: bytes, size_bytes: int) -> int | None:
    """The checksum that the header of a page of that size tells; None when it is no such header."""
    if len(header) != HEADER_BYTES:
        return None
    checksum = int(_HEADER.unpack(header)[2])
    # Each of its bytes counts, unused ones too.
    return checksum if header == _HEADER.pack(_MAGIC, size_bytes, checksum) else None


def checksum_of(page: Parts) -> int:
    """CRC-32 of a page."""
    value = 0
    for part in page:
        value = zlib.crc32(part, value)
    return value


def scatter(whole: memoryview, page: Parts) -> None:
    """Copy a page that is one run of bytes into its parts."""
    start = 0
    for part in page:
        end = start + part.nbytes
        if part.nbytes:
            part.cast("B")[:] = whole[start:end]
        start = end
