# SPDX-License-Identifier: Apache-2.0
"""Does the KV feature fit this model and these engine settings?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo_plugin.core.geometry import GeometryError, read_geometry


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not cache.enable_prefix_caching:
        return (
            "prefix caching is off, there is nothing to retain; start with --enable-prefix-caching"
        )
    text_config = vllm_config.model_config.hf_text_config
    try:
        geometry = read_geometry(text_config.to_dict())
    except GeometryError as error:
        return f"the model's config.json can't be read as a hybrid SWA model: {error}"
    num_full, num_swa = geometry.full_layers, geometry.swa_layers
    if not num_full or not num_swa:
        return (
            f"the model has {num_full} full-attention and {num_swa} sliding-window layers, at "
            "least one of each is needed; leave kv out of --plugin mimo:… for this model"
        )
    if scheduler.disable_hybrid_kv_cache_manager:
        transfer = vllm_config.kv_transfer_config
        connector = getattr(transfer, "kv_connector", None)
        by = f"KV connector {connector}, which does not support it," if connector else "an option"
        return (
            f"the hybrid KV cache manager is switched off by {by} so every layer is sized as full "
            "attention; use a connector that supports the hybrid manager, or drop "
            "--disable-hybrid-kv-cache-manager"
        )
    unit = getattr(cache, "prefix_match_unit", None)
    if unit is not None:
        return (
            f"--prefix-match-unit is {unit}, but sliding-window groups only match whole blocks, so "
            "hits at that unit can't be served; drop --prefix-match-unit"
        )
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return (
            f"decode context parallel size is {parallel.decode_context_parallel_size}, which "
            "sliding-window groups don't support; set it to 1"
        )
    return None


def why_groups_do_not_fit(groups: Sequence[Any]) -> str | None:
    """Reason why these KV cache groups can't be served, or None."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    full = swa = 0
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs = list(spec.kv_cache_specs.values())
            spec = specs[0]
        if isinstance(spec, SlidingWindowSpec):
            swa += 1
        elif isinstance(spec, FullAttentionSpec):
            full += 1
        else:
            return (
                f"KV cache group of type {type(spec).__name__} found; only full attention beside "
                "sliding-window attention is supported; leave kv out of --plugin mimo:…"
            )
    if not full or not swa:
        return (
            f"{full} full-attention and {swa} sliding-window KV cache groups found, at least one "
            "of each is needed; leave kv out of --plugin mimo:… for this model"
        )
    return None
