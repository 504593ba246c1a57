# SPDX-License-Identifier: Apache-2.0
"""Leaders: a waiting request does not compute what a running prefill is about to leave behind.

Requests that miss on the same blocks would each compute them. One of them (the leader) is started;
the others wait until the leader has passed the last position at which they can take over its KV.
Waiting costs them nothing: the leader computes no more tokens to get there than they would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def common_blocks(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix of two sequences of chained block hashes.

    A chained hash covers everything before it, so equality at one index means equality below it,
    and a binary search does.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def awaited_tokens(
    hit_tokens: int,
    limit_tokens: int,
    leader_tokens: int,
    last_stop: Callable[[int, int], int],
) -> int:
    """Where a follower will be able to take over from a leader; 0 when it need not wait.

    Args:
        hit_tokens: the follower's hit now.
        limit_tokens: tokens that the two share and that the follower could reuse.
        leader_tokens: what the leader has computed.
        last_stop: ``(after, upto)`` -> the last position in ``(after, upto]`` at which the leader
            leaves KV that a request can resume from, 0 when there is none.
    """
    after = max(hit_tokens, leader_tokens)
    return last_stop(after, limit_tokens) if limit_tokens > after else 0
