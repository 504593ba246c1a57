# SPDX-License-Identifier: Apache-2.0
"""Specifications, items and pixels that the tests of the pixel kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mimo_plugin.core.pixels import IMAGENET_MEAN, IMAGENET_STD, Item, PixelSpec
from mimo_plugin.core.qwen_pixels import qwen_spec

CLIP = qwen_spec({})


def spec_of(
    resample: str, patch: int = 16, merge: int = 2, depth: int = 2, max_pixels: int = 1 << 24
) -> PixelSpec:
    """A specification with limits that don't matter here."""
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if resample == "bilinear" else (CLIP.mean, CLIP.std)
    return PixelSpec(resample, mean, std, patch, merge, depth, 1, max_pixels)


def pixels(items: Sequence[Item], seed: int = 0) -> Any:
    """Random bytes for the items."""
    size = sum(item.source_bytes for item in items)
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))


def mixed(spec: PixelSpec, *, stills_only: bool = False) -> list[Item]:
    """Every kind of item: enlarged, shrunk, along one side, not at all; stills and videos."""
    side = spec.factor
    items = [
        Item(1, 3 * side + 5, 2 * side - 3, 2 * side, 3 * side),
        Item(1, side, 2 * side, side, 2 * side),
        Item(1, 5 * side + 1, side + 1, side, side),  # bicubic: columns first
        Item(1, 2 * side, side + 9, 2 * side, side),
        Item(1, side + 9, 2 * side, side, 2 * side),
        Item(1, 1, 7, side, 2 * side),
        Item(1, 40, 1, 2 * side, side),
    ]
    if not stills_only:
        items[2:2] = [
            Item(2, side, side, side, side),
            Item(3, side + 3, 2 * side + 7, side, side),
            Item(5, 2 * side, 19, 2 * side, side),
        ]
    return items


@st.composite
def batches(draw: Any, *, most: int = 4, largest: int = 120) -> tuple[PixelSpec, list[Item]]:
    """A specification and a few items of any shapes for it."""
    spec = spec_of(
        draw(st.sampled_from(["bilinear", "bicubic"])),
        draw(st.sampled_from([4, 8, 14, 16])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 3])),
    )
    side, blocks = st.integers(1, largest), st.integers(1, max(1, largest // spec.factor))
    items = []
    for _ in range(draw(st.integers(1, most))):
        target = draw(blocks) * spec.factor, draw(blocks) * spec.factor
        same = draw(st.sampled_from([(False, False), (True, True), (True, False), (False, True)]))
        source = [t if keep else draw(side) for t, keep in zip(target, same, strict=True)]
        items.append(Item(draw(st.integers(1, 4)), *source, *target))
    return spec, items
