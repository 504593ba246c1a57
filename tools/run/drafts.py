# SPDX-License-Identifier: Apache-2.0
"""The report's section "Drafts": speculation with MiMo-V2's MTP layers, stock and plugin.

Two more servers, one after the other, answer the same held-out prompts: stock vLLM drafts every
token with one MTP layer, the plugin's feature ``mtp`` with a layer for each. The tiny run takes the
trained tiny checkpoint, because only trained layers draft anything that is accepted.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo_plugin.engines.vllm.mtp.checkpoint import UnreadableCheckpoint, count_mtp_layers
from mimo_plugin.engines.vllm.mtp.fit import TARGETS
from mimo_plugin.errors import one_line
from tools import model_runner_v2, tiny_trained
from tools.run.compare import RunError, Samples, claim, compare_answers, ratio
from tools.run.replay import Record, ask
from tools.run.workload import Turn
from tools.server import ServerError, VllmServer, is_cpu_build

PLUGIN = "mimo:mtp"
PROMPTS, QUICK_PROMPTS = 24, 16
OUTPUT_TOKENS = 16
TINY_ARGUMENTS = (
    "--enable-prompt-tokens-details",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=1024",
)
ROUNDS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SPECULATION_OPTIONS = ("--spec", "-sc")
"""How the options of vLLM start that the section sets itself."""
COUNTERS = ("mimo:mtp_draft_rounds_total", "mimo:mtp_accepted_tokens_total")
"""The plugin's own counters of the same two things as :data:`ROUNDS` and :data:`ACCEPTED`."""


class LeftOut(Exception):
    """The section does not apply here; the message says why, in one line."""


@dataclass(frozen=True)
class Setup:
    """What the two servers of the section serve and are asked.

    Attributes:
        model: directory or name.
        layers: MTP layers of the checkpoint, and tokens that a round drafts.
        prompts: token ids of each request.
        exact: whether answers must be identical.
        arguments: of both servers.
        environment: of both servers.
        concurrency: requests in flight.
        ready_timeout_s: longest start-up of a server.
    """

    model: str
    layers: int
    prompts: list[list[int]]
    exact: bool
    arguments: list[str]
    environment: dict[str, str]
    concurrency: int
    ready_timeout_s: float

    @property
    def speculation(self) -> dict[str, Any]:
        """The speculative configuration that stock vLLM is given and the plugin fills in."""
        return {"method": "mtp", "num_speculative_tokens": self.layers}

    def own_arguments(self, name: str) -> list[str]:
        """What only the server ``name`` is given."""
        if name == "plugin":
            return ["--plugin", PLUGIN]
        return ["--speculative-config", json.dumps(self.speculation)]


@dataclass(frozen=True)
class Acceptance:
    """What one server's counters say of its drafts.

    Attributes:
        rounds: drafts that were verified, at least one.
        accepted: accepted tokens by position in the draft.
        accepted_tokens: all of them.
    """

    rounds: int
    accepted: list[int]
    accepted_tokens: int

    @property
    def length_tokens(self) -> float:
        """Tokens that a round gives on average, the target's own included."""
        return 1 + self.accepted_tokens / self.rounds

    @property
    def conditional(self) -> list[float]:
        """Share accepted at each position, of the rounds that accepted all positions before it."""
        reached = [self.rounds, *self.accepted]
        return [
            taken / before if before else 0.0
            for before, taken in zip(reached, self.accepted, strict=False)
        ]


@dataclass(frozen=True)
class Side:
    """One server's answers and drafts."""

    name: str
    records: list[Record]
    acceptance: Acceptance
    start_up_s: float
    wall_s: float
    counters: dict[str, int] = field(default_factory=dict)


def total(samples: Samples, name: str) -> int | None:
    """Sum of a counter over all its labels; None where the server does not export it."""
    found = samples.get(name)
    return None if found is None else round(sum(value for _, value in found))


def read_acceptance(samples: Samples, server: str) -> Acceptance:
    """Drafts of a server that started with speculation and was asked nothing else.

    Raises:
        RunError: nothing was drafted, so the server does not speculate.
    """
    rounds = total(samples, ROUNDS)
    if not rounds:
        raise RunError(f"drafts, {server}: the server drafted nothing ({ROUNDS} is {rounds})")
    by_position: dict[int, float] = {}
    for labels, value in samples.get(ACCEPTED_AT, ()):
        place = int(labels["position"])
        by_position[place] = by_position.get(place, 0.0) + value
    accepted = [round(by_position[place]) for place in sorted(by_position)]
    return Acceptance(rounds, accepted, total(samples, ACCEPTED) or 0)


