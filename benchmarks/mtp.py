# SPDX-License-Identifier: Apache-2.0
"""What all of MiMo's MTP layers are worth, and that they change no token.

* acceptance: a real engine in float32 with the trained tiny checkpoint and held-out source code as
  prompts, longer than the window: stock, the plugin (cold, cached, with ``kv``, prompts cut into
  chunks) and the plugin with one property taken away. Plain torch decodes the same beside it.
* load: one batch of 8 requests of 180 tokens: no speculation, 1 to 3 drafts, lengths by measured
  acceptance, and a schedule that asks for no drafts, the plugin's and stock's. Engines take turns;
  CPU time is compared, as other work on the machine disturbs it least. Kernels are interpreted and
  the model has 4 layers beside the 3 of MTP, so these times say little of a GPU and a large model.

Model Runner V2 runs on the CPU here (``tools/model_runner_v2.py``), for every engine alike.

Run: ``python -m benchmarks.mtp [--quick] [--json PATH] [--prompts N]``
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.mtp_claims import Found, acceptance_table, claims, emitted, load_table
from benchmarks.mtp_engine import Engine, Pass, Result
from benchmarks.mtp_plot import plot
from benchmarks.mtp_reference import DRAFTS, acceptance, reference
from tools import tiny_trained

PARTS = ("acceptance", "load")
PROMPTS, QUICK_PROMPTS = 150, 16
OUTPUTS, FIRST_OUTPUTS = 16, 6
CHUNK_TOKENS = 128
LOAD_REQUESTS, LOAD_OUTPUTS = 8, 180
#: batches of 5 and more draft nothing
SCHEDULE = [[1, 4, 2], [5, 512, 0]]
ENGINE_TIMEOUT_S = 600.0
WORKERS = min(2, os.cpu_count() or 1)


def speculation(drafts: int, **options: Any) -> dict[str, Any]:
    """vLLM's speculative configuration."""
    return {"method": "mtp", "num_speculative_tokens": drafts, **options}


def acceptance_engines(prompts: int, quick: bool) -> list[Engine]:
    """No speculation, stock, the plugin, and the plugin with one property taken away."""
    cold = (Pass("cold", OUTPUTS),)
    twice = (*cold, Pass("cached", OUTPUTS, cold=False))
    three = speculation(DRAFTS)

    def ours(name: str, passes: tuple[Pass, ...], **options: Any) -> Engine:
        options = {"features": ("mtp",), "speculative": three, **options}
        return Engine(name, passes, prompts, **options)

    engines = [
        Engine("none", cold, prompts),
        Engine("stock", cold, prompts, speculative=three),
        # Once is enough to see that the first outputs' rounds don't depend on where a request ends.
        ours("ours", (*twice, Pass("short", FIRST_OUTPUTS)) if quick else twice),
        ours("no_prompt", cold, change="no_prompt"),
    ]
    if quick:
        return engines
    chunks = {"max_num_batched_tokens": CHUNK_TOKENS}
    return [
        *engines,
        ours("ours_kv", twice, features=("mtp", "kv")),
        ours("ours_chunked", cold, arguments=chunks),
        ours("stock_window", cold, change="stock_window"),
        ours("chained", cold, change="chained"),
        ours("first_layer_prompt", cold, change="first_layer_prompt"),
    ]


def load_engines(quick: bool) -> list[Engine]:
    """Engines with 8 requests; those whose times are compared take turns."""
    passes = (Pass("cold", 40 if quick else LOAD_OUTPUTS),)

    def ours(name: str, **options: Any) -> Engine:
        options = {"speculative": speculation(DRAFTS), **options}
        return Engine(name, passes, LOAD_REQUESTS, features=("mtp",), **options)

    schedule = speculation(2, num_speculative_tokens_per_batch_size=SCHEDULE)
    turn = [
        Engine("load_none", passes, LOAD_REQUESTS),
        ours("load_schedule", speculative=schedule),
    ]
    if quick:
        return turn
    return [
        *turn,
        Engine("load_stock_schedule", passes, LOAD_REQUESTS, speculative=schedule),
        *(ours(f"load_k{k}", speculative=speculation(k)) for k in range(1, DRAFTS + 1)),
        ours("load_adaptive", settings={"adaptive_length": True}),
        *turn,
    ]


def run_engine(engine: Engine, keep: Path | None = None) -> tuple[str, dict[str, Result]]:
    """Name and results of one engine, which runs in a fresh process.

    With the folder ``keep`` results are kept there, and taken from there when the same engine with
    the same weights ran before.
    """
    given = json.dumps(dataclasses.asdict(engine))
    started = time.monotonic()
    kept = None
    if keep is not None:
        key = given + tiny_trained.weights_sha256(tiny_trained.CHECKPOINT)
        kept = keep / f"{engine.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if kept.exists():
            return engine.name, read_results(kept)
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder:
        path = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.mtp_engine", str(path)],
            input=given,
            text=True,
            stderr=subprocess.PIPE,
            timeout=ENGINE_TIMEOUT_S,
        )
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-25:])
            raise RuntimeError(f"{engine.name}: the engine failed\n{tail}")
        results = read_results(path)
        if kept is not None:
            shutil.copy(path, kept)
    print(f"  {engine.name} in {time.monotonic() - started:.0f} s", flush=True)
    return engine.name, results


