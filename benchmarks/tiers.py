# SPDX-License-Identifier: Apache-2.0
"""Bytes and hits of the feature ``tiers`` on vLLM, against vLLM's own tiers, dense, and the ideal.

Real engines on a CPU with a tiny MiMo in float32 (2 full-attention and 12 sliding-window layers,
blocks of 128 tokens, as long as the window), real stores below host memory: files, Redis, Mooncake.
Ideal is vLLM's default, which keeps one window at the end of each prompt; dense is its
``prefix_cache_retention_interval`` ``None``, which keeps all windows.

* bytes stored and hits from host memory: a prompt of 1500 tokens, two that part from it, one that
  goes on, and chats;
* repairs: what moves when one tier has lost something;
* one of three stores is lost; the store is killed while requests run;
* a hot prompt that the device answers for, in a Mooncake under pressure, after a restart;
* with ``--traces``: what other ladders would store and lose, without an engine.

Run: ``python -m benchmarks.tiers [--quick] [--json PATH] [--traces DIR]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.tiers_claims import claims, plot, table
from benchmarks.tiers_engine import Job, stock_connector
from benchmarks.tiers_services import Mooncake
from benchmarks.tiers_traces import replay_all, trace_table
from mimo_plugin.engines.vllm.tiers.names import TIER, TIER_MODULE
from tools import tiny_mimo

MODEL = tiny_mimo.TinyMiMo(
    layers=14, full_every=7, window_tokens=128, full_kv_heads=2, swa_kv_heads=2
)
HOST_GIB = 0.5
#: host memory of engines whose hits are to come from a store
SMALL_HOST_GIB = 0.03
LEASE_S, TOUCH_S = 10.0, 1.0
LIMIT_S = 1500.0
DENSE: dict[str, Any] = {"prefix_cache_retention_interval": None}


def size_jobs(model: str, quick: bool) -> list[Job]:
    """Bytes and hits of each rule."""
    options: dict[str, Any] = {"seeds": [0], "chats": 1, "chat_seeds": []}
    if not quick:
        options = {"seeds": [0, 1, 2], "chats": 4, "chat_seeds": [0, 1]}
    stock = stock_connector(int(HOST_GIB * (1 << 30)))
    ends = {"classes": ["prompt_end"], "outputs": False}
    return [
        Job("dense", "sizes", model, connector=stock, arguments=DENSE, options=options),
        Job("ladder", "sizes", model, settings={"host_gib": HOST_GIB}, options=options),
        Job("ideal", "sizes", model, connector=stock, options=options),
        Job(
            "prompt_ends",
            "sizes",
            model,
            settings={"host_gib": HOST_GIB, **ends},
            options=options | {"chat_seeds": []},
        ),
    ]


def repair_jobs(model: str, folder: Path) -> list[Job]:
    """What moves when something is missing."""
    ours, stock = folder / "repairs", folder / "repairs_stock"
    tier = {"type": "fs", "root_dir": str(stock)}
    settings = {"host_gib": HOST_GIB, "path": str(ours), "capacity_gib": 1, "touch_interval_s": 0}
    return [
        Job(
            "repairs",
            "repairs",
            model,
            settings=settings,
            options={"seed": 0, "folder": str(ours), "pattern": "*.page"},
        ),
        Job(
            "repairs_stock",
            "repairs",
            model,
            connector=stock_connector(int(HOST_GIB * (1 << 30)), [tier]),
            options={"seed": 0, "folder": str(stock), "pattern": "*.bin"},
        ),
    ]


def failing_jobs(model: str, quick: bool) -> list[Job]:
    """Stores that are lost."""
    kills = {"seed": 0, "requests": 24, "prefixes": 8, "kills": 2}
    if not quick:
        kills = {"seed": 0, "requests": 200, "prefixes": 24, "kills": 6}
    small = {"host_gib": SMALL_HOST_GIB}
    return [
        *(
            Job(
                f"ring_{store}_{seed}",
                "ring",
                model,
                settings={"host_gib": HOST_GIB},
                options={"seed": seed, "prompts": 3 if quick else 10, "store": store},
            )
            for seed in range(1 if quick else 2)
            for store in (("file",) if quick else ("file", "redis"))
        ),
        Job("kills_reference", "reference", model, options=kills),
        Job("kills", "kills", model, settings=small, options=kills),
    ]


def keep_alive_jobs(model: str, quick: bool, stack: ExitStack) -> list[Job]:
    """A hot prompt in Mooncake, ours and with vLLM's manager over the same kind of store."""
    options = {"seed": 0, "cold": 8 if quick else 24}
    jobs = []
    for name in ("keepalive", "keepalive_stock"):
        store = stack.enter_context(Mooncake(16 if quick else 48, LEASE_S))
        place = {"store": "mooncake", "path": store.address}
        settings: dict[str, Any] | None = {"host_gib": HOST_GIB, "touch_interval_s": TOUCH_S}
        connector = None
        if name == "keepalive":
            assert settings is not None
            settings |= place
        else:
            settings = None
            tier = {"type": TIER, "module_path": TIER_MODULE, "settings": place}
            connector = stock_connector(int(HOST_GIB * (1 << 30)), [tier], over_store=True)
        jobs += [
            Job(name, "traffic", model, settings, connector, options=options),
            Job(
                f"{name}_restarted",
                "restarted",
                model,
                settings,
                connector,
                options=options,
                after=name,
            ),
        ]
    return jobs


