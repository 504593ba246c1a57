# SPDX-License-Identifier: Apache-2.0
"""Window attention of MiMo's vision tower, written out: one dense softmax for each sequence.

A key counts for a query at most ``window`` places away, that one included. The sink of a head is
added to the logit of its sequence's first key, where that counts, and nowhere else (source: the
attention of the checkpoint's own ``modeling_mimo_v2.py``, which adds it to a mask that has minus
infinity outside of the window).
"""

from __future__ import annotations

from typing import Any

import torch


def dense_window(
    q: Any, k: Any, v: Any, ends: list[int], window: int, scale: float, sinks: Any,
    *, use: str = "key 0",
) -> Any:  # fmt: skip
    """Attention in float64.

    Args:
        q: [tokens, heads, dim].
        k: [tokens, KV heads, dim].
        v: [tokens, KV heads, dim].
        ends: 0, then the end of each sequence.
        window: largest distance of a key.
        scale: of the logits.
        sinks: [heads], or None.
        use: ``key 0`` as the model wants it; ``denominator`` and ``none`` are wrong readings.

    Returns:
        [tokens, heads, dim].
    """
    heads = q.shape[1]
    out = torch.empty(q.shape[0], heads, v.shape[2], dtype=torch.float64)
    for begin, end in zip(ends, ends[1:], strict=False):
        at = torch.arange(end - begin)
        outside = (at[:, None] - at[None, :]).abs() > window
        for head in range(heads):
            kv = head * k.shape[1] // heads
            logits = q[begin:end, head].double() @ k[begin:end, kv].double().T * scale
            if sinks is not None and use == "key 0":
                logits[:, 0] += sinks[head].double()
            logits.masked_fill_(outside, float("-inf"))
            if sinks is not None and use == "denominator":
                column = sinks[head].double().expand(len(at), 1)
                weights = torch.cat([logits, column], 1).softmax(-1)[:, :-1]
            else:
                weights = logits.softmax(-1)
            out[begin:end, head] = weights @ v[begin:end, kv].double()
    return out
