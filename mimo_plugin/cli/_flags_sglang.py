# SPDX-License-Identifier: Apache-2.0
"""``mimo flags --engine sglang``: the recommended ``sglang serve`` command of a model."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

from mimo_plugin.cli._command import (
    MIMO_ARCHITECTURES,
    Command,
    block_tokens,
    check_sizes,
    mtp_layers_of,
)
from mimo_plugin.cli._model import Model, require_hybrid
from mimo_plugin.config import parse_plugin_option
from mimo_plugin.core.geometry import GeometryError, ModelGeometry
from mimo_plugin.core.pool_ratio import SWA_SHARE, least_swa_tokens, swa_per_full
from mimo_plugin.core.pools import GIB
from mimo_plugin.errors import ConfigError, FeatureUnavailable, setting_error
from mimo_plugin.features import available

ENGINE = "sglang"
ENCODER, LANGUAGE = "encoder", "language"
VISION_ARCHITECTURE = "MiMoV2ForCausalLM"
"""The one architecture that SGLang serves with MiMo's vision tower."""

CHUNK_TOKENS = 8192
"""Largest chunk of a prefill; that of SGLang on a GPU of 80 GiB or more."""

_LEAST_CHUNK_TOKENS = 512
_FREED_EVERY_TOKENS = 128  # SGLANG_SWA_EVICTION_INTERVAL
_STOCK_RATIO = 0.8
_BOOTSTRAP_PORT = 8997

_OPTIONS = ("role", "encoder_url", "hicache", "hicache_path", "hicache_gib", "kv_gib")
_DEFAULT_RUNNING = 64


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command is to be made for; as the options of ``mimo flags`` say.

    Attributes:
        features: names, comma-separated; None takes those that fit.
        tp: tensor parallel size.
        max_len: tokens; None: what the model was made for.
        role: ``encoder`` or ``language`` for a server that does only that; None: one that does all.
        encoder_urls: for ``language``: its encoders; for ``encoder``: where to register.
        hicache: keep KV in host memory too.
        hicache_path: folder of pages behind that; None: none.
        hicache_gib: its size.
        kv_gib: memory for KV on one rank; None: not known.
        running: requests that run at once.
        drafts: draft with the MTP layers of the checkpoint.
    """

    features: str | None = None
    tp: int = 1
    max_len: int | None = None
    role: str | None = None
    encoder_urls: tuple[str, ...] = ()
    hicache: bool = False
    hicache_path: str | None = None
    hicache_gib: float | None = None
    kv_gib: float | None = None
    running: int = _DEFAULT_RUNNING
    drafts: bool = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only SGLang's command knows."""
    group = parser.add_argument_group("SGLang only")
    add = group.add_argument
    add("--role", choices=(ENCODER, LANGUAGE), help="a server with only the vision tower, or none")
    add(
        "--encoder-url",
        action="append",
        metavar="URL",
        help="for the role language: one of its encoders; for encoder: where it registers (the "
        f"language server, port {_BOOTSTRAP_PORT}). Repeat it for several",
    )
    add("--hicache", action="store_true", help="keep KV in host memory, too")
    add("--hicache-path", metavar="DIR", help="and behind that in a folder of pages")
    add("--hicache-gib", type=float, metavar="X", help="size of that folder")
    add("--kv-gib", type=float, metavar="X", help="memory for KV on one rank, to check the pools")
    add(
        "--running",
        type=int,
        default=_DEFAULT_RUNNING,
        metavar="N",
        help="requests that run at once (default: %(default)s)",
    )
    add("--no-drafts", action="store_true", help="leave the MTP layers of the checkpoint unused")


