# SPDX-License-Identifier: Apache-2.0
"""Command lines as SGLang reads them, and a process that gets the arguments of one of them.

    python -m integration_tests.sglang_arguments '{"NAME": ["--model-path", …], …}' NAME

Prints one JSON object: what was found for each name, and under ``process`` what the plugin did in
a process that was started with the resolved arguments of the second argument's command, and that
loads no plugins, as SGLang's encoder ranks and further tokenizers.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any


def serve(record: Any, answers: Any) -> None:
    """What such a process of SGLang does first."""
    from sglang.srt import plugins
    from sglang.srt.runtime_context import publish

    from mimo_plugin.engines.sglang import register

    publish(record, role="encoder")
    roles = [role for _, role in register._announced]
    answers.put({"plugins_loaded": plugins._plugins_loaded, "roles": roles})


def process_of(words: list[str]) -> dict[str, Any]:
    """Start one with the arguments of a command."""
    from sglang.srt.server_args import prepare_server_args

    record = prepare_server_args(words)
    record.resolve_once()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=serve, args=(record, answers))
    child.start()
    child.join(120)
    found: dict[str, Any] = {"exit": child.exitcode}
    return found | ({} if answers.empty() else answers.get())


def main(lines: str, process: str) -> None:
    """See the module."""
    from mimo_plugin.engines.sglang import arguments

    commands = json.loads(lines)
    found = {name: arguments.read(words) for name, words in commands.items()}
    print("\n" + json.dumps(found | {"process": process_of(commands[process])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
