# SPDX-License-Identifier: Apache-2.0
"""``mimo flags --tiers``: the arguments with which vLLM keeps KV in host memory and a store."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from mimo_plugin.cli._model import Model
from mimo_plugin.config_tiers import FILE, STORES, TiersConfig, parse_tiers, require_place
from mimo_plugin.core.pools import GIB, PoolPlan
from mimo_plugin.engines.vllm.tiers.configure import transfer_config
from mimo_plugin.errors import ConfigError, setting_error

FEATURE = "tiers"
_OPTIONS = ("tiers", "host_gib", "tiers_path", "tiers_store", "tiers_gib", "tiers_connector")
_PAGE_BYTES = 4096
_EXAMPLE_TOKENS = 32768


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only vLLM's command knows; SGLang's says it with ``--hicache…``."""
    group = parser.add_argument_group("vLLM only: KV in host memory, and in a store below it")
    add = group.add_argument
    add("--tiers", action="store_true", help="keep KV in host memory, too; needs --host-gib")
    add("--host-gib", type=float, metavar="X", help="that much of it, for all ranks together")
    add(
        "--tiers-path",
        action="append",
        metavar="PLACE",
        help="and in a store: its folder, or the URL of its server or master; repeat it for "
        "several",
    )
    add("--tiers-store", choices=STORES, help=f"kind of that store (default: {FILE})")
    add("--tiers-gib", type=float, metavar="X", help="size of a store of files")
    add(
        "--tiers-connector",
        action="store_true",
        help="write --kv-transfer-config in place of the feature",
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse what only vLLM's command knows.

    Raises:
        ConfigError: it was given with another engine.
    """
    given = [name for name in _OPTIONS if getattr(args, name)]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option}: found it with --engine {args.engine}; allowed: with --engine vllm; fix: "
            "use --hicache, and --hicache-path for a store"
        )


def wanted(args: argparse.Namespace) -> TiersConfig | None:
    """The section ``tiers`` that the options ask for; None: none.

    Raises:
        ConfigError: an option without its partner, or out of range.
    """
    if not args.tiers:
        given = next((name for name in _OPTIONS if getattr(args, name)), None)
        if given is not None:
            option = "--" + given.replace("_", "-")
            raise setting_error(option, getattr(args, given), "with --tiers", "add --tiers")
        return None
    for option, value in (("--host-gib", args.host_gib), ("--tiers-gib", args.tiers_gib)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise setting_error(option, value, "a number > 0", "change the option")
    if args.host_gib is None:
        raise setting_error(
            "--host-gib",
            None,
            "a number > 0, with --tiers",
            "add --host-gib 64, or as much as the machine can spare",
        )
    raw: dict[str, Any] = {"host_gib": args.host_gib}
    if not args.tiers_path:
        for name in ("tiers_store", "tiers_gib"):
            if getattr(args, name):
                option = "--" + name.replace("_", "-")
                raise setting_error(
                    option, getattr(args, name), "with --tiers-path", "say where the store is"
                )
        return parse_tiers(FEATURE, raw)
    store = args.tiers_store or FILE
    if store == FILE and args.tiers_gib is None:
        raise setting_error(
            "--tiers-gib", None, "a number > 0, with a store of files", "say how much it may hold"
        )
    if store != FILE and args.tiers_gib is not None:
        raise setting_error(
            "--tiers-gib", args.tiers_gib, f"none with --tiers-store {store}", "drop it"
        )
    paths = args.tiers_path
    raw |= {"store": store, "path": paths[0] if len(paths) == 1 else paths}
    if args.tiers_gib is not None:
        raw["capacity_gib"] = args.tiers_gib
    config = parse_tiers(FEATURE, raw)
    require_place(FEATURE, config)
    return config


def section_of(config: TiersConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, as the section ``tiers`` has them."""
    settings: dict[str, Any] = transfer_config(config)["kv_connector_extra_config"]["mimo_tiers"]
    return settings


def arguments_of(config: TiersConfig, *, connector: bool) -> tuple[str, str]:
    """One argument of vLLM.

    Args:
        config: the section.
        connector: name the connector; otherwise the section of the feature.
    """
    if connector:
        return "--kv-transfer-config", json.dumps(transfer_config(config))
    return "--additional-config", json.dumps({"mimo": {FEATURE: section_of(config)}})


def notes_of(model: Model, config: TiersConfig, plan: PoolPlan, tp: int) -> list[str]:
    """How far the host memory goes, and what else has to be known."""
    host_gib = config.host_gib or 0.0
    row_bytes = -(-tp * plan.block_bytes // _PAGE_BYTES) * _PAGE_BYTES
    rows = int(host_gib * GIB) // row_bytes
    length = min(_EXAMPLE_TOKENS, model.geometry.max_len_tokens or _EXAMPLE_TOKENS)
    full = sum(length // group.block_tokens for group in plan.of_kind("full"))
    if rows < full + plan.checkpoint_blocks:
        needed = (full + plan.checkpoint_blocks) * row_bytes / GIB
        raise setting_error(
            "--host-gib",
            host_gib,
            f"at least {needed:.2f}, for one prefix of {length} tokens",
            "give more host memory",
        )
    checkpoint = plan.checkpoint_blocks
    notes = [
        f"host memory of {host_gib:g} GiB has {rows} rows of {row_bytes} bytes",
        f"a prefix of {length} tokens takes {full} rows, each place to resume it at {checkpoint}",
        "host memory lies in /dev/shm: a container needs --shm-size or --ipc=host for it",
    ]
    if not config.path:
        notes.append("without --tiers-path nothing outlives the engine")
    return notes
