# SPDX-License-Identifier: Apache-2.0
"""``mimo flags``: the whole recommended command that serves a model with the plugin."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mimo_plugin.cli import _flags_sglang as sglang
from mimo_plugin.cli import _flags_tiers as tiers
from mimo_plugin.cli._command import (
    MIMO_ARCHITECTURES,
    Command,
    block_tokens,
    check_sizes,
    mtp_layers_of,
)
from mimo_plugin.cli._model import Model, load_model, require_hybrid
from mimo_plugin.config import parse_plugin_option
from mimo_plugin.config_tiers import TiersConfig
from mimo_plugin.core.geometry import GeometryError
from mimo_plugin.core.pools import plan_pool
from mimo_plugin.engines.vllm.vision.names import REPLACES as VISION_ARCHITECTURES
from mimo_plugin.errors import setting_error
from mimo_plugin.features import available

ENGINES = ("vllm", "sglang")


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
        help="features to switch on (default: those of the engine that fit; vLLM: "
        f"{', '.join(available('vllm'))}; SGLang: {', '.join(available('sglang'))})",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)"
    )
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="default: what the model was made for"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    tiers.add_options(parser)
    sglang.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the command."""
    model = load_model(args.model)
    if args.engine == sglang.ENGINE:
        tiers.refuse_options(args)
        command = sglang.sglang_command(model, sglang.wanted(args))
    else:
        sglang.refuse_options(args)
        command = vllm_command(
            model,
            features=args.features,
            tp=args.tp,
            max_len=args.max_model_len,
            tiers_config=tiers.wanted(args),
            connector=args.tiers_connector,
        )
    if args.json:
        print(command.to_json())
        return 0
    for line in command.notes:
        print(f"# {line}", file=sys.stderr)
    print(command.to_text())
    return 0


def vllm_command(
    model: Model,
    *,
    features: str | None = None,
    tp: int = 1,
    max_len: int | None = None,
    tiers_config: TiersConfig | None = None,
    connector: bool = False,
) -> Command:
    """The recommended ``vllm serve`` command for a model.

    Args:
        model: whose command.
        features: names, comma-separated; None takes those that fit.
        tp: tensor parallel size.
        max_len: tokens; None: what the model was made for.
        tiers_config: keep KV in host memory and perhaps in a store; None: no.
        connector: say that with the connector's own argument, in place of the feature.

    Raises:
        ConfigError: unknown feature, or a size that does not fit the model.
        FeatureUnavailable: the model has no sliding-window layers beside full attention.
    """
    require_hybrid(model)
    drafts, why_none = mtp_layers_of(model)
    media = model.architecture in VISION_ARCHITECTURES
    tiered = tiers_config is not None and not connector
    fits = {"mtp": bool(drafts), "vision": media, "video": media, tiers.FEATURE: tiered}
    fits["dp_affinity"] = False  # the command has one rank
    names = tuple(name for name in available("vllm") if fits.get(name, True))
    if features is not None:
        names = parse_plugin_option(f"mimo:{features}") or ()
        if (tiers.FEATURE in names) != tiered:
            raise setting_error(
                "--features",
                features,
                "tiers there, with --tiers" if tiered else "no tiers there, without --tiers",
                "add tiers to it" if tiered else "add --tiers --host-gib X, or drop tiers",
            )
    geometry = model.geometry
    window = geometry.window_tokens or 0
    block = block_tokens(window)
    check_sizes(model, tp, max_len)
    try:
        in_cache = geometry.with_draft_layers(drafts if "mtp" in names else 0)
        plan = plan_pool(in_cache, block_tokens=block, tp=tp)
    except GeometryError as error:
        raise setting_error("--tp", tp, "a size that fits the KV heads", str(error)) from None
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
    if "dp_affinity" not in names:
        notes.append("with --data-parallel-size N: add dp_affinity to the features")
    if tp > 1:
        arguments.append(("--tensor-parallel-size", str(tp)))
    if max_len is not None:
        arguments.append(("--max-model-len", str(max_len)))
    if model.needs_remote_code:
        arguments.append(("--trust-remote-code",))
        notes.append("the configuration names code of its own: read it before you trust it")
    if model.architecture.startswith(MIMO_ARCHITECTURES) and model.has_chat_template:
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
    if tiers_config is not None:
        arguments.append(tiers.arguments_of(tiers_config, connector=connector))
        notes += tiers.notes_of(model, tiers_config, plan, tp)
    return Command(arguments=tuple(arguments), notes=tuple(notes))
