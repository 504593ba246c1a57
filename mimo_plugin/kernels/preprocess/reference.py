# SPDX-License-Identifier: Apache-2.0
"""Patch rows in plain PyTorch: slow, obvious, and the measure for the other backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from mimo_plugin.core.pixels import CHANNELS, Item, PixelSpec, check_batch
from mimo_plugin.kernels.preprocess.taps import (
    FRACTION_BITS,
    bicubic_taps,
    byte_values,
    columns_first,
)


def patch_rows(
    packed: Any, items: Sequence[Item], spec: PixelSpec, *, dtype: Any, once: bool = False
) -> Any:
    """See ``dispatch.patch_rows``; computes in float32 and rounds to ``dtype`` at the end."""
    check_batch(spec, items, packed.numel(), once=once)
    rows, start = [], 0
    for item in items:
        shape = (item.frames, item.height, item.width, CHANNELS)
        frames = packed[start : start + item.source_bytes].view(shape)
        start += item.source_bytes
        values = normalised(frames, item, spec)
        repeats = 1 if once else -item.frames % spec.temporal_patch_size
        if not once and repeats:
            values = torch.cat([values, values[-1:].expand(repeats, -1, -1, -1)])
        rows.append(to_rows(values, spec, 1 if once else spec.temporal_patch_size))
    return torch.cat(rows).to(dtype)


def normalised(frames: Any, item: Item, spec: PixelSpec) -> Any:
    """Resize and normalise uint8 [F, H, W, C] to float32 [F, C, target height, target width]."""
    if spec.resample == "bicubic":
        resized = bicubic(frames, item.target_height, item.target_width)
        table = torch.from_numpy(byte_values(spec).copy()).to(frames.device)
        return torch.stack([table[c][resized[..., c].long()] for c in range(CHANNELS)], dim=1)
    planes = frames.permute(0, 3, 1, 2).float()
    resized = functional.interpolate(
        planes, (item.target_height, item.target_width), mode="bilinear", align_corners=False
    )
    mean = torch.tensor(spec.mean, device=frames.device).view(1, CHANNELS, 1, 1)
    std = torch.tensor(spec.std, device=frames.device).view(1, CHANNELS, 1, 1)
    return (resized - mean) / std


def bicubic(frames: Any, target_height: int, target_width: int) -> Any:
    """Resize uint8 [F, H, W, C] to uint8 [F, target height, target width, C] as Pillow does."""
    _, height, width, _ = frames.shape
    axes = [(2, width, target_width), (1, height, target_height)]
    if columns_first(height, width, target_height, target_width):
        axes.reverse()
    for axis, source, target in axes:
        if source != target:
            frames = _pass(frames, axis, source, target)
    return frames


def _pass(frames: Any, axis: int, source: int, target: int) -> Any:
    first, weights = (
        torch.from_numpy(array.copy()).to(frames.device, torch.int64)
        for array in bicubic_taps(source, target)
    )
    along = [1] * frames.ndim
    along[axis] = target
    total: Any = 1 << (FRACTION_BITS - 1)
    for tap in range(weights.shape[1]):
        pixels = frames.index_select(axis, (first + tap).clamp(max=source - 1)).long()
        total = total + pixels * weights[:, tap].view(along)
    return (total >> FRACTION_BITS).clamp(0, 255).to(torch.uint8)


def to_rows(values: Any, spec: PixelSpec, frames_per_patch: int) -> Any:
    """[F, C, H, W] to [t*h*w, C*T*P*P]: rows (t, bh, bw, mh, mw), columns (C, T, P, P)."""
    frames, channels, height, width = values.shape
    patch, merge, depth = spec.patch_size, spec.merge_size, frames_per_patch
    split = values.reshape(
        frames // depth,
        depth,
        channels,
        height // spec.factor,
        merge,
        patch,
        width // spec.factor,
        merge,
        patch,
    )
    # t, T, C, bh, mh, ph, bw, mw, pw -> t, bh, bw, mh, mw, C, T, ph, pw
    ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * depth * patch * patch)
