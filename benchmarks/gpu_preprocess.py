# SPDX-License-Identifier: Apache-2.0
"""The Triton pixel kernels on a GPU: right, and how far from what its memory allows.

Needs torch, triton and numpy, and this repository; no engine, no Pillow. First every kind of item
is compared with the reference (and, where there is numba, to the bit with the CPU backend); then
batches are timed with cold caches, launches only, beside the time that the bytes any implementation
must move (``Traffic.minimum``) take at the bandwidth of a large copy in the same run. Takes about a
minute after the kernels are compiled.

Run: ``python -m benchmarks.gpu_preprocess [--quick] [--json PATH]``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mimo_plugin.core.pixels import IMAGENET_MEAN, IMAGENET_STD, Item, PixelSpec, target_size
from mimo_plugin.kernels.preprocess import reference

MAX_PIXELS = 2880 * 2880
FLUSH_BYTES = 512 * 2**20
COPY_BYTES = 2**30
BOUND = 2e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spec_of(resample: str, patch: int = 16, merge: int = 2, depth: int = 2) -> PixelSpec:
    """ImageNet's mean and standard deviation; the published MiMo-V2.5 sizes."""
    return PixelSpec(
        resample, IMAGENET_MEAN, IMAGENET_STD, patch, merge, depth, 4 * 32**2, MAX_PIXELS
    )


def pixels(items: list[Item], seed: int = 0) -> Any:
    """Random bytes for the items, on the host."""
    size = sum(item.source_bytes for item in items)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def kinds(side: int) -> list[Item]:
    """Enlarged, shrunk, along one side, not at all; stills and videos."""
    return [
        Item(1, 3 * side + 5, 2 * side - 3, 2 * side, 3 * side),
        Item(1, side, 2 * side, side, 2 * side),
        Item(3, side + 3, 2 * side + 7, side, side),
        Item(5, 2 * side, 19, 2 * side, side),
        Item(1, 9 * side + 1, side + 1, side, side),
        Item(1, 1, 7, side, 2 * side),
        Item(1, 1500, 2100, 32 * side, 40 * side),
    ]


def check() -> list[str]:
    """Lines about what is wrong; none if all is right."""
    from mimo_plugin.kernels.preprocess import cpu, triton

    with_host = importlib.util.find_spec("numba") is not None
    wrong = []
    for resample in ("bilinear", "bicubic"):
        for patch, merge, depth in ((16, 2, 2), (14, 2, 2), (8, 1, 3)):
            spec = spec_of(resample, patch, merge, depth)
            items = kinds(spec.factor)
            for once in (False, True):
                chosen = [item for item in items if item.frames == 1] if once else items
                packed = pixels(chosen)
                exact = reference.patch_rows(packed, chosen, spec, dtype=torch.float32, once=once)
                for dtype in DTYPES:
                    found = triton.patch_rows(packed.cuda(), chosen, spec, dtype=dtype, once=once)
                    found = found.cpu()
                    name = f"{resample} patch {patch} merge {merge} {dtype} once {once}"
                    # A half type may round the other way: one step of the largest values.
                    step = {torch.float32: BOUND, torch.bfloat16: 2**-6, torch.float16: 2**-9}
                    error = float((found.float() - exact.to(dtype).float()).abs().max())
                    if error > (0.0 if resample == "bicubic" else step[dtype]):
                        wrong.append(f"{name}: differs from the reference by {error:.2e}")
                    if with_host:
                        host = cpu.patch_rows(packed, chosen, spec, dtype=dtype, once=once)
                        differ = float((found != host).float().mean())
                        if differ:
                            wrong.append(f"{name}: {differ:.2e} of the values not the CPU's bits")
    return wrong


def gpu_s(call: Callable[[], Any], flush: Any, repeats: int) -> float:
    """Median seconds of a call's kernels with cold caches."""
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def bandwidth(flush: Any, repeats: int) -> float:
    """Bytes per second of a large copy, read and written bytes added."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / gpu_s(lambda: target.copy_(source), flush, repeats)


def batches() -> list[tuple[str, str, list[Item], bool]]:
    """Name, resample, items and whether stills are written once."""
    spec = spec_of("bilinear")

    def still(height: int, width: int) -> Item:
        return Item(1, height, width, *target_size(spec, height, width))

    large, square, photo = still(4096, 4096), still(1024, 1024), still(1080, 1920)
    return [
        ("4096x4096", "bilinear", [large], False),
        ("4096x4096, once", "bilinear", [large], True),
        ("32 of 1024x1024", "bilinear", [square] * 32, False),
        ("32 of 1000x1000", "bilinear", [Item(1, 1000, 1000, 1024, 1024)] * 32, False),
        ("16 of 1080x1920", "bilinear", [photo] * 16, False),
        ("64 frames 720x1280", "bilinear", [Item(64, 720, 1280, 448, 800)], False),
        ("4096x4096", "bicubic", [large], False),
        ("32 of 1024x1024", "bicubic", [square] * 32, False),
        ("32 of 1000x1000", "bicubic", [Item(1, 1000, 1000, 1024, 1024)] * 32, False),
    ]


def measure(repeats: int) -> tuple[float, list[dict[str, Any]]]:
    """Bandwidth, and a row for each batch."""
    from mimo_plugin.kernels.preprocess import triton
    from mimo_plugin.kernels.preprocess.traffic import bytes_touched

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rate = bandwidth(flush, repeats)
    rows = []
    for name, resample, items, once in batches():
        packed = pixels(items).pin_memory()
        there = packed.cuda()
        spec = spec_of(resample)
        batch = triton.Batch(packed.numel(), items, spec, there.device, once=once)
        out = batch.launch(there, torch.bfloat16)
        taken = gpu_s(lambda b=batch, t=there, o=out: b.launch(t, o.dtype, o), flush, repeats)
        copied = gpu_s(lambda t=there, p=packed: t.copy_(p, non_blocking=True), flush, repeats)
        moved = bytes_touched(batch.plan, 2)
        floor = moved.minimum / rate
        rows.append(
            {
                "batch": name,
                "resample": resample,
                "launches": batch.plan.launches,
                "time_us": 1e6 * taken,
                "floor_us": 1e6 * floor,
                "time_over_floor": taken / floor,
                "bytes_ratio": moved.ratio,
                "h2d_us": 1e6 * copied,
            }
        )
    return rate, rows


def main(argv: list[str] | None = None) -> int:
    """Check, time, print, write JSON; 1 when something is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_preprocess", description=__doc__
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpu_preprocess.json"))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device; nothing was run")
        return 2
    if importlib.util.find_spec("triton") is None:
        print("no triton in this environment; nothing was run")
        return 2
    started = time.monotonic()
    device = torch.cuda.get_device_name()
    wrong = check()
    print(f"{device}: " + ("values are right" if not wrong else f"{len(wrong)} WRONG"))
    print("\n".join(wrong))
    rate, rows = measure(repeats=10 if options.quick else 50)
    print(f"bandwidth of a copy: {rate / 1e12:.2f} TB/s; times without the copy to the device")
    for row in rows:
        print(
            f"  {row['resample']:9} {row['batch']:20} {row['launches']} launches "
            f"{row['time_us']:8.1f} us, floor {row['floor_us']:7.1f} us, "
            f"time / floor {row['time_over_floor']:5.2f}; to the device {row['h2d_us']:7.1f} us"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    seconds = round(time.monotonic() - started, 1)
    written = {
        "device": device,
        "bandwidth_bytes_per_s": rate,
        "wrong": wrong,
        "batches": rows,
        "seconds": seconds,
    }
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.json} in {seconds} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
