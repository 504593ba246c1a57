# SPDX-License-Identifier: Apache-2.0
"""How large the pool for sliding windows should be beside the one for full attention.

Where an engine has two physical pools, their ratio is set once, at start. It is a matter of bytes:
sliding-window layers are many, so a ratio of tokens that looks small can still take most of the
memory. Units: tokens, bytes on one tensor-parallel rank.
"""

from __future__ import annotations

from mimo_plugin.core.geometry import GeometryError, ModelGeometry

SWA_SHARE = 0.6
"""Share of a pool's bytes for sliding-window KV: the default of ``kv.swa_share``, which holds where
one pool holds both kinds."""


def swa_per_full(geometry: ModelGeometry, *, share: float = SWA_SHARE, tp: int = 1) -> float:
    """Sliding-window tokens for each full-attention token, so that windows take ``share`` of all.

    Args:
        geometry: the model, draft layers included where they have KV.
        share: of the bytes, 0 < share < 1.
        tp: tensor parallel size.

    Returns:
        At most 1: no window is longer than its prefix.

    Raises:
        GeometryError: the model isn't hybrid, or ``tp`` does not divide its KV heads.
    """
    if not geometry.is_hybrid:
        raise GeometryError("two pools need a model with full-attention and sliding-window layers")
    full = geometry.bytes_per_token("full", tp=tp)
    swa = geometry.bytes_per_token("swa", tp=tp)
    return min(1.0, share / (1.0 - share) * full / swa)


def least_swa_tokens(
    window_tokens: int,
    *,
    page_tokens: int,
    chunk_tokens: int,
    running: int,
    freed_every_tokens: int,
    draft_tokens: int = 0,
) -> int:
    """Sliding-window tokens that running requests can hold at once.

    A request that decodes holds its window, what has left it since the engine last freed, and a
    page at either end; one that is in prefill holds a chunk more.

    Args:
        window_tokens: of the model.
        page_tokens: of the engine.
        chunk_tokens: of a prefill step.
        running: requests that run at once.
        freed_every_tokens: steps of decoding between two times the engine frees what left windows.
        draft_tokens: tokens that a step may add besides its own.
    """
    held = window_tokens + freed_every_tokens * (1 + draft_tokens) + 2 * page_tokens
    return running * held + chunk_tokens
