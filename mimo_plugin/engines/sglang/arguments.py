# SPDX-License-Identifier: Apache-2.0
"""What SGLang makes of a command line.  For ``mimo doctor`` and tests; nothing is started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from mimo_plugin.config import DEGRADED_KEY
from mimo_plugin.engines.sglang import register
from mimo_plugin.errors import MimoError, one_line

REFUSED = "mimo-plugin: error: "
"""How the plugin's own refusals begin, in a command of SGLang's too."""

PARSE, RESOLVE, DONE = "parse", "resolve", "done"
FEATURES, DEGRADED = "mimo_features", "mimo_degraded"
"""Names of what the plugin made of it, among SGLang's own."""


def read(words: Sequence[str]) -> dict[str, Any]:
    """Read and resolve the arguments of ``sglang serve``.

    Returns:
        ``step``: where it ended, ``parse``, ``resolve`` or ``done``; ``error``: one line, None when
        all went well; ``parsed`` and ``values``: the arguments by SGLang's names as given and as
        resolved (as given where that failed), as far as they are plain.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            record = prepare_server_args(list(words))
    except SystemExit as error:  # the parser has printed why
        lines = printed.getvalue().strip().splitlines()
        return _found(PARSE, lines[-1] if lines else str(error), {})
    except Exception as error:
        return _found(PARSE, _named(error), {})
    parsed = _plain(record)
    try:
        record.resolve_once()
    except SystemExit as error:
        return _found(RESOLVE, str(error), parsed)
    except MimoError as error:
        return _found(RESOLVE, f"{REFUSED}{error}", parsed)
    except Exception as error:
        return _found(RESOLVE, _named(error), parsed)
    section = getattr(record, register.RECORD_ATTRIBUTE, None) or {}
    values = _plain(register.resolved(record), list(parsed))
    values[FEATURES] = list(section.get("features", ()))
    values[DEGRADED] = section.get(DEGRADED_KEY)
    return _found(DONE, None, parsed, values)


def _found(
    step: str, error: str | None, parsed: dict[str, Any], values: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "step": step,
        "error": None if error is None else one_line(error),
        "parsed": parsed,
        "values": parsed if values is None else values,
    }


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _plain(record: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """Values that JSON knows."""
    plain = (bool, int, float, str, list, type(None))
    values = {}
    for name in names or record.__struct_fields__:
        value = getattr(record, name, None)
        if isinstance(value, plain) and not name.startswith("_"):
            values[name] = value
    return values


def main(mark: str) -> None:
    """Read the arguments of this process, print what was found behind ``mark``, and end."""
    print(f"\n{mark}{json.dumps(read(sys.argv[1:]))}", flush=True)
    os._exit(0)  # not through the exit handlers of an engine that was never started
