# SPDX-License-Identifier: Apache-2.0
"""Does a ``sglang serve`` command do what it seems to?  SGLang reads it; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mimo_plugin.cli._command import MIMO_ARCHITECTURES, mtp_layers_of
from mimo_plugin.cli._model import Model, load_model
from mimo_plugin.cli._probe import Probe, try_sglang_command
from mimo_plugin.cli._report import Finding, note, ok, problem
from mimo_plugin.core.pool_ratio import swa_per_full
from mimo_plugin.engines.sglang.arguments import REFUSED
from mimo_plugin.errors import ConfigError

_STOCK_RATIO = 0.8


def check_command(words: Sequence[str], *, timeout_s: float) -> list[Finding]:
    """What is wrong with a command line, as far as it can be told without starting it.

    Args:
        words: ``sglang serve …``, or its arguments alone.
        timeout_s: limit for SGLang to read and resolve it.
    """
    arguments = list(words)
    if arguments[:1] == ["sglang"]:
        arguments = arguments[1:]
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    tried = try_sglang_command(arguments, timeout_s=timeout_s)
    return [*_outcome(tried), *_advice(tried)]


def _outcome(tried: Probe) -> Iterator[Finding]:
    if tried.error is None:
        features = tried.values.get("mimo_features")
        if features:
            yield ok("command", f"SGLang takes it; features {', '.join(features)}")
        elif tried.values.get("mimo_degraded"):
            yield problem(
                "command",
                f"no feature of the plugin runs: {tried.values['mimo_degraded']}",
                "name the features that fit, or drop --plugin",
            )
        else:
            yield note("command", "SGLang takes it; it does not ask for the plugin (--plugin mimo)")
    elif tried.step == "parse":
        yield problem(
            "command", f"SGLang does not read it: {tried.error}", "correct the command line"
        )
    elif tried.error.startswith(REFUSED):
        yield problem("command", tried.error.removeprefix(REFUSED), "as the line says")
    elif tried.step == "resolve":
        yield problem(
            "command",
            f"SGLang refuses it here: {tried.error}",
            "correct the command, or check it on the machine that it is meant for",
        )
    else:
        yield problem(
            "command", f"SGLang does not read it at all: {tried.error}", "repair SGLang first"
        )


def _advice(tried: Probe) -> Iterator[Finding]:
    """What SGLang takes without a word, although it is hardly what was meant."""
    values = tried.values
    path = values.get("model_path")
    if not path or values.get("encoder_only"):
        return
    try:
        model = load_model(str(path))
    except ConfigError:
        yield note("command", f"{path} is no directory here: its pools and drafts are not checked")
        return
    yield from _pools(model, values)
    if model.architecture.startswith(MIMO_ARCHITECTURES):
        yield from _drafts(model, values)


def _pools(model: Model, values: Mapping[str, Any]) -> Iterator[Finding]:
    ratio = values.get("swa_full_tokens_ratio")
    if not model.geometry.is_hybrid or ratio not in (None, _STOCK_RATIO):
        return
    full = model.geometry.bytes_per_token("full")
    swa = _STOCK_RATIO * model.geometry.bytes_per_token("swa")
    better = swa_per_full(model.geometry)
    yield note(
        "pools",
        f"--swa-full-tokens-ratio is SGLang's {_STOCK_RATIO}: {swa / (full + swa):.0%} of the KV's "
        f"bytes are for sliding windows; `mimo flags` recommends about {better:.3g}",
    )


def _drafts(model: Model, values: Mapping[str, Any]) -> Iterator[Finding]:
    """One MTP layer for each draft step: SGLang builds as many modules as steps are asked for."""
    check = "drafts"
    layers, why_none = mtp_layers_of(model)
    algorithm = str(values.get("speculative_algorithm") or "").upper()
    if not algorithm:
        if layers:
            yield note(
                check,
                f"the checkpoint's {layers} MTP layers are not used; `mimo flags` has the options",
            )
        return
    if algorithm not in ("EAGLE", "NEXTN"):
        return
    if why_none:
        yield problem(
            check,
            f"--speculative-algorithm {algorithm}, but {why_none}",
            "drop it, or serve a checkpoint with MTP layers",
        )
        return
    steps = values.get("speculative_num_steps")
    if steps is not None and steps > layers:
        yield problem(
            check,
            f"--speculative-num-steps {steps}, the checkpoint has {layers} MTP layers: SGLang "
            "builds a module for each step, and the last ones find no weights",
            f"--speculative-num-steps {layers} --speculative-num-draft-tokens {layers + 1}",
        )
    elif steps is not None and steps < layers:
        yield note(check, f"{steps} of {layers} MTP layers are used (--speculative-num-steps)")
    else:
        yield ok(check, f"one draft step for each of {layers} MTP layers")
    if values.get("speculative_eagle_topk") not in (None, 1):
        yield problem(
            check,
            f"--speculative-eagle-topk {values['speculative_eagle_topk']}: MTP layers draft a "
            "chain, not a tree",
            "--speculative-eagle-topk 1",
        )
    if model.geometry.mtp_layers < layers:
        yield note(
            check,
            "config.json does not say num_nextn_predict_layers: SGLang sizes its pools without the "
            "KV of draft layers; leave that room with --mem-fraction-static",
        )
