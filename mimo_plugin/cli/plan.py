# SPDX-License-Identifier: Apache-2.0
"""``mimo plan``: what a model's KV costs, and how much of it fits."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from typing import Any

from mimo_plugin.cli._command import block_tokens
from mimo_plugin.cli._model import Model, load_model, require_hybrid
from mimo_plugin.core.geometry import GeometryError
from mimo_plugin.core.pools import GIB, PoolPlan, plan_pool
from mimo_plugin.errors import ConfigError, setting_error

ELEMENT_BYTES = {"auto": None, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

_CHECKPOINT_EVERY_TOKENS = (1024, 4096, 16384, 65536)
_REQUEST_TOKENS = (8192, 65536, 262144, 1048576)
_MIB = 1 << 20

Row = tuple[str, str]


def add_parser(subparsers: Any) -> None:
    """Add the ``plan`` command to the parser of ``mimo``."""
    parser = subparsers.add_parser(
        "plan",
        help="print bytes, blocks, checkpoint cost and capacity of a model's KV cache",
        description="Arithmetic on the model's config.json; nothing is started. All bytes are per "
        "tensor-parallel rank.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="directory with config.json")
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)")
    add("--block-size", type=int, metavar="TOKENS", help="default: what `mimo flags` recommends")
    add("--kv-cache-dtype", choices=sorted(ELEMENT_BYTES), default="auto", help="default: auto")
    add("--mtp-layers", type=int, default=0, metavar="N", help="draft layers in the KV cache")
    add("--gpu-memory-gib", type=float, metavar="X", help="memory of one GPU")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="F",
        help="default: %(default)s",
    )
    add(
        "--weights-gib",
        type=float,
        metavar="X",
        help="weights on one rank (default: the model's weight files, divided by --tp)",
    )
    add(
        "--overhead-gib",
        type=float,
        default=4.0,
        metavar="X",
        help="activations and graphs on one rank (default: %(default)g)",
    )
    add("--kv-gib", type=float, metavar="X", help="memory for KV, instead of the four above")
    add(
        "--in-flight-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a request that may be in flight (the engine's largest batch; default: "
        "%(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    model = load_model(args.model)
    require_hybrid(model)
    for name in ("mtp_layers", "in_flight_tokens"):
        if getattr(args, name) < 0:
            raise _bad(name, getattr(args, name), "a number >= 0")
    try:
        geometry = model.geometry.with_draft_layers(args.mtp_layers)
        window = geometry.window_tokens or 0
        block = args.block_size if args.block_size is not None else block_tokens(window)
        size = ELEMENT_BYTES[args.kv_cache_dtype]
        if args.tp < 1:
            raise GeometryError(f"--tp: found {args.tp}; allowed: a number > 0")
        plan, off = (
            plan_pool(geometry, block_tokens=block, tp=args.tp, element_bytes=size, hybrid=hybrid)
            for hybrid in (True, False)
        )
    except GeometryError as error:
        raise ConfigError(str(error)) from None
    pool = kv_bytes(args, model)
    if args.json:
        print(json.dumps(as_dict(model, plan, pool), indent=1))
    else:
        print(as_text(model, plan, off, pool, args.in_flight_tokens))
    return 0


def kv_bytes(args: argparse.Namespace, model: Model) -> int | None:
    """Bytes for KV on one rank; None when no memory was named.

    Raises:
        ConfigError: nothing is left for KV, or a number makes no sense.
    """
    for name in ("kv_gib", "gpu_memory_gib", "weights_gib", "overhead_gib"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise _bad(name, value, "a number >= 0")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise _bad("gpu_memory_utilization", args.gpu_memory_utilization, "0 < x <= 1")
    if args.kv_gib is not None:
        return int(args.kv_gib * GIB)
    if args.gpu_memory_gib is None:
        return None
    weights = args.weights_gib
    if weights is None:
        if not model.weight_bytes:
            raise setting_error(
                "--weights-gib",
                None,
                "the size of the weights on one rank",
                f"{model.path} holds no *.safetensors: give --weights-gib or --kv-gib",
            )
        weights = model.weight_bytes / args.tp / GIB
    left = args.gpu_memory_gib * args.gpu_memory_utilization - weights - args.overhead_gib
    if left <= 0:
        raise setting_error(
            "--gpu-memory-gib",
            args.gpu_memory_gib,
            f"more than {(weights + args.overhead_gib) / args.gpu_memory_utilization:.1f}",
            f"the weights take {weights:.1f} GiB of each rank: use a larger --tp",
        )
    return int(left * GIB)


def _bad(name: str, found: object, allowed: str) -> ConfigError:
    option = "--" + name.replace("_", "-")
    return setting_error(option, found, allowed, "change the option")


def as_dict(model: Model, plan: PoolPlan, pool_bytes: int | None) -> dict[str, Any]:
    """The plan as plain data."""
    geometry = model.geometry
    data: dict[str, Any] = {
        "model": model.path,
        "architecture": model.architecture,
        "full_layers": geometry.full_layers,
        "swa_layers": geometry.swa_layers,
        "window_tokens": geometry.window_tokens,
        "replay_tokens": geometry.replay_tokens,
        "groups": [
            {"kind": group.kind, "layers": group.layers, "block_tokens": group.block_tokens}
            for group in plan.groups
        ],
        "block_bytes": plan.block_bytes,
        "padding": plan.padding,
        "alignment_tokens": plan.alignment_tokens,
        "full_bytes_per_token": plan.full_bytes_per_token,
        "dense_swa_bytes_per_token": plan.dense_swa_bytes_per_token,
        "checkpoint_blocks": plan.checkpoint_blocks,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_full_tokens": plan.checkpoint_full_tokens,
    }
    if pool_bytes is not None:
        data["kv_bytes"] = pool_bytes
        data["pool_blocks"] = plan.blocks(pool_bytes)
    return data


def as_text(
    model: Model, plan: PoolPlan, off: PoolPlan, pool_bytes: int | None, in_flight_tokens: int
) -> str:
    """The plan as a table; ``off`` is the same with the engine's hybrid manager off."""
    lines = [*_table(_cost_rows(model, plan, off)), ""]
    blocks = plan.blocks(GIB if pool_bytes is None else pool_bytes)
    title = "1 GiB of KV" if pool_bytes is None else f"{pool_bytes / GIB:.1f} GiB of KV"
    lines.append(f"{title}: {blocks:,} blocks; reusable tokens with one checkpoint for every")
    lines += _table(_capacity_rows(plan, blocks), indent="  ")
    if pool_bytes is not None:
        lines += ["", "running requests that fit, of"]
        lines += _table(_request_rows(model, plan, off, pool_bytes, in_flight_tokens), indent="  ")
    return "\n".join(lines)


