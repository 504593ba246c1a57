# SPDX-License-Identifier: Apache-2.0
"""Try an import in a process of its own, bounded in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MARK = "mimo-doctor-result:"

# argv: value of the entry point, "call" or "load", what it wraps.
_ENTRY_CODE = f"""
import importlib, json, os, sys
value, action, hooked = sys.argv[1:4]
def say(step, error=None, refused=False):
    text = None
    if error is not None:
        text = " ".join((type(error).__name__ + ": " + str(error)).split())
    found = {{"step": step, "error": text, "refused": refused}}
    print("\\n{_MARK}" + json.dumps(found), flush=True)
    os._exit(0)
try:
    module, _, attribute = value.partition(":")
    function = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        function = getattr(function, part)
except BaseException as error:
    say("load", error)
if action == "load":
    say("done")
try:
    function()
except BaseException as error:
    say("call", error)
try:
    module, _, name = hooked.partition(":")
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
except BaseException as error:
    say("engine", error)
say("done", refused=not getattr(target, "mimo_plugin_wrapper", False))
"""

# argv: the arguments of `sglang serve`.
_SGLANG_CODE = f"from mimo_plugin.engines.sglang.arguments import main; main({_MARK!r})"

# argv: the arguments of `vllm serve`.
_VLLM_CODE = f"""
import contextlib, io, json, os, sys
def say(step, error=None, values=None):
    text = None if error is None else " ".join(str(error).split())
    found = {{"step": step, "error": text, "values": values or {{}}}}
    print("\\n{_MARK}" + json.dumps(found, default=str), flush=True)
    os._exit(0)
try:
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
except BaseException as error:
    say("load", type(error).__name__ + ": " + str(error))
printed = io.StringIO()
try:
    with contextlib.redirect_stderr(printed):
        args = parser.parse_args(["serve", *sys.argv[1:]])
        if getattr(args, "model_tag", None):
            args.model = args.model_tag
        engine = AsyncEngineArgs.from_cli_args(args)
except SystemExit as error:
    say("parse", (printed.getvalue().strip().splitlines() or [error])[-1])
except BaseException as error:
    say("parse", type(error).__name__ + ": " + str(error))
transfer = engine.kv_transfer_config
say("done", None, {{
    "model": engine.model,
    "section": (engine.additional_config or {{}}).get("mimo"),
    "kv_connector": getattr(transfer, "kv_connector", None),
    "kv_connector_extra_config": getattr(transfer, "kv_connector_extra_config", None),
    "engines": engine.data_parallel_size_local or engine.data_parallel_size or 1,
}})
"""

_IMPORT_CODE = f"""
import importlib, json, os, sys
try:
    importlib.import_module(sys.argv[1])
    error = None
except BaseException as found:
    error = " ".join((type(found).__name__ + ": " + str(found)).split())
print("\\n{_MARK}" + json.dumps({{"step": "load", "error": error}}), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What happened in the other process.

    Attributes:
        step: where it ended: ``load``, ``call``, ``engine`` (the engine's own import), ``parse`` or
            ``resolve`` (of a command line), ``done``.
        error: ``Type: message``, None when nothing was raised.
        refused: the call returned but left the engine untouched.
        values: of the arguments of a command line, by SGLang's names.
    """

    step: str
    error: str | None
    refused: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)


def try_entry_point(value: str, hooked: str, *, call: bool, timeout_s: float) -> Probe:
    """Load ``module:function`` and call it, as the engine does; ``hooked`` is what it wraps."""
    return _run(_ENTRY_CODE, [value, "call" if call else "load", hooked], timeout_s)


def try_sglang_command(words: list[str], *, timeout_s: float) -> Probe:
    """Read and resolve the arguments of ``sglang serve`` as SGLang does; nothing is started."""
    return _run(_SGLANG_CODE, words, timeout_s)


def try_vllm_command(words: list[str], *, timeout_s: float) -> Probe:
    """Read the arguments of ``vllm serve`` as vLLM does; the model is not looked at."""
    return _run(_VLLM_CODE, words, timeout_s)


def try_import(module: str, *, timeout_s: float) -> Probe:
    """Import a module."""
    return _run(_IMPORT_CODE, [module], timeout_s)


def _run(code: str, arguments: list[str], timeout_s: float) -> Probe:
    flags = ["-S"] if sys.flags.no_site else []
    if sys.flags.no_user_site:
        flags.append("-s")
    command = [sys.executable, *flags, "-c", code, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=os.sep,  # so that the current directory is no place to import from
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(step="load", error=f"no answer within {timeout_s:g} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            found = json.loads(line.removeprefix(_MARK))
            return Probe(
                step=found["step"],
                error=found["error"],
                refused=found.get("refused", False),
                values=found.get("values", {}),
            )
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return Probe(step="load", error=f"the process ended with status {done.returncode}: {last[0]}")


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # The list of names is what is being checked; it must not change what is tried here.
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        environment.pop(name, None)
    path = environment.get("PYTHONPATH")
    if path:
        absolute = [os.path.abspath(part) for part in path.split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    return environment
