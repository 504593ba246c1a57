# SPDX-License-Identifier: Apache-2.0
"""What the CPU pays between a decoded image and its patch rows, plugin against stock.

Stock is vLLM's MiMo processor (``vllm.transformers_utils.processors.mimo_v2_omni``) on the CPU with
PyTorch's default threads; both sides start from decoded uint8 pixels and end with bfloat16 rows, as
the model takes them. Times are CPU seconds of the whole process (all threads), the least of several
runs, sides in turn. Errors are against stock. A 4K image alone and eight of them (user case B79)
are also timed by the clock on the wall, as a request waits for them. The Qwen part compares 1,000
random sizes with the Pillow processor of transformers. Launches and bytes of the GPU kernels follow
from their plans.

Run: ``python -m benchmarks.preprocess_cpu [--quick] [--json PATH]``
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

from mimo_plugin.core.pixels import Item, PixelSpec, mimo_spec, target_size
from mimo_plugin.core.qwen_pixels import qwen_spec
from mimo_plugin.kernels.preprocess import cpu, reference
from mimo_plugin.kernels.preprocess.plan import make_plan
from mimo_plugin.kernels.preprocess.traffic import Traffic, bytes_touched

VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
#: the limit in pixels of the published MiMo-V2.5 configuration, 8100 tokens
MAX_PIXELS = 2880 * 2880
#: (height, width); 1024 needs no resize
SIZES = ((4096, 4096), (3000, 4000), (1080, 1920), (1024, 1024), (333, 517))
QUICK_SIZES = ((4096, 4096), (1024, 1024))
#: (height, width) and batches of user case B79
SIZE_4K, BATCHES_4K = (2160, 3840), (1, 8)
QWEN_SIZES, QUICK_QWEN_SIZES = 1000, 100
QWEN_MAX_TOKENS = 64
SETTLE_S = 0.05


@dataclass(frozen=True)
class Cost:
    """CPU seconds from pixels to bfloat16 rows, and how far the rows are from stock's."""

    height: int
    width: int
    target_height: int
    target_width: int
    stock_s: float
    plugin_s: float
    max_abs_err_fp32: float
    fp32_differ: float
    bf16_differ: float
    bf16_max_err: float
    bf16_max_ulp: int

    @property
    def ratio(self) -> float:
        """Stock over plugin."""
        return self.stock_s / self.plugin_s


@dataclass(frozen=True)
class Batch:
    """Seconds for a batch of 4K images, and the largest difference from stock's float32 rows."""

    images: int
    stock_cpu_s: float
    plugin_cpu_s: float
    stock_wall_s: float
    plugin_wall_s: float
    max_abs_err_fp32: float


class Stock:
    """vLLM's processor, as far as a still goes through it."""

    def __init__(self, spec: PixelSpec) -> None:
        from vllm.transformers_utils.processors import mimo_v2_omni

        self.module, self.spec = mimo_v2_omni, spec
        self.processor = object.__new__(mimo_v2_omni.MiMoVLProcessor)
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            setattr(self.processor, name, getattr(spec, name))

    def rows(self, image: Any, dtype: Any) -> Any:
        """Patch rows of uint8 [H, W, C]."""
        spec = self.spec
        limits = (spec.factor, spec.min_pixels, spec.max_pixels)
        pixels, _, _ = self.module._transform_single(image.permute(2, 0, 1), *limits)
        rows, _ = self.processor._flatten_visual(pixels, "image")
        return rows.to(dtype)


def plugin_rows(spec: PixelSpec, images: Any, dtype: Any) -> Any:
    """The same by the plugin, for uint8 [H, W, C] or [N, H, W, C]."""
    height, width, _ = images.shape[-3:]
    item = Item(1, height, width, *target_size(spec, height, width))
    count = len(images) if images.dim() == 4 else 1
    return cpu.patch_rows(images.view(-1), [item] * count, spec, dtype=dtype)


def least_s(calls: list[Callable[[], Any]], repeats: int) -> list[tuple[float, float]]:
    """Least CPU seconds of the process, and seconds, for each call; the calls take turns."""
    best = [(float("inf"), float("inf"))] * len(calls)
    for _ in range(repeats):
        for number, call in enumerate(calls):
            # OpenMP's threads spin on after a call, which must not count for the next one.
            time.sleep(SETTLE_S)
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            call()
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            best[number] = (min(best[number][0], cpu_s), min(best[number][1], wall_s))
    return best


