# SPDX-License-Identifier: Apache-2.0
"""Keys of media content: two things that may be embedded differently never share one.

A key is fed with framed fields: each value is preceded by its kind and its length, containers by
their number of elements. So no two different inputs give the same bytes to the hash (an image of
4x6 and one of 6x4 with the same bytes, a list split 10+14 and one split 12+12), and the whole key
is used everywhere: nothing in the package cuts one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence, Set

KEY_BYTES = 32
"""Length of the digest: 256 bits, so that a chance collision is out of reach."""

_PERSON = b"mimo-content-1"  # changes whenever the framing changes


def content_key(
    kind: str,
    data: bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview],
    *,
    mode: str,
    size: tuple[int, ...],
    settings: Mapping[str, object],
) -> str:
    """Key of one item as it is embedded.

    Args:
        kind: ``image``, ``video``, ...; part of the key.
        data: the encoded bytes, or the raw pixels; a list of byte strings keeps its borders.
        mode: how the bytes are read, e.g. ``RGB`` or a dtype.
        size: of the pixels, all axes in order.
        settings: everything of the processor that changes the result (resize limits, mean, std,
            patch sizes, frame rule, checkpoint). Any nesting of mappings, sequences, sets, text,
            bytes, numbers, booleans and None; the order of a mapping's keys does not matter.

    Returns:
        64 hexadecimal digits (256 bits).

    Raises:
        TypeError: a value that has no unambiguous form.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON)
    for part in (kind, data, mode, size, settings):
        for chunk in _framed(part):
            digest.update(chunk)
    return digest.hexdigest()


def length_agrees(found: int, expected: int | None) -> bool:
    """Whether a cached embedding of ``found`` rows answers a request for ``expected`` rows.

    A key that agrees with a length that does not is a miss: the entry belongs to something else.
    """
    return expected is None or found == expected


def _framed(value: object) -> Iterable[bytes | bytearray | memoryview]:
    if value is None:
        yield b"N"
    elif isinstance(value, bool):  # before int, whose subclass it is
        yield b"T" if value else b"F"
    elif isinstance(value, int):
        yield from _leaf(b"I", b"%d" % value)
    elif isinstance(value, float):
        yield from _leaf(b"D", struct.pack("<d", value))
    elif isinstance(value, str):
        yield from _leaf(b"S", value.encode())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield from _leaf(b"B", value)
    elif isinstance(value, Mapping):
        yield _head(b"M", len(value))
        pairs = ((_joined(key), item) for key, item in value.items())
        for key, item in sorted(pairs, key=lambda pair: pair[0]):
            yield key
            yield from _framed(item)
    elif isinstance(value, Set):
        yield _head(b"E", len(value))
        yield from sorted(_joined(item) for item in value)
    elif isinstance(value, Sequence):
        yield _head(b"L", len(value))
        for item in value:
            yield from _framed(item)
    else:
        raise TypeError(
            f"content key: found a value of type {type(value).__name__}; allowed: text, bytes, "
            "numbers, booleans, None, and mappings, sequences and sets of them"
        )


def _head(kind: bytes, length: int) -> bytes:
    return kind + struct.pack("<Q", length)


def _leaf(
    kind: bytes, data: bytes | bytearray | memoryview
) -> Iterable[bytes | bytearray | memoryview]:
    if isinstance(data, memoryview):
        data = data if data.c_contiguous else data.tobytes()
    yield _head(kind, data.nbytes if isinstance(data, memoryview) else len(data))
    yield data


def _joined(value: object) -> bytes:
    return b"".join(bytes(chunk) for chunk in _framed(value))
