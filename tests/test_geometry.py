# SPDX-License-Identifier: Apache-2.0
"""Geometry and pool arithmetic, on configurations of published models."""

from __future__ import annotations

from typing import Any

import pytest

from mimo_plugin.core.geometry import GeometryError, ModelGeometry, read_geometry
from mimo_plugin.core.pools import GIB, plan_pool, split_pools, swa_tokens_of_request
from tests.published_models import (
    EXAONE4_32B,
    GEMMA2_9B,
    GEMMA3_27B,
    GEMMA4_TEXT,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_31_8B,
    MIMO_V2_5,
    MIMO_V2_5_PRO,
    MIMO_V2_FLASH,
    MIMO_V2_FLASH_TRANSFORMERS,
    MISTRAL_7B_V01,
    REPORT_10F_60S,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("config", "full", "swa", "window", "replay"),
    [
        (MIMO_V2_FLASH, 9, 39, 128, 4953),
        (MIMO_V2_FLASH_TRANSFORMERS, 9, 39, 128, 4953),
        (MIMO_V2_5, 9, 39, 128, 4953),
        (MIMO_V2_5_PRO, 10, 60, 128, 7620),
        (REPORT_10F_60S, 10, 60, 128, 7620),
        (GPT_OSS_20B, 12, 12, 128, 1524),
        (GPT_OSS_120B, 18, 18, 128, 2286),
        (GEMMA2_9B, 21, 21, 4096, 85995),
        (GEMMA3_27B, 10, 52, 1024, 53196),
        (GEMMA4_TEXT, 5, 25, 512, 12775),
        (EXAONE4_32B, 16, 48, 4096, 196560),
        (MISTRAL_7B_V01, 0, 32, 4096, 131040),
        (LLAMA_31_8B, 32, 0, None, 0),
    ],
)
def test_layers_of_published_models(
    config: dict[str, Any], full: int, swa: int, window: int | None, replay: int
) -> None:
    geometry = read_geometry(config)
    assert (geometry.full_layers, geometry.swa_layers) == (full, swa)
    assert geometry.window_tokens == window
    assert geometry.replay_tokens == replay
    assert geometry.is_hybrid == (full > 0 and swa > 0)


def test_heads_and_dimensions_of_mimo() -> None:
    for config in (MIMO_V2_FLASH, MIMO_V2_FLASH_TRANSFORMERS):
        geometry = read_geometry(config)
        (full,), (swa,) = set(geometry.of_kind("full")), set(geometry.of_kind("swa"))
        assert (full.kv_heads, full.k_dim, full.v_dim) == (4, 192, 128)
        assert (swa.kv_heads, swa.k_dim, swa.v_dim) == (8, 192, 128)
        assert full.bytes_per_token() == 4 * 320 * 2
        assert swa.bytes_per_token(tp=4, element_bytes=1) == 2 * 320
        assert full.bytes_per_token(tp=8) == 320 * 2  # replicated, not split further


def test_gemma4_global_heads_and_shared_layers() -> None:
    geometry = read_geometry(GEMMA4_TEXT)
    (full,), (swa,) = set(geometry.of_kind("full")), set(geometry.of_kind("swa"))
    assert (full.k_dim, full.kv_heads, swa.k_dim, swa.kv_heads) == (512, 4, 256, 4)
    shared = read_geometry(
        GEMMA4_TEXT
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
        | {"num_kv_shared_layers": 6}
    )
    assert (shared.full_layers, shared.swa_layers) == (4, 20)
    assert shared.of_kind("full")[0].kv_heads == 2