def photo(height: int, width: int, seed: int) -> Any:
    """uint8 [H, W, C] with smooth parts and noise."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 64 + 2, width // 64 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.integers(-20, 21, (height, width, 3))
    return torch.from_numpy(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))


def measure(spec: PixelSpec, sizes: tuple[tuple[int, int], ...], repeats: int) -> list[Cost]:
    """Costs and errors at each size."""
    stock, costs = Stock(spec), []
    for height, width in sizes:
        image = photo(height, width, seed=height)
        float_rows = [stock.rows(image, torch.float32), plugin_rows(spec, image, torch.float32)]
        half_rows = [stock.rows(image, torch.bfloat16), plugin_rows(spec, image, torch.bfloat16)]
        apart = ulps_apart(*half_rows)
        (stock_s, _), (plugin_s, _) = least_s(
            [
                lambda i=image: stock.rows(i, torch.bfloat16),
                lambda i=image: plugin_rows(spec, i, torch.bfloat16),
            ],
            repeats,
        )
        target = target_size(spec, height, width)
        costs.append(
            Cost(
                height,
                width,
                *target,
                stock_s,
                plugin_s,
                float((float_rows[0] - float_rows[1]).abs().max()),
                float((float_rows[0] != float_rows[1]).float().mean()),
                float((apart > 0).float().mean()),
                float((half_rows[0].float() - half_rows[1].float()).abs().max()),
                int(apart.max()),
            )
        )
    return costs


def batches_4k(spec: PixelSpec, repeats: int) -> list[Batch]:
    """User case B79: stock takes one image after the other, the plugin the batch in one call."""
    stock, found = Stock(spec), []
    image = photo(*SIZE_4K, seed=0)
    for count in BATCHES_4K:
        images = torch.stack([image.roll(i, 0) for i in range(count)])
        rows = torch.cat([stock.rows(one, torch.float32) for one in images])
        error = float((rows - plugin_rows(spec, images, torch.float32)).abs().max())
        del rows
        (stock_cpu_s, stock_wall_s), (plugin_cpu_s, plugin_wall_s) = least_s(
            [
                lambda i=images: [stock.rows(one, torch.bfloat16) for one in i],
                lambda i=images: plugin_rows(spec, i, torch.bfloat16),
            ],
            repeats,
        )
        times = (stock_cpu_s, plugin_cpu_s, stock_wall_s, plugin_wall_s)
        found.append(Batch(count, *times, error))
    return found


def ulps_apart(a: Any, b: Any) -> Any:
    """Steps from one bfloat16 to another; through 0 they are counted from both sides."""
    keys = []
    for rows in (a, b):
        bits = rows.view(torch.int16).int()
        keys.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (keys[0] - keys[1]).abs()


def qwen_identical(sizes: int) -> tuple[int, int]:
    """How many random sizes give transformers' rows and grid to the bit; reference and CPU."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * QWEN_MAX_TOKENS}
    spec, processor = qwen_spec({"size": size}), Qwen2VLImageProcessorPil(size=size)
    random = np.random.default_rng(0)
    same = [0, 0]
    for _ in range(sizes):
        height, width = (int(v) for v in np.exp(random.uniform(np.log(10), np.log(500), 2)))
        frame = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = processor(images=[Image.fromarray(frame)], return_tensors="pt")["pixel_values"]
        item = Item(1, height, width, *target_size(spec, height, width))
        pixels = torch.from_numpy(frame).flatten()
        for number, backend in enumerate((reference, cpu)):
            rows = backend.patch_rows(pixels, [item], spec, dtype=torch.float32)
            same[number] += torch.equal(rows, expected)
    return same[0], same[1]


def most_launches(spec: PixelSpec) -> int:
    """Kernel launches of a batch of 64 stills and 8 videos, the more of both rules."""
    most = 0
    for given in (spec, qwen_spec({})):
        items = [
            Item(1, 300 + 7 * i, 500 - 3 * i, given.factor * (1 + i % 5), given.factor * 7)
            for i in range(64)
        ]
        items += [Item(9, 360, 640, given.factor * 4, given.factor * 8)] * 8
        size = sum(item.source_bytes for item in items)
        most = max(most, make_plan(size, items, given).launches)
    return most


def traffic(spec: PixelSpec, height: int, width: int) -> Traffic:
    """Bytes that the GPU kernel moves for one still in bfloat16."""
    item = Item(1, height, width, *target_size(spec, height, width))
    return bytes_touched(make_plan(item.source_bytes, [item], spec), 2)


def claims(found: dict[str, Any], how: str) -> list[dict[str, Any]]:
    """One entry per claim id."""
    by_size: dict[tuple[int, int], Cost] = {(c.height, c.width): c for c in found["costs"]}
    large, small = by_size[4096, 4096], by_size[1024, 1024]
    moved: Traffic = found["traffic"]
    cpu_how = (
        f"{how}; value = stock CPU seconds / plugin CPU seconds, decoded uint8 pixels to bf16 rows"
    )
    rows = [
        ("cpu_ratio_4096", large.ratio, 1.0, ">= 5", "stock / plugin", cpu_how),
        ("cpu_ratio_1024", small.ratio, 1.0, ">= 2", "stock / plugin", cpu_how),
        (
            "max_abs_err_fp32",
            max(c.max_abs_err_fp32 for c in found["costs"]),
            0.0,
            "<= 2e-5",
            "normalised value",
            f"{how}; largest difference from stock's float32 rows, all sizes",
        ),
        (
            "launches_per_batch",
            found["launches"],
            None,
            "<= 2",
            "launches",
            f"{how}; from the plan of 64 stills and 8 videos, bilinear and bicubic",
        ),
        (
            "bytes_ratio_4096",
            moved.ratio,
            None,
            "<= 1.2",
            "bytes / minimum",
            f"{how}; from the plan: 4096x4096 to bf16 rows, L2 hits between programs not counted",
        ),
    ]
    names = ("id", "value", "stock", "bound", "unit", "how")
    return [dict(zip(names, row, strict=True)) | {"seeds": 1} for row in rows]


