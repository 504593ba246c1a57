# SPDX-License-Identifier: Apache-2.0
"""``mimo doctor``: is the plugin found, allowed, loadable, and fit for the installed engine?

The engine is not imported here.  What must really be tried runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.cli import _environment as environment
from mimo_plugin.cli import _plugins as plugins
from mimo_plugin.cli._command_check import check_command
from mimo_plugin.cli._probe import Probe, try_entry_point
from mimo_plugin.cli._report import Finding, GroupStatus, Report, note, ok, problem
from mimo_plugin.cli._vllm_command_check import check_command as check_vllm_command
from mimo_plugin.contracts import find_package
from mimo_plugin.errors import ConfigError

ENGINES = tuple(plugins.SEAMS)
DEFAULT_TIMEOUT_S = 180.0


def add_parser(subparsers: Any) -> None:
    """Add the ``doctor`` command to the parser of ``mimo``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation; exit status 1 when something is wrong",
        description="Check entry points, allow-lists, versions, contracts, torch and GPU. Each "
        "problem is printed with its fix. Exit status: 0 all is well, 1 something is wrong.",
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-load",
        action="store_true",
        help="do not load the plugin into the engine in a separate process (saves its import)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="limit for each thing tried in a separate process (default: %(default)g)",
    )
    parser.add_argument(
        "line",
        nargs="*",
        metavar="COMMAND",
        help="behind `--`: a command `vllm serve …` or `sglang serve …` to check, with the "
        "environment of this one; nothing is started",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when there is a problem."""
    seam = plugins.SEAMS[args.engine]
    other = next((engine for engine in ENGINES if engine != args.engine), None)
    if args.line[:1] == [other]:
        raise ConfigError(
            f"COMMAND: found one of {other} with --engine {args.engine}; allowed: one of that "
            f"engine; fix: use --engine {other}"
        )
    report = examine(os.environ, load=not args.no_load, timeout_s=args.timeout_s, seam=seam)
    if args.line and seam is plugins.SGLANG:
        report.add(check_command(args.line, timeout_s=args.timeout_s))
    elif args.line:
        report.add(check_vllm_command(args.line, os.environ, timeout_s=args.timeout_s))
    print(report.to_json() if args.json else report.to_text())
    return 1 if report.problems else 0


def examine(
    environ: Mapping[str, str],
    *,
    load: bool,
    timeout_s: float,
    seam: plugins.Seam = plugins.VLLM,
) -> Report:
    """Everything that can be wrong between an installed plugin and a running one."""
    report = Report(
        engine=seam.engine, plugin_version=__version__, python=platform.python_version()
    )
    installed = plugins.scan()
    names = {
        group: [entry.name for _, entry in plugins.entries_of(group, installed)]
        for group in seam.groups
    }
    platforms = [name for group in seam.groups if "platform" in group for name in names[group]]
    report.add(environment.check_engine(environ, seam))
    report.add(environment.check_contracts(seam))
    report.add(environment.check_torch_family(timeout_s))
    report.add(environment.check_gpu(environment.nvidia_gpus(), seam, platforms))
    report.add(plugins.check_entry_point(installed, __version__, seam))
    known = [name for group in seam.groups for name in names[group]]
    report.add(plugins.check_allow_list(environ, known, seam))
    report.add(environment.check_variables(environ))
    if seam is plugins.SGLANG:
        report.add(environment.check_section(environ))
    load_findings = _check_loading(installed, load, timeout_s, seam)
    report.add(load_findings)
    loaded = any(found.level == "ok" for found in load_findings)
    report.groups = _groups(installed, environ, seam, loaded=loaded)
    return report


def _check_loading(
    installed: Sequence[plugins.Installed], load: bool, timeout_s: float, seam: plugins.Seam
) -> list[Finding]:
    """Load our entry point as the engine does and call it."""
    values = [
        entry.value
        for _, entry in plugins.entries_of(seam.group, installed)
        if entry.name == plugins.PLUGIN_NAME
    ]
    if not values:
        return []
    value = values[-1]  # the one that the engine ends up with
    call = load and find_package(seam.engine) is not None
    tried = try_entry_point(value, seam.hooked, call=call, timeout_s=timeout_s)
    return [_loading_finding(value, tried, call, seam)]


def _loading_finding(value: str, tried: Probe, called: bool, seam: plugins.Seam) -> Finding:
    check = "loading"
    if tried.error is None and not tried.refused:
        if called:
            return ok(check, f"{value} loads, and attaches to the engine")
        return note(check, f"{value} loads (not called: no engine, or --no-load)")
    if tried.error is None:
        return problem(
            check,
            f"{value} ran but did not attach to the engine: it would refuse every request for it",
            "see the contracts and versions above; reinstall a matching pair of both",
        )
    if tried.step == "load":
        return problem(
            check,
            f"{value} does not load: {tried.error}; {seam.title} logs this and runs "
            "without the plugin",
            "install what is missing, or reinstall mimo-plugin",
        )
    if tried.step == "call":
        effect = "runs without the plugin" if seam.strips else "every process of it ends"
        return problem(
            check,
            f"{value} fails when it is called: {tried.error}; {seam.title}: {effect}",
            "reinstall mimo-plugin, or uninstall it",
        )
    return problem(
        check, f"{seam.title} itself does not import: {tried.error}", f"repair {seam.title} first"
    )


def _groups(
    installed: Sequence[plugins.Installed],
    environ: Mapping[str, str],
    seam: plugins.Seam,
    *,
    loaded: bool,
) -> list[GroupStatus]:
    names = plugins.allow_list(environ, seam)
    groups = []
    for group in seam.groups:
        found = list(plugins.entries_of(group, installed))
        if not found and group != seam.group:
            continue
        present = [entry.name for _, entry in found]
        allowed = None if names is None else tuple(name for name in present if name in names)
        ours = plugins.PLUGIN_NAME in (present if allowed is None else allowed)
        active = group == seam.group and ours and loaded
        groups.append(
            GroupStatus(
                group=group,
                found=tuple(f"{entry.name} ({owner.label})" for owner, entry in found),
                allowed=allowed,
                active=(plugins.PLUGIN_NAME,) if active else (),
            )
        )
    return groups
