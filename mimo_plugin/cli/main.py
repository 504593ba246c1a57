# SPDX-License-Identifier: Apache-2.0
"""The command ``mimo``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.errors import MimoError

COMMANDS = ("doctor", "flags", "plan", "patches", "router")
"""Modules of this package with ``add_parser(subparsers)``, which sets ``run(args) -> int``."""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command that this installation has."""
    parser = argparse.ArgumentParser(
        prog="mimo", description="Tools for mimo-plugin: check, size and start an engine with it."
    )
    parser.add_argument("--version", action="version", version=f"mimo-plugin {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = _command(name)
        if module is not None:
            module.add_parser(subparsers)
    return parser


def _command(name: str) -> Any:
    """The module of a command, None when this installation leaves it out."""
    dotted = f"mimo_plugin.cli.{name}"
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name == dotted:
            return None
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 something is wrong, 2 the command line is wrong."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except MimoError as error:
        print(f"mimo {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
