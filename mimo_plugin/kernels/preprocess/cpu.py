# SPDX-License-Identifier: Apache-2.0
"""CPU backend: from bytes to patch rows in one pass, compiled by numba.

numba is imported at the first call, not before: vLLM's CPU worker walks all modules when it starts
and fails on llvmlite's. The work is shared by threads of our own, because numba's are tied to a
threading layer that either dies when a process forks or may not be entered twice.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mimo_plugin.core.pixels import Item, PixelSpec, grid_of
from mimo_plugin.kernels.preprocess.plan import COLUMNS, Plan, make_plan
from mimo_plugin.kernels.preprocess.taps import byte_values

logger = logging.getLogger("vllm.mimo_plugin")

KINDS: dict[Any, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
"""Output types, as ``loops`` counts them."""

MIDDLE_LIMIT_BYTES = 128 * 2**20
"""Size of the buffer between two bicubic passes above which a call is done in parts."""

_SHARES = 4
# Below so many values per thread, starting it costs more than it saves.
_LEAST_VALUES = 1 << 17


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
    out = _empty(plan.rows, plan.row_values, dtype)
    bytes_ = packed.numpy()
    threads = torch.get_num_threads() if threads is None else max(1, threads)
    if plan.middle_bytes <= MIDDLE_LIMIT_BYTES:
        _run(plan, bytes_, out, threads)
        return out
    start = row = 0
    for item in _parts(plan):
        part = make_plan(item.source_bytes, [item], spec, once=once)
        pixels = bytes_[start : start + item.source_bytes]
        _run(part, pixels, out[row : row + part.rows], threads)
        start += item.source_bytes
        row += part.rows
    return out


def _empty(rows: int, values: int, dtype: Any) -> Any:
    """A tensor in memory of numpy, which asks the kernel for huge pages: a quarter of the time for
    the page faults of a large one."""
    memory: Any = np.empty((rows, values), f"u{dtype.itemsize}")
    return torch.from_numpy(memory).view(dtype)


def _parts(plan: Plan) -> Iterator[Item]:
    """Items, and videos in pieces of whole patches, whose buffers keep to the limit."""
    depth = plan.spec.temporal_patch_size
    for item, stride in zip(plan.items, plan.table[:, COLUMNS.middle_stride], strict=True):
        patches = max(1, MIDDLE_LIMIT_BYTES // max(1, int(stride) * depth))
        for first in range(0, item.frames, patches * depth):
            yield item._replace(frames=min(patches * depth, item.frames - first))


def _run(plan: Plan, packed: Any, out: Any, threads: int) -> None:
    """Fill ``out`` [rows, row values]."""
    spec, kind = plan.spec, KINDS[out.dtype]
    loops = _loops()
    target = _stored(out)
    values = _encoded_values(spec, out.dtype)
    lines = [grid_of(spec, item) for item in plan.items]
    jobs = np.cumsum([depth * down for depth, down, _ in lines])
    sizes = (spec.patch_size, spec.merge_size, spec.temporal_patch_size)
    threads = max(1, min(threads, plan.rows * plan.row_values // _LEAST_VALUES))
    table = (plan.table, COLUMNS)
    taps = (plan.first, plan.weights)
    if spec.resample == "bilinear":
        mean = np.array(spec.mean, np.float32)
        std = np.array(spec.std, np.float32)
        inputs = (packed, *table, jobs, *taps, values, mean, std)
        _share(loops.bilinear, (*inputs, target, sizes, plan.once, kind), int(jobs[-1]), threads)
        return
    middle: Any = np.empty(plan.middle_bytes, np.uint8)
    if plan.tiles:
        with_early = plan.table[:, COLUMNS.early] > 0
        lines_each = plan.table[:, COLUMNS.frames] * plan.table[:, COLUMNS.middle_height]
        ends = np.cumsum(np.where(with_early, lines_each, 0))
        _share(loops.early, (packed, *table, ends, *taps, middle), int(ends[-1]), threads)
    with_middle = (packed, *table, jobs, *taps, values, middle)
    _share(loops.bicubic, (*with_middle, target, sizes, plan.once), int(jobs[-1]), threads)


def _share(function: Any, fixed: tuple[Any, ...], jobs: int, threads: int) -> None:
    """Call ``function(*fixed, begin, end)`` so that the ranges cover ``jobs``."""
    _compile(function, fixed)
    if threads == 1 or jobs < 2:
        function(*fixed, 0, jobs)
        return
    shares = min(jobs, threads * _SHARES)
    bounds = [jobs * i // shares for i in range(shares + 1)]
    pool = _pool(threads, os.getpid())
    ranges = zip(bounds, bounds[1:], strict=False)
    for future in [pool.submit(function, *(*fixed, begin, end)) for begin, end in ranges]:
        future.result()


@lru_cache(maxsize=8)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A pool of this process: a forked child has the object, but not the threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"mimo-pixels-{process}")


@lru_cache(maxsize=64)
def _encoded_values(spec: PixelSpec, dtype: Any) -> Any:
    """[3, 256], what a byte becomes, as the loops store it."""
    return _stored(torch.from_numpy(byte_values(spec).copy()).to(dtype))


def _stored(values: Any) -> Any:
    """A tensor as the loops store it: numpy has no bfloat16."""
    if values.dtype in (torch.float32, torch.uint8):
        return values.numpy()
    return values.view(torch.int16).numpy().view(np.uint16)


_compile_lock = threading.Lock()


@lru_cache(maxsize=1)
def _loops() -> Any:
    """The loops; their compiled code is kept on disk where numba finds a place to write."""
    try:
        loops = importlib.import_module("mimo_plugin.kernels.preprocess.loops")
    except ImportError as error:
        raise ImportError(
            f"pixel backend cpu: found no usable numba ({error}); needed: numba; fix: install it, "
            "or take the backend reference"
        ) from error
    for function in loops.ENTRIES:
        try:
            function.enable_caching()
        except RuntimeError as error:
            logger.info("CPU pixel code is compiled anew in each process: %s", error)
    return loops


def _compile(function: Any, fixed: tuple[Any, ...]) -> None:
    """Have the code for these types; an empty range does nothing else.

    Code on disk may be damaged, of a user who may read it only, or the disk be full: then it is
    compiled without the disk.
    """
    with _compile_lock:
        try:
            function(*fixed, 0, 0)
        except Exception as error:
            logger.warning("CPU pixel code could not be kept on disk: %s", error)
            function._cache = importlib.import_module("numba.core.caching").NullCache()
            function(*fixed, 0, 0)
