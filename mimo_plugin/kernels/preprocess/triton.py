# SPDX-License-Identifier: Apache-2.0
"""GPU backend: at most two launches for a batch, whatever the number of images and frames.

A program of the last launch makes the patch rows of one block (what becomes one token of one
temporal patch), so neighbouring patches share what they read. Which item a program belongs to is
looked up, one load; items and tap tables travel in one small copy. Values are worked out in the
order in which they are stored, so stores are 16 bytes wide (8 for rows of bytes) for patch sizes
whose area allows it.

In Triton's interpreter (``TRITON_INTERPRET=1``) it runs on the CPU; its bfloat16 stores truncate.
"""
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mimo_plugin.core.pixels import Item, PixelSpec
from mimo_plugin.kernels.preprocess.plan import ALIGN_BYTES, COLUMNS, Plan, make_plan
from mimo_plugin.kernels.preprocess.taps import FRACTION_BITS, byte_values

NUM_WARPS = 4

_C = {name: tl.constexpr(value) for name, value in COLUMNS._asdict().items()}
SOURCE, FRAMES, HEIGHT, WIDTH = _C["source"], _C["frames"], _C["height"], _C["width"]
ROW, BLOCK, BLOCKS_DOWN = _C["row"], _C["block"], _C["blocks_down"]
BLOCKS_ACROSS, DOWN, ACROSS = _C["blocks_across"], _C["down"], _C["across"]
LAST, EARLY, MIDDLE, TILE = _C["last"], _C["early"], _C["middle"], _C["tile"]
MIDDLE_HEIGHT, MIDDLE_WIDTH = _C["middle_height"], _C["middle_width"]
MIDDLE_STRIDE, COLUMN_COUNT = _C["middle_stride"], _C["end"]
BITS = tl.constexpr(FRACTION_BITS)
HALF = tl.constexpr(1 << (FRACTION_BITS - 1))
ALIGN = tl.constexpr(ALIGN_BYTES)
LINE_VALUES = tl.constexpr(32)


@triton.jit
def _number(line, column):  # type: ignore[no-untyped-def]
    """An entry of the table that fits 32 bits."""
    return tl.load(line + column).to(tl.int32)