def table(costs: list[Cost]) -> list[str]:
    """Lines of the printed table."""
    lines = [
        f"  {'image':>11} {'rows of':>11} {'stock ms':>9} {'plugin ms':>9} {'ratio':>6}  fp32 error"
    ]
    for c in costs:
        lines.append(
            f"  {f'{c.height}x{c.width}':>11} {f'{c.target_height}x{c.target_width}':>11} "
            f"{1e3 * c.stock_s:9.1f} {1e3 * c.plugin_s:9.1f} {c.ratio:6.1f}  "
            f"{c.max_abs_err_fp32:.1e} ({c.fp32_differ:.1e} of the values differ; bf16: "
            f"{c.bf16_differ:.1e}, by at most {c.bf16_max_err:.1e} or {c.bf16_max_ulp} ulp)"
        )
    return lines


def table_4k(batches: list[Batch]) -> list[str]:
    """Lines about user case B79."""
    height, width = SIZE_4K
    return [
        f"B79, {b.images} x {height}x{width}: CPU {1e3 * b.stock_cpu_s:.0f} / "
        f"{1e3 * b.plugin_cpu_s:.0f} ms = {b.stock_cpu_s / b.plugin_cpu_s:.1f}, wait "
        f"{1e3 * b.stock_wall_s:.0f} / {1e3 * b.plugin_wall_s:.0f} ms = "
        f"{b.stock_wall_s / b.plugin_wall_s:.1f}; fp32 error {b.max_abs_err_fp32:.1e}"
        for b in batches
    ]


def plot(costs: list[Cost], path: Path) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    places = range(len(costs))
    for shift, name, colour in ((-0.2, "stock", "#868e96"), (0.2, "plugin", "#d9480f")):
        values = [1e3 * getattr(c, f"{name}_s") for c in costs]
        axis.barh([p + shift for p in places], values, 0.38, color=colour, label=name)
    for place, cost in zip(places, costs, strict=True):
        axis.text(1e3 * cost.stock_s, place - 0.2, f" {cost.ratio:.1f}x", va="center", fontsize=8)
    axis.set_yticks(places, [f"{c.height}x{c.width}" for c in costs])
    axis.set_xlabel("CPU milliseconds, decoded pixels to bfloat16 patch rows")
    axis.invert_yaxis()
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess_cpu", description=__doc__
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/preprocess_cpu.json"))
    parser.add_argument("--quick", action="store_true", help="two sizes, 100 Qwen sizes")
    options = parser.parse_args(argv)
    quick = options.quick

    started = time.monotonic()
    limits = {"image_max_pixels": MAX_PIXELS}
    spec = mimo_spec({"vision_config": VISION, "processor_config": limits}, {})
    costs = measure(spec, QUICK_SIZES if quick else SIZES, repeats=3 if quick else 7)
    batches = batches_4k(spec, repeats=2 if quick else 5)
    qwen_sizes = QUICK_QWEN_SIZES if quick else QWEN_SIZES
    identical = qwen_identical(qwen_sizes)
    found = {
        "costs": costs,
        "launches": most_launches(spec),
        "traffic": traffic(spec, 4096, 4096),
    }
    how = "python -m benchmarks.preprocess_cpu" + (" --quick" if quick else "")
    listed = claims(found, how)

    print(f"MiMo, {torch.get_num_threads()} PyTorch threads")
    print("\n".join([*table(costs), *table_4k(batches)]))
    print(
        f"Qwen: {identical[0]} (reference) and {identical[1]} (cpu) of {qwen_sizes} random sizes "
        "identical to transformers' Pillow processor"
    )
    for claim in listed:
        print(f"  {claim['id']:20} {claim['value']:.4g}  ({claim['bound']})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    bicubic = qwen_spec({"size": {"shortest_edge": 784, "longest_edge": MAX_PIXELS}})
    moved = {"bilinear": found["traffic"], "bicubic": traffic(bicubic, 4096, 4096)}
    written = {
        "claims": listed,
        "costs": [{**asdict(c), "ratio": c.ratio} for c in costs],
        "batches_4k": [asdict(b) for b in batches],
        "qwen_identical": {"sizes": qwen_sizes, "reference": identical[0], "cpu": identical[1]},
        "bytes_4096": {n: {**t._asdict(), "ratio": t.ratio} for n, t in moved.items()},
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - started, 1),
    }
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    plot(costs, options.json.with_suffix(".png"))
    print(f"wrote {options.json} in {written['seconds']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
