# SPDX-License-Identifier: Apache-2.0
"""Bytes that the GPU kernels move, worked out from a plan. numpy only.

Counted as the programs ask for them: each program's source bytes in whole sectors, every sector
once per program and source line, and nothing for what the L2 cache saves between programs. So the
true traffic of the memory is lower. Frames are counted as if each began at a sector.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mimo_plugin.core.pixels import CHANNELS, Item
from mimo_plugin.kernels.preprocess.plan import COLUMNS, Plan

SECTOR_BYTES = 32
"""What a GPU reads at least."""


class Traffic(NamedTuple):
    """Bytes of one call.

    Attributes:
        pixels: source pixels read.
        tables: items, owners, taps and values read.
        middle: written and read again between two bicubic passes.
        rows: patch rows written.
        minimum: what any implementation moves: each source pixel that counts once, and the rows.
    """

    pixels: int
    tables: int
    middle: int
    rows: int
    minimum: int

    @property
    def total(self) -> int:
        """All bytes that are moved."""
        return self.pixels + self.tables + self.middle + self.rows

    @property
    def ratio(self) -> float:
        """Total over minimum."""
        return self.total / self.minimum


def bytes_touched(plan: Plan, value_bytes: int) -> Traffic:
    """Bytes that the launches of a plan move.

    Args:
        plan: the call.
        value_bytes: of one value of the rows: 4, or 2 for the half types.
    """
    pixels = middle = needed = 0
    tables = plan.blocks * 4 + plan.table.nbytes
    for line, item in zip(plan.table, plan.items, strict=True):
        found = _item(plan, line, item)
        pixels += found[0]
        middle += found[1]
        tables += found[2]
        needed += found[3]
    rows = plan.rows * plan.row_values * value_bytes
    return Traffic(pixels, tables, middle, rows, needed + rows)


def _item(plan: Plan, line: Any, item: Item) -> tuple[int, int, int, int]:
    """Bytes of pixels, of the buffer and of tables, and pixels that count, of one item."""
    factor, early = plan.spec.factor, int(line[COLUMNS.early])
    depth = plan.spec.temporal_patch_size
    frames = 1 if item.frames == 1 else -(-item.frames // depth) * depth
    down = _block_reads(plan, line, COLUMNS.down, item.height, item.target_height)
    across = _block_reads(plan, line, COLUMNS.across, item.width, item.target_width)
    needed = int(down.any(0).sum() * across.any(0).sum()) * CHANNELS * item.frames
    programs = len(down) * len(across) * -(-frames // depth)
    tables = programs * _tap_bytes(plan, line)
    if not early:
        return _sectors(down, across) * frames * SECTOR_BYTES, 0, tables, needed
    height, width = int(line[COLUMNS.middle_height]), int(line[COLUMNS.middle_width])
    # The last pass reads the buffer with taps along one axis and one to one along the other.
    if early == COLUMNS.down:
        read = _sectors(_one_to_one(height, factor), across)
    else:
        read = _sectors(down, _one_to_one(width, factor))
    written = int(line[COLUMNS.middle_stride]) * item.frames
    pixels = _tile_sectors(plan, line, item) * item.frames
    return pixels * SECTOR_BYTES, written + read * frames * SECTOR_BYTES, tables, needed


def _block_reads(plan: Plan, line: Any, axis: int, source: int, target: int) -> Any:
    """bool [blocks, source]: which places along an axis the programs of a block need."""
    taps = int(line[axis + 2])
    if not taps:
        return _one_to_one(source, plan.spec.factor)
    first = plan.first[line[axis] : line[axis] + target].astype(np.int64)
    reads: Any = np.zeros((target // plan.spec.factor, source), bool)
    block: Any = np.arange(target) // plan.spec.factor
    for tap in range(2 if plan.spec.resample == "bilinear" else taps):
        reads[block, np.minimum(first + tap, source - 1)] = True
    return reads


def _one_to_one(length: int, factor: int) -> Any:
    """The same for an axis that is not resized."""
    reads: Any = np.zeros((length // factor, length), bool)
    reads[np.arange(length) // factor, np.arange(length)] = True
    return reads


def _sectors(down: Any, across: Any) -> int:
    """Sectors that all programs of a frame read, each once per program and source line."""
    width = across.shape[1]
    aligned = (np.arange(down.shape[1], dtype=np.int64) * width * CHANNELS) % SECTOR_BYTES
    bytes_ = np.repeat(across, CHANNELS, axis=1)
    total = 0
    for shift in np.unique(aligned):
        whole = -(-(bytes_.shape[1] + shift) // SECTOR_BYTES) * SECTOR_BYTES
        padded = np.zeros((len(bytes_), whole), bool)
        padded[:, shift : shift + bytes_.shape[1]] = bytes_
        touched = padded.reshape(len(bytes_), -1, SECTOR_BYTES).any(2).sum()
        total += int(touched) * int(down[:, aligned == shift].sum())
    return total


def _tile_sectors(plan: Plan, line: Any, item: Item) -> int:
    """Sectors that the tiles of the early pass read of a frame."""
    axis, taps = int(line[COLUMNS.early]), int(line[line[COLUMNS.early] + 2])
    line_bytes = int(line[COLUMNS.middle_width]) * CHANNELS
    frame_bytes = int(line[COLUMNS.middle_height]) * line_bytes
    starts = np.union1d(
        np.arange(0, frame_bytes, plan.tile_bytes), np.arange(0, frame_bytes, line_bytes)
    )
    ends = np.append(starts[1:], frame_bytes) - 1  # the last byte of each part of a tile
    y = starts // line_bytes
    left, right = starts % line_bytes // CHANNELS, ends % line_bytes // CHANNELS
    first = plan.first[line[axis] :].astype(np.int64)
    stride = item.width * CHANNELS
    if axis == COLUMNS.across:
        low = y * stride + first[left] * CHANNELS
        last = np.minimum(first[right] + taps, item.width)
        return int(
            ((y * stride + last * CHANNELS - 1) // SECTOR_BYTES - low // SECTOR_BYTES + 1).sum()
        )
    total = 0
    for tap in range(taps):
        row = first[y] + tap
        low = row * stride + left * CHANNELS
        high = row * stride + (right + 1) * CHANNELS - 1
        sectors = high // SECTOR_BYTES - low // SECTOR_BYTES + 1
        total += int(sectors[row < item.height].sum())
    return total


def _tap_bytes(plan: Plan, line: Any) -> int:
    """Taps that a program of a block reads."""
    last = int(line[COLUMNS.last])
    axes = (last,) if last else (COLUMNS.down, COLUMNS.across)
    return sum(plan.spec.factor * 4 * (1 + int(line[a + 2])) for a in axes if line[a + 2])
