# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's window attention of MiMo's tower in Triton's interpreter; print its errors as JSON.

A process of its own, in the environment of ``tools.model_runner_v2``. What is run is the method of
upstream's attention layer, on tensors with the strides that the layer makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.vision.dense import dense_window

WINDOW = 64
HEADS, DIM = 8, 64

Case = tuple[str, list[int], int, float, Any]


def cases() -> Iterator[Case]:
    """Name, lengths of the sequences, KV heads, size of the sinks, dtype.

    bfloat16 is left out: the interpreter multiplies its bits as whole numbers.
    """
    yield "B76", [300], HEADS, 3.0, torch.float32
    yield "B76-half", [300], HEADS, 3.0, torch.float16
    yield "grouped", [200], 2, 3.0, torch.float32
    yield "several", [1, 63, 64, 65, 66, 130], 2, 3.0, torch.float32
    yield "large-sinks", [150, 90], HEADS, 12.0, torch.float32
    yield "no-sinks", [150], HEADS, 0.0, torch.float32


def run(name: str, lengths: list[int], kv_heads: int, size: float, dtype: Any) -> Any:
    """Largest error against a dense softmax in float64, and what other readings would give."""
    from vllm.model_executor.models.mimo_v2_omni import MiMoVisionAttention

    torch.manual_seed(0)
    total = sum(lengths)
    width = (HEADS + 2 * kv_heads) * DIM
    # Values lie in the projection's result, between others, as in the layer.
    qkv = torch.randn(total, width).to(dtype)
    queries, keys, values = qkv.split([HEADS * DIM, kv_heads * DIM, kv_heads * DIM], dim=-1)
    q = queries.reshape(total, HEADS, DIM).contiguous()
    k = keys.reshape(total, kv_heads, DIM).contiguous()
    v = values.view(total, kv_heads, DIM)
    sinks = None if name == "no-sinks" else (torch.randn(HEADS) * size).to(dtype)
    layer: Any = SimpleNamespace(
        visual_token_window_size=WINDOW,
        tp_rank=0,
        num_heads_per_partition=HEADS,
        sinks=sinks,
        scale=DIM**-0.5,
    )
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = MiMoVisionAttention._forward_window_attn(layer, q, k, v, ends, max(lengths))

    def error(**reading: Any) -> float:
        window = reading.pop("window", WINDOW)
        right = dense_window(q, k, v, ends.tolist(), window, layer.scale, sinks, **reading)
        return float((found.double() - right).abs().max())

    return {
        "name": name,
        "error": error(),
        "unused": error(use="none"),
        "denominator": error(use="denominator"),
        "narrower": error(window=WINDOW - 1),
    }


if __name__ == "__main__":
    print(json.dumps([run(*case) for case in cases()]))
