# SPDX-License-Identifier: Apache-2.0
"""Canonical hashes of a prompt's blocks: the same in every process, whatever an engine calls them.

An engine's own block hashes depend on its algorithm and seed. A canonical one depends on nothing
but what the block and all before it hold: token ids, and *extra keys*, which tell prompts with the
same tokens apart. They are what vLLM hashes too
(``vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys``), each told once:

* adapter and ``cache_salt`` belong to the first block: a hash stands for all before it as well;
* an image, video or audio clip belongs to the block in which it starts.

So they can be worked out from blocks of any multiple of the size.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

ExtraKeys: TypeAlias = "tuple[tuple[Any, ...], ...]"
"""``("lora", name)``, ``("mm", identifier, offset in block)``, ``("salt", s)``, in this order."""

HASH_BYTES = 8
_ROOT = bytes(HASH_BYTES)
_TOKEN_BYTES = 4


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Mapping[int, ExtraKeys] | None = None,
    *,
    parent: int | None = None,
) -> list[int]:
    """Hashes of all full blocks, each an unsigned integer of 64 bits.

    Args:
        token_ids: from a block's first token on; numbers of 32 bits.
        block_tokens: tokens in a block, > 0.
        extra_keys: of those blocks that have any, by their index in ``token_ids``.
        parent: hash of the block before the first one; None where a prompt starts.

    Raises:
        ValueError: a token id or the block size is out of range.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens: found {block_tokens}; allowed: > 0")
    count = len(token_ids) // block_tokens
    if len(token_ids) != count * block_tokens:
        token_ids = token_ids[: count * block_tokens]
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: allowed: integers from 0 to 2**32 - 1; {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    size = block_tokens * _TOKEN_BYTES
    last = _ROOT if parent is None else parent.to_bytes(HASH_BYTES, "big")
    digests: list[bytes] = []
    start = 0
    for index in sorted(extra_keys or ()):
        value = (extra_keys or {})[index]
        if value and 0 <= index < count:
            last = _plain(data, start, index * size, size, last, digests)
            start = (index + 1) * size
            block = last + data[index * size : start] + repr(value).encode()
            last = blake2b(block, digest_size=HASH_BYTES).digest()
            digests.append(last)
    _plain(data, start, count * size, size, last, digests)
    numbers = array("Q", b"".join(digests))
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tolist()


def _plain(
    data: bytes, start: int, stop: int, size: int, last: bytes, digests: list[bytes]
) -> bytes:
    """Go on through blocks without extra keys."""
    add, make = digests.append, blake2b
    for at in range(start, stop, size):
        last = make(last + data[at : at + size], digest_size=8).digest()
        add(last)
    return last


class Span(Protocol):
    """One medium in a prompt, as :class:`mimo_plugin.router.prompt.MediaSpan`."""

    @property
    def start_tokens(self) -> int: ...
    @property
    def length_tokens(self) -> int: ...
    @property
    def identifier(self) -> str: ...


class HashedPrompt(Protocol):
    """What a prompt's hashes are made of, as :class:`mimo_plugin.router.prompt.Prompt`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def media(self) -> Sequence[Span]: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def salt(self) -> str | None: ...


def prompt_extra_keys(prompt: HashedPrompt, block_tokens: int) -> dict[int, ExtraKeys]:
    """Extra keys of a prompt's blocks.

    vLLM leaves out a medium that starts inside of another one which goes on beyond the block
    (sound that is interleaved with its video), and so does this.
    """
    keys: dict[int, list[tuple[Any, ...]]] = {}
    if prompt.lora:
        keys[0] = [("lora", prompt.lora)]
    furthest = 0
    for span in prompt.media:
        block, offset = divmod(span.start_tokens, block_tokens)
        if furthest <= (block + 1) * block_tokens:
            keys.setdefault(block, []).append(("mm", span.identifier, offset))
        furthest = max(furthest, span.start_tokens + span.length_tokens)
    if prompt.salt:
        keys.setdefault(0, []).append(("salt", prompt.salt))
    return {block: tuple(value) for block, value in keys.items()}


class PromptHasher:
    """Canonical hashes of prompts.

    Args:
        hash_block_tokens: tokens that one hash stands for.
    """

    __slots__ = ("hash_block_tokens",)

    def __init__(self, hash_block_tokens: int) -> None:
        if hash_block_tokens <= 0:
            raise ValueError(f"hash_block_tokens: found {hash_block_tokens}; allowed: > 0")
        self.hash_block_tokens = hash_block_tokens

    def hashes(self, prompt: HashedPrompt) -> list[int]:
        """Of the prompt's full blocks, in order.

        Raises:
            ValueError: a token id is no number of 32 bits.
        """
        keys = None
        if prompt.media or prompt.lora or prompt.salt:
            keys = prompt_extra_keys(prompt, self.hash_block_tokens)
        return block_hashes(prompt.token_ids, self.hash_block_tokens, keys)
