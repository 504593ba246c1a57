# SPDX-License-Identifier: Apache-2.0
"""CPU backend without PyTorch: arrays of numpy, in processes that decode as in those that serve.

numba is imported at the first call, not before: vLLM's CPU worker walks all modules when it starts
and fails on llvmlite's. The work is shared by threads of our own, because numba's are tied to a
threading layer that either dies when a process forks or may not be entered twice.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from mimo_plugin.core.pixels import CHANNELS, Item, PixelSpec, grid_of
from mimo_plugin.kernels.preprocess.plan import COLUMNS, Plan, make_plan
from mimo_plugin.kernels.preprocess.taps import byte_values

logger = logging.getLogger("vllm.mimo_plugin")

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "uint8": 3}
"""Output types, as ``loops`` counts them."""

_SHARES = 4
# Below so many values per thread, starting it costs more than it saves.
_LEAST_VALUES = 1 << 17


def storage(dtype: str) -> Any:
    """The type of numpy that holds values of ``dtype``: itself, or their bits as uint16."""
    return np.dtype(dtype if dtype in ("float32", "uint8") else np.uint16)


class FrameRows:
    """Writes the patch rows of a video frame by frame, in any order.

    Args:
        spec: how the pixels are wanted.
        item: the video before and after the resize.
        dtype: of the rows, one of ``KINDS``.

    Attributes:
        shape: of the rows as bytes, [t, h * w, bytes of a row].

    Raises:
        PixelError: the item can't be served.
        ImportError: there is no numba.
    """

    def __init__(self, spec: PixelSpec, item: Item, dtype: str) -> None:
        still = item._replace(frames=1)
        self._plan = make_plan(still.source_bytes, [still], spec, once=True)
        self._dtype, self._item, self._depth = dtype, item, spec.temporal_patch_size
        self._area = spec.patch_size**2
        self._line: Any = np.empty((self._plan.rows, self._plan.row_values), storage(dtype))
        self.shape = (
            grid_of(spec, item)[0],
            self._plan.rows,
            spec.row_values() * storage(dtype).itemsize,
        )
        _loops()

    def write(self, pixels: Any, position: int, out: Any) -> None:
        """Put a frame into its place; the last one also fills what is left of its patch.

        Args:
            pixels: uint8 [height, width, 3].
            position: of the frame in the video.
            out: uint8 of ``shape``, at an address that suits the type.
        """
        run(self._plan, np.ascontiguousarray(pixels).reshape(-1), self._line, self._dtype, 1)
        patches, rows, _ = self.shape
        columns = (CHANNELS, self._depth, self._area)
        target = out.view(self._line.dtype).reshape(patches, rows, *columns)
        values = self._line.reshape(rows, CHANNELS, self._area)
        last = position == self._item.frames - 1
        for place in range(position, patches * self._depth if last else position + 1):
            target[place // self._depth, :, :, place % self._depth] = values


def run(plan: Plan, packed: Any, out: Any, dtype: str, threads: int) -> None:
    """Make the patch rows of a plan.

    Args:
        plan: what to make.
        packed: uint8 [bytes].
        out: [rows, row values] of ``storage(dtype)``, filled.
        dtype: one of ``KINDS``.
        threads: how many to use at most.

    Raises:
        ImportError: there is no numba.
    """
    spec, kind = plan.spec, KINDS[dtype]
    loops = _loops()
    values = _encoded_values(spec, dtype)
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
        _share(loops.bilinear, (*inputs, out, sizes, plan.once, kind), int(jobs[-1]), threads)
        return
    middle: Any = np.empty(plan.middle_bytes, np.uint8)
    if plan.tiles:
        with_early = plan.table[:, COLUMNS.early] > 0
        lines_each = plan.table[:, COLUMNS.frames] * plan.table[:, COLUMNS.middle_height]
        ends = np.cumsum(np.where(with_early, lines_each, 0))
        _share(loops.early, (packed, *table, ends, *taps, middle), int(ends[-1]), threads)
    with_middle = (packed, *table, jobs, *taps, values, middle)
    _share(loops.bicubic, (*with_middle, out, sizes, plan.once), int(jobs[-1]), threads)


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
def _encoded_values(spec: PixelSpec, dtype: str) -> Any:
    """[3, 256], what a byte becomes, as the loops store it: the nearest value, ties to even."""
    values = byte_values(spec)
    if dtype in ("float32", "uint8"):
        return values.astype(dtype)
    if dtype == "float16":
        with np.errstate(over="ignore"):  # too large becomes infinite
            return values.astype(np.float16).view(np.uint16)
    bits = values.copy().view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


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
