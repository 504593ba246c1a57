# SPDX-License-Identifier: Apache-2.0
"""What the CPU pays for an image of a Qwen-VL model, and how far stock's two processors are apart.

Costs are CPU seconds of the whole process from a decoded Pillow image to the rows of bytes that
vLLM's vision towers of that family take, the least of several runs, sides in turn: transformers'
Pillow processor, whose values the plugin gives, its torchvision processor, which vLLM takes by
default, and the plugin, of which the API process pays the last column where the model runs on a
GPU. Distances between the two processors are 8-bit levels over random sizes.

Run: ``python -m benchmarks.preprocess_qwen [--quick] [--json PATH]``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.preprocess_cpu import photo
from mimo_plugin.core.pixels import Item, target_size
from mimo_plugin.core.qwen_pixels import qwen_spec
from mimo_plugin.kernels.preprocess import cpu

#: limits in pixels of the published Qwen2-VL and Qwen2.5-VL preprocessors
LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}
#: (height, width) and the least ratio that is claimed
SIZES = {(4096, 4096): 1.5, (1024, 1024): 1.1}
SETTLE_S = 0.05
RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}


@dataclass(frozen=True)
class Cost:
    """CPU seconds for one image."""

    height: int
    width: int
    pillow_s: float
    torchvision_s: float
    plugin_s: float
    sent_s: float
    identical: bool
    """Whether the plugin's rows are the Pillow processor's, to the bit."""

    @property
    def ratio(self) -> float:
        """Stock with Pillow over plugin."""
        return self.pillow_s / self.plugin_s


@dataclass(frozen=True)
class Distance:
    """From the torchvision processor to the Pillow one, of 8-bit values."""

    kind: str
    sizes: int
    most: float
    mean: float
    differ: float


def processors(size: dict[str, int]) -> tuple[Any, Any]:
    """The Pillow and the torchvision processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessorPil(size=size), Qwen2VLImageProcessor(size=size)


def least_cpu_s(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Least CPU seconds of the process for each call; the calls take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for number, call in enumerate(calls):
            time.sleep(SETTLE_S)  # threads that spin on must not count for the next call
            started = time.process_time()
            call()
            best[number] = min(best[number], time.process_time() - started)
    return best


def cost(height: int, width: int, repeats: int) -> Cost:
    """Costs at a size."""
    pillow, torchvision = processors(LIMITS)
    spec = qwen_spec({"size": LIMITS}).as_bytes()
    image = Image.fromarray(photo(height, width, seed=height).numpy())
    item = Item(1, height, width, *target_size(spec, height, width))

    def stock() -> Any:
        return pillow([image], **RAW)["pixel_values"].to(torch.bfloat16)

    def sent() -> Any:
        return torch.from_numpy(np.array(image)).view(-1)

    def plugin() -> Any:
        return cpu.patch_rows(sent(), [item], spec, dtype=torch.uint8)

    identical = torch.equal(stock().to(torch.uint8), plugin())
    calls = [stock, lambda: torchvision([image], **RAW)["pixel_values"], plugin, sent]
    return Cost(height, width, *least_cpu_s(calls, repeats), identical)


def distance(kind: str, sizes: int) -> Distance:
    """How far the two processors are apart on ``noise`` or ``photo`` of random sizes."""
    pillow, torchvision = processors({"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28})
    random = np.random.default_rng(0)
    most = total = differ = count = 0.0
    for number in range(sizes):
        height, width = (int(v) for v in np.exp(random.uniform(np.log(40), np.log(1600), 2)))
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if kind == "photo":
            pixels = photo(height, width, seed=number).numpy()
        one, other = (p([Image.fromarray(pixels)], **RAW) for p in (pillow, torchvision))
        apart = (one["pixel_values"] - other["pixel_values"].float()).abs()
        most = max(most, float(apart.max()))
        total += float(apart.sum())
        differ += float((apart > 0).sum())
        count += apart.numel()
    return Distance(kind, sizes, most, total / count, differ / count)


def claims(costs: list[Cost], how: str) -> list[dict[str, Any]]:
    """One entry per claim id."""
    return [
        {
            "id": f"qwen_cpu_ratio_{found.height}",
            "value": found.ratio,
            "stock": 1.0,
            "bound": f">= {SIZES[found.height, found.width]}",
            "unit": "stock / plugin",
            "how": f"{how}; CPU seconds of transformers' Pillow processor / plugin's, to bytes",
            "seeds": 1,
        }
        for found in costs
    ]


def main(argv: list[str] | None = None) -> int:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess_qwen", description=__doc__
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/preprocess_qwen.json"))
    parser.add_argument("--quick", action="store_true", help="fewer runs and sizes")
    options = parser.parse_args(argv)
    started = time.monotonic()
    costs = [cost(*size, repeats=3 if options.quick else 7) for size in SIZES]
    apart = [distance(kind, 30 if options.quick else 120) for kind in ("photo", "noise")]
    how = "python -m benchmarks.preprocess_qwen" + (" --quick" if options.quick else "")
    for found in costs:
        times = [found.pillow_s, found.torchvision_s, found.plugin_s, found.sent_s]
        said = ", ".join(f"{1e3 * seconds:.1f}" for seconds in times)
        print(
            f"{found.height}x{found.width}: Pillow, torchvision, plugin, of that in the API "
            f"process: {said} ms; identical {found.identical}; ratio {found.ratio:.2f}"
        )
    for far in apart:
        print(
            f"torchvision from Pillow, {far.kind}: at most {far.most:.0f} levels, mean "
            f"{far.mean:.3f}, {100 * far.differ:.1f} % of the values differ"
        )
    written = {
        "claims": claims(costs, how),
        "costs": [asdict(found) for found in costs],
        "distances": [asdict(far) for far in apart],
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - started, 1),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.json} in {written['seconds']} s")
    return 0 if all(found.identical for found in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