def read_results(path: Path) -> dict[str, Result]:
    """Results by pass, as an engine's process wrote them."""
    written = json.loads(path.read_text(encoding="utf-8"))
    results = {name: Result(**result) for name, result in written.items()}
    for result in results.values():
        result.rounds = [(r[0], r[1], r[2], r[3]) for r in result.rounds]
    return results


def check(found: Found) -> None:
    """Raise RuntimeError where a configuration was not what its name says."""
    for name, passes in found.passes.items():
        for pass_name, result in passes.items():
            cached = min(result.cached_tokens)
            if (pass_name == "cached") != (cached > 0):
                raise RuntimeError(f"{name}, {pass_name}: least cached tokens of a prompt {cached}")
            if (name == "ours_chunked") != (result.cut_prompts > 0):
                raise RuntimeError(f"{name}, {pass_name}: prompts cut {result.cut_prompts} times")
    ours = found.passes.get("ours", {})
    if "short" in ours:
        whole, short = (
            acceptance(ours[name].rounds, 0, FIRST_OUTPUTS) for name in ("cold", "short")
        )
        if whole != short:
            raise RuntimeError(f"first {FIRST_OUTPUTS} outputs: {whole}, ending there: {short}")


def document(found: Found) -> dict[str, Any]:
    """Everything measured, without tokens and single rounds."""
    passes = {}
    for name, by_pass in found.passes.items():
        for pass_name, result in by_pass.items():
            passes[f"{name}/{pass_name}"] = {
                f"first_{FIRST_OUTPUTS}": vars(acceptance(result.rounds, 0, FIRST_OUTPUTS)),
                f"first_{OUTPUTS}": vars(acceptance(result.rounds)),
                "cached_tokens_min": min(result.cached_tokens),
                "cut_prompts": result.cut_prompts,
                "seconds": round(result.seconds, 2),
                "cpu_s": round(result.cpu_s, 2),
                "start_s": round(result.start_s, 2),
            }
    torch = {
        mode: {f"first_{end}": vars(acceptance(rounds, 0, end)) for end in (FIRST_OUTPUTS, OUTPUTS)}
        for mode, rounds in found.torch_rounds.items()
    }
    load = [
        {
            "name": name,
            "emitted_per_verified": round(emitted(r)[1], 4),
            "cpu_s": round(r.cpu_s, 2),
            "seconds": round(r.seconds, 2),
        }
        | {"all": vars(acceptance(r.rounds))}
        for name, r in found.load
    ]
    return {"prompts": found.prompts, "engine": passes, "torch": torch, "load": load}


def main(argv: list[str] | None = None) -> int:
    """Run, print the tables, write JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mtp", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/mtp.json"))
    parser.add_argument("--quick", action="store_true", help="few prompts and configurations")
    parser.add_argument("--prompts", type=int, help=f"held-out prompts (default {PROMPTS})")
    parser.add_argument(
        "--engines", type=int, default=1, help="engines at a time where no time is measured"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for results of the acceptance part's engines; a run that was cut off goes on "
        "from there (empty it when the code has changed)",
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="leave the others out")
    options = parser.parse_args(argv)
    quick = options.quick
    parts = options.only or (["acceptance"] if quick else list(PARTS))
    prompts = options.prompts or (QUICK_PROMPTS if quick else PROMPTS)

    started, weights = time.monotonic(), tiny_trained.weights_sha256(tiny_trained.CHECKPOINT)
    found = Found(prompts, FIRST_OUTPUTS, OUTPUTS)
    if "acceptance" in parts:
        modes = ("exact", "layer0") if quick else ("exact", "chained", "layer0")
        torch = reference(prompts, OUTPUTS, modes, WORKERS)
        found.torch_outputs, found.torch_rounds = torch.outputs, torch.rounds
        print(f"  plain torch in {time.monotonic() - started:.0f} s", flush=True)
        with ThreadPoolExecutor(options.engines) as pool:
            engines = acceptance_engines(prompts, quick)
            found.passes = dict(pool.map(partial(run_engine, keep=options.keep), engines))
    if "load" in parts:
        ran = map(run_engine, load_engines(quick))
        found.load = [(name, passes["cold"]) for name, passes in ran]
    if tiny_trained.weights_sha256(tiny_trained.CHECKPOINT) != weights:
        raise RuntimeError("the checkpoint changed while it was measured")
    check(found)

    how = "python -m benchmarks.mtp" + (" --quick" if quick else "")
    how += "".join(f" --only {part}" for part in options.only or ())
    if options.prompts:
        how += f" --prompts {prompts}"
    listed = claims(found, how)
    if found.passes:
        print("\nAcceptance (tokens gained by a round; share accepted by draft position)")
        print("\n".join(acceptance_table(found)))
    if found.load:
        print(f"\n{LOAD_REQUESTS} requests, one batch")
        print("\n".join(load_table(found)))
    print()
    for claim in listed:
        print(f"  {claim['id']:24} {claim['value']}  (stock {claim['stock']})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    seconds = round(time.monotonic() - started, 1)
    written = {
        "claims": listed,
        "weights_sha256": weights,
        **document(found),
        "seconds": seconds,
    }
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if found.passes:
        plot(found, options.json.with_suffix(".png"))
    print(f"wrote {options.json} in {seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
