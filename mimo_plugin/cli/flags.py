# SPDX-License-Identifier: Apache-2.0
"""``mimo flags``: the whole recommended command that serves a model with the plugin."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from mimo_plugin.cli._model import Model, load_model, require_hybrid
from mimo_plugin.config import parse_plugin_option
from mimo_plugin.core.geometry import GeometryError
from mimo_plugin.core.pools import plan_pool
from mimo_plugin.engines.vllm.mtp.checkpoint import UnreadableCheckpoint, count_mtp_layers
from mimo_plugin.engines.vllm.vision.names import REPLACES as VISION_ARCHITECTURES
from mimo_plugin.errors import one_line, setting_error
from mimo_plugin.features import available

ENGINES = ("vllm",)

MIN_BLOCK_TOKENS = 16
"""Smallest block that all of vLLM's attention backends accept."""

MAX_BLOCK_TOKENS = 64
"""Largest block that they have in common."""

_BLOCKS_IN_A_WINDOW = 8
"""A hit is rounded down to whole blocks and a checkpoint up to them: at most 1/8 of a window."""

_MIMO_PARSERS = "MiMoV2"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line and why each part is in it."""

    arguments: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """For a shell, one option a line."""
        return " \\\n  ".join(shlex.join(group) for group in self.arguments)

    def to_json(self) -> str:
        """The argument vector and the notes."""
        vector = [word for group in self.arguments for word in group]
        return json.dumps({"command": vector, "notes": list(self.notes)}, indent=1)


def add_parser(subparsers: Any) -> None:
    """Add the ``flags`` command to the parser of ``mimo``."""
    parser = subparsers.add_parser(
        "flags",
        help="print the recommended command that serves a model with the plugin",
        description="Read the model's config.json and print the whole command on standard output; "
        "what was chosen and why goes to standard error.",
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument("--model", required=True, metavar="DIR", help="directory with config.json")
    parser.add_argument(
        "--features",
        metavar="NAME[,NAME...]",
        help=f"features to switch on (default: those of {','.join(available('vllm'))} that fit)",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)"
    )
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="default: what the model was made for"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the command."""
    command = vllm_command(
        load_model(args.model), features=args.features, tp=args.tp, max_len=args.max_model_len
    )
    if args.json:
        print(command.to_json())
        return 0
    for line in command.notes:
        print(f"# {line}", file=sys.stderr)
    print(command.to_text())
    return 0


def block_tokens(window_tokens: int) -> int:
    """Block size for a window: the largest power of two that still cuts it into eight."""
    size = MIN_BLOCK_TOKENS
    while size < MAX_BLOCK_TOKENS and 2 * size * _BLOCKS_IN_A_WINDOW <= window_tokens:
        size *= 2
    return size


def vllm_command(
    model: Model, *, features: str | None = None, tp: int = 1, max_len: int | None = None
) -> Command:
    """The recommended ``vllm serve`` command for a model.

    Raises:
        ConfigError: unknown feature, or a size that does not fit the model.
        FeatureUnavailable: the model has no sliding-window layers beside full attention.
    """
    require_hybrid(model)
    drafts, why_none = _mtp_layers(model)
    media = model.architecture in VISION_ARCHITECTURES
    fits = {"mtp": bool(drafts), "vision": media, "video": media}
    names = tuple(name for name in available("vllm") if fits.get(name, True))
    if features is not None:
        names = parse_plugin_option(f"mimo:{features}") or ()
    geometry = model.geometry
    window = geometry.window_tokens or 0
    block = block_tokens(window)
    if tp < 1:
        raise setting_error("--tp", tp, "a number > 0", "choose a divisor of the KV heads")
    try:
        in_cache = geometry.with_draft_layers(drafts if "mtp" in names else 0)
        plan = plan_pool(in_cache, block_tokens=block, tp=tp)
    except GeometryError as error:
        raise setting_error("--tp", tp, "a size that fits the KV heads", str(error)) from None
    longest = geometry.max_len_tokens
    if max_len is not None and (max_len < 1 or (longest is not None and max_len > longest)):
        allowed = f"1 to {longest}" if longest is not None else "a number > 0"
        raise setting_error("--max-model-len", max_len, allowed, "choose a shorter length")
    arguments: list[tuple[str, ...]] = [
        ("vllm", "serve", model.path),
        ("--plugin", f"mimo:{','.join(names)}"),
        ("--block-size", str(block)),
        ("--enable-prefix-caching",),
        ("--prefix-cache-retention-interval", "0"),
        ("--no-disable-hybrid-kv-cache-manager",),
    ]
    notes = [
        f"{model.path}: {model.summary}",
        f"block size {block}: a window of {window} tokens is {-(-(window - 1) // block)} blocks",
        f"hits are multiples of {plan.alignment_tokens} tokens",
        f"a checkpoint costs {plan.checkpoint_bytes / 2**20:.1f} MiB on each rank",
        f"that is {plan.checkpoint_full_tokens:.0f} tokens of full-attention KV",
        "retention interval 0: checkpoints are kept by class, not at fixed distances",
        "hybrid KV cache manager kept on: without it sliding-window layers cost as much as full",
    ]
    if tp > 1:
        arguments.append(("--tensor-parallel-size", str(tp)))
    if max_len is not None:
        arguments.append(("--max-model-len", str(max_len)))
    if model.needs_remote_code:
        arguments.append(("--trust-remote-code",))
        notes.append("the configuration names code of its own: read it before you trust it")
    if model.architecture.startswith(_MIMO_PARSERS) and model.has_chat_template:
        arguments += [
            ("--reasoning-parser", "mimo"),
            ("--enable-auto-tool-choice",),
            ("--tool-call-parser", "mimo"),
        ]
    if "mtp" in names and drafts:
        config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
        arguments.append(("--speculative-config", config))
        notes.append(f"{drafts} MTP layers found, one for each draft token; needs Model Runner V2")
    elif why_none:
        notes.append(f"speculative decoding is left out: {why_none}")
    return Command(arguments=tuple(arguments), notes=tuple(notes))


def _mtp_layers(model: Model) -> tuple[int, str]:
    """MTP layers that feature ``mtp`` can use, or 0 and why there are none (empty: not MiMo-V2)."""
    if not model.architecture.startswith(_MIMO_PARSERS):
        return 0, ""
    try:
        found = count_mtp_layers(model.path)
    except (UnreadableCheckpoint, ImportError, ValueError) as error:
        return 0, f"the MTP layers can't be counted ({one_line(error)})"
    return found, "" if found else "the checkpoint holds no MTP layers"