def _cost_rows(model: Model, plan: PoolPlan, off: PoolPlan) -> Iterable[Row]:
    full, swa = plan.of_kind("full"), plan.of_kind("swa")
    geometry = model.geometry
    layers = max(group.layers for group in plan.groups)
    lengths = ", ".join(
        f"{kind} {'/'.join(str(n) for n in sorted({group.block_tokens for group in groups}))}"
        for kind, groups in (("full", full), ("sliding-window", swa))
    )
    yield "model", f"{model.architecture or geometry.model_type}: {model.summary}"
    yield "groups", f"{len(full)} full + {len(swa)} sliding-window, of {layers} layers"
    yield "block", f"{plan.block_bytes:,} bytes; tokens: {lengths}; padding {plan.padding:.1%}"
    yield "hit alignment", f"{plan.alignment_tokens} tokens"
    yield "full attention", f"{plan.full_bytes_per_token:,.0f} bytes a token"
    tokens = f"{plan.checkpoint_full_tokens:,.0f} tokens of full attention"
    size = f"{plan.checkpoint_bytes / _MIB:.2f} MiB"
    yield "checkpoint", f"{plan.checkpoint_blocks} blocks = {size} = {tokens}"
    dense = plan.dense_swa_bytes_per_token
    yield (
        "dense windows",
        f"{dense:,.0f} bytes a token = {dense / plan.full_bytes_per_token:.1f} x full attention",
    )
    yield "bounded replay", f"{geometry.replay_tokens:,} tokens"
    yield (
        "manager off",
        f"{off.full_bytes_per_token:,.0f} bytes a token (hybrid KV cache manager off)",
    )


def _capacity_rows(plan: PoolPlan, blocks: int) -> Iterable[Row]:
    for every in _CHECKPOINT_EVERY_TOKENS:
        yield f"{every:,} tokens", f"{plan.cached_tokens(blocks, every):,}"
    yield "block (dense)", f"{plan.cached_tokens(blocks, plan.alignment_tokens):,}"
    yield "never (bound)", f"{plan.cached_tokens(blocks, math.inf):,}"


def _request_rows(
    model: Model, plan: PoolPlan, off: PoolPlan, pool_bytes: int, in_flight_tokens: int
) -> Iterable[Row]:
    longest = model.geometry.max_len_tokens or max(_REQUEST_TOKENS)
    for length in _REQUEST_TOKENS:
        if length > longest:
            break
        fit, fit_off = (
            p.blocks(pool_bytes) // p.request_blocks(length, in_flight_tokens) for p in (plan, off)
        )
        yield f"{length:,} tokens", f"{fit:,}   (hybrid manager off: {fit_off:,})"


def _table(rows: Iterable[Row], indent: str = "") -> list[str]:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return [f"{indent}{name:<{width}}  {value}" for name, value in listed]