def test_per_layer_overrides() -> None:
    geometry = read_geometry(
        GPT_OSS_20B | {"per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 2}}}
    )
    assert (geometry.layers[1].k_dim, geometry.layers[1].kv_heads) == (128, 2)
    assert geometry.layers[3].k_dim == 64


def test_mimo_block_of_the_report_geometry() -> None:
    """10 full + 60 sliding layers with 4 and 8 KV heads: the full block doubles, no padding."""
    plan = plan_pool(read_geometry(REPORT_10F_60S))
    (full,) = plan.of_kind("full")
    swa = plan.of_kind("swa")
    assert (full.layers, full.block_tokens) == (10, 32)
    assert [(group.layers, group.block_tokens) for group in swa] == [(10, 16)] * 6
    assert plan.alignment_tokens == 32
    assert plan.checkpoint_blocks == 48
    assert plan.checkpoint_bytes == 37.5 * MIB
    assert plan.checkpoint_full_tokens == 1536
    assert plan.padding == 0
    assert plan.full_bytes_per_token == 10 * 4 * 320 * 2
    assert plan.dense_swa_bytes_per_token / plan.full_bytes_per_token == 12


@pytest.mark.parametrize(
    ("config", "drafts", "swa_groups", "wasted_of_swa"),
    [
        (REPORT_10F_60S, 0, 6, 0.0),
        (REPORT_10F_60S, 1, 7, 9 / 61),
        (REPORT_10F_60S, 3, 7, 7 / 63),
        (MIMO_V2_FLASH, 0, 5, 6 / 39),
        (MIMO_V2_FLASH, 3, 5, 3 / 42),
    ],
)
def test_groups_and_padding(
    config: dict[str, Any], drafts: int, swa_groups: int, wasted_of_swa: float
) -> None:
    geometry = read_geometry(config).with_draft_layers(drafts)
    plan = plan_pool(geometry)
    swa = plan.of_kind("swa")
    real = sum(group.layers for group in swa)
    assert len(swa) == swa_groups
    assert sum(group.draft_layers for group in swa) == drafts
    slots = geometry.full_layers * swa_groups
    assert (slots - real) / real == pytest.approx(wasted_of_swa)
    assert plan.padding == pytest.approx((slots - real) / (slots + geometry.full_layers))
    assert geometry.with_draft_layers(0) == read_geometry(config)


def test_equal_heads_keep_equal_blocks() -> None:
    pro = plan_pool(read_geometry(MIMO_V2_5_PRO))
    assert {group.block_tokens for group in pro.groups} == {16}
    replicated = plan_pool(read_geometry(REPORT_10F_60S), tp=8)
    assert {group.block_tokens for group in replicated.groups} == {16}
    assert replicated.checkpoint_full_tokens == 768


def test_nearly_equal_buckets_share_the_larger_size() -> None:
    one_more = GPT_OSS_20B | {
        "num_hidden_layers": 25,
        "layer_types": [*GPT_OSS_20B["layer_types"], "full_attention"],
    }
    plan = plan_pool(read_geometry(one_more))
    assert [(group.kind, group.layers) for group in plan.groups] == [("full", 13), ("swa", 12)]
    assert plan.block_bytes == 13 * 16 * 8 * 128 * 2


def test_pages_that_do_not_divide_are_padded() -> None:
    """Full pages of 5 heads beside sliding pages of 8: neither divides the other."""
    odd = REPORT_10F_60S | {"num_attention_heads": 40, "num_key_value_heads": 5}
    plan = plan_pool(read_geometry(odd))
    (full,) = plan.of_kind("full")
    assert full.block_tokens == 16
    assert full.payload_bytes / plan.block_bytes == pytest.approx(5 / 8)


def test_one_kind_is_one_group() -> None:
    for config in (MISTRAL_7B_V01, LLAMA_31_8B):
        plan = plan_pool(read_geometry(config))
        assert len(plan.groups) == 1
        assert plan.block_bytes == 32 * 16 * 8 * 256 * 2
    assert plan_pool(read_geometry(MISTRAL_7B_V01)).checkpoint_full_tokens == 0


def test_cached_tokens_per_gib() -> None:
    """One checkpoint for 1536 tokens costs as much as the tokens: half of the full-only bound."""
    plan = plan_pool(read_geometry(REPORT_10F_60S))
    blocks = plan.blocks(GIB)
    assert blocks == 1310
    bound = blocks * 32
    assert plan.cached_tokens(blocks, 1536) == pytest.approx(bound / 2, abs=1)
    assert plan.cached_tokens(blocks, 1) == pytest.approx(bound / 13, abs=1)  # dense
    with pytest.raises(ValueError):
        plan.cached_tokens(blocks, 0)


def test_blocks_of_a_running_request() -> None:
    plan = plan_pool(read_geometry(REPORT_10F_60S))
    assert plan.request_blocks(16) == 1 + 6
    assert plan.request_blocks(100_000, in_flight_tokens=8192) == 3125 + 6 * (520 + 1)


def test_capacity_with_the_hybrid_manager_off() -> None:
    """B13: the capacity that is lost when the engine turns its hybrid manager off, to the block.

    With it on, the pool holds the same tokens whatever connector is present.
    """
    geometry = read_geometry(REPORT_10F_60S)
    on, off = plan_pool(geometry), plan_pool(geometry, hybrid=False)
    assert off.block_bytes == 16 * (10 * 4 + 60 * 8) * 320 * 2
    length, pool = 32_768, 40 * GIB
    held_on = on.blocks(pool) // on.request_blocks(length)
    held_off = off.blocks(pool) // off.request_blocks(length)
    assert held_on > 8 * held_off


@pytest.mark.parametrize("config", [MIMO_V2_FLASH, REPORT_10F_60S, GPT_OSS_20B, GEMMA3_27B])
@pytest.mark.parametrize(("tp", "page"), [(1, 1), (1, 64), (4, 64)])
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.8, 1.0])
def test_two_pools_use_the_whole_budget(
    config: dict[str, Any], tp: int, page: int, ratio: float
) -> None:
    """B14: all pools sum to the budget within a page; each layer counted once, by its own dims."""
    geometry = read_geometry(config)
    budget = 37 * GIB + 12_345
    pools = split_pools(geometry, budget, swa_per_full=ratio, page_tokens=page, tp=tp)

    def hand(kind: str) -> int:
        layers = [layer for layer in geometry.layers if layer.kind == kind]
        return sum(max(1, n.kv_heads // tp) * (n.k_dim + n.v_dim) * 2 for n in layers)

    assert pools.full_bytes == pools.full_tokens * hand("full")
    assert pools.swa_bytes == pools.swa_tokens * hand("swa")
    assert 0 <= budget - pools.bytes < page * hand("swa")
    assert pools.swa_tokens / pools.full_tokens == pytest.approx(ratio, rel=0.01)


def test_two_pools_refuse_what_cannot_be() -> None:
    with pytest.raises(GeometryError, match="two pools"):
        split_pools(read_geometry(LLAMA_31_8B), GIB, swa_per_full=1)
    geometry = read_geometry(REPORT_10F_60S)
    with pytest.raises(GeometryError, match="budget"):
        split_pools(geometry, 1000, swa_per_full=1)
    with pytest.raises(GeometryError, match="swa_per_full"):
        split_pools(geometry, GIB, swa_per_full=0)


def test_swa_budget_of_a_request_does_not_grow_with_its_length() -> None:
    """B12: 128 requests of 16K; a pool that admitted 16 by full length keeps 64 and more."""
    length, window, chunk, page = 16_384, 128, 2048, 64
    pool_tokens = 16 * length
    each = swa_tokens_of_request(length, window, chunk, page)
    assert each == window + chunk + page
    assert pool_tokens // each >= 64
    assert swa_tokens_of_request(100, window, chunk, page) == 100 + page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: found True"),
        ({"num_key_value_heads": -4}, "num_key_value_heads: found -4"),
        ({"head_dim": 1.5}, "head_dim: found 1.5"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern: found 2 entries"),
        ({"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern: found 2; allowed"),
        ({"hybrid_layer_pattern": 6}, "hybrid_layer_pattern: found int"),
        ({"sliding_window": None, "sliding_window_size": None}, "sliding_window: missing"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ],
)
def test_what_makes_no_sense_is_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GeometryError, match=said) as caught:
        read_geometry(MIMO_V2_FLASH | change)
    assert "\n" not in str(caught.value)


def test_other_layer_kinds_are_refused_by_name() -> None:
    with pytest.raises(GeometryError, match="linear_attention"):
        read_geometry(GPT_OSS_20B | {"layer_types": ["linear_attention"] * 24})
    with pytest.raises(GeometryError, match="num_hidden_layers"):
        read_geometry({"model_type": "clip"})
    with pytest.raises(GeometryError, match="sliding_window_pattern"):
        read_geometry(EXAONE4_32B | {"sliding_window_pattern": 0})


def test_tensor_parallel_sizes_that_do_not_fit() -> None:
    with pytest.raises(GeometryError, match="tensor parallel size: found 3"):
        plan_pool(read_geometry(MIMO_V2_FLASH), tp=3)
    with pytest.raises(GeometryError, match="block size"):
        plan_pool(read_geometry(MIMO_V2_FLASH), block_tokens=0)
    with pytest.raises(GeometryError, match="draft layers"):
        read_geometry(LLAMA_31_8B).with_draft_layers(1)


def test_switches_and_defaults() -> None:
    assert read_geometry(MISTRAL_7B_V01 | {"use_sliding_window": False}).swa_layers == 0
    assert read_geometry(MIMO_V2_FLASH | {"torch_dtype": "float32"}).element_bytes == 4
    assert read_geometry(MIMO_V2_FLASH | {"num_nextn_predict_layers": 3}).mtp_layers == 3
    assert read_geometry(LLAMA_31_8B).of_kind("full")[0].k_dim == 128
    assert isinstance(read_geometry(LLAMA_31_8B), ModelGeometry)
