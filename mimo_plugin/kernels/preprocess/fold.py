# SPDX-License-Identifier: Apache-2.0
"""Weights for stills that are written once.

A still fills every frame of its patch with the same pixels, so its embedding is
``sum over t of W[:, :, t] x = (sum over t of W[:, :, t]) x``: with the sum as weights the pixels
are needed once, which halves the bytes of the patch rows at two frames per patch.
"""

from __future__ import annotations

from typing import Any

import torch

from mimo_plugin.core.pixels import CHANNELS, PixelSpec


def fold_patch_embed(weight: Any, spec: PixelSpec) -> Any:
    """Weights of the patch embedding for rows that were made with ``once=True``.

    Args:
        weight: of a convolution, [D, C, T, P, P], or of the same as a linear layer, [D, C*T*P*P].
        spec: of the checkpoint.

    Returns:
        [D, C*P*P] or [D, C, 1, P, P], as ``weight`` came, of its type; added in float32.

    Raises:
        ValueError: the shape is another one.
    """
    shape = (CHANNELS, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    linear = weight.dim() == 2 and weight.shape[1] == spec.row_values()
    if not linear and tuple(weight.shape[1:]) != shape:
        raise ValueError(
            f"patch embedding weight: found shape {tuple(weight.shape)}; needed: "
            f"[D, {', '.join(map(str, shape))}] or [D, {spec.row_values()}]"
        )
    summed = weight.reshape(-1, *shape).to(torch.float32).sum(dim=2, keepdim=True)
    return (summed.flatten(1) if linear else summed).to(weight.dtype)
