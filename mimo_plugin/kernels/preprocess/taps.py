# SPDX-License-Identifier: Apache-2.0
"""Which source pixels an output pixel is made of, with which weights; and what a byte becomes.

Every backend reads these tables, so they agree to the bit in what they sample. One table serves
an axis of all images with the same source and target length. numpy only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mimo_plugin.core.pixels import PixelSpec

FRACTION_BITS = 22
"""Of Pillow's coefficients for 8-bit images: 32 less 8 for the pixel and 2 for overshoot."""

_CACHED_TABLES = 1024
_BICUBIC_REACH = 2.0
_BICUBIC_A = -0.5
_PROBE_SIDE = 24


class Taps(NamedTuple):
    """One axis; K taps for each of the target's pixels.

    Attributes:
        first: int32 [target]: the first source pixel read; ``first + K`` may lie beyond the end
            of the source, where weights are zero.
        weights: bicubic: int32 [target, K], fixed point; bilinear: float32 [target, 1], the
            weight of the pixel behind the first one.
    """

    first: Any
    weights: Any


@lru_cache(maxsize=_CACHED_TABLES)
def bilinear_taps(source: int, target: int) -> Taps:
    """``align_corners=False`` without antialias, in float32 as PyTorch computes it.

    Its kernels round the product and the subtraction of ``scale * (i + 0.5) - 0.5`` once, as a
    fused multiply-add (GCC for AVX2, nvcc). At 4000 pixels a second rounding would move a
    position by 2e-4 pixels.
    """
    scale = float(np.float32(source) / np.float32(target))
    centres = np.arange(target, dtype=np.float64) + 0.5
    # Products of two float32 are exact in float64.
    places = np.maximum((scale * centres - 0.5).astype(np.float32), np.float32(0))
    first = np.minimum(places.astype(np.int32), source - 1)
    return _frozen(first, np.minimum(places - first.astype(np.float32), np.float32(1))[:, None])


@lru_cache(maxsize=_CACHED_TABLES)
def bicubic_taps(source: int, target: int) -> Taps:
    """Pillow's antialiased bicubic for 8-bit images.

    Source: ``precompute_coeffs`` and ``normalize_coeffs_8bpc`` of Pillow; the operations come in
    their order, so that every double rounds as theirs do.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    reach = _BICUBIC_REACH * stretch
    centres = (np.arange(target, dtype=np.float64) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + reach + 0.5).astype(np.int64), source) - first
    tap: Any = np.arange(max(1, int(counts.max())), dtype=np.int64)
    distance = (tap + first[:, None] - centres[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(tap < counts[:, None], _bicubic(distance), 0.0)
    total = np.zeros(target)
    for column in weights.T:
        total += column
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = weights * float(1 << FRACTION_BITS)
    fixed = np.where(weights < 0.0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    return _frozen(first.astype(np.int32), fixed)


def _bicubic(distance: Any) -> Any:
    x = np.abs(distance)
    near = ((_BICUBIC_A + 2.0) * x - (_BICUBIC_A + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * _BICUBIC_A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def columns_first(height: int, width: int, target_height: int, target_width: int) -> bool:
    """Whether Pillow resizes along the columns (vertically) before it does along the rows.

    Pillow 13 and later do when the height shrinks by more than twice as many pixels as the width;
    the result is rounded to a byte between the passes, so the order shows. Earlier ones never do.
    """
    shrinks = height - target_height
    return _pillow_orders() and shrinks > max(0, 2 * (width - target_width))


@lru_cache(maxsize=1)
def _pillow_orders() -> bool:
    """What the installed Pillow does with one image; True where there is none to ask."""
    try:
        from PIL import Image
    except ImportError:
        return True
    side, target = _PROBE_SIDE, (8, _PROBE_SIDE - 1)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((target[1], target[0]), Image.Resampling.BICUBIC)
    down, across = bicubic_taps(side, target[0]), bicubic_taps(side, target[1])
    columns = resample(resample(pixels, 0, down), 1, across)
    rows = resample(resample(pixels, 1, across), 0, down)
    found = np.asarray(image)
    if not np.array_equal(columns, found) and not np.array_equal(rows, found):
        raise RuntimeError(
            "bicubic resize: the installed Pillow gives other pixels than the rule of versions "
            "up to 13; fix: install Pillow 13, or a plugin that knows this version"
        )
    return bool(np.array_equal(columns, found))


def resample(pixels: Any, axis: int, taps: Taps) -> Any:
    """One bicubic pass, obvious and slow: uint8 [H, W, C] to uint8 with ``axis`` resized."""
    moved = np.moveaxis(pixels, axis, 0).astype(np.int64)
    total = np.full((len(taps.first), *moved.shape[1:]), 1 << (FRACTION_BITS - 1), np.int64)
    for tap in range(taps.weights.shape[1]):
        at = np.minimum(taps.first + tap, len(moved) - 1)
        total += moved[at] * taps.weights[:, tap, None, None]
    return np.moveaxis(np.clip(total >> FRACTION_BITS, 0, 255).astype(np.uint8), 0, axis)


@lru_cache(maxsize=64)
def byte_values(spec: PixelSpec) -> Any:
    """float32 [3, 256]: what each byte of each channel becomes.

    Exact: for bilinear what vLLM's MiMo processor makes of a pixel that no resize touches; for
    bicubic what transformers' Pillow processor does (rescale in float64, the rest in float32).
    """
    bytes_: Any = np.arange(256, dtype=np.float64)
    if spec.resample == "bicubic":
        pixels, unit = (bytes_ * spec.rescale).astype(np.float32), spec.rescale
    else:
        pixels, unit = bytes_.astype(np.float32), 1.0
    mean = (np.array(spec.mean) * unit).astype(np.float32)
    std = (np.array(spec.std) * unit).astype(np.float32)
    table = (pixels[None, :] - mean[:, None]) / std[:, None]
    table.flags.writeable = False
    return table


def _frozen(first: Any, weights: Any) -> Taps:
    arrays = [np.ascontiguousarray(first), np.ascontiguousarray(weights)]
    for array in arrays:
        array.flags.writeable = False
    return Taps(*arrays)
