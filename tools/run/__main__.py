# SPDX-License-Identifier: Apache-2.0
"""Command line of the comparison; see :mod:`tools.run`."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tools import tiny_mimo
from tools.run import compare, drafts, drafts_page, page
from tools.run.replay import replay, warm_up
from tools.run.text import ChatText, chat_text, load_tokenizer
from tools.run.workload import Shape, build_sessions, lengths, turn_order
from tools.server import ServerError, VllmServer, is_cpu_build

ROOT = Path(__file__).resolve().parents[2]
TINY_SCALE = 0.25
"""Lengths of the tiny model's workload, relative to those of a real deployment."""
TINY_BLOCKS = 2600
"""Pool of the tiny model's servers: small enough that the whole workload does not fit."""
TINY_BLOCK_TOKENS = 16
BOUND_BLOCK_TOKENS = 16
"""Granularity of the unlimited cache that the figures are compared with."""
SAMPLE_CHARACTERS = 3000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.run",
        description="Compare stock vLLM and vLLM with the plugin on one workload.",
    )
    parser.add_argument("--model", help="model path or name; default: a tiny MiMo made here")
    parser.add_argument("--plugin", default="mimo:kv", help="value of --plugin (default mimo:kv)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "run", help="default: out/run")
    parser.add_argument("--quick", action="store_true", help="a quarter of the sessions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, help="factor on all lengths in tokens")
    parser.add_argument("--concurrency", type=int, default=3, help="requests in flight")
    parser.add_argument("--blocks", type=int, help="KV pool in blocks; default: engine's choice")
    parser.add_argument("--dtype", help="default: float32 for the tiny model, else auto")
    parser.add_argument(
        "--engine-args", default="", help="more arguments for both servers, as one string"
    )
    parser.add_argument(
        "--no-drafts", action="store_true", help="leave out the section on speculation"
    )
    parser.add_argument("--stock-twice", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Plan:
    """What to run, resolved from the command line; ``tiny`` when the model is made here."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.tiny = options.model is None
        self.out.mkdir(parents=True, exist_ok=True)
        self.model = options.model or str(tiny_mimo.make(self.out / "tiny-mimo"))
        self.dtype = options.dtype or ("float32" if self.tiny else "auto")
        scale = options.scale or (TINY_SCALE if self.tiny else 1.0)
        shape = Shape(seed=options.seed).scaled(scale)
        self.shape = shape.quick() if options.quick else shape
        self.blocks: int | None = options.blocks
        if self.tiny and self.blocks is None:
            full = Shape()
            share = (self.shape.chats + self.shape.agents) / (full.chats + full.agents)
            self.blocks = round(TINY_BLOCKS * share * scale / TINY_SCALE)
        self.tokenizer = load_tokenizer(self.model)
        self.text: ChatText = chat_text(self.tokenizer)
        self.counts = lengths(self.shape, self.text)
        self.order = turn_order(self.counts, self.shape.seed, options.concurrency)

    @property
    def exact(self) -> bool:
        """Whether answers must be identical: only fp32 is free of the noise that flips tokens."""
        return self.dtype in ("float32", "float")

    @property
    def ready_timeout_s(self) -> float:
        """Longest start-up of a server."""
        return 300.0 if self.tiny else 3600.0

    def server_arguments(self) -> list[str]:
        """Arguments that both servers get."""
        arguments = ["--enable-prompt-tokens-details", f"--dtype={self.dtype}"]
        if self.blocks is not None:
            arguments.append(f"--num-gpu-blocks-override={self.blocks}")
        if self.tiny:
            arguments += [
                f"--block-size={TINY_BLOCK_TOKENS}",
                "--max-model-len=16384",
                "--max-num-batched-tokens=1024",
                "--max-num-seqs=16",
            ]
        if is_cpu_build():
            arguments.append("--enforce-eager")
        return arguments + shlex.split(self.options.engine_args)

    def run(self, name: str, plugin: str | None) -> compare.Outcome:
        """Start one server, play the whole workload, stop the server."""
        arguments = self.server_arguments() + (["--plugin", plugin] if plugin else [])
        server = VllmServer(
            self.model,
            arguments=arguments,
            log=self.out / f"{name}.log",
            name=name,
            ready_timeout_s=self.ready_timeout_s,
        )
        print(f"[run] {name}: starting {shlex.join(server.command)}", flush=True)
        with server:
            print(f"[run] {name}: ready after {server.start_up_s:.0f} s", flush=True)
            warm_up(server, self.text.encode("warm up " * 200))
            if plugin:
                compare.require_plugin_metrics(server.metrics())
            started = time.monotonic()
            sessions = build_sessions(self.shape, self.text)
            records = replay(server, sessions, self.order, self.options.concurrency, name)
            wall_s = time.monotonic() - started
            samples = server.metrics()
        return compare.Outcome(name, records, server.start_up_s, wall_s, samples)

    def drafts_setup(self) -> drafts.Setup | dict[str, Any]:
        """What the section on speculation serves, or the section that says why there is none."""
        options = self.options
        try:
            if options.no_drafts or options.stock_twice:
                raise drafts.LeftOut("as asked")
            return drafts.prepare(
                model=options.model,
                dtype=self.dtype,
                exact=self.exact,
                quick=options.quick,
                arguments=self.server_arguments(),
                user_arguments=shlex.split(options.engine_args),
                concurrency=options.concurrency,
                encode=self.tokenizer.encode_ids,
                ready_timeout_s=self.ready_timeout_s,
            )
        except drafts.LeftOut as reason:
            return {"left_out": str(reason)}


def versions() -> str:
    """Versions of the engine that ran."""
    engines = metadata.packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in (*engines, "torch"))


def sample_chat(plan: Plan, outcome: compare.Outcome) -> str:
    """Text of the last turn of the first chat, without most of its system prompt."""
    last = [record for record in outcome.records if record.session == 0][-1]
    ids = [*last.prompt, *last.answer][max(0, plan.shape.system_tokens - 40) :]
    text: str = plan.tokenizer.decode_ids(ids)
    return "… " + text[:SAMPLE_CHARACTERS] + (" …" if len(text) > SAMPLE_CHARACTERS else "")


def write_results(
    plan: Plan, stock: compare.Outcome, plugin: compare.Outcome, section: dict[str, Any]
) -> int:
    """Print the tables, write the reports, return the exit status. ``section``: on speculation."""
    options = plan.options
    figures = compare.summary(stock, plugin, BOUND_BLOCK_TOKENS)
    how = ("python -m tools.run " + shlex.join(sys.argv[1:])).strip()
    entries = compare.claims(figures, options.seed, how) + drafts.claims(section, how)
    rows = compare.table(figures)
    facts = {
        "model": plan.model,
        "dtype": plan.dtype,
        "answers must be identical": "yes" if plan.exact else "no, only fp32 allows it",
        "versions": f"{versions()}, mimo-plugin {metadata.version('mimo-plugin')}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "requests in flight": str(options.concurrency),
        "KV pool, blocks": "engine's choice" if plan.blocks is None else f"{plan.blocks:,}",
        "server arguments": shlex.join(plan.server_arguments()),
        "plugin argument": f"--plugin {options.plugin}",
        "seed": str(options.seed),
    }
    picture = page.draw(stock, plugin, figures)
    (plan.out / "report.png").write_bytes(picture)
    page.write_page(
        plan.out / "report.html",
        figures,
        rows,
        picture,
        facts,
        sample_chat(plan, plugin),
        drafts_page.build(section),
    )
    report = {"claims": entries, "figures": figures, "drafts": section, "settings": facts}
    (plan.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n" + compare.format_table(rows) + "\n")
    if "runs" in section:
        print(compare.format_table(drafts.table(section)) + "\n")
    print(f"[run] report: {plan.out / 'report.html'}")
    print(f"[run] claims: {plan.out / 'report.json'}")
    good, line = drafts.verdict(section)
    if good:
        print(f"[run] {line}")
    else:
        print(f"[run] FAILED: {line}", file=sys.stderr)
    return max(0 if good else 1, identity_status(plan, figures))


def identity_status(plan: Plan, figures: dict[str, Any]) -> int:
    """Say whether the workload's answers are identical; 1 when they should be and are not."""
    difference = figures["first_difference"]
    if difference is None:
        print("[run] every answer is identical, token for token")
        return 0
    if not plan.exact:
        print(
            f"[run] answers differ first at {difference}; with dtype {plan.dtype} that is "
            "expected (other batches round differently) and not counted as a failure"
        )
        return 0
    print(f"[run] FAILED: answers differ, first at {difference}", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the servers one after the other; 0 when the comparison holds."""
    options = parse(argv)
    started = time.monotonic()
    try:
        plan = Plan(options)
        print(
            f"[run] {len(plan.order)} requests in {len(plan.counts)} sessions, dtype {plan.dtype}, "
            f"model {plan.model}",
            flush=True,
        )
        setup = plan.drafts_setup()
        stock = plan.run("stock", None)
        plugin = plan.run("plugin", None if options.stock_twice else options.plugin)
        section = drafts.measure(setup, plan.out) if isinstance(setup, drafts.Setup) else setup
        status = write_results(plan, stock, plugin, section)
    except (ServerError, compare.RunError, ValueError, OSError) as error:
        print(f"[run] FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[run] interrupted; the servers are stopped", file=sys.stderr)
        return 130
    print(f"[run] done in {time.monotonic() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
