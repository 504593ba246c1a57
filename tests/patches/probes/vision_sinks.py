# SPDX-License-Identifier: Apache-2.0
"""Window attention of MiMo-V2's vision tower with sinks, against plain softmax; prints JSON.

The model's own method runs with the engine's Triton kernel in the interpreter. Answers per case
the greatest difference from three references in float32: ``key0`` adds a head's sink to the logit
of a sequence's first key where that is in the window, ``denominator`` adds it to the softmax's sum,
``without`` ignores it; ``narrower`` is ``key0`` with one key less on each side. No case is in
bfloat16: the interpreter's products of it are wrong.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
from tools.model_runner_v2 import enable

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 2, 64, 64
LENGTHS = (1, 41, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 130)
"""Tokens of the sequences: one alone, those around the window's edge, and more than one window."""
RANKS = 2


def softmax_attention(q: Any, k: Any, v: Any, sinks: Any, mode: str) -> Any:
    """Attention in a window of a sequence, in float32: [tokens, heads, dim] each."""
    import torch

    tokens, heads = q.shape[:2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]).abs()
    logits.masked_fill_(distance > WINDOW - (mode == "narrower"), float("-inf"))
    if mode in ("key0", "narrower"):
        logits[:, :, 0] += sinks[:, None]
    if mode == "denominator":
        extra = sinks[:, None, None].expand(heads, tokens, 1)
        weights = torch.cat([logits, extra], dim=-1).softmax(-1)[:, :, :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def differences(dtype: Any, rank: int | None, kv_heads: int = KV_HEADS) -> dict[str, float]:
    """Greatest difference from each reference; ``rank``: of tensor parallelism."""
    import torch
    from vllm.model_executor.models.mimo_v2_omni import MiMoVisionAttention

    generator = torch.Generator().manual_seed(0)
    sinks = torch.randn(HEADS, generator=generator) * 2 + 2
    heads = HEADS if rank is None else HEADS // RANKS
    kv_heads = kv_heads if rank is None else kv_heads // RANKS
    q, k, v = (
        torch.randn(sum(LENGTHS), count, HEAD_DIM, generator=generator).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    block = SimpleNamespace(
        visual_token_window_size=WINDOW,
        tp_rank=rank or 0,
        num_heads_per_partition=heads,
        sinks=sinks,
        scale=HEAD_DIM**-0.5,
    )
    out = MiMoVisionAttention._forward_window_attn(block, q, k, v, borders, max(LENGTHS))
    own = sinks[(rank or 0) * heads :][:heads]
    ranges = list(zip(borders.tolist(), borders.tolist()[1:], strict=False))
    found = {}
    for mode in ("key0", "denominator", "without", "narrower"):
        expected = torch.cat(
            [softmax_attention(q[a:b], k[a:b], v[a:b], own, mode) for a, b in ranges]
        )
        found[mode] = (out.float() - expected).abs().max().item()
    return found


def main() -> None:
    os.environ |= {"VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    enable()
    import torch

    cases = {
        "float32, no groups": (torch.float32, None, HEADS),
        "float32": (torch.float32, None),
        "float16": (torch.float16, None),
        "float32, rank 1": (torch.float32, 1),
    }
    print(json.dumps({name: differences(*case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
