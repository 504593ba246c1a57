# SPDX-License-Identifier: Apache-2.0
"""From decoded media to the bytes that travel to the model's process.

An item travels as its RGB bytes at source size, or, where it is much larger than its target, as
finished patch rows in the model's dtype. Either way it is one-dimensional uint8; a line of
``SIZES`` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mimo_plugin.core.pixels import (
    CHANNELS,
    Item,
    PixelError,
    PixelSpec,
    grid_of,
    patch_rows_of,
    resize_on_host,
)
from mimo_plugin.engines.vllm.video.names import ROWS_KEY
from mimo_plugin.engines.vllm.vision.budget import check_budget
from mimo_plugin.engines.vllm.vision.limits import Limits, sized
from mimo_plugin.engines.vllm.vision.setup import VisionSetup
from mimo_plugin.kernels.preprocess.dispatch import patch_rows

SIZES = ("frames", "height", "width", "target_height", "target_width", "rows", "bytes")
"""Columns of the field with sizes; ``rows`` is 1 where the bytes are patch rows."""


class Packed(NamedTuple):
    """One image or video, ready to travel.

    Attributes:
        data: uint8, 1-D: RGB lines of all frames, or patch rows.
        item: source and target sizes.
        rows: whether ``data`` are patch rows.
        grid: patches in time, down and across.
    """

    data: Any
    item: Item
    rows: bool
    grid: tuple[int, int, int]

    @property
    def sizes(self) -> list[int]:
        """The line of ``SIZES``."""
        return [*self.item, int(self.rows), self.data.numel()]


def pack(
    frames: Any, setup: VisionSetup, limits: Limits, dtype: Any, *, once: bool = False
) -> Packed:
    """Pack one image or the frames of one video.

    Args:
        frames: uint8 numpy array [frames, height, width, 3].
        setup: of the engine.
        limits: of this request, for media of this kind.
        dtype: the model's; that of rows made here.
        once: rows made here hold a still once.

    Raises:
        PixelError: no frames, a size that the model has no target for, or more tokens than the
            engine's encoder takes.
    """
    item = sized(setup.spec, limits, *frames.shape[:3])
    check_budget(item, setup)
    data = torch.from_numpy(np.ascontiguousarray(frames).reshape(-1))
    on_host = resize_on_host(
        item.height * item.width,
        item.target_height * item.target_width,
        setup.config.host_resize_ratio,
    )
    if on_host:
        data = _host_rows(data, item, setup, dtype, once)
    return Packed(data, item, on_host, grid_of(setup.spec, item))


def pack_rows(
    rows: Any, metadata: Mapping[str, Any], setup: VisionSetup, limits: Limits, dtype: Any
) -> Packed:
    """Pack a video that the loader ``mimo`` has made patch rows of.

    Args:
        rows: uint8 numpy array, their bytes.
        metadata: of the video, with ``ROWS_KEY``.
        setup: of the engine.
        limits: of this request, for videos.
        dtype: the model's.

    Raises:
        PixelError: the request wants frames of another size, or the rows are not whole.
    """
    made = metadata[ROWS_KEY]
    item = sized(setup.spec, limits, len(metadata["frames_indices"]), *made["source"])
    check_budget(item, setup)
    found, needed = tuple(made["target"]), (item.target_height, item.target_width)
    if found != needed:
        raise PixelError(
            f"mm_processor_kwargs: found limits that make frames of {needed[0]}x{needed[1]} "
            f"pixels, the loader made {found[0]}x{found[1]}; allowed: the same limits for both; "
            "fix: give them under media_io_kwargs.video as well, or in --mm-processor-kwargs"
        )
    data = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1))
    size = patch_rows_of(setup.spec, item) * setup.spec.row_values() * dtype.itemsize
    if data.dtype != torch.uint8 or data.numel() != size:
        raise PixelError(
            f"patch rows of a video: found {data.numel()} values of {data.dtype}; needed: "
            f"{size} bytes"
        )
    return Packed(data, item, True, grid_of(setup.spec, item))


def host_backend(backend: str) -> str:
    """The backend for work in the API process, where one for the device only can't run."""
    return backend if backend in ("cpu", "reference") else "auto"


