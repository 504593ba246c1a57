# SPDX-License-Identifier: Apache-2.0
"""Pictures of concurrent requests: vLLM's decoding threads against the decoding pool.

    make bench BENCH=media
    python -m benchmarks.media --json out/bench/media.json

Many requests with one JPEG each arrive at once, as data URLs; each is fetched through vLLM's media
connector, or through the plugin's, and its pixels are read once, as a processor does. Meanwhile a
text request would only need the event loop: a task that wants to run every 2 ms says how late it
runs. Each figure is the median of the rounds, in which both ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((480, 640, 256), (1200, 1600, 64), (3000, 4000, 16))
"""Height, width and requests at once: 0.3, 2 and 12 megapixels."""

TICK_S = 0.002
LARGE = "3000x4000"


@dataclass(frozen=True)
class Round:
    """One burst of requests.

    Attributes:
        wall_s: until the last one has its pixels.
        server_cpu_s: CPU time of the server's process alone.
        late_p90_s: how late the event loop ran a task, 90th percentile.
        late_max_s: the same, at most.
    """

    wall_s: float
    server_cpu_s: float
    late_p90_s: float
    late_max_s: float


def jpeg_url(height: int, width: int) -> str:
    """A picture of soft noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    out = io.BytesIO()
    picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    picture.save(out, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


async def burst(connector: Callable[[], Any], url: str, requests: int) -> Round:
    """Serve ``requests`` at once."""
    loop, late_s = asyncio.get_running_loop(), []
    done = asyncio.Event()

    async def tick() -> None:
        while not done.is_set():
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - due_s)

    async def request() -> None:
        item = await connector().fetch_image_async(url)
        await loop.run_in_executor(None, np.array, item.media)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    late_s.clear()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(request() for _ in range(requests)))
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    await asyncio.sleep(TICK_S)
    done.set()
    await ticking
    return Round(wall_s, cpu_s, float(np.percentile(late_s, 90)), max(late_s))


def measure(
    sizes: Sequence[tuple[int, int, int]], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by size, then way, then field of :class:`Round`."""
    from vllm.multimodal.media import MediaConnector

    from mimo_plugin.engines.vllm.media import MimoMediaConnector

    ways: dict[str, Callable[[], Any]] = {"stock": MediaConnector, "plugin": MimoMediaConnector}
    found = {}
    for height, width, requests in sizes:
        url = jpeg_url(height, width)
        runs: dict[str, list[Round]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, connector in ways.items():
                one = asyncio.run(burst(connector, url, requests))
                if number:  # the first one starts threads and processes
                    runs[name].append(one)
        found[f"{height}x{width}"] = {
            name: {
                field: statistics.median(asdict(one)[field] for one in rows)
                for field in asdict(rows[0])
            }
            for name, rows in runs.items()
        }
    return found


def claims(found: dict[str, Any], how: str, rounds: int) -> list[dict[str, Any]]:
    """Ratios plugin / stock of the largest pictures."""
    stock, plugin = found[LARGE]["stock"], found[LARGE]["plugin"]
    ids = {
        "media_wall_12mp": ("wall_s", "< 1", "time until 16 requests have their pixels"),
        "media_server_cpu_12mp": ("server_cpu_s", "< 0.5", "CPU time of the API process"),
        "media_loop_late_12mp": ("late_max_s", "< 0.5", "longest delay of the event loop"),
    }
    return [
        {
            "id": name,
            "value": plugin[field] / stock[field],
            "stock": 1.0,
            "bound": bound,
            "unit": "plugin / stock",
            "seeds": rounds,
            "how": f"{how}; {what}",
        }
        for name, (field, bound, what) in ids.items()
    ]


def plot(found: dict[str, Any], path: Path) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"wall_s": "all pixels there", "late_max_s": "longest delay of the event loop"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(8, 3))
    for axis, (field, title) in zip(axes, panels.items(), strict=True):
        for shift, name, colour in ((-0.2, "stock", "#868e96"), (0.2, "plugin", "#d9480f")):
            values = [1e3 * ways[name][field] for ways in found.values()]
            axis.bar([n + shift for n in range(len(found))], values, 0.38, color=colour, label=name)
        axis.set_xticks(range(len(found)), list(found))
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("ms")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.media", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/media.json"))
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else 9
    found = measure(SIZES, rounds)
    how = "python -m benchmarks.media" + (" --quick" if options.quick else "")
    listed = claims(found, how, rounds)
    requests = {f"{height}x{width}": number for height, width, number in SIZES}
    heads = f"{'wall ms':>8} {'server CPU ms':>14} {'loop late ms':>20}"
    print(f"{'JPEG':>11} {'at once':>8} {'':>7} {heads}")
    for size, ways in found.items():
        for name, one in ways.items():
            late = f"{1e3 * one['late_p90_s']:.1f} p90, {1e3 * one['late_max_s']:.1f} max"
            print(
                f"{size:>11} {requests[size]:>8} {name:>7} {1e3 * one['wall_s']:8.0f} "
                f"{1e3 * one['server_cpu_s']:14.0f} {late:>20}"
            )
    for claim in listed:
        print(f"  {claim['id']:24} {claim['value']:.3f}  ({claim['bound']})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    written = {"claims": listed, "medians": found, "requests": requests}
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    plot(found, options.json.with_suffix(".png"))
    print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
