# SPDX-License-Identifier: Apache-2.0
"""What the engines call when they load plugins. Standard library only at import.

An engine that merely has the plugin installed must run exactly as if it had not, so neither
function raises. What can't be set up is refused later, when a user asks for the plugin.
"""

from __future__ import annotations

import logging
import os
import sys

# Engines configure the logging of their own name space only.
_VLLM_LOGGER = "vllm.mimo_plugin"
_SGLANG_LOGGER = "sglang.mimo_plugin"


def register_vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``; runs in each process, repeatedly.

    Adds the option ``--plugin`` and the check of the ``mimo`` section, nothing else.
    """
    try:
        from mimo_plugin.engines.vllm.switch import install

        install()
    except Exception as error:
        _refuse_when_asked(error)


def register_sglang() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs once in each process.

    Adds the option ``--plugin`` and the reading of ``MIMO_CONFIG``, nothing else.
    """
    try:
        from mimo_plugin.engines.sglang.switch import install

        install()
    except Exception as error:
        _refuse_sglang_when_asked(error)


def _refuse_sglang_when_asked(error: Exception) -> None:
    """End a process that asks for the plugin: SGLang would log ``error`` and run stock."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    message = (
        f"mimo-plugin is installed but could not attach to this SGLang ({line}); "
        "fix: run `mimo doctor`, or drop the mimo settings"
    )
    asked = bool(os.environ.get("MIMO_CONFIG", "").strip()) or _names_the_plugin(sys.argv)
    if asked and os.environ.get("MIMO_STRICT", "1").strip() != "0":
        raise SystemExit(f"mimo-plugin: error: {message}")
    log = logging.getLogger(_SGLANG_LOGGER)
    log.log(logging.ERROR if asked else logging.WARNING, "%s", message)


def _names_the_plugin(arguments: list[str]) -> bool:
    """Whether a command line holds ``--plugin mimo…``, or a name that only the plugin knows."""
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if option == "--plugin" and value.strip().split(":")[0] == "mimo":
            return True
        if (option, value) in (
            ("--radix-cache-backend", "mimo"),
            ("--schedule-policy", "mimo-affinity"),
        ):
            return True
    return False


def _refuse_when_asked(error: Exception) -> None:
    """Make an engine that asks for the plugin fail with ``error`` instead of running stock."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    message = (
        f"mimo-plugin is installed but could not attach to this vLLM ({line}); "
        "fix: run `mimo doctor`, or drop the mimo settings"
    )
    try:
        import functools

        from vllm.engine.arg_utils import EngineArgs

        stock = EngineArgs.create_engine_config

        @functools.wraps(stock)
        def create_engine_config(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            extra = getattr(self, "additional_config", None)
            if isinstance(extra, dict) and extra.get("mimo") is not None:
                if os.environ.get("MIMO_STRICT", "1").strip() != "0":
                    if "vllm.entrypoints.cli.main" in sys.modules:  # the command: no traceback
                        raise SystemExit(message)
                    raise RuntimeError(message)
                logging.getLogger(_VLLM_LOGGER).error("%s", message)
            return stock(self, *args, **kwargs)

        if not getattr(stock, "mimo_plugin_refusal", False):
            create_engine_config.mimo_plugin_refusal = True  # type: ignore[attr-defined]
            EngineArgs.create_engine_config = create_engine_config
    except Exception as second:
        logging.getLogger(_VLLM_LOGGER).debug("mimo-plugin: no engine arguments here: %s", second)
    logging.getLogger(_VLLM_LOGGER).warning("%s", message)
