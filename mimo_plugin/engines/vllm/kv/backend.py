# SPDX-License-Identifier: Apache-2.0
"""Can the attention backend that vLLM will use compute keys and values of unequal width?

MiMo-V2's published checkpoints have 192-wide keys and 128-wide values. vLLM then takes one of its
two backends for that, without a check of its own where the user names one: ``FLASH_ATTN_DIFFKV``
(FlashAttention 4; version 3 only in layers without sinks) or ``TRITON_ATTN_DIFFKV`` (all else).
Two ways lead to wrong numbers instead of an error, and others to an error long after start:

* both backends keep the value width in a class attribute, so the layer that was built last decides
  it for all: full-attention and sliding-window layers of unequal width read each other's KV;
* FlashAttention 3 is taken in layers with sinks where version 4 is not there;
* a backend named on the command line is taken on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

FLASH = "FLASH_ATTN_DIFFKV"
TRITON = "TRITON_ATTN_DIFFKV"
_ARCHITECTURE_PREFIXES = ("MiMoV2", "MimoPlugin")
"""Of vLLM's classes, and of ours that stand in for them."""

#: FlashAttention version for (key width, value width, has sinks); None: none on this device
FlashVersion = Callable[[int, int, bool], int | None]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Widths of one kind of attention layer, in elements, and whether it has sinks."""

    name: str
    key_dim: int
    value_dim: int
    sinks: bool


def why_backend_unsafe(
    vllm_config: Any,
    *,
    flash_version: FlashVersion | None = None,
) -> str | None:
    """Reason, with its fix, why attention would be wrong or fail; None if it is safe or not ours.

    Call it where the model's devices are visible (the EngineCore, or a worker). It asks the driver
    for the compute capability and allocates nothing on a device.

    Args:
        vllm_config: the engine's configuration.
        flash_version: what FlashAttention offers here; None: ask vLLM.
    """
    kinds = unequal_kinds(vllm_config)
    if not kinds:
        return None
    shown = ", ".join(f"{k.name} keys {k.key_dim} / values {k.value_dim}" for k in kinds)
    if len({kind.value_dim for kind in kinds}) > 1:
        return (
            f"layers have values of unequal width ({shown}), and vLLM's DIFFKV backends keep one "
            "width for all layers, so some would read wrong values; use a checkpoint with one "
            "value width"
        )
    if vllm_config.device_config.device_type == "cpu":
        return (
            f"keys and values differ in width ({shown}), which no CPU attention backend of vLLM "
            "supports; run this checkpoint on a GPU"
        )
    backend = getattr(vllm_config.attention_config.backend, "name", None)
    if backend == TRITON:
        return None
    ask = flash_version or _flash_version_of(vllm_config)
    versions = {kind: ask(kind.key_dim, kind.value_dim, kind.sinks) for kind in kinds}
    for kind, version in versions.items():
        if version == 4 or (version == 3 and not kind.sinks):
            continue
        if backend != FLASH and version != 3:
            continue  # vLLM takes the Triton backend by itself
        found = f"FlashAttention {version}" if version else "no FlashAttention"
        return (
            f"attention backend {FLASH} {'is asked for' if backend == FLASH else 'would be used'} "
            f"with {found} on this device, but {kind.name} layers with {kind.key_dim}-wide keys "
            f"and {kind.value_dim}-wide values{' and sinks' if kind.sinks else ''} need "
            f"{'version 4' if kind.sinks else 'version 3 or 4'}; start with "
            f"--attention-backend {TRITON}"
        )
    return None


def unequal_kinds(vllm_config: Any) -> tuple[LayerKind, ...]:
    """The model's layer kinds whose keys and values differ in width; () for other models."""
    config = vllm_config.model_config.hf_text_config
    architectures = getattr(vllm_config.model_config.hf_config, "architectures", None) or ()
    if not any(str(name).startswith(_ARCHITECTURE_PREFIXES) for name in architectures):
        return ()
    pattern = getattr(config, "hybrid_layer_pattern", None) or ()
    kinds = []
    if 0 in pattern:
        kinds.append(_kind(config, "full-attention", "", sinks=False))
    if any(pattern):
        sinks = bool(getattr(config, "add_swa_attention_sink_bias", False))
        kinds.append(_kind(config, "sliding-window", "swa_", sinks=sinks))
    return tuple(kind for kind in kinds if kind.key_dim != kind.value_dim)


def _kind(config: Any, name: str, prefix: str, *, sinks: bool) -> LayerKind:
    key_dim = int(getattr(config, f"{prefix}head_dim"))
    value_dim = getattr(config, f"{prefix}v_head_dim", None)
    return LayerKind(name, key_dim, key_dim if value_dim is None else int(value_dim), sinks)


def _flash_version_of(vllm_config: Any) -> FlashVersion:
    """Ask vLLM as its backend does; the user's choice of a version is respected."""
    from vllm.config.vllm import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import (
        get_flash_attn_version,
        is_flash_attn_varlen_func_available,
    )

    def flash_version(key_dim: int, value_dim: int, sinks: bool) -> int | None:
        if not is_flash_attn_varlen_func_available():
            return None
        context: AbstractContextManager[Any] = set_current_vllm_config(vllm_config)
        with context:
            version: int | None = get_flash_attn_version(
                head_size=key_dim, head_size_v=value_dim, has_sinks=sinks
            )
        return version

    return flash_version
