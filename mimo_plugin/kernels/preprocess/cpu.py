# SPDX-License-Identifier: Apache-2.0
"""CPU backend: from bytes to patch rows in one pass, compiled by numba; tensors around ``host``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mimo_plugin.core.pixels import Item, PixelSpec
from mimo_plugin.kernels.preprocess.host import run, storage
from mimo_plugin.kernels.preprocess.plan import COLUMNS, Plan, make_plan

MIDDLE_LIMIT_BYTES = 128 * 2**20
"""Size of the buffer between two bicubic passes above which a call is done in parts."""


def patch_rows(
    packed: Any,
    items: Sequence[Item],
    spec: PixelSpec,
    *,
    dtype: Any,
    once: bool = False,
    threads: int | None = None,
) -> Any:
    """See ``dispatch.patch_rows``.

    Args:
        packed: uint8 [bytes] on the CPU.
        items: what lies in it.
        spec: how the pixels are wanted.
        dtype: of the result.
        once: write stills once.
        threads: how many to use at most; PyTorch's number without it.

    Raises:
        PixelError: an item can't be served.
        ImportError: there is no numba.
    """
    plan = make_plan(packed.numel(), items, spec, once=once)
    name = str(dtype).removeprefix("torch.")
    # Memory of numpy, which asks the kernel for huge pages: a quarter of the time for page faults.
    rows: Any = np.empty((plan.rows, plan.row_values), storage(name))
    whole = dtype in (torch.float32, torch.uint8)
    out = torch.from_numpy(rows if whole else rows.view(np.int16)).view(dtype)
    bytes_ = packed.numpy()
    threads = torch.get_num_threads() if threads is None else max(1, threads)
    if plan.middle_bytes <= MIDDLE_LIMIT_BYTES:
        run(plan, bytes_, rows, name, threads)
        return out
    start = row = 0
    for item in _parts(plan):
        part = make_plan(item.source_bytes, [item], spec, once=once)
        pixels = bytes_[start : start + item.source_bytes]
        run(part, pixels, rows[row : row + part.rows], name, threads)
        start += item.source_bytes
        row += part.rows
    return out


def _parts(plan: Plan) -> Iterator[Item]:
    """Items, and videos in pieces of whole patches, whose buffers keep to the limit."""
    depth = plan.spec.temporal_patch_size
    for item, stride in zip(plan.items, plan.table[:, COLUMNS.middle_stride], strict=True):
        patches = max(1, MIDDLE_LIMIT_BYTES // max(1, int(stride) * depth))
        for first in range(0, item.frames, patches * depth):
            yield item._replace(frames=min(patches * depth, item.frames - first))
