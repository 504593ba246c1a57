# SPDX-License-Identifier: Apache-2.0
"""What reading only the wanted frames of a video is worth, and that they are the right ones.

* same: every frame that the plugin gives, for clips with fixed and variable rate, with and without
  B frames, GOPs of 12 to 300, at 1 fps and with 32 frames, with 1 and 2 workers, against a full
  decode.
* cost: CPU time at 1 fps by GOP, against a full decode with the same library and one thread, and
  against the whole of stock vLLM's loader (OpenCV) where it is there.
* workers: time with one worker and with two, by turns. Other work on the machine makes it less; so
  the CPU time of the busier worker is given as well.
* memory: peaks of the worker that reads a long clip and of the server's side (shared memory counts
  for both), against their bounds, and the bounds of an hour.

Clips are made here with x264; they say nothing of other encoders' shares of reference frames.

Run: ``python -m benchmarks.video [--quick] [--json PATH] [--parts same,cost,workers,memory]``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.video_clips import FPS, Clip, full_decode, make, repeat
from benchmarks.video_memory import TOKEN, rules_at_1fps, server_bytes
from benchmarks.video_plot import plot
from mimo_plugin.core.frames import peak_bytes, plan_frames, uniform_indices
from mimo_plugin.core.pixels import MIMO_TOTAL_TOKENS
from mimo_plugin.media.video import VideoFile

PARTS = ("same", "cost", "workers", "memory")
CLAIM_GOP = 250
HOUR_S = 3600
HOUR_WORKERS = 4
HOUR_BITS_PER_S = 1_000_000
MEMORY_TIMEOUT_S = 400.0


def at_1fps(video: VideoFile) -> tuple[int, ...]:
    """Frames of the plan at 1 fps."""
    info = video.info
    rules = rules_at_1fps()
    return plan_frames(rules, info.total_frames, info.times_s, info.fps, info.duration_s).indices


def compare(clips: list[Clip]) -> list[dict[str, Any]]:
    """How many frames are those of a full decode, by clip, sampling and workers."""
    rows = []
    for clip in clips:
        data = make(clip)
        video = VideoFile(data)
        info = video.info
        reference = full_decode(data, set(range(clip.frames)))
        samplings = {
            "1 fps": list(at_1fps(video)),
            "32 frames": uniform_indices(info.total_frames, info.duration_s, num_frames=32),
        }
        for (name, wanted), workers in product(samplings.items(), (1, 2)):
            found = dict(video.frames(wanted, workers=workers))
            same = sum(
                position in found and np.array_equal(found[position], reference[index])
                for position, index in enumerate(wanted)
            )
            rows.append(
                {
                    "clip": clip.name,
                    "sampling": name,
                    "workers": workers,
                    "frames": len(wanted),
                    "same": same,
                }
            )
    return rows


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def cost(data: bytes, clip: Clip, rounds: int) -> dict[str, Any]:
    """CPU seconds of a full decode, the plugin's and stock's, by turns."""
    wanted = at_1fps(VideoFile(data))

    def ours() -> None:
        for _ in VideoFile(data).frames(wanted):
            pass

    ways: dict[str, Callable[[], object]] = {
        "full": lambda: full_decode(data, set(wanted)),
        "plugin": ours,
        "index": lambda: VideoFile(data),
    }
    stock = stock_loader(data, len(wanted))
    if stock is not None:
        ways["stock"] = stock
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            times[name].append(cpu_s(work))
    ratios = [a / b for a, b in zip(times["plugin"], times["full"], strict=True)]
    return {
        "clip": clip.name,
        "gop": clip.gop,
        "frames": clip.frames,
        "taken": len(wanted),
        "cpu_s": {name: round(statistics.median(found), 4) for name, found in times.items()},
        "ratio": round(statistics.median(ratios), 4),
        "worst": round(max(ratios), 4),
    }


def stock_loader(data: bytes, frames: int) -> Callable[[], object] | None:
    """The default loader of the vLLM in this environment, asked for as many frames."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
    except ImportError:
        return None
    loader = VIDEO_LOADER_REGISTRY.load("opencv")
    return lambda: loader.load_bytes(data, num_frames=frames)


