# SPDX-License-Identifier: Apache-2.0
"""What one call does: a table with a line per item, and the tap tables of all of them. numpy only.

A *block* is what becomes one token of one temporal patch: merge x merge patches. The *early* pass
is the first of two bicubic passes; its bytes lie in a buffer in between (``middle``), every frame
at a multiple of ``ALIGN_BYTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mimo_plugin.core.pixels import (
    CHANNELS,
    MAX_FRAME_BYTES,
    Item,
    PixelError,
    PixelSpec,
    check_batch,
    grid_of,
    patch_rows_of,
)
from mimo_plugin.kernels.preprocess.taps import Taps, bicubic_taps, bilinear_taps, columns_first

ALIGN_BYTES = 16


class Columns(NamedTuple):
    """Columns of the table, by what they hold.

    An axis has three: place of its taps in ``Plan.first``, place in ``Plan.weights``, and how many
    taps a target pixel has, 0 without a resize.
    """

    source: int = 0  # byte of the first frame in the packed pixels
    frames: int = 1
    height: int = 2
    width: int = 3
    row: int = 4  # first patch row
    block: int = 5  # first block
    blocks_down: int = 6
    blocks_across: int = 7
    down: int = 8
    across: int = 11
    last: int = 14  # bicubic: column of the axis that is resized last; 0 without a resize
    early: int = 15  # column of the axis that is resized before; 0 unless both are
    middle: int = 16  # byte of the first frame in the buffer between the passes
    middle_height: int = 17
    middle_width: int = 18
    middle_stride: int = 19  # bytes from a frame in the buffer to the next
    tile: int = 20  # first program of the early pass
    end: int = 21


COLUMNS = Columns()


@dataclass(frozen=True)
class Plan:
    """One call.

    Attributes:
        spec: how the pixels are wanted.
        items: what there is, in order.
        once: stills are written once.
        table: int64 [items, COLUMNS.end].
        first: int32, ``Taps.first`` of all axes, one behind the other.
        weights: ``Taps.weights`` of all axes, flat.
        rows: patch rows.
        blocks: programs of the last pass.
        tiles: programs of the early pass, of ``tile_bytes`` each.
        middle_bytes: size of the buffer between the passes.
        tile_bytes: bytes of the buffer that one program of the early pass makes.
    """

    spec: PixelSpec
    items: tuple[Item, ...]
    once: bool
    table: Any
    first: Any
    weights: Any
    rows: int
    blocks: int
    tiles: int
    middle_bytes: int
    tile_bytes: int

    @property
    def launches(self) -> int:
        """Kernel launches on a GPU, whatever the number of items."""
        return 1 + (self.tiles > 0)

    @property
    def row_values(self) -> int:
        """Values in a patch row."""
        return self.spec.row_values(once=self.once)


class _TapStore:
    """Tap tables one behind the other; each distinct axis once."""

    def __init__(self, resample: str) -> None:
        self._make = bilinear_taps if resample == "bilinear" else bicubic_taps
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._taps: list[Taps] = []
        self._first = self._weights = 0

    def place(self, source: int, target: int) -> tuple[int, int, int]:
        """Where the table of an axis begins in ``first`` and ``weights``, and its taps."""
        key = (source, target)
        if key not in self._places:
            taps = self._make(source, target)
            self._taps.append(taps)
            self._places[key] = (self._first, self._weights, taps.weights.shape[1])
            self._first += taps.first.size
            self._weights += taps.weights.size
        return self._places[key]

    def arrays(self) -> tuple[Any, Any]:
        """Both arrays; never empty, as a kernel takes their addresses."""
        if not self._taps:
            return np.zeros(1, np.int32), np.zeros(1, np.int32)
        return (
            np.concatenate([t.first for t in self._taps]),
            np.concatenate([t.weights.ravel() for t in self._taps]),
        )


def make_plan(
    packed_bytes: int,
    items: Sequence[Item],
    spec: PixelSpec,
    *,
    once: bool = False,
    tile_bytes: int = 2048,
) -> Plan:
    """Lay out a call.

    Args:
        packed_bytes: size of the packed pixels.
        items: what lies in them, one behind the other.
        spec: how the pixels are wanted.
        once: write stills once; then there may be no videos, whose rows are longer.
        tile_bytes: see ``Plan``.

    Raises:
        PixelError: an item can't be served, or the items and the pixels do not fit together.
    """
    items = tuple(Item(*item) for item in items)
    check_batch(spec, items, packed_bytes, once=once)
    store = _TapStore(spec.resample)
    table: Any = np.zeros((len(items), COLUMNS.end), np.int64)
    source = row = block = tile = middle = 0
    for line, item in zip(table, items, strict=True):
        depth, down, across = grid_of(spec, item)
        line[[COLUMNS.source, COLUMNS.frames, COLUMNS.height, COLUMNS.width]] = (
            source,
            item.frames,
            item.height,
            item.width,
        )
        line[[COLUMNS.row, COLUMNS.block]] = row, block
        line[[COLUMNS.blocks_down, COLUMNS.blocks_across]] = (
            down // spec.merge_size,
            across // spec.merge_size,
        )
        _place_axes(line, item, store, spec)
        line[[COLUMNS.middle, COLUMNS.tile]] = middle, tile
        if line[COLUMNS.early]:
            frame_bytes = int(line[COLUMNS.middle_height] * line[COLUMNS.middle_width]) * CHANNELS
            if frame_bytes > MAX_FRAME_BYTES:
                raise PixelError(
                    f"image of {item.height}x{item.width} pixels to {item.target_height}x"
                    f"{item.target_width}: between the passes a frame may have at most "
                    f"{MAX_FRAME_BYTES} bytes"
                )
            line[COLUMNS.middle_stride] = _ceil(frame_bytes, ALIGN_BYTES) * ALIGN_BYTES
            middle += int(line[COLUMNS.middle_stride]) * item.frames
            tile += _ceil(frame_bytes, tile_bytes) * item.frames
        source += item.source_bytes
        row += patch_rows_of(spec, item)
        block += depth * int(line[COLUMNS.blocks_down] * line[COLUMNS.blocks_across])
    first, weights = store.arrays()
    if spec.resample == "bilinear":
        weights = weights.astype(np.float32)
    return Plan(spec, items, once, table, first, weights, row, block, tile, middle, tile_bytes)


def _place_axes(line: Any, item: Item, store: _TapStore, spec: PixelSpec) -> None:
    """Taps of both axes, and for bicubic the order of the passes."""
    resized = []
    lengths = (
        (COLUMNS.down, item.height, item.target_height),
        (COLUMNS.across, item.width, item.target_width),
    )
    # Bilinear weighs along both axes at once, so it needs both tables or none.
    both = spec.resample == "bilinear" and any(s != t for _, s, t in lengths)
    for axis, source, target in lengths:
        if both or source != target:
            line[axis : axis + 3] = store.place(source, target)
            resized.append(axis)
    line[[COLUMNS.middle_height, COLUMNS.middle_width]] = item.height, item.width
    if spec.resample == "bilinear" or not resized:
        return
    down_first = columns_first(item.height, item.width, item.target_height, item.target_width)
    resized.sort(
        reverse=not down_first
    )  # COLUMNS.across before COLUMNS.down unless Pillow has it otherwise
    line[COLUMNS.last] = resized[-1]
    if len(resized) == 2:
        line[COLUMNS.early] = resized[0]
        if down_first:
            line[COLUMNS.middle_height] = item.target_height
        else:
            line[COLUMNS.middle_width] = item.target_width


def _ceil(value: int, step: int) -> int:
    return -(-value // step)