def wanted(args: argparse.Namespace) -> Wanted:
    """The options of a command line."""
    return Wanted(
        features=args.features,
        tp=args.tp,
        max_len=args.max_model_len,
        role=args.role,
        encoder_urls=tuple(args.encoder_url or ()),
        hicache=args.hicache or args.hicache_path is not None,
        hicache_path=args.hicache_path,
        hicache_gib=args.hicache_gib,
        kv_gib=args.kv_gib,
        running=args.running,
        drafts=not args.no_drafts,
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse what only SGLang's command knows.

    Raises:
        ConfigError: it was given with another engine.
    """
    given = [name for name in _OPTIONS if getattr(args, name)]
    given += ["no_drafts"] if args.no_drafts else []
    given += ["running"] if args.running != _DEFAULT_RUNNING else []
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option}: found it with --engine {args.engine}; allowed: with --engine sglang; fix: "
            "drop it"
        )


def sglang_command(model: Model, wish: Wanted) -> Command:
    """The recommended ``sglang serve`` command for a model.

    Raises:
        ConfigError: unknown feature, an option without its partner, or a size that does not fit.
        FeatureUnavailable: the model has no sliding-window layers beside full attention, or no
            vision tower that the role needs.
    """
    require_hybrid(model)
    check_sizes(model, wish.tp, wish.max_len)
    _check_wish(model, wish)
    names = _features(model, wish)
    arguments: list[tuple[str, ...]] = [
        ("sglang", "serve", "--model-path", model.path),
        ("--plugin", f"mimo:{','.join(names)}"),
    ]
    notes = [f"{model.path}: {model.summary}"]
    if wish.tp > 1:
        arguments.append(("--tp-size", str(wish.tp)))
    if model.needs_remote_code:
        arguments.append(("--trust-remote-code",))
        notes.append("the configuration names code of its own: read it before you trust it")
    if wish.role == ENCODER:
        arguments += [("--encoder-only",), ("--enable-prefix-mm-cache",)]
        if wish.encoder_urls:
            arguments.append(("--encoder-register-urls", *wish.encoder_urls))
        notes.append("an encoder has no KV: its options are those of the language server")
        return Command(arguments=tuple(arguments), notes=tuple(notes))
    drafts, why_none = mtp_layers_of(model) if wish.drafts else (0, "")
    _add_pools(model, wish, drafts, arguments, notes)
    if wish.max_len is not None:
        arguments.append(("--context-length", str(wish.max_len)))
    if model.architecture.startswith(MIMO_ARCHITECTURES) and model.has_chat_template:
        arguments += [("--reasoning-parser", "mimo"), ("--tool-call-parser", "mimo")]
    if drafts:
        _add_drafts(model, drafts, arguments, notes)
    elif why_none:
        notes.append(f"speculative decoding is left out: {why_none}")
    if wish.role == LANGUAGE:
        arguments.append(("--language-only",))
        if wish.encoder_urls:
            arguments.append(("--encoder-urls", *wish.encoder_urls))
        else:
            arguments.append(("--encoder-bootstrap-port", str(_BOOTSTRAP_PORT)))
            notes.append(f"encoders register at port {_BOOTSTRAP_PORT}")
    if wish.hicache:
        _add_hicache(wish, arguments, notes)
    return Command(arguments=tuple(arguments), notes=tuple(notes))


def takes_images(model: Model) -> bool:
    """Whether SGLang builds a vision tower for the model."""
    return model.architecture == VISION_ARCHITECTURE and model.has_towers


def _features(model: Model, wish: Wanted) -> tuple[str, ...]:
    if wish.features is not None:
        names = parse_plugin_option(f"mimo:{wish.features}", ENGINE) or ()
        if wish.role == ENCODER and names != ("vision",):
            raise setting_error(
                "--features", wish.features, "vision, with --role encoder", "drop it"
            )
        return names
    if wish.role == ENCODER:
        return ("vision",)
    fits = {"vision": takes_images(model), "tiers": False}  # tiers wants settings of its own
    return tuple(name for name in available(ENGINE) if fits.get(name, True))


def _check_wish(model: Model, wish: Wanted) -> None:
    if wish.role is not None and not takes_images(model):
        raise FeatureUnavailable(
            f"--role: found {wish.role!r} for {model.architecture or 'a model'} without a vision "
            f"and an audio tower; allowed: {VISION_ARCHITECTURE} with vision_config and "
            "audio_config; fix: drop --role"
        )
    if wish.encoder_urls and wish.role is None:
        raise setting_error(
            "--encoder-url", wish.encoder_urls[0], "with --role", "add --role language"
        )
    if (wish.hicache_path is None) != (wish.hicache_gib is None):
        raise setting_error(
            "--hicache-path",
            wish.hicache_path,
            "a folder, with --hicache-gib",
            "give both or neither",
        )
    for option, value in (("--hicache-gib", wish.hicache_gib), ("--kv-gib", wish.kv_gib)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise setting_error(option, value, "a number > 0", "change the option")
    if wish.running < 1:
        raise setting_error("--running", wish.running, "a number > 0", "change the option")
    if model.fused_qkv_ranks is not None and model.fused_qkv_ranks % wish.tp:
        raise setting_error(
            "--tp",
            wish.tp,
            f"a divisor of {model.fused_qkv_ranks}, by which the fused qkv weights are cut",
            "choose another size",
        )


def _add_pools(
    model: Model,
    wish: Wanted,
    drafts: int,
    arguments: list[tuple[str, ...]],
    notes: list[str],
) -> None:
    """Page size, ratio of the pools, and chunk."""
    window = model.geometry.window_tokens or 0
    page = block_tokens(window)
    try:
        geometry = model.geometry.with_draft_layers(drafts)
        ratio = round(swa_per_full(geometry, tp=wish.tp), 3)
    except GeometryError as error:
        raise setting_error("--tp", wish.tp, "a size that fits the KV heads", str(error)) from None
    chunk, given = CHUNK_TOKENS, ratio
    if wish.kv_gib is not None:
        ratio, chunk = _fitted(geometry, wish, ratio, page, drafts)
    gain = _full_share(geometry, ratio, wish.tp) / _full_share(geometry, _STOCK_RATIO, wish.tp)
    shown = f"{ratio:g}"
    arguments += [
        ("--page-size", str(page)),
        ("--swa-full-tokens-ratio", shown),
        ("--chunked-prefill-size", str(chunk)),
    ]
    notes += [
        f"page size {page}: a window of {window} tokens is {-(-(window - 1) // page)} pages",
        f"ratio {shown}: {SWA_SHARE:.0%} of the KV's bytes are for sliding windows"
        if ratio == given
        else f"ratio {shown}: what {wish.running} running requests need in a pool of this size",
        f"that leaves {gain:.2f} times the full-attention tokens of SGLang's own {_STOCK_RATIO}",
        "--plugin chooses the radix backend (kv) and the schedule policy (scheduler)",
    ]


def _full_share(geometry: ModelGeometry, ratio: float, tp: int) -> float:
    """Full-attention tokens that one byte buys."""
    full = geometry.bytes_per_token("full", tp=tp)
    return 1.0 / (full + ratio * geometry.bytes_per_token("swa", tp=tp))


def _fitted(
    geometry: ModelGeometry, wish: Wanted, ratio: float, page: int, drafts: int
) -> tuple[float, int]:
    """Ratio and chunk that a pool of known size has room for.

    Raises:
        ConfigError: it has none.
    """
    budget = int((wish.kv_gib or 0.0) * GIB)
    window = geometry.window_tokens or 0
    full_bytes = geometry.bytes_per_token("full", tp=wish.tp)
    chunk = CHUNK_TOKENS
    while True:
        least = least_swa_tokens(
            window,
            page_tokens=page,
            chunk_tokens=chunk,
            running=wish.running,
            freed_every_tokens=_FREED_EVERY_TOKENS,
            draft_tokens=drafts,
        )
        swa_bytes = least * geometry.bytes_per_token("swa", tp=wish.tp)
        # The pool that windows need, and no more full attention than there are bytes left.
        full_tokens = (budget - swa_bytes) // full_bytes
        if full_tokens >= max(least, chunk):
            return max(ratio, math.ceil(least / full_tokens * 1000) / 1000), chunk
        if chunk <= _LEAST_CHUNK_TOKENS:
            break
        chunk //= 2
    needed = (swa_bytes + max(least, chunk) * full_bytes) / GIB
    raise setting_error(
        "--kv-gib",
        wish.kv_gib,
        f"at least {needed:.2f} for {wish.running} running requests",
        "lower --running, or use a larger --tp",
    )


def _add_drafts(
    model: Model, drafts: int, arguments: list[tuple[str, ...]], notes: list[str]
) -> None:
    arguments += [
        ("--speculative-algorithm", "EAGLE"),
        ("--speculative-num-steps", str(drafts)),
        ("--speculative-eagle-topk", "1"),
        ("--speculative-num-draft-tokens", str(drafts + 1)),
        ("--enable-multi-layer-eagle",),
    ]
    notes.append(f"{drafts} MTP layers found: SGLang drafts one token with each; needs a GPU")
    if model.geometry.mtp_layers != drafts:
        notes.append(
            "config.json does not say num_nextn_predict_layers: SGLang sizes its pools without the "
            "KV of draft layers; leave that room with --mem-fraction-static"
        )


def _add_hicache(wish: Wanted, arguments: list[tuple[str, ...]], notes: list[str]) -> None:
    arguments += [
        ("--enable-hierarchical-cache",),
        ("--hicache-mem-layout", "page_first_direct"),
        ("--hicache-io-backend", "direct"),
    ]
    notes.append("host memory: keys and values of unequal width need a page-first layout")
    if wish.hicache_path is not None:
        extra = {
            "backend_name": "mimo",
            "interface_v1": 1,
            "module_path": "mimo_plugin.engines.sglang.storage.backend",
            "class_name": "MimoStorage",
            "path": wish.hicache_path,
            "capacity_gib": wish.hicache_gib,
        }
        arguments += [
            ("--hicache-storage-backend", "dynamic"),
            ("--hicache-storage-backend-extra-config", json.dumps(extra)),
        ]
        notes.append("SGLang's own file store does not take keys and values of unequal width")
