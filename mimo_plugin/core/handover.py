# SPDX-License-Identifier: Apache-2.0
"""Where a request goes on after KV of its MTP layers came from another engine.

Row p of MTP layer i (0 <= i < k) is made from the embedding of token p+1+i. An engine that computed
``end`` tokens and nothing after them knew no token at or past ``end``, except by guessing: the rows
p with p+1+i >= end rest on its own sample and on its drafts, which are the last i+1 rows of layer i
and so, over all layers, the last k rows. An engine that goes on by itself computes them again when
the tokens are known. One that got them from elsewhere has to compute those tokens again, because a
row needs the target's hidden state, which is not sent.

How far back it may go is bounded by the sliding windows: the first recomputed token sees the W-1
tokens before it, and only the blocks of the window at ``end`` (and a few tokens more) were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """What is there of one KV cache group of a request after a load.

    Args:
        block_size_tokens: tokens in one block, > 0.
        first_block: index of the first block from which on all blocks up to the load's end hold KV.
        window_tokens: sliding window W (the query's own token included), None for full attention.
    """

    block_size_tokens: int
    first_block: int = 0
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.block_size_tokens <= 0 or self.first_block < 0:
            raise ValueError(
                f"block_size_tokens must be > 0 and first_block >= 0, got "
                f"{self.block_size_tokens} and {self.first_block}"
            )
        if self.window_tokens is not None and self.window_tokens <= 0:
            raise ValueError(f"window_tokens must be > 0 or None, got {self.window_tokens}")

    @property
    def first_resumable(self) -> int:
        """The first token that can be computed: all that it attends to before itself is there."""
        first_token = self.first_block * self.block_size_tokens
        if first_token == 0:
            return 0
        if self.window_tokens is None:
            raise ValueError("a full-attention group must hold all blocks from the first on")
        return first_token + self.window_tokens - 1


def unknown_rows(end_tokens: int, layer: int) -> range:
    """Rows of MTP layer ``layer`` that rest on tokens at or past ``end_tokens``."""
    if end_tokens < 0 or layer < 0:
        raise ValueError(f"end_tokens and layer must be >= 0, got {end_tokens} and {layer}")
    return range(max(0, end_tokens - 1 - layer), end_tokens)


def resume_at(
    end_tokens: int,
    num_layers: int,
    groups: Iterable[LoadedGroup],
    *,
    local_tokens: int = 0,
) -> int:
    """Tokens to count as computed after a load that ends at ``end_tokens``.

    Args:
        end_tokens: tokens of the request whose KV is there, the sender's last one included.
        num_layers: MTP layers k.
        groups: what is there of each KV cache group.
        local_tokens: leading tokens whose KV this engine had itself; nothing of it is recomputed.

    Returns:
        ``end_tokens - k`` where that is possible, else the smallest number that is. Rows of MTP
        layers before the result are exact, save those of ``unknown_rows`` that it leaves out.
    """
    if num_layers < 0 or end_tokens < 0 or local_tokens < 0:
        raise ValueError(
            f"end_tokens, num_layers and local_tokens must be >= 0, got {end_tokens}, "
            f"{num_layers} and {local_tokens}"
        )
    lowest = max([local_tokens, end_tokens - num_layers, *(g.first_resumable for g in groups)])
    return max(0, min(lowest, end_tokens))
