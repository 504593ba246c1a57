# SPDX-License-Identifier: Apache-2.0
"""How the plugin is asked for: the option ``--plugin`` and the section ``mimo``.

``install`` wraps three methods of ``EngineArgs`` and nothing else. With the plugin not asked for
the wrappers add an unused option to the parser and return what vLLM returned.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from mimo_plugin.config import (
    SECTION,
    merge_plugin_option,
    parse_plugin_option,
    section_of,
)
from mimo_plugin.engines.vllm import register
from mimo_plugin.errors import MimoError, setting_error
from mimo_plugin.features import available

logger = logging.getLogger(register.LOGGER_NAME)

OPTION = "--plugin"
_MARK = "mimo_plugin_wrapper"
# The command `vllm` imports this module; a user's own program does not.
_CLI_MODULE = "vllm.entrypoints.cli.main"
# arguments that features fill in before vLLM reads them
_FILLED_IN = ("speculative_config", "kv_transfer_config")


def install() -> None:
    """Wrap ``EngineArgs``; a second call changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    for name, wrap in (
        ("add_cli_args", _wrap_add_cli_args),
        ("from_cli_args", _wrap_from_cli_args),
        ("create_engine_config", _wrap_create_engine_config),
    ):
        current = EngineArgs.__dict__[name]
        stock = getattr(current, "__func__", current)
        if getattr(stock, _MARK, False):
            continue
        wrapper = functools.wraps(stock)(wrap(stock))
        setattr(wrapper, _MARK, True)
        kind = type(current) if isinstance(current, (staticmethod, classmethod)) else None
        setattr(EngineArgs, name, kind(wrapper) if kind else wrapper)


def _wrap_add_cli_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = stock(*args, **kwargs)
        if OPTION in getattr(parser, "_option_string_actions", ()):
            logger.warning(
                "mimo-plugin: the option %s is taken; use --additional-config '{\"%s\": {...}}'",
                OPTION,
                SECTION,
            )
            return parser
        parser.add_argument(
            OPTION,
            type=_option_value,
            default=None,
            metavar=f"{SECTION}[:FEATURE,...]",
            help=(
                f"Switch on mimo-plugin: `{SECTION}` for every feature that fits the model, or "
                f"`{SECTION}:FEATURE,...` with {', '.join(available('vllm'))}."
            ),
        )
        return parser

    return add_cli_args


def _option_value(text: str) -> str:
    """Check the option while parsing, so that the parser prints the one line and exits."""
    try:
        parse_plugin_option(text)
    except MimoError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _wrap_from_cli_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        option = getattr(args, "plugin", None)
        if isinstance(option, str) and option.partition(":")[0].strip() == SECTION:
            try:
                # Into the arguments themselves: processes that vLLM starts with these arguments
                # build their own EngineArgs, perhaps before this wrapper exists there.
                args.additional_config = _with_option(
                    option, getattr(args, "additional_config", None)
                )
            except MimoError as error:
                raise _for_user(error) from None
        return stock(cls, args, *rest, **kwargs)

    return from_cli_args


def _with_option(option: str, additional_config: Any) -> dict[str, Any]:
    if additional_config is None:
        additional_config = {}
    if not isinstance(additional_config, dict):
        raise setting_error(
            "--additional-config", additional_config, "a JSON object", f"drop it or {OPTION}"
        )
    section = merge_plugin_option(parse_plugin_option(option), additional_config.get(SECTION))
    return {**additional_config, SECTION: section}


def _wrap_create_engine_config(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        section = section_of(getattr(self, "additional_config", None))
        try:
            register.prepare_parts(self, os.environ)
            if section is None:
                return stock(self, *args, **kwargs)
            # Before vLLM reads the model: a wrong setting is reported at once.
            register.check_section(section, os.environ)
            given = {name: getattr(self, name, None) for name in _FILLED_IN}
            register.complete_arguments(self, os.environ)
            vllm_config = stock(self, *args, **kwargs)
            active = register.activate(vllm_config, environ=os.environ)
        except MimoError as error:
            raise _for_user(error) from error.__cause__
        if active is None and any(getattr(self, n, None) is not v for n, v in given.items()):
            # Given up: the engine is stock, so what was filled in for the plugin goes too.
            for name, value in given.items():
                setattr(self, name, value)
            marked = vllm_config.additional_config
            vllm_config = stock(self, *args, **kwargs)
            vllm_config.additional_config = marked
        return vllm_config

    return create_engine_config


def _for_user(error: MimoError) -> BaseException:
    """The exception to raise: for the command ``vllm`` one line without a traceback."""
    if _CLI_MODULE in sys.modules:
        return SystemExit(f"mimo-plugin: error: {error}")
    return error