def speed_up(data: bytes, rounds: int) -> dict[str, Any]:
    """Seconds with one worker and with two, by turns."""
    video = VideoFile(data)
    wanted = at_1fps(video)
    busiest: list[float] = []
    decode, lock = VideoFile._worker, threading.Lock()
    threads: list[float] = []

    def timed(self: VideoFile, runs: Any) -> Iterator[tuple[int, Any]]:
        before = time.thread_time()
        yield from decode(self, runs)
        with lock:
            threads.append(time.thread_time() - before)

    VideoFile._worker = timed  # type: ignore[method-assign]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    try:
        for _, workers in product(range(rounds), (1, 2)):
            threads.clear()
            started = time.perf_counter()
            for _ in video.frames(wanted, workers=workers):
                pass
            seconds[workers].append(time.perf_counter() - started)
            if workers == 2:
                busiest.append(sum(threads) / max(threads))
    finally:
        VideoFile._worker = decode  # type: ignore[method-assign]
    ratios = [a / b for a, b in zip(seconds[1], seconds[2], strict=True)]
    return {
        "one_s": [round(s, 3) for s in seconds[1]],
        "two_s": [round(s, 3) for s in seconds[2]],
        "best": round(min(seconds[1]) / min(seconds[2]), 3),
        "median": round(statistics.median(ratios), 3),
        "worst": round(min(ratios), 3),
        "by_cpu_time": round(statistics.median(busiest), 3),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def memory(data: bytes, times: int, folder: Path) -> list[dict[str, Any]]:
    """Peak memory of reading the clip ``times`` times behind itself, with 1 and 2 workers."""
    path = folder / "long.mp4"
    repeat(data, times, path)
    repeat(data, 1, folder / "warm-up.mp4")
    rows = []
    for workers in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.video_memory", str(path), str(workers)],
            capture_output=True,
            text=True,
            timeout=MEMORY_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"benchmarks.video_memory failed:\n{done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def hour_bounds() -> dict[str, int]:
    """Bounds of an hour of 720p at 1 fps, whose frames share MiMo's pixels, as bfloat16."""
    kept = MIMO_TOTAL_TOKENS * TOKEN * rules_at_1fps().temporal_patch_size * 3 * 2
    file_bytes = HOUR_S * HOUR_BITS_PER_S // 8
    return {
        "worker": peak_bytes(
            1280,
            720,
            total_frames=HOUR_S * FPS,
            workers=HOUR_WORKERS,
            file_bytes=file_bytes,
            kept_bytes=kept,
        ),
        "server": server_bytes(file_bytes, kept),
    }


def claims(found: dict[str, Any], how: str) -> list[dict[str, Any]]:
    """One entry for each claim whose part was run."""
    out: list[dict[str, Any]] = []

    def add(name: str, value: float, stock: Any, bound: Any, unit: str, **more: Any) -> None:
        entry = {"id": name, "value": value, "stock": stock, "bound": bound, "unit": unit}
        out.append({**entry, "seeds": [], "how": how, **more})

    if found["same"]:
        total = sum(row["frames"] for row in found["same"])
        same = sum(row["same"] for row in found["same"])
        worst = min(row["same"] / row["frames"] for row in found["same"])
        unit = "share of frames whose pixels are those of a full decode"
        add("frames_identical", same / total, 1.0, 1.0, unit, worst=worst, frames=total)
    for row in found["cost"]:
        if row["gop"] == CLAIM_GOP:
            unit = f"CPU time at 1 fps over that of a full decode, GOP {CLAIM_GOP}"
            times = row["cpu_s"]
            stock = round(times["stock"] / times["full"], 3) if "stock" in times else 1.0
            add("video_cpu_ratio_1fps", row["ratio"], stock, 0.6, unit, worst=row["worst"])
    if found["workers"]:
        row = found["workers"]
        unit = "time of one worker over that of two, best of several by turns"
        more = {name: row[name] for name in ("median", "worst", "by_cpu_time", "cores", "load")}
        add("video_two_worker_speedup", row["best"], 1.0, 1.6, unit, **more)
    if found["memory"]:
        unit = f"MB at most a process, an hour of 720p at 1 fps, {HOUR_WORKERS} workers, computed"
        stock_mb = HOUR_S * 1280 * 720 * 3 * 4 / 1e6
        shares = [
            row["measured_bytes"][side] / row["bound_bytes"][side]
            for row, side in product(found["memory"], ("worker", "server"))
        ]
        worst = round(max(shares), 3)
        sides = {side: round(size / 1e6, 1) for side, size in hour_bounds().items()}
        value = max(sides.values())
        more = {"worst_measured_over_bound": worst, "measured": found["memory"], "sides_mb": sides}
        add("video_peak_mb_1h_720p", value, round(stock_mb, 1), 1000.0, unit, **more)
    return out


def tables(found: dict[str, Any]) -> Iterator[str]:
    """What was measured, as text."""
    if found["same"]:
        yield f"{'clip':40}{'sampling':>12}{'workers':>9}{'frames':>8}{'same':>7}"
        for row in found["same"]:
            yield (
                f"{row['clip']:40}{row['sampling']:>12}{row['workers']:9}{row['frames']:8}"
                f"{row['same']:7}"
            )
    if found["cost"]:
        yield f"\n{'CPU s at 1 fps':40}{'full':>8}{'plugin':>8}{'index':>8}{'stock':>8}{'ratio':>8}"
        for row in found["cost"]:
            times = row["cpu_s"]
            shown = "".join(f"{times[n]:8.3f}" for n in ("full", "plugin", "index"))
            stock = f"{times['stock']:8.3f}" if "stock" in times else f"{'-':>8}"
            yield f"{row['clip']:40}{shown}{stock}{row['ratio']:8.3f}"
    if found["workers"]:
        row = found["workers"]
        yield (
            f"\none worker {min(row['one_s'])} s, two {min(row['two_s'])} s: {row['best']}x "
            f"(median {row['median']}, by CPU time {row['by_cpu_time']}; {row['cores']} cores, "
            f"load {row['load']})"
        )
    for row in found["memory"]:
        yield (
            f"\n{row['seconds_of_video']:.0f} s of 720p, {row['taken']} frames as {row['form']}, "
            f"{row['workers']} worker(s), floats at full size {row['float_bytes'] / 1e6:.0f} MB"
        )
        for side, measured in row["measured_bytes"].items():
            yield f"  {side}: {measured / 1e6:.0f} of {row['bound_bytes'][side] / 1e6:.0f} MB"


def main() -> int:
    """Run the parts, print tables, write JSON and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("out/video.json"))
    parser.add_argument("--quick", action="store_true", help="fewer and shorter clips")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    arguments = parser.parse_args()
    parts, quick = arguments.parts.split(","), arguments.quick
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    started = time.monotonic()
    found: dict[str, Any] = {"same": [], "cost": [], "workers": {}, "memory": []}
    if "same" in parts:
        gops = (12, 250) if quick else (12, 60, 250, 300)
        frames = 320 if quick else 640
        found["same"] = compare(
            [
                Clip(frames, 160, 96, gop, b_frames, variable)
                for gop, b_frames, variable in product(gops, (0, 3), (False, True))
            ]
        )
    frames = 1000 if quick else 1500
    kept: dict[int, bytes] = {}
    gops = (CLAIM_GOP,) if quick else (12, 60, CLAIM_GOP)
    for gop in gops if {"cost", "workers"} & set(parts) else ():
        clip = Clip(frames, 1280, 720, gop)
        if "cost" in parts or gop == CLAIM_GOP:
            kept[gop] = make(clip)
        if "cost" in parts:
            found["cost"].append(cost(kept[gop], clip, 3 if quick else 5))
    if "workers" in parts:
        found["workers"] = speed_up(kept[CLAIM_GOP], 4 if quick else 8)
    if "memory" in parts:
        clip = Clip(300, 1280, 720, CLAIM_GOP)
        with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder:
            found["memory"] = memory(make(clip), 3 if quick else 60, Path(folder))

    how = "python -m benchmarks.video" + (" --quick" if quick else "")
    listed = claims(found, how)
    print("\n".join(tables(found)) + "\n")
    for claim in listed:
        worst = f", worst {claim['worst']}" if claim.get("worst") is not None else ""
        print(f"  {claim['id']:26} {claim['value']}  (stock {claim['stock']}{worst})")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"claims": listed, **found, "seconds": round(time.monotonic() - started, 1)}
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(found, arguments.json.with_suffix(".png"))
    print(f"wrote {arguments.json} in {document['seconds']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
