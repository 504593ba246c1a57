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
    """Entry point of the group ``sglang.srt.plugins``: no feature runs on SGLang yet."""
    logging.getLogger(_SGLANG_LOGGER).debug("mimo-plugin: no feature for SGLang in this version")


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
