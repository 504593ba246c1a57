# SPDX-License-Identifier: Apache-2.0
"""Try an import in a process of its own, bounded in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

_MARK = "mimo-doctor-result:"

# argv: value of the entry point, "call" or "load".
_ENTRY_CODE = f"""
import importlib, json, os, sys
value, action = sys.argv[1:3]
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
    from vllm.engine.arg_utils import EngineArgs
except BaseException as error:
    say("engine", error)
wrapped = getattr(EngineArgs.create_engine_config, "mimo_plugin_wrapper", False)
say("done", refused=not wrapped)
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
        step: where it ended: ``load``, ``call``, ``engine`` (the engine's own import) or ``done``.
        error: ``Type: message``, None when nothing was raised.
        refused: the call returned but left the engine untouched.
    """

    step: str
    error: str | None
    refused: bool = False


def try_entry_point(value: str, *, call: bool, timeout_s: float) -> Probe:
    """Load ``module:function`` and call it, as the engine does."""
    return _run(_ENTRY_CODE, [value, "call" if call else "load"], timeout_s)


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
                step=found["step"], error=found["error"], refused=found.get("refused", False)
            )
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return Probe(step="load", error=f"the process ended with status {done.returncode}: {last[0]}")


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # The list of names is what is being checked; it must not change what is tried here.
    environment.pop("VLLM_PLUGINS", None)
    path = environment.get("PYTHONPATH")
    if path:
        absolute = [os.path.abspath(part) for part in path.split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    return environment