@triton.jit
def _grid(SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """0..SIZE-1 in lines of 32: so shaped, a warp reads neighbouring pixels, while with one
    dimension a thread stores neighbouring values."""
    lines = tl.arange(0, SIZE // LINE_VALUES)[:, None] * LINE_VALUES
    return lines + tl.arange(0, LINE_VALUES)[None, :]


@triton.jit
def _places(line, block, SIZE: tl.constexpr, PATCH: tl.constexpr, MERGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a block lies: temporal patch, first row, and x and y of each value of a plane."""
    across = _number(line, BLOCKS_ACROSS)
    per_group = _number(line, BLOCKS_DOWN) * across
    local = block - _number(line, BLOCK)
    group = local // per_group
    inside = local % per_group
    row = tl.load(line + ROW) + local.to(tl.int64) * (MERGE * MERGE)
    number = _grid(SIZE)
    patch = number // (PATCH * PATCH)
    pixel = number % (PATCH * PATCH)
    y = ((inside // across) * MERGE + patch // MERGE) * PATCH + pixel // PATCH
    x = ((inside % across) * MERGE + patch % MERGE) * PATCH + pixel % PATCH
    return group, row, y, x


@triton.jit
def _targets(  # type: ignore[no-untyped-def]
    out, row, SIZE: tl.constexpr, AREA: tl.constexpr, USED: tl.constexpr, WRITTEN: tl.constexpr
):
    """Where the values of a block's first plane are stored, and which of them are."""
    number = tl.arange(0, SIZE)
    values: tl.constexpr = 3 * WRITTEN * AREA
    return out + row * values + number // AREA * values + number % AREA, number < USED


@triton.jit
def _spread(to, values, plane, still, mask, AREA: tl.constexpr, WRITTEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a plane of a frame; a still's in all frames of the patch."""
    values = tl.reshape(values.to(to.dtype.element_ty), mask.shape)
    tl.store(to + plane * AREA, values, mask=mask)
    if still:
        for copy in tl.static_range(1, WRITTEN):
            tl.store(to + (plane + copy) * AREA, values, mask=mask)


@triton.jit
def _divided(value, divisor, inverse):  # type: ignore[no-untyped-def]
    """``value / divisor`` rounded as a division is, for the price of a multiplication and two
    fused ones: Markstein's correction; ``inverse`` is the rounded 1 / divisor."""
    quotient = value * inverse
    return tl.fma(tl.fma(-quotient, divisor, value), inverse, quotient)


@triton.jit
def bilinear(  # type: ignore[no-untyped-def]
    packed,
    table,
    owners,
    first,
    weights,
    values,
    out,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTH: tl.constexpr,
    WRITTEN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """MiMo's resize, and pixels that keep their size. One program: the rows of one block."""
    AREA: tl.constexpr = PATCH * PATCH
    USED: tl.constexpr = MERGE * MERGE * AREA
    block = tl.program_id(0)
    line = table + tl.load(owners + block) * COLUMN_COUNT
    group, row, y, x = _places(line, block, SIZE, PATCH, MERGE)
    # Values beyond the last patch (sides that are no power of two) repeat it and are not stored.
    mask = _grid(SIZE) < USED
    to, stored = _targets(out, row, SIZE, AREA, USED, WRITTEN)
    height, width = _number(line, HEIGHT), _number(line, WIDTH)
    frames = _number(line, FRAMES)
    still = frames == 1
    taken = tl.where(still, 1, DEPTH)
    source = packed + tl.load(line + SOURCE)
    frame_bytes = height.to(tl.int64) * width * 3
    if _number(line, ACROSS + 2) > 0:
        top = tl.load(first + _number(line, DOWN) + y, mask=mask, other=0)
        down = tl.load(weights + _number(line, DOWN + 1) + y, mask=mask, other=0.0)
        left = tl.load(first + _number(line, ACROSS) + x, mask=mask, other=0)
        share = tl.load(weights + _number(line, ACROSS + 1) + x, mask=mask, other=0.0)
        bottom = tl.minimum(top + 1, height - 1)
        right = tl.minimum(left + 1, width - 1)
        upper, lower = top * (width * 3), bottom * (width * 3)
        for number in range(taken):
            frame = tl.minimum(group * DEPTH + number, frames - 1)
            base = source + frame * frame_bytes
            # Not unrolled: the loads of three channels at once would take all registers.
            for c in tl.range(0, 3, loop_unroll_factor=1):
                a = tl.load(base + (upper + left * 3 + c), mask=mask, other=0).to(tl.float32)
                b = tl.load(base + (lower + left * 3 + c), mask=mask, other=0).to(tl.float32)
                d = tl.load(base + (upper + right * 3 + c), mask=mask, other=0).to(tl.float32)
                e = tl.load(base + (lower + right * 3 + c), mask=mask, other=0).to(tl.float32)
                above = tl.fma(a, 1.0 - share, d * share)
                below = tl.fma(b, 1.0 - share, e * share)
                value = tl.fma(above, 1.0 - down, below * down) - tl.load(values + 768 + c)
                value = _divided(value, tl.load(values + 771 + c), tl.load(values + 774 + c))
                _spread(to, value, c * WRITTEN + number, still, stored, AREA, WRITTEN)
    else:
        place = (y * width + x) * 3
        for number in range(taken):
            frame = tl.minimum(group * DEPTH + number, frames - 1)
            base = source + frame * frame_bytes
            for c in tl.static_range(3):
                byte = tl.load(base + (place + c), mask=mask, other=0).to(tl.int32)
                value = tl.load(values + c * 256 + byte)
                _spread(to, value, c * WRITTEN + number, still, stored, AREA, WRITTEN)


@triton.jit
def _clipped(total):  # type: ignore[no-untyped-def]
    """Pillow's rounding of a fixed-point sum to a byte (0..255, still as int32)."""
    return tl.minimum(tl.maximum(total >> BITS, 0), 255)


@triton.jit
def early(packed, table, owners, first, weights, middle, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of two bicubic passes. One program: ``SIZE`` bytes of a frame of the buffer."""
    tile = tl.program_id(0)
    line = table + tl.load(owners + tile) * COLUMN_COUNT
    width = _number(line, WIDTH)
    middle_width = _number(line, MIDDLE_WIDTH)
    line_bytes = middle_width * 3
    frame_bytes = _number(line, MIDDLE_HEIGHT) * line_bytes
    local = tile - _number(line, TILE)
    tiles = tl.cdiv(frame_bytes, SIZE)
    frame = (local // tiles).to(tl.int64)
    at = (local % tiles) * SIZE + _grid(SIZE)
    mask = at < frame_bytes
    y, inside = at // line_bytes, at % line_bytes
    x, c = inside // 3, inside % 3
    height = _number(line, HEIGHT)
    axis = _number(line, EARLY)
    down = axis == DOWN
    taps = _number(line, axis + 2)
    place = tl.where(down, y, x)
    start = tl.load(first + _number(line, axis) + place, mask=mask, other=0)
    weight_at = weights + tl.load(line + axis + 1) + place * taps
    step = tl.where(down, width * 3, 3)
    last = tl.where(down, height, width) - 1
    fixed = tl.where(down, x * 3, y * (width * 3)) + c
    base = packed + tl.load(line + SOURCE) + frame * (height.to(tl.int64) * width * 3)
    total = tl.full(mask.shape, HALF, tl.int32)
    for tap in range(taps):
        weight = tl.load(weight_at + tap, mask=mask, other=0)
        from_ = fixed + tl.minimum(start + tap, last) * step
        total += tl.load(base + from_, mask=mask, other=0).to(tl.int32) * weight
    stride = tl.multiple_of(tl.load(line + MIDDLE_STRIDE), ALIGN)
    inside_frame = (local % tiles) * SIZE + tl.arange(0, SIZE)
    to = middle + tl.multiple_of(tl.load(line + MIDDLE), ALIGN) + frame * stride + inside_frame
    # Up to the next frame, so that whole 16 bytes are stored.
    pixels = tl.reshape(_clipped(total).to(tl.uint8), inside_frame.shape)
    tl.store(to, pixels, mask=inside_frame < stride.to(tl.int32))


@triton.jit
def bicubic(  # type: ignore[no-untyped-def]
    packed,
    table,
    owners,
    first,
    weights,
    values,
    middle,
    out,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTH: tl.constexpr,
    WRITTEN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The last bicubic pass, the table of values and the patch rows of one block."""
    AREA: tl.constexpr = PATCH * PATCH
    USED: tl.constexpr = MERGE * MERGE * AREA
    block = tl.program_id(0)
    line = table + tl.load(owners + block) * COLUMN_COUNT
    group, row, y, x = _places(line, block, SIZE, PATCH, MERGE)
    mask = _grid(SIZE) < USED
    to, stored = _targets(out, row, SIZE, AREA, USED, WRITTEN)
    height, width = _number(line, MIDDLE_HEIGHT), _number(line, MIDDLE_WIDTH)
    frames = _number(line, FRAMES)
    still = frames == 1
    taken = tl.where(still, 1, DEPTH)
    if _number(line, EARLY) > 0:
        source = middle + tl.load(line + MIDDLE)
        frame_bytes = tl.load(line + MIDDLE_STRIDE)
    else:
        source = packed + tl.load(line + SOURCE)
        frame_bytes = height.to(tl.int64) * width * 3
    axis = _number(line, LAST)
    if axis > 0:
        down = axis == DOWN
        taps = _number(line, axis + 2)
        place = tl.where(down, y, x)
        start = tl.load(first + _number(line, axis) + place, mask=mask, other=0)
        weight_at = weights + tl.load(line + axis + 1) + place * taps
        step = tl.where(down, width * 3, 3)
        last = tl.where(down, height, width) - 1
        fixed = tl.where(down, x * 3, y * (width * 3))
        for number in range(taken):
            base = source + tl.minimum(group * DEPTH + number, frames - 1) * frame_bytes
            red = tl.full(mask.shape, HALF, tl.int32)
            green = tl.full(mask.shape, HALF, tl.int32)
            blue = tl.full(mask.shape, HALF, tl.int32)
            for tap in range(taps):
                weight = tl.load(weight_at + tap, mask=mask, other=0)
                from_ = base + (fixed + tl.minimum(start + tap, last) * step)
                red += tl.load(from_, mask=mask, other=0).to(tl.int32) * weight
                green += tl.load(from_ + 1, mask=mask, other=0).to(tl.int32) * weight
                blue += tl.load(from_ + 2, mask=mask, other=0).to(tl.int32) * weight
            red = tl.load(values + _clipped(red))
            green = tl.load(values + 256 + _clipped(green))
            blue = tl.load(values + 512 + _clipped(blue))
            _spread(to, red, number, still, stored, AREA, WRITTEN)
            _spread(to, green, WRITTEN + number, still, stored, AREA, WRITTEN)
            _spread(to, blue, 2 * WRITTEN + number, still, stored, AREA, WRITTEN)
    else:
        fixed = (y * width + x) * 3
        for number in range(taken):
            base = source + tl.minimum(group * DEPTH + number, frames - 1) * frame_bytes
            for c in tl.static_range(3):
                byte = tl.load(base + (fixed + c), mask=mask, other=0).to(tl.int32)
                value = tl.load(values + c * 256 + byte)
                _spread(to, value, c * WRITTEN + number, still, stored, AREA, WRITTEN)


def patch_rows(
    packed: Any, items: Sequence[Item], spec: PixelSpec, *, dtype: Any, once: bool = False
) -> Any:
    """See ``dispatch.patch_rows``.

    Raises:
        PixelError: an item can't be served.
    """
    return Batch(packed.numel(), items, spec, packed.device, once=once).launch(packed, dtype)


class Batch:
    """A plan with its tables on the device; it may be launched again for other pixels.

    Args:
        packed_bytes: of the pixels.
        items: what lies in them.
        spec: how the pixels are wanted.
        device: where they are.
        once: write stills once.
    """

    def __init__(
        self,
        packed_bytes: int,
        items: Sequence[Item],
        spec: PixelSpec,
        device: Any,
        *,
        once: bool = False,
    ) -> None:
        self.plan = make_plan(packed_bytes, items, spec, once=once)
        self._tables = _upload(self.plan, device)
        self._middle = torch.empty(max(1, self.plan.middle_bytes), dtype=torch.uint8, device=device)

    def launch(self, packed: Any, dtype: Any, out: Any = None) -> Any:
        """Fill and return ``out`` [rows, row values], made of ``dtype`` where there is none."""
        plan, spec = self.plan, self.plan.spec
        if out is None:
            out = torch.empty(plan.rows, plan.row_values, dtype=dtype, device=packed.device)
        table, owners, tile_owners, first, weights, values = self._tables
        sizes = block_constants(spec, once=plan.once)
        # Fused only where PyTorch fuses, so that the bits are those of the CPU backend.
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        if spec.resample == "bilinear":
            bilinear[(plan.blocks,)](
                packed, table, owners, first, weights, values, out,
                **sizes, **options,
            )  # fmt: skip
            return out
        if plan.tiles:
            early[(plan.tiles,)](
                packed, table, tile_owners, first, weights, self._middle,
                SIZE=plan.tile_bytes, **options,
            )  # fmt: skip
        bicubic[(plan.blocks,)](
            packed, table, owners, first, weights, values, self._middle, out, **sizes, **options
        )
        return out


def block_constants(spec: PixelSpec, *, once: bool = False) -> dict[str, int]:
    """Compile-time constants of the kernels that write blocks."""
    return {
        "PATCH": spec.patch_size,
        "MERGE": spec.merge_size,
        "DEPTH": spec.temporal_patch_size,
        "WRITTEN": 1 if once else spec.temporal_patch_size,
        "SIZE": max(LINE_VALUES.value, triton.next_power_of_2(spec.factor**2)),
    }


def _values(spec: PixelSpec) -> Any:
    """float32: what the bytes of each channel become, means, deviations and their inverses."""
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    return np.concatenate([byte_values(spec).ravel(), mean, std, np.float32(1) / std])


def _upload(plan: Plan, device: Any) -> list[Any]:
    """Table, owners of blocks and tiles, taps and values on the device, in one copy."""
    lines: Any = np.arange(len(plan.items), dtype=np.int32)
    blocks = np.diff(plan.table[:, COLUMNS.block], append=plan.blocks)
    tiles = np.diff(plan.table[:, COLUMNS.tile], append=plan.tiles)
    arrays = [
        plan.table,
        np.repeat(lines, blocks),
        np.repeat(lines, tiles),
        plan.first,
        plan.weights,
        _values(plan.spec),
    ]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-max(1, array.nbytes) // ALIGN_BYTES) * ALIGN_BYTES)
    whole = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = whole.numpy()
    for array, start in zip(arrays, starts, strict=False):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = whole.to(device, non_blocking=True)
    types = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
    return [
        there[start : start + array.nbytes].view(types[array.dtype.name])
        for array, start in zip(arrays, starts, strict=False)
    ]
