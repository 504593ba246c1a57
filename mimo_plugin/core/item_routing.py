# SPDX-License-Identifier: Apache-2.0
"""Which encoder gets which image or video: the same item always the same one.

An encoder keeps the embeddings of what it has seen, so an item that comes back (every turn of a
chat brings its images again) should find the encoder that knows it. Each encoder draws a number for
each item, and the largest wins (rendezvous hashing): no table is kept, processes agree without
talking, and an encoder that leaves moves only the items it had won.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

SPREAD = 2.0
"""Most items of one request on one encoder, as a multiple of an even share."""

_WHOLE_BYTES = 1 << 16
_SAMPLES, _SAMPLE_BYTES = 64, 256

Kind = TypeVar("Kind", bound=Hashable)


class Routes(NamedTuple):
    """Encoders of the items of one request.

    Attributes:
        encoders: one for each item, the kinds in order of their first item.
        counts: for each kind, 1 where the entry of ``encoders`` is for an item of it, else 0.
    """

    encoders: tuple[str, ...]
    counts: dict[Hashable, list[int]]


def item_key(content: bytes) -> bytes:
    """Key of an item by its content, cheap for any length.

    Of a long content, samples over its whole length count, and the length. Two items that share a
    key only share an encoder.
    """
    digest = hashlib.blake2b(len(content).to_bytes(8, "big"), digest_size=16)
    if len(content) <= _WHOLE_BYTES:
        digest.update(content)
    else:
        last = len(content) - _SAMPLE_BYTES
        for sample in range(_SAMPLES):
            start = last * sample // (_SAMPLES - 1)
            digest.update(content[start : start + _SAMPLE_BYTES])
    return digest.digest()


def preference(key: bytes, encoders: Sequence[str]) -> list[int]:
    """Indices of ``encoders``, the one that ``key`` belongs to first.

    Args:
        key: of an item.
        encoders: names, in any order: the answer does not depend on it.
    """

    def drawn(index: int) -> tuple[bytes, str]:
        name = encoders[index]
        digest = hashlib.blake2b(name.encode(), key=key[:64], digest_size=8)
        return digest.digest(), name

    return sorted(range(len(encoders)), key=drawn, reverse=True)


def assign(keys: Sequence[bytes], encoders: Sequence[str], spread: float = SPREAD) -> list[int]:
    """The index of an encoder for each item of a request.

    An item goes to the first encoder of its preference that has not had ``spread`` times an even
    share of this request (at least one), so that one request never waits for one encoder alone.
    Earlier items choose first: a chat that grows keeps the encoders of what it has shown before.
    One that is there twice is encoded once, so it follows the first and counts once.

    Args:
        keys: of the items, in order.
        encoders: at least one.
        spread: at least 1.
    """
    if not encoders or spread < 1:
        raise ValueError(f"found {len(encoders)} encoders, spread {spread}; at least 1 of each")
    different = list(dict.fromkeys(keys))
    most = -(-int(spread * len(different) * 1000) // (1000 * len(encoders)))
    taken = [0] * len(encoders)
    chosen = {}
    for key in different:
        index = next(i for i in preference(key, encoders) if taken[i] < most)
        taken[index] += 1
        chosen[key] = index
    return [chosen[key] for key in keys]


def route(
    items: Sequence[tuple[Kind, bytes]], encoders: Sequence[str], spread: float = SPREAD
) -> Routes:
    """Encoders for a request whose items are of several kinds.

    Each item is a part of its own, so that an encoder which keeps embeddings by part finds it
    again in whatever company.

    Args:
        items: kind and key of each item, in order.
        encoders: names, at least one.
        spread: as in :func:`assign`.
    """
    chosen = assign([key for _, key in items], encoders, spread)
    kinds = list(dict.fromkeys(kind for kind, _ in items))
    order = [i for kind in kinds for i, (of, _) in enumerate(items) if of == kind]
    counts: dict[Hashable, list[int]] = {
        kind: [int(items[i][0] == kind) for i in order] for kind in kinds
    }
    return Routes(tuple(encoders[chosen[i]] for i in order), counts)
