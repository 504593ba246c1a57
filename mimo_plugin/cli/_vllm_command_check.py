# SPDX-License-Identifier: Apache-2.0
"""Does a ``vllm serve`` command find what its tiers need?  vLLM reads it; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mimo_plugin.cli._probe import Probe, try_vllm_command
from mimo_plugin.cli._report import Finding, note, ok, problem
from mimo_plugin.cli._tiers_check import check_tiers
from mimo_plugin.config import MimoConfig, parse_config
from mimo_plugin.config_tiers import TiersConfig
from mimo_plugin.engines.vllm.tiers.configure import WHERE, require_host, settings_from
from mimo_plugin.engines.vllm.tiers.names import CONNECTOR
from mimo_plugin.errors import MimoError

_COMMAND = "command"


def check_command(
    words: Sequence[str], environ: Mapping[str, str], *, timeout_s: float
) -> list[Finding]:
    """What is wrong with a command line, as far as it can be told without starting it.

    Args:
        words: ``vllm serve …``, or its arguments alone.
        environ: of that command.
        timeout_s: limit for vLLM to read it.
    """
    arguments = list(words)
    if arguments[:1] == ["vllm"]:
        arguments = arguments[1:]
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    return list(_findings(try_vllm_command(arguments, timeout_s=timeout_s), environ))


def _findings(tried: Probe, environ: Mapping[str, str]) -> Iterator[Finding]:
    if tried.step == "parse":
        yield problem(_COMMAND, f"vLLM does not read it: {tried.error}", "correct the command line")
        return
    if tried.error is not None:
        yield problem(_COMMAND, f"vLLM does not read it at all: {tried.error}", "repair vLLM first")
        return
    values = tried.values
    try:
        config = parse_config(values.get("section"), environ=environ, engine="vllm")
        tiers = _tiers_of(config, values)
    except MimoError as error:
        yield problem(_COMMAND, str(error), "as the line says")
        return
    if config is None:
        yield note(_COMMAND, "vLLM takes it; it does not ask for the plugin (--plugin mimo)")
    else:
        yield ok(_COMMAND, f"vLLM takes it; features {', '.join(config.features)}")
    if tiers is not None:
        yield from check_tiers(tiers, engines=int(values.get("engines") or 1))


def _tiers_of(config: MimoConfig | None, values: Mapping[str, Any]) -> TiersConfig | None:
    """The settings of the tiers: of the feature, or of the connector given by hand.

    Raises:
        ConfigError: a setting is missing, unknown or out of range.
    """
    if config is not None and "tiers" in config.features:
        require_host(WHERE, config.tiers)
        return config.tiers
    if values.get("kv_connector") == CONNECTOR:
        tiers = settings_from(values.get("kv_connector_extra_config") or {})
        require_host(WHERE, tiers)
        return tiers
    return None