def require_counters(samples: Samples) -> dict[str, int]:
    """The plugin's own counters, which prove that it acted.

    Raises:
        RunError: they are absent, or no round was counted.
    """
    found = {name: total(samples, name) for name in COUNTERS}
    if None in found.values() or not found[COUNTERS[0]]:
        raise RunError(
            f"drafts, plugin: its own counters say {found}: the feature 'mtp' was not active; "
            "check `mimo doctor` and the log of the server"
        )
    return {name: value or 0 for name, value in found.items()}


# --- what to run ----------------------------------------------------------------------------


def prepare(
    *,
    model: str | None,
    dtype: str,
    exact: bool,
    quick: bool,
    arguments: Sequence[str],
    user_arguments: Sequence[str],
    concurrency: int,
    encode: Callable[[str], list[int]],
    ready_timeout_s: float,
) -> Setup:
    """Decide what the section serves; starts nothing.

    Args:
        model: as the user gave it; None for the trained tiny checkpoint.
        dtype: of the weights in both servers.
        exact: whether that type allows answers to be compared token for token.
        quick: ask fewer prompts.
        arguments: of the comparison's servers, taken where a model was given.
        user_arguments: those of them that the user wrote.
        concurrency: requests in flight.
        encode: the given model's tokenizer.
        ready_timeout_s: longest start-up of a server.

    Raises:
        LeftOut: no MiMo-V2 model with MTP layers, or something that is needed is not installed.
    """
    if any(argument.startswith(SPECULATION_OPTIONS) for argument in user_arguments):
        raise LeftOut("the given engine arguments choose the speculation themselves")
    layers = count_layers(model or str(tiny_trained.CHECKPOINT))
    count = QUICK_PROMPTS if quick else PROMPTS
    environment: dict[str, str] = {}
    try:
        if is_cpu_build():
            environment = model_runner_v2.environment()
        if model is None:
            prompts = tiny_trained.held_out_prompts(count)
        else:
            prompts = [encode(text) for text in tiny_trained.held_out_texts(count)]
    except (RuntimeError, ValueError, ImportError) as error:
        raise LeftOut(one_line(error)) from None
    shared = list(arguments)
    if model is None:
        shared = [*TINY_ARGUMENTS, f"--dtype={dtype}", *user_arguments]
        if is_cpu_build():
            shared.append("--enforce-eager")
    return Setup(
        model=model or str(tiny_trained.CHECKPOINT),
        layers=layers,
        prompts=prompts,
        exact=exact,
        arguments=shared,
        environment=environment,
        concurrency=concurrency,
        ready_timeout_s=ready_timeout_s,
    )


def count_layers(model: str) -> int:
    """MTP layers of ``model``, at least one.

    Raises:
        LeftOut: it is no MiMo-V2 model or holds none.
    """
    names = architectures(model)
    if not any(name in TARGETS for name in names):
        raise LeftOut(f"the model is {', '.join(names) or 'unknown'}, not MiMo-V2")
    try:
        layers = count_mtp_layers(model)
    except (UnreadableCheckpoint, ValueError) as error:
        raise LeftOut(f"the MTP layers can't be counted: {one_line(error)}") from None
    if not layers:
        raise LeftOut("the checkpoint holds no MTP layers")
    return layers


def architectures(model: str) -> list[str]:
    """Architectures that the ``config.json`` of ``model`` (directory or name) names."""
    path = Path(model).expanduser() / "config.json"
    try:
        if not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        found = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    except Exception as error:  # not there, not JSON, offline, no such repository
        raise LeftOut(f"{path.name} of {model} can't be read: {one_line(error)}") from None
    return [str(name) for name in found or ()]


# --- running --------------------------------------------------------------------------------


