# SPDX-License-Identifier: Apache-2.0
"""How the plugin is asked for on SGLang: ``--plugin``, ``MIMO_CONFIG``, the radix backend's name.

``install`` wraps three methods of ``ServerArgs`` and hooks ``publish``, which each process calls
once it has its arguments. With the plugin not asked for the wrappers add an unused option to the
parser, one name to the choices of ``--schedule-policy``, and return what SGLang returned.

The wrappers are set directly: SGLang's hook registry logs a hook that can't be applied and goes on
without it, and the engine would run stock though the plugin was asked for.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from mimo_plugin.config import SECTION, merge_plugin_option, parse_plugin_option, parse_strict
from mimo_plugin.engines.sglang import register
from mimo_plugin.engines.sglang.section import Section
from mimo_plugin.errors import FeatureUnavailable, MimoError
from mimo_plugin.features import available

logger = logging.getLogger(register.LOGGER_NAME)

OPTION = "--plugin"
POLICY_OPTION = "--schedule-policy"
PUBLISH = "sglang.srt.runtime_context.publish"
_MARK = "mimo_plugin_wrapper"
# Modules that are the program itself when SGLang's own commands run.
_COMMANDS = ("sglang.cli.main", "sglang.launch_server")


def install() -> None:
    """Wrap ``ServerArgs`` and hook ``publish``; a second call changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    done = True
    for name, wrap in (
        ("add_cli_args", _wrap_add_cli_args),
        ("from_cli_args", _wrap_from_cli_args),
        ("resolve_once", _wrap_resolve_once),
    ):
        current = ServerArgs.__dict__[name]
        stock = getattr(current, "__func__", current)
        if getattr(stock, _MARK, False):
            continue
        done = False
        wrapper = functools.wraps(stock)(wrap(stock))
        setattr(wrapper, _MARK, True)
        kind = type(current) if isinstance(current, (staticmethod, classmethod)) else None
        setattr(ServerArgs, name, kind(wrapper) if kind else wrapper)
    if not done:
        # By the registry: it also reaches modules that have imported the function already.
        HookRegistry.register(PUBLISH, after_publish, HookType.AFTER)


def join_process() -> None:
    """Attach to a process that has got the arguments of an engine with the plugin.

    Raises:
        FeatureUnavailable: the hook can't be applied.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    install()
    HookRegistry.apply_hooks()
    _require_hook()


def _require_hook() -> None:
    """SGLang only logs a hook that it can't apply; without it no process would be prepared."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if PUBLISH not in HookRegistry._patched:
        raise FeatureUnavailable(
            f"SGLang did not apply the plugin's hook on {PUBLISH} in this process; needed: plugins "
            "loaded before arguments are resolved; fix: run `mimo doctor --engine sglang`"
        )


def after_publish(result: Any, server_args: Any, *args: Any, role: str, **kwargs: Any) -> None:
    """Hook behind ``publish(server_args, role=…)``; changes nothing without a section."""
    try:
        register.enter_process(server_args, role)
    except MimoError as error:
        # Past every `except Exception` of the process; the process that started it ends as well.
        raise SystemExit(f"mimo-plugin: error: {error}") from error.__cause__


def _wrap_add_cli_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(parser, *args, **kwargs)
        if OPTION in getattr(parser, "_option_string_actions", ()):
            if not _is_ours(parser):
                logger.warning(
                    "mimo-plugin: the option %s is taken; use %s='{\"features\": [...]}'",
                    OPTION,
                    register.CONFIG_ENV,
                )
            return result
        for action in parser._actions:
            if POLICY_OPTION in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, register.POLICY]
        parser.add_argument(
            OPTION,
            type=_option_value,
            default=None,
            metavar=f"{SECTION}[:FEATURE,...]",
            help=(
                f"Switch on mimo-plugin: `{SECTION}` for every feature that fits the model, or "
                f"`{SECTION}:FEATURE,...` with {', '.join(available(register.ENGINE))}."
            ),
        )
        return result

    return add_cli_args


def _is_ours(parser: Any) -> bool:
    return parser._option_string_actions[OPTION].type is _option_value


def _option_value(text: str) -> str:
    """Check the option while parsing, so that the parser prints the one line and exits."""
    try:
        parse_plugin_option(text, register.ENGINE)
    except MimoError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _wrap_from_cli_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        server_args = stock(cls, args, *rest, **kwargs)
        option = getattr(args, "plugin", None)
        if isinstance(option, str) and option.partition(":")[0].strip() == SECTION:
            try:
                section = Section(_with_option(option))
                setattr(server_args, register.RECORD_ATTRIBUTE, section)
            except MimoError as error:
                raise _for_user(error) from None
        return server_args

    return from_cli_args


def _with_option(option: str) -> dict[str, Any]:
    return merge_plugin_option(
        parse_plugin_option(option, register.ENGINE),
        register.section_from_environment(os.environ),
        engine=register.ENGINE,
        source=register.CONFIG_ENV,
    )


def _wrap_resolve_once(stock: Callable[..., Any]) -> Callable[..., Any]:
    def resolve_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_resolution_finished", False):
            return stock(self, *args, **kwargs)
        try:
            # Before SGLang reads the model: a wrong setting is reported at once.
            _check_early(self)
            result = stock(self, *args, **kwargs)
            if register.activate(self, os.environ) is not None:
                _require_hook()
        except MimoError as error:
            # Not to be taken for resolved: a second start with this record would run stock.
            self._resolution_finished, self._resolution_failed = False, True
            raise _for_user(error) from error.__cause__
        return result

    return resolve_once


def _check_early(server_args: Any) -> None:
    """Refuse a wrong section before the model is looked at; lenient leaves it to later."""
    try:
        register.decide_early(server_args, os.environ)
    except MimoError:
        if parse_strict(os.environ):
            raise


def _for_user(error: MimoError) -> BaseException:
    """The exception to raise: for SGLang's commands one line without a traceback."""
    if runs_as_command():
        return SystemExit(f"mimo-plugin: error: {error}")
    return error


def runs_as_command() -> bool:
    """Whether this process is one of SGLang's commands, not a user's own program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "sglang.cli.main" in sys.modules or getattr(spec, "name", None) in _COMMANDS
