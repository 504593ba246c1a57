# SPDX-License-Identifier: Apache-2.0
"""Who joins a prefill batch: followers wait for their leader, long prefills leave room.

SGLang fills a batch from the head of the waiting list until something does not fit. Two things go
wrong there. Requests that share a prefix which is not cached yet all compute it, because they join
the same batch. And a long prefill, of which SGLang works on one at a time, takes every batch whole,
so that all who come later wait for its end, whatever their length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mimo_plugin.core.lanes import Lane, lane_of, long_room_tokens
from mimo_plugin.core.leaders import awaited_tokens
from mimo_plugin.engines.sglang.sched.order import length_of

LEAST_SAVED_TOKENS = 64
"""A request does not wait a batch for less than this; joining costs about as much."""

MAX_LEADERS = 32
"""Requests of a batch that one that wants to join is compared with."""


class RecentBatches:
    """Requests of the last batches whose KV is not in the tree yet.

    With its overlap schedule SGLang fills a batch before it has taken over the results of the one
    before. What a request of that one computes can't be hit yet, and is worth waiting for all the
    same.
    """

    def __init__(self) -> None:
        self._batches: deque[Sequence[Any]] = deque(maxlen=4)

    def note(self, members: Sequence[Any]) -> None:
        """A batch; the list may still grow. Noting the latest one again changes nothing."""
        if not self._batches or self._batches[-1] is not members:
            self._batches.append(members)

    def pending(self) -> Iterator[Any]:
        """Requests that have not handed over what they compute, the latest batch first."""
        for members in reversed(self._batches):
            for request in members:
                if request.extend_end is not None and request.prefix_len < request.extend_end:
                    yield request


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences of token ids (arrays of 64-bit integers)."""
    length = min(len(a), len(b))
    start, step = 0, 256
    while start < length:
        end = min(length, start + step)
        differ = np.flatnonzero(np.asarray(a[start:end]) != np.asarray(b[start:end]))
        if len(differ):
            return start + int(differ[0])
        start, step = end, step * 2
    return length


def awaited_leader(
    request: Any, batch: Iterable[Any], page_size: int, *, dense: bool
) -> tuple[str, int] | None:
    """The member of a batch that computes what a request would compute as well, so that the
    request should let the batch go without it: its id, and the tokens up to where the request can
    go on from. None if there is none.

    Args:
        request: after its look-up: ``prefix_len`` and ``host_hit_length`` are what it found.
        batch: requests of the batch, and of those before it that are not done; each computes from
            its ``prefix_len`` to its ``extend_end``.
        page_size: tokens of a page.
        dense: a leader leaves KV at every page from which a request can resume; otherwise only at
            the end of what it computes in the batch.
    """
    hit_tokens = request.prefix_len + request.host_hit_length
    tokens = request.full_untruncated_fill_ids
    mine = _name_space(request)
    for number, leader in enumerate(batch):
        if number == MAX_LEADERS:
            break
        if _name_space(leader) != mine:
            continue
        common = common_tokens(tokens, leader.full_untruncated_fill_ids)
        shared = min(common, len(tokens) - 1) // page_size * page_size
        end = leader.extend_end // page_size * page_size

        def last_stop(after: int, upto: int, end: int = end) -> int:
            if dense:
                return upto
            return end if after < end <= upto else 0

        stop = awaited_tokens(hit_tokens, shared, leader.prefix_len, last_stop)
        if stop - hit_tokens >= LEAST_SAVED_TOKENS:
            return str(leader.rid), stop
    return None


def _name_space(request: Any) -> tuple[Any, ...]:
    """Requests of different ones never share KV."""
    return (request.extra_key, request.cache_salt, request.lora_id)


def chunk_limit_tokens(
    left_tokens: int,
    shorter_tokens: int,
    budget_tokens: int,
    page_size: int,
    *,
    lanes: Sequence[Lane],
    share: float,
) -> int | None:
    """The most tokens of a batch for the prefill that SGLang is in the middle of.

    Args:
        left_tokens: what it still has to compute.
        shorter_tokens: what requests outside every lane that wait could compute.
        budget_tokens: of the batch.
        page_size: the answer is whole pages.
        lanes: ascending by ``over_tokens``.
        share: of the batch that it always gets.

    Returns:
        At least one page; None for no limit.
    """
    if not lane_of(lanes, left_tokens) or budget_tokens < 2 * page_size or not shorter_tokens:
        return None
    room = long_room_tokens(
        budget_tokens, share=share, decode_tokens=0, shorter_tokens=shorter_tokens
    )
    room = max(page_size, room // page_size * page_size)
    return None if room >= budget_tokens else room


def shorter_tokens(
    waiting: Iterable[Any], lanes: Sequence[Lane], page_size: int, upto_tokens: int
) -> int:
    """Uncached tokens, in whole pages, of waiting requests outside every lane; counting ends at
    ``upto_tokens``."""
    total = 0
    for request in waiting:
        uncached = max(1, length_of(request) - request.num_matched_prefix_tokens)
        if not lane_of(lanes, uncached):
            total += -(-uncached // page_size) * page_size
        if total >= upto_tokens:
            return upto_tokens
    return total