def run_side(setup: Setup, name: str, out: Path) -> Side:
    """Start the server ``name`` ("stock" or "plugin"), ask all prompts, stop it."""
    server = VllmServer(
        setup.model,
        arguments=[*setup.arguments, *setup.own_arguments(name)],
        environment=setup.environment,
        log=out / f"drafts-{name}.log",
        name=f"drafts, {name}",
        ready_timeout_s=setup.ready_timeout_s,
    )
    print(f"[run] {server.name}: starting {shlex.join(server.command)}", flush=True)

    def one(number: int) -> Record:
        turn = Turn(setup.prompts[number], OUTPUT_TOKENS, "held-out code")
        return ask(server, number, 0, turn)

    with server:
        print(f"[run] {server.name}: ready after {server.start_up_s:.0f} s", flush=True)
        started = time.monotonic()
        with ThreadPoolExecutor(setup.concurrency) as pool:
            records = list(pool.map(one, range(len(setup.prompts))))
        wall_s = time.monotonic() - started
        samples = server.metrics()
    acceptance = read_acceptance(samples, name)
    counters = require_counters(samples) if name == "plugin" else {}
    return Side(name, records, acceptance, server.start_up_s, wall_s, counters)


def measure(setup: Setup, out: Path) -> dict[str, Any]:
    """Run both servers; the section's figures, or ``{"failed": reason}``."""
    try:
        return summary(setup, *(run_side(setup, name, out) for name in ("stock", "plugin")))
    except (ServerError, RunError) as error:
        return {"failed": str(error)}


# --- results --------------------------------------------------------------------------------


def summary(setup: Setup, stock: Side, plugin: Side) -> dict[str, Any]:
    """All figures of the section, JSON-able."""
    identity = compare_answers(stock.records, plugin.records)
    runs = {
        side.name: {
            "accept_len": side.acceptance.length_tokens,
            "conditional": side.acceptance.conditional,
            "rounds": side.acceptance.rounds,
            "accepted_tokens": side.acceptance.accepted_tokens,
            "start_up_s": side.start_up_s,
            "wall_s": side.wall_s,
        }
        for side in (stock, plugin)
    }
    return {
        "model": setup.model,
        "layers": setup.layers,
        "prompts": len(setup.prompts),
        "prompt_tokens": sum(map(len, setup.prompts)),
        "answer_tokens": OUTPUT_TOKENS,
        "exact": setup.exact,
        "runs": runs,
        "accept_len_ratio": ratio(plugin.acceptance.length_tokens, stock.acceptance.length_tokens),
        "identical_requests": identity.identical_requests,
        "identical_fraction": identity.fraction,
        "first_difference": identity.first_difference,
        "plugin_counters": plugin.counters,
    }


def claims(section: Mapping[str, Any], how: str) -> list[dict[str, Any]]:
    """The section's entries of the claims format; none where it was left out."""
    if "runs" not in section:
        return []
    return [
        claim("drafts_identical", section["identical_fraction"], 1.0, "fraction", [], how),
        claim("accept_len_ratio", section["accept_len_ratio"], None, "plugin/stock", [], how),
    ]


def table(section: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the section's table: what, stock, plugin, plugin/stock."""
    stock, plugin = (section["runs"][name] for name in ("stock", "plugin"))

    def row(title: str, one: float, other: float, form: str) -> list[str]:
        return [title, form.format(one), form.format(other), f"{ratio(other, one):.3f}"]

    rows = [
        ["drafts", "stock", "plugin", "plugin/stock"],
        row("tokens a round", stock["accept_len"], plugin["accept_len"], "{:.3f}"),
    ]
    pairs = zip(stock["conditional"], plugin["conditional"], strict=True)
    for place, (one, other) in enumerate(pairs, start=1):
        given = ", given those before" if place > 1 else ""
        rows.append(row(f"draft {place} accepted, %{given}", 100 * one, 100 * other, "{:.1f}"))
    rows.append(row("draft rounds", stock["rounds"], plugin["rounds"], "{:,}"))
    same = f"{section['identical_requests']} of {section['prompts']}"
    return [*rows, ["identical answers", "", same, ""]]


def verdict(section: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the section allows the run to succeed, and its one line."""
    if "left_out" in section:
        return True, f"drafts: left out, {section['left_out']}"
    if "failed" in section:
        return False, f"drafts: {section['failed']}"
    difference = section["first_difference"]
    if difference is None:
        return True, "drafts: every answer is identical, token for token"
    if section["exact"]:
        return False, f"drafts: answers differ, first at {difference}"
    return True, f"drafts: answers differ first at {difference}, which only fp32 rules out"