def run(jobs: list[Job], folder: Path, workers: int) -> dict[str, Any]:
    """Results by job.

    Raises:
        RuntimeError: a job failed; with the end of what it said.
    """
    given = json.dumps([asdict(job) for job in jobs])
    command = [sys.executable, "-m", "benchmarks.tiers_engine", str(folder), str(workers)]
    subprocess.run(command, input=given, text=True, check=False, timeout=LIMIT_S)
    found = {}
    for job in jobs:
        path = folder / f"{job.name}.json"
        if not path.exists():
            log = folder / f"{job.name}.log"
            said = log.read_text(errors="replace").splitlines() if log.exists() else []
            raise RuntimeError("\n".join([f"{job.name}: the engine failed", *said[-25:]]))
        found[job.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def seeds_of(jobs: list[Job]) -> dict[str, list[int]]:
    """By claim."""
    by_name = {job.name: job.options for job in jobs}
    sizes, one = by_name["ladder"], [0]
    return {
        "ladder_bytes_vs_dense": sizes["seeds"],
        "ladder_hits_equal_dense": sorted({*sizes["seeds"], *sizes["chat_seeds"]}),
        "prompt_end_bytes_vs_ideal": sizes["seeds"],
        "keepalive_fraction": one,
        "repair_excess_bytes": one,
        "ring_lose_one_hit_fraction": sorted(
            {job.options["seed"] for job in jobs if job.scenario == "ring"}
        ),
        "kill9_failed_requests": one,
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers")
    parser.add_argument("--json", type=Path, default=Path("out/bench/tiers.json"))
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--traces", type=Path, help="folder with Mooncake-style *.jsonl traces")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)

    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        model = str(tiny_mimo.make(folder / "model", MODEL))
        jobs = [
            *keep_alive_jobs(model, arguments.quick, stack),
            *failing_jobs(model, arguments.quick),
            *size_jobs(model, arguments.quick),
            *repair_jobs(model, folder),
        ]
        found = run(jobs, folder, arguments.workers)
    how = "python -m benchmarks.tiers" + (" --quick" if arguments.quick else "")
    listed = claims(found, seeds_of(jobs), how)
    print("\n".join(table(found)))
    replayed = replay_all(arguments.traces) if arguments.traces is not None else []
    print("\n".join(trace_table(replayed)))
    for claim in listed:
        print(f"  {claim['id']:28} {claim['value']}  (stock {claim['stock']})")

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "claims": listed,
        "results": found,
        "traces": [asdict(each) for each in replayed],
        "seconds": round(time.monotonic() - started_s),
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(found, arguments.json.with_suffix(".png"))
    print(f"wrote {arguments.json} and {arguments.json.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
