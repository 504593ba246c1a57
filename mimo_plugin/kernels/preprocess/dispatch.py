# SPDX-License-Identifier: Apache-2.0
"""The entry: packed pixels to patch rows, by the backend that is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from mimo_plugin.core.pixels import Item, PixelSpec

logger = logging.getLogger("vllm.mimo_plugin")

BACKENDS = ("auto", "triton", "cpu", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of normalised rows; those of ``PixelSpec.as_bytes`` are uint8."""


class BackendError(RuntimeError):
    """A backend that was asked for can't run here; one line: found, needed, fix."""


def patch_rows(
    packed: Any,
    items: Sequence[Item],
    spec: PixelSpec,
    *,
    dtype: Any,
    backend: str = "auto",
    once: bool = False,
    threads: int | None = None,
) -> Any:
    """Resize, normalise and cut into patches.

    A video whose frames are no multiple of the temporal patch size repeats its last frame; a still
    is repeated over the whole patch.

    Args:
        packed: uint8, 1-D, contiguous: the frames of the items as RGB lines, one behind the other.
        items: what lies in it, in order.
        spec: how the checkpoint wants its pixels.
        dtype: of the result: float32, bfloat16 or float16; uint8 for a spec made ``as_bytes``.
        backend: one of ``BACKENDS``. ``auto`` logs once what it takes; any other never gives way
            to another one.
        once: write stills once instead of ``temporal_patch_size`` times; then there may be no
            videos, and the patch embedding needs the weights of ``fold.fold_patch_embed``.
        threads: of the backend ``cpu``, at most; PyTorch's number without it.

    Returns:
        [sum of t*h*w, C*T*P*P] on the device of ``packed`` (T is 1 with ``once``): rows in the
        order (t, bh, bw, mh, mw), columns in the order (C, T, P, P).

    Raises:
        PixelError: an item can't be served, or items and pixels do not fit together.
        BackendError: the backend can't run here.
        TypeError: ``packed`` or ``dtype`` is of the wrong type.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
        raise TypeError(
            f"packed pixels: found {packed.dtype} with shape {tuple(packed.shape)}; needed: "
            "contiguous torch.uint8 with one dimension"
        )
    allowed = (torch.uint8,) if spec.keeps_bytes else DTYPES
    if dtype not in allowed:
        raise TypeError(
            f"dtype of patch rows: found {dtype}; allowed: {', '.join(map(str, allowed))}"
        )
    name = chosen_backend(packed.device, backend)
    module = importlib.import_module(f"mimo_plugin.kernels.preprocess.{name}")
    options = {"threads": threads} if name == "cpu" else {}
    return module.patch_rows(packed, items, spec, dtype=dtype, once=once, **options)


def chosen_backend(device: Any, backend: str = "auto") -> str:
    """The backend that runs for pixels on ``device``.

    Raises:
        BackendError: it can't run here.
        ValueError: there is none of that name.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"pixel backend: found {backend!r}; allowed: {', '.join(BACKENDS)}; fix: take auto"
        )
    kind = torch.device(device).type
    if backend != "auto":
        reason = _why_not(backend, kind)
        if reason:
            raise BackendError(f"pixel backend {backend}: {reason}")
        return backend
    return _automatic(kind)


@lru_cache(maxsize=8)
def _automatic(kind: str) -> str:
    """The fastest that runs; says so once for each kind of device."""
    reasons = []
    for name in ("cpu",) if kind == "cpu" else ("triton",):
        reason = _why_not(name, kind)
        if reason is None:
            logger.info("pixel backend auto: %s for pixels on %s", name, kind)
            return name
        reasons.append(f"{name}: {reason}")
    logger.warning(
        "pixel backend auto: reference (slow) for pixels on %s; %s", kind, "; ".join(reasons)
    )
    return "reference"


def _why_not(name: str, kind: str) -> str | None:
    """Why a backend can't take pixels on such a device: found, needed, fix."""
    if name == "cpu":
        if kind != "cpu":
            return f"found pixels on {kind}; needed: in host memory; fix: take triton or auto"
        if importlib.util.find_spec("numba") is None:
            return "found no numba; needed: numba; fix: install it, or take reference"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "found no triton; needed: triton; fix: install it, or take cpu or reference"
        if kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "found pixels on cpu; needed: on a GPU; fix: take cpu or auto"
    return None
