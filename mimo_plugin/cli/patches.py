# SPDX-License-Identifier: Apache-2.0
"""``mimo patches``: check, list, apply and undo the patch queue of an engine."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimo_plugin.cli import _patch_state as source
from mimo_plugin.cli._patch_queue import (
    ENGINES,
    Patch,
    PatchError,
    header_problems,
    load_series,
    readme,
)

ACTIONS = ("check", "list", "apply", "readme")


def add_parser(subparsers: Any) -> None:
    """Add the ``patches`` command to the parser of ``mimo``."""
    parser = subparsers.add_parser(
        "patches",
        help="check, list, apply or undo the optional patches of an installed engine",
        description="Work on the patch queue of an engine. The engine is found, not imported.",
    )
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="check: would the series apply (exit status 1 if not); list: what there is and what "
        "is on; apply: the whole series or nothing; readme: the text of patches/README.md",
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument(
        "--undo", action="store_true", help="with apply: restore the engine's own files"
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="directory that holds the engine's package (default: where this Python finds it)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status (0 good, 1 a problem, 2 wrong usage)."""
    if args.undo and args.action != "apply":
        print(f"mimo patches {args.action}: --undo goes with apply", file=sys.stderr)
        return 2
    try:
        if args.action == "readme":
            sys.stdout.write(readme())
            return 0
        base = source.locate(args.engine, args.target)
        if args.undo:
            return _undo(base, args.engine)
        series = load_series(args.engine)
        action = {"check": _check, "list": _list, "apply": _apply}[args.action]
        return action(series, base, args.engine)
    except (PatchError, OSError) as error:
        print(f"mimo patches {args.action}: {error}", file=sys.stderr)
        return 1


def _where(base: Path, engine: str) -> str:
    return f"{engine} {source.engine_version(base, engine) or '(version unknown)'} at {base}"


def _list(series: Sequence[Patch], base: Path, engine: str) -> int:
    now = source.status(base, engine)
    on = {entry["name"] for entry in (now.record or {}).get("patches", [])}
    print(f"{_where(base, engine)}: {now.state}")
    for patch in series:
        mark = (
            now.state
            if patch.name in on and now.state in ("partial", "changed")
            else ("applied" if patch.name in on and now.state == "applied" else "not applied")
        )
        print(f"  {patch.name}  [{patch.fields.get('Reason', '?')}] {mark}\n      {patch.subject}")
    return 0


def _check(series: Sequence[Patch], base: Path, engine: str) -> int:
    print(_where(base, engine))
    problems = [f"{p.name}: {line}" for p in series for line in header_problems(p)]
    now = source.status(base, engine)
    if now.state in ("partial", "changed"):
        problems.append(
            f"{now.files[0]} is not as 'mimo patches apply' left it ({now.state}); "
            "run 'mimo patches apply --undo'"
        )
    elif now.state == "applied":
        print(f"  applied, {len(now.record['files']) if now.record else 0} file(s) as recorded")
    if not problems and now.state in ("plain", "stale"):
        problems += source.version_problems(series, base, engine)
        merged = [patch.name for patch in series if source.reverse_applies(patch, base)]
        problems += [f"{name}: the engine already has this change; drop it" for name in merged]
    if not problems and now.state in ("plain", "stale"):
        with tempfile.TemporaryDirectory(prefix="mimo-patches-") as scratch:
            files = source.trial(series, base, Path(scratch))
        print(f"  {len(series)} patch(es) apply in order, {len(files)} file(s) touched")
    for line in problems:
        print(f"  problem: {line}")
    return 1 if problems else 0


def _apply(series: Sequence[Patch], base: Path, engine: str) -> int:
    if source.apply(series, base, engine):
        print(f"{_where(base, engine)}: {len(series)} patch(es) applied; restart running engines")
    else:
        print(f"{_where(base, engine)}: already applied")
    return 0


def _undo(base: Path, engine: str) -> int:
    if source.undo(base, engine):
        print(f"{_where(base, engine)}: the engine's own files are back; restart running engines")
    else:
        print(f"{_where(base, engine)}: nothing to undo")
    return 0