def _host_rows(data: Any, item: Item, setup: VisionSetup, dtype: Any, once: bool) -> Any:
    """Patch rows as bytes."""
    backend = host_backend(setup.config.backend)
    rows = patch_rows(data, [item], setup.spec, dtype=dtype, backend=backend, once=once)
    return rows.contiguous().view(torch.uint8).reshape(-1)


def unpack(data: Any, sizes: Any, spec: PixelSpec, *, dtype: Any, backend: str, once: bool) -> Any:
    """Patch rows of all items of a batch, in one kernel pass, on the device of ``data``.

    Args:
        data: uint8, 1-D: the packed items one behind the other.
        sizes: whole numbers [items, len(SIZES)], on the host.
        spec: of the checkpoint.
        dtype: the vision tower's; that of rows that came finished.
        backend: of the kernel.
        once: stills are written once, and come so.

    Returns:
        [sum of t*h*w, C*T*P*P].
    """
    items: list[Item] = []
    pieces: list[Any] = []
    finished: dict[int, Any] = {}
    cursor = 0
    lines = sizes.tolist()
    for index, line in enumerate(lines):
        *size, rows, byte_count = line
        piece = data[cursor : cursor + byte_count]
        cursor += byte_count
        item = Item(*size)
        if rows:
            # A copy of its own is aligned for the wider dtype.
            values = spec.row_values(once=once)
            finished[index] = piece.clone().view(dtype).reshape(-1, values)
        else:
            items.append(item)
            pieces.append(piece)
    if not items:
        return torch.cat(list(finished.values()))
    packed = data if not finished else torch.cat(pieces)
    made = patch_rows(packed, items, spec, dtype=dtype, backend=backend, once=once)
    if not finished:
        return made
    counts = [patch_rows_of(spec, item) for item in items]
    parts = iter(made.split(counts))
    return torch.cat([finished[i] if i in finished else next(parts) for i in range(len(lines))])


# --- decoded media ---------------------------------------------------------------------------


def image_frames(image: Any) -> Any:
    """One image as uint8 [1, height, width, 3].

    Args:
        image: a Pillow image of any mode, or an array or tensor of RGB values 0..255: [3, H, W] as
            PyTorch has them, or [H, W, 3].

    Raises:
        PixelError: another shape, or values that are no bytes.
    """
    if hasattr(image, "convert"):
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return np.array(rgb)[None]
    values = _as_bytes(image, "image")
    if values.ndim != 3:
        raise PixelError(f"image of shape {values.shape}: needed: [3, H, W] or [H, W, 3]")
    return _channels_last(values[None], "image")


def video_frames(video: Any) -> Any:
    """The frames of one video as uint8 [frames, height, width, 3].

    Args:
        video: an array or tensor of RGB values 0..255, [F, H, W, 3] or [F, 3, H, W].

    Raises:
        PixelError: another shape, or values that are no bytes.
    """
    values = _as_bytes(video, "video")
    if values.ndim != 4:
        raise PixelError(f"video of shape {values.shape}: needed: [F, H, W, 3] or [F, 3, H, W]")
    return _channels_last(values, "video")


def _channels_last(values: Any, what: str) -> Any:
    if values.shape[-1] == CHANNELS:
        return values
    if values.shape[1] == CHANNELS:
        return values.transpose(0, 2, 3, 1)
    raise PixelError(f"{what} of shape {values.shape}: needed: {CHANNELS} colour channels")


def _as_bytes(values: Any, what: str) -> Any:
    """Values 0..255 as uint8; others would lose what the model was to see."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.dtype == np.uint8:
        return array
    if array.dtype == object or not np.issubdtype(array.dtype, np.number):
        raise PixelError(f"{what} of type {array.dtype}: needed: numbers 0..255")
    as_bytes = np.clip(np.nan_to_num(array), 0, 255).astype(np.uint8)
    if not np.array_equal(as_bytes, array):
        raise PixelError(f"{what} of type {array.dtype}: needed: whole values 0..255")
    return as_bytes
