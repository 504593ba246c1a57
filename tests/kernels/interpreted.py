# SPDX-License-Identifier: Apache-2.0
"""Run the Triton kernels in Triton's interpreter and print what differs from the other backends.

A process of its own, because ``TRITON_INTERPRET`` counts when triton is imported. Prints a JSON
object. bfloat16 is left out: the interpreter's stores truncate it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from mimo_plugin.core.pixels import Item, PixelSpec
from mimo_plugin.kernels.preprocess import cpu, reference, triton
from mimo_plugin.kernels.preprocess.plan import COLUMNS
from tests.kernels.pictures import mixed, pixels, spec_of

Case = tuple[str, PixelSpec, list[Item], Any, bool]


def cases() -> Iterator[Case]:
    """Name, specification, items, type, whether stills are written once."""
    for resample in ("bilinear", "bicubic"):
        for patch, merge, depth in ((16, 2, 2), (14, 2, 2), (8, 1, 3), (4, 3, 1)):
            spec = spec_of(resample, patch, merge, depth)
            shape = f"{resample}-{patch}-{merge}-{depth}"
            yield f"{shape}-float32", spec, mixed(spec), torch.float32, False
            if patch >= 14:
                items = mixed(spec, stills_only=True)
                yield f"{shape}-float16-once", spec, items, torch.float16, True
            if resample == "bicubic":
                yield f"{shape}-uint8", spec.as_bytes(), mixed(spec), torch.uint8, False


FAR = 2**31 + 7 * 16
"""Bytes (or values) past what 32 bits count; the memory before is never touched."""


def far(resample: str) -> bool:
    """Whether pixels, buffer and rows that lie beyond 32 bits are found."""
    spec = spec_of(resample, 4, 1, 1)
    items = [Item(1, 9, 11, 8, 4), Item(2, 5, 7, 4, 8)]
    packed = pixels(items)
    batch = triton.Batch(packed.numel(), items, spec, packed.device)
    expected = batch.launch(packed, torch.float16)
    rows = FAR // batch.plan.row_values + 1
    table = batch._tables[0].view(len(items), COLUMNS.end)
    table[:, COLUMNS.source] += FAR
    table[:, COLUMNS.middle] += FAR
    table[:, COLUMNS.row] += rows
    distant = torch.empty(FAR + packed.numel(), dtype=torch.uint8)
    distant[FAR:] = packed
    batch._middle = torch.empty(FAR + batch.plan.middle_bytes, dtype=torch.uint8)
    out = torch.empty(rows + batch.plan.rows, batch.plan.row_values, dtype=torch.float16)
    batch.launch(distant, torch.float16, out)
    return bool(torch.equal(out[rows:], expected))


def main() -> None:
    """Compare and print."""
    results = []
    for name, spec, items, dtype, once in cases():
        packed = pixels(items)
        batch = triton.Batch(packed.numel(), items, spec, packed.device, once=once)
        blank = float("nan") if dtype.is_floating_point else 0
        out = torch.full((batch.plan.rows, batch.plan.row_values), blank, dtype=dtype)
        found = batch.launch(packed, dtype, out)
        expected = reference.patch_rows(packed, items, spec, dtype=dtype, once=once)
        host = cpu.patch_rows(packed, items, spec, dtype=dtype, once=once)
        results.append(
            {
                "name": name,
                "error": float((found.float() - expected.float()).abs().max()),
                "written": not bool(found.isnan().any()),
                "same_as_cpu": bool(torch.equal(found, host)),
                "launches": batch.plan.launches,
            }
        )
    distant = {resample: far(resample) for resample in ("bilinear", "bicubic")}
    print(json.dumps({"cases": results, "far": distant}))


if __name__ == "__main__":
    main()
