# SPDX-License-Identifier: Apache-2.0
"""Is the decoding pool asked for, and can it be had? Nothing of the engine is imported to say so.

Two ways ask for it: ``vision.decode`` for one engine, ``VLLM_MEDIA_CONNECTOR=mimo`` for all engines
of a process. Another value of that variable is the user's own connector, which is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.contracts.vllm_media import MEDIA_POOL
from mimo_plugin.errors import ContractError

VARIABLE = "VLLM_MEDIA_CONNECTOR"
"""vLLM reads from it which media connector its requests use."""

CONNECTOR = "mimo"
"""Its value that means our connector."""

STOCK_CONNECTOR = "http"
"""Its value that means vLLM's own, which is the default."""

logger = logging.getLogger("vllm.mimo_plugin")

Check = Callable[[str], str | None]
"""The first broken contract of a tag in one line, None when all hold."""


def why_not(decode: str, environ: Mapping[str, str]) -> str | None:
    """Why ``vision.decode`` can't be had, with the fix; None where it can."""
    other = _other_connector(environ)
    if decode != "pool" or other is None:
        return None
    return (
        f"{VARIABLE} is {other!r}, but mimo.vision.decode is 'pool'; allowed beside it: "
        f"{STOCK_CONNECTOR}, {CONNECTOR} or unset; fix: unset {VARIABLE}, or set decode to 'stock'"
    )


def contracts_of(decode: str) -> tuple[str, ...]:
    """Tags of the rows without which ``vision.decode`` can't be had."""
    return (MEDIA_POOL,) if decode == "pool" else ()


def switch_on(
    vllm_config: Any, config: VisionConfig, environ: Mapping[str, str], broken: Check
) -> None:
    """Give an engine's pictures the pool if its settings say so.

    With ``auto`` it does without where the user has a connector of his own, or where this vLLM
    lacks what the pool relies on; the log says so. The settings of the pool hold in any case, for
    the jobs of others.
    """
    from mimo_plugin.engines.vllm.media_pool import remember, settings_of  # not where it is off

    settings = settings_of(config, vllm_config.parallel_config._api_process_count)
    token = remember(settings)
    if config.decode == "stock":
        return
    other = _other_connector(environ)
    if other is not None:
        logger.info("mimo vision: %s is %r, so it decodes pictures", VARIABLE, other)
        return
    problem = broken(MEDIA_POOL)
    if problem is not None:
        logger.warning(
            "mimo vision: vLLM decodes pictures, it lacks what a pool relies on: %s", problem
        )
        return
    from mimo_plugin.engines.vllm import media

    media.attach(vllm_config, token)


def register_named(environ: Mapping[str, str], broken: Check) -> None:
    """Make the connector known where the variable names it.

    Raises:
        ContractError: this engine lacks what it relies on.
    """
    if environ.get(VARIABLE) != CONNECTOR:
        return
    problem = broken(MEDIA_POOL)
    if problem is not None:
        raise ContractError(
            f"{VARIABLE}: found {CONNECTOR!r}, but this vLLM lacks what it relies on: {problem}; "
            f"fix: unset {VARIABLE}"
        )
    from mimo_plugin.engines.vllm import media

    media.register()


def _other_connector(environ: Mapping[str, str]) -> str | None:
    """The connector that the user chose for all of the process, when it is not ours."""
    chosen = environ.get(VARIABLE)
    return None if chosen in (None, CONNECTOR, STOCK_CONNECTOR) else chosen
