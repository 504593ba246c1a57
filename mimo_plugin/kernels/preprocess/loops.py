# SPDX-License-Identifier: Apache-2.0
"""Loops of the CPU backend, compiled by numba; only ``cpu.py`` imports this, and late.

A *job* is one row of patches of one temporal patch: ``patch`` target lines of up to ``depth``
frames. Functions run without the GIL on ranges of jobs, so that threads can share a call. ``kind``
says how ``out`` holds values: 0 float32, 1 bfloat16 and 2 float16 as uint16.

The bilinear path does PyTorch's operations in PyTorch's order, fused multiply-adds included
(along the line first, the nearer pixel inside the fused product), so it gives the same bits.
"""
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

numba: Any = import_module("numba")
extending: Any = import_module("numba.extending")

HALF, BITS = np.int32(1 << 21), np.int32(22)
ONE = np.float32(1)


@numba.njit(inline="always")
def _bfloat16(value: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@numba.njit(inline="always")
def _float16(value: Any) -> Any:
    """Bits of the nearest float16, ties to even; too large becomes infinite."""
    bits = np.float32(value).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    if size >= np.uint32(0x47800000):
        half = np.uint32(0x7C00)
    elif size < np.uint32(0x38800000):
        # Adding 0.5 puts the last bit of a subnormal float16 where a float32 rounds.
        shifted = np.float32(np.abs(np.float32(value)) + np.float32(0.5))
        half = shifted.view(np.uint32) - np.uint32(0x3F000000)
    else:
        odd = (size >> np.uint32(13)) & np.uint32(1)
        half = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(sign | half)


@numba.njit(inline="always")
def _encode(line: Any, encoded: Any, kind: Any) -> Any:
    """Round a line of float32 values to what ``out`` holds."""
    if kind == 1:
        for i in range(line.size):
            encoded[i] = _bfloat16(line[i])
    elif kind == 2:
        for i in range(line.size):
            encoded[i] = _float16(line[i])
    else:
        for i in range(line.size):
            encoded[i] = line[i]


@numba.njit(inline="always")
def _look_up(pixels: Any, values: Any, encoded: Any, width: Any) -> Any:
    """A line of bytes, RGB after RGB, to a line of values, plane after plane."""
    for x in range(width):
        encoded[x] = values[0, pixels[3 * x]]
        encoded[width + x] = values[1, pixels[3 * x + 1]]
        encoded[2 * width + x] = values[2, pixels[3 * x + 2]]


@numba.njit(inline="always")
def _write(
    encoded: Any, out: Any, row: Any, at: Any, sizes: Any, blocks_across: Any, copies: Any
) -> Any:
    """Spread a line over the patches it crosses, ``copies`` times along the patch's frames.

    ``row`` is the first patch's row, ``at`` the line's place in a patch's first plane.
    """
    patch, merge, depth = sizes
    area = patch * patch
    width = blocks_across * merge * patch
    for block in range(blocks_across):
        for across in range(merge):
            target = out[row + block * merge * merge + across]
            start = (block * merge + across) * patch
            for c in range(3):
                for copy in range(copies):
                    to = (c * depth + copy) * area + at
                    target[to : to + patch] = encoded[c * width + start : c * width + start + patch]


@numba.njit(inline="always")
def _place(table: Any, col: Any, job_ends: Any, job: Any, merge: Any) -> Any:
    """Where a job lies: its item, the item's blocks across, the temporal patch, the line of patches
    in it, and the first row."""
    number = np.searchsorted(job_ends, job, side="right")
    item = table[number]
    across = item[col.blocks_across]
    down = item[col.blocks_down] * merge
    inside = job - (job_ends[number - 1] if number else 0)
    group, grid_y = inside // down, inside % down
    row = (
        item[col.row]
        + (group * down + grid_y // merge * merge) * across * merge
        + grid_y % merge * merge
    )
    return item, across, group, grid_y, row


@extending.intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    single = numba.types.float32
    return single(single, single, single), generate


@numba.njit(inline="always")
def _stretch(pixels: Any, start: Any, width: Any, lefts: Any, shares: Any, line: Any) -> Any:
    """One source line of bytes to the target's width, plane after plane."""
    size = lefts.size
    for x in range(size):
        at = start + 3 * np.int64(lefts[x])
        # Beyond the last pixel its own value counts, with a share of 0 or not.
        behind = at + (3 if lefts[x] < width - 1 else 0)
        share = shares[x]
        rest = ONE - share
        line[x] = _fma(np.float32(pixels[at]), rest, np.float32(pixels[behind]) * share)
        line[size + x] = _fma(
            np.float32(pixels[at + 1]), rest, np.float32(pixels[behind + 1]) * share
        )
        line[2 * size + x] = _fma(
            np.float32(pixels[at + 2]), rest, np.float32(pixels[behind + 2]) * share
        )


@numba.njit(inline="always")
def _blend(top: Any, bottom: Any, weight: Any, mean: Any, std: Any, line: Any) -> Any:
    """Two stretched lines to one, normalised."""
    rest = ONE - weight
    size = line.size // 3
    for c in range(3):
        for i in range(c * size, (c + 1) * size):
            line[i] = (_fma(top[i], rest, bottom[i] * weight) - mean[c]) / std[c]


@numba.njit(nogil=True, error_model="numpy")
def bilinear(
    packed: Any,
    table: Any,
    col: Any,
    job_ends: Any,
    first: Any,
    weights: Any,
    values: Any,
    mean: Any,
    std: Any,
    out: Any,
    sizes: Any,
    once: Any,
    kind: Any,
    begin: Any,
    end: Any,
) -> Any:
    """MiMo's resize, and pixels that keep their size.

    Args:
        packed: uint8 [bytes].
        table: ``Plan.table``.
        col: its columns, an argument so that no compiled code outlives their order.
        job_ends: int64 [items], the job after an item's last one.
        first: ``Plan.first``.
        weights: ``Plan.weights``.
        values: [3, 256], what a byte becomes, in ``out``'s form.
        mean: float32 [3].
        std: float32 [3].
        out: [rows, row values].
        sizes: patch size, merge size, frames per patch.
        once: whether stills are written once.
        kind: of ``out``.
        begin: first job.
        end: the job after the last one.
    """
    patch, merge, depth = sizes
    written = 1 if once else depth
    for job in range(begin, end):
        item, across, group, grid_y, row = _place(table, col, job_ends, job, merge)
        height, width, frames = item[col.height], item[col.width], item[col.frames]
        target_width = across * merge * patch
        encoded = np.empty(3 * target_width, out.dtype)
        line = np.empty(3 * target_width, np.float32)
        # Stretched source lines: a line serves all target lines between it and the next.
        stretched = np.empty((2, 3 * target_width), np.float32)
        held: Any = np.empty(2, np.int64)
        taken = 1 if frames == 1 else depth
        copies = written if frames == 1 else 1
        lefts = first[item[col.across] : item[col.across] + target_width]
        shares = weights[item[col.across + 1] : item[col.across + 1] + target_width]
        resized = item[col.across + 2] > 0
        for frame in range(taken):
            number_in_item = min(group * depth + frame, frames - 1)
            start = item[col.source] + number_in_item * height * width * 3
            held[:] = -1
            for y in range(patch):
                target_y = grid_y * patch + y
                if resized:
                    top = first[item[col.down] + target_y]
                    bottom = min(top + 1, height - 1)
                    # Line n is kept in the half n % 2.
                    for source in range(top, bottom + 1):
                        if held[source % 2] != source:
                            begin_at = start + source * width * 3
                            half = stretched[source % 2]
                            _stretch(packed, begin_at, width, lefts, shares, half)
                            held[source % 2] = source
                    weight = weights[item[col.down + 1] + target_y]
                    _blend(stretched[top % 2], stretched[bottom % 2], weight, mean, std, line)
                    _encode(line, encoded, kind)
                else:
                    upper = start + target_y * width * 3
                    _look_up(packed[upper : upper + 3 * width], values, encoded, width)
                at_line = frame * patch * patch + y * patch
                _write(encoded, out, row, at_line, (patch, merge, written), across, copies)


@numba.njit(inline="always")
def _resize_down(
    pixels: Any, start: Any, height: Any, width: Any, top: Any, weights: Any, total: Any, line: Any
) -> Any:
    """One target line of bytes out of the lines from ``top`` on."""
    size = 3 * width
    total[:size] = HALF
    for tap in range(weights.size):
        at = start + min(top + tap, height - 1) * size
        source = pixels[at : at + size]
        weight = weights[tap]
        for i in range(size):
            total[i] += np.int32(source[i]) * weight
    for i in range(size):
        line[i] = min(max(total[i] >> BITS, 0), 255)


@numba.njit(inline="always")
def _resize_across(source: Any, width: Any, lefts: Any, weights: Any, taps: Any, line: Any) -> Any:
    """One line of bytes to the target's width."""
    for x in range(lefts.size):
        left = lefts[x]
        used = min(taps, width - left)
        red, green, blue = HALF, HALF, HALF
        for tap in range(used):
            weight = weights[x * taps + tap]
            at = 3 * (left + tap)
            red += np.int32(source[at]) * weight
            green += np.int32(source[at + 1]) * weight
            blue += np.int32(source[at + 2]) * weight
        line[3 * x] = min(max(red >> BITS, 0), 255)
        line[3 * x + 1] = min(max(green >> BITS, 0), 255)
        line[3 * x + 2] = min(max(blue >> BITS, 0), 255)


@numba.njit(nogil=True, error_model="numpy")
def early(
    packed: Any,
    table: Any,
    col: Any,
    line_ends: Any,
    first: Any,
    weights: Any,
    middle: Any,
    begin: Any,
    end: Any,
) -> Any:
    """The first of two bicubic passes; here a job is one line of the buffer.

    Args:
        packed: uint8 [bytes].
        table: ``Plan.table``.
        col: its columns, an argument so that no compiled code outlives their order.
        line_ends: int64 [items], the job after an item's last one.
        first: ``Plan.first``.
        weights: ``Plan.weights``, int32.
        middle: uint8 [middle bytes], the buffer.
        begin: first job.
        end: the job after the last one.
    """
    for job in range(begin, end):
        number = np.searchsorted(line_ends, job, side="right")
        item = table[number]
        axis, height, width = item[col.early], item[col.height], item[col.width]
        inside = job - (line_ends[number - 1] if number else 0)
        frame, y = inside // item[col.middle_height], inside % item[col.middle_height]
        start = item[col.source] + frame * height * width * 3
        middle_width = item[col.middle_width]
        to = item[col.middle] + frame * item[col.middle_stride] + y * middle_width * 3
        line = middle[to : to + 3 * middle_width]
        taps, at = item[axis + 2], item[axis + 1]
        if axis == col.down:
            total = np.empty(3 * width, np.int32)
            top = first[item[col.down] + y]
            chosen = weights[at + y * taps : at + (y + 1) * taps]
            _resize_down(packed, start, height, width, top, chosen, total, line)
        else:
            lefts = first[item[col.across] : item[col.across] + middle_width]
            source = packed[start + y * width * 3 : start + (y + 1) * width * 3]
            _resize_across(source, width, lefts, weights[at:], taps, line)


@numba.njit(nogil=True, error_model="numpy")
def bicubic(
    packed: Any,
    table: Any,
    col: Any,
    job_ends: Any,
    first: Any,
    weights: Any,
    values: Any,
    middle: Any,
    out: Any,
    sizes: Any,
    once: Any,
    begin: Any,
    end: Any,
) -> Any:
    """The last bicubic pass, the table and the patch rows; arguments as above."""
    patch, merge, depth = sizes
    written = 1 if once else depth
    for job in range(begin, end):
        item, across, group, grid_y, row = _place(table, col, job_ends, job, merge)
        height, width, frames = item[col.middle_height], item[col.middle_width], item[col.frames]
        target_width = across * merge * patch
        encoded = np.empty(3 * target_width, out.dtype)
        line = np.empty(3 * target_width, np.uint8)
        axis = item[col.last]
        taps, at = item[axis + 2], item[axis + 1]
        total: Any = np.empty(3 * width if axis == col.down else 0, np.int32)
        taken = 1 if frames == 1 else depth
        copies = written if frames == 1 else 1
        for frame in range(taken):
            number_in_item = min(group * depth + frame, frames - 1)
            if item[col.early]:
                pixels = middle
                start = item[col.middle] + number_in_item * item[col.middle_stride]
            else:
                pixels = packed
                start = item[col.source] + number_in_item * height * width * 3
            for y in range(patch):
                target_y = grid_y * patch + y
                if axis == col.down:
                    top = first[item[col.down] + target_y]
                    chosen = weights[at + target_y * taps : at + (target_y + 1) * taps]
                    _resize_down(pixels, start, height, width, top, chosen, total, line)
                    _look_up(line, values, encoded, target_width)
                elif axis == col.across:
                    lefts = first[item[col.across] : item[col.across] + target_width]
                    upper = start + target_y * width * 3
                    source = pixels[upper : upper + 3 * width]
                    _resize_across(source, width, lefts, weights[at:], taps, line)
                    _look_up(line, values, encoded, target_width)
                else:
                    upper = start + target_y * width * 3
                    _look_up(pixels[upper : upper + 3 * width], values, encoded, target_width)
                at_line = frame * patch * patch + y * patch
                _write(encoded, out, row, at_line, (patch, merge, written), across, copies)


ENTRIES = (bilinear, early, bicubic)
"""What is called from outside."""
