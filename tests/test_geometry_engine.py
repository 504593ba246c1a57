# SPDX-License-Identifier: Apache-2.0
"""Our pool arithmetic against the engine's own grouping code (no engine is started)."""

from __future__ import annotations

from typing import Any

import pytest

from mimo_plugin.core.geometry import ModelGeometry, read_geometry
from mimo_plugin.core.pools import plan_pool
from tests.published_models import (
    GEMMA3_27B,
    GEMMA4_TEXT,
    GPT_OSS_20B,
    MIMO_V2_FLASH,
    REPORT_10F_60S,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def _engine_groups(geometry: ModelGeometry, block_tokens: int, tp: int) -> list[Any]:
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    planning: Any = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    if not hasattr(planning, "unify_kv_cache_spec_page_size"):  # moved in 0.33
        planning = pytest.importorskip("vllm.v1.core.kv_cache_planning")
    specs = {}
    for index, layer in enumerate(geometry.layers):
        common = {
            "block_size": block_tokens,
            "num_kv_heads": layer.heads_per_rank(tp),
            "head_size": layer.k_dim,
            "head_size_v": layer.v_dim,
            "dtype": torch.bfloat16,
        }
        if layer.window_tokens is None:
            specs[f"layers.{index}"] = interface.FullAttentionSpec(**common)
        else:
            specs[f"layers.{index}"] = interface.SlidingWindowSpec(
                **common, sliding_window=layer.window_tokens
            )
    unified = planning.unify_kv_cache_spec_page_size(specs)
    groups: list[Any] = planning._get_kv_cache_groups_uniform_page_size(unified)
    return groups


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "config",
    [MIMO_V2_FLASH, REPORT_10F_60S, GPT_OSS_20B, GEMMA3_27B, GEMMA4_TEXT],
    ids=["flash", "10f60s", "gpt-oss", "gemma3", "gemma4"],
)
def test_groups_are_the_engine_s(
    config: dict[str, Any], drafts: int, block_tokens: int, tp: int
) -> None:
    geometry = read_geometry(config).with_draft_layers(drafts)
    plan = plan_pool(geometry, block_tokens=block_tokens, tp=tp)
    ours = sorted((g.window_tokens or 0, g.layers, g.block_tokens) for g in plan.groups)
    engine = _engine_groups(geometry, block_tokens, tp)
    theirs = sorted(
        (
            getattr(group.kv_cache_spec, "sliding_window", None) or 0,
            len(group.layer_names),
            group.kv_cache_spec.block_size,
        )
        for group in engine
    )
    assert ours == theirs
    widest = max(len(group.layer_names) for group in engine)
    assert plan.block_bytes == widest * engine[0].kv_cache_spec.page_size_bytes
