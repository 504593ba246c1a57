# SPDX-License-Identifier: Apache-2.0
"""KV cache configurations by vLLM's own planning code, for the geometry of published models."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from mimo_plugin.core.geometry import read_geometry  # noqa: E402


def planning() -> Any:
    """The module of vLLM that plans the KV cache."""
    found = importlib.import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(found, "get_kv_cache_config_from_groups"):  # moved in 0.33
        found = importlib.import_module("vllm.v1.core.kv_cache_planning")
    return found


def vllm_config(layout: str = "LBHNC") -> Any:
    """As much of a configuration as planning and registering ask for."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        prefix_cache_retention_interval=0,
        num_gpu_blocks_override=None,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        # Not the ranks of one group: no canonical layout is derived.
        world_size=2,
    )
    return SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


def layer_specs(
    model: dict[str, Any], *, block_tokens: int = 16, tp: int = 1, drafts: int = 0, **more: Any
) -> dict[str, Any]:
    """A spec for each layer of a published model."""
    specs: dict[str, Any] = {}
    for index, layer in enumerate(read_geometry(model).with_draft_layers(drafts).layers):
        common = {
            "block_size": block_tokens,
            "num_kv_heads": layer.heads_per_rank(tp),
            "head_size": layer.k_dim,
            "head_size_v": layer.v_dim,
            "dtype": torch.bfloat16,
            **more,
        }
        specs[f"layers.{index}"] = (
            FullAttentionSpec(**common)
            if layer.window_tokens is None
            else SlidingWindowSpec(**common, sliding_window=layer.window_tokens)
        )
    return specs


def hybrid(specs: dict[str, Any]) -> list[Any]:
    """Groups of a model with several kinds of layers, all pages alike."""
    module = planning()
    groups: list[Any] = module._get_kv_cache_groups_uniform_page_size(
        module.unify_kv_cache_spec_page_size(specs)
    )
    return groups


def config_of(groups: list[Any], *, num_blocks: int = 2, layout: str = "LBHNC") -> Any:
    """The KV cache configuration of one worker."""
    module, config = planning(), vllm_config(layout)
    block_bytes = module._get_kv_cache_bytes_per_block(groups, KVCacheLayout[layout])
    return module.get_kv_cache_config_from_groups(config, groups, num_blocks * block_bytes)


def block_bytes(config: Any) -> int:
    """Bytes of a block on one rank."""
    return int(config.kv_cache_tensors[0].size // config.num_blocks)
