# SPDX-License-Identifier: Apache-2.0
"""Is the plugin found and allowed?  Entry points and allow-lists, from metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from mimo_plugin.cli._report import Finding, note, ok, problem
from mimo_plugin.errors import nearest

PLUGIN_NAME = "mimo"
PLUGIN_DISTRIBUTION = "mimo-plugin"
VLLM_GROUP = "vllm.general_plugins"
VLLM_ENTRY = "mimo_plugin.entrypoints:register_vllm"
SGLANG_GROUP = "sglang.srt.plugins"
SGLANG_ENTRY = "mimo_plugin.entrypoints:register_sglang"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """How one engine finds its plugins.

    Attributes:
        engine: as the user writes it.
        title: as its makers write it.
        group: of our entry point.
        entry: value of our entry point.
        allow_list: variable that names the plugins to load.
        groups: entry-point groups which that filters.
        strips: names are stripped, and a list without a name loads all; otherwise names are
            compared exactly, and an empty list loads none.
        hooked: what our entry point wraps, as ``module:qualified.name``.
    """

    engine: str
    title: str
    group: str
    entry: str
    allow_list: str
    groups: tuple[str, ...]
    strips: bool
    hooked: str


VLLM = Seam(
    engine="vllm",
    title="vLLM",
    group=VLLM_GROUP,
    entry=VLLM_ENTRY,
    allow_list="VLLM_PLUGINS",
    groups=(
        VLLM_GROUP,
        "vllm.platform_plugins",
        "vllm.io_processor_plugins",
        "vllm.stat_logger_plugins",
        "vllm.endpoint_plugins",
    ),
    strips=False,
    hooked="vllm.engine.arg_utils:EngineArgs.create_engine_config",
)
SGLANG = Seam(
    engine="sglang",
    title="SGLang",
    group=SGLANG_GROUP,
    entry=SGLANG_ENTRY,
    allow_list="SGLANG_PLUGINS",
    groups=(SGLANG_GROUP, "sglang.srt.platforms"),
    strips=True,
    hooked="sglang.srt.server_args:ServerArgs.resolve_once",
)
SEAMS = {seam.engine: seam for seam in (VLLM, SGLANG)}

_REINSTALL = (
    f"pip install --force-reinstall --no-deps {PLUGIN_DISTRIBUTION} (or `pip install -e .`)"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point."""

    group: str
    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Metadata of one distribution.

    ``shadowed`` copies come later on the path than another of the same name; nothing reads them.
    """

    name: str
    version: str
    where: str
    entries: tuple[Entry, ...]
    shadowed: bool

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


def canonical(name: str) -> str:
    """A distribution's name as package tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan() -> list[Installed]:
    """All metadata on ``sys.path``, in the order in which it is found."""
    seen: set[str] = set()
    found = []
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if not name:  # a directory that is no longer a distribution
            continue
        entries = tuple(
            Entry(group=entry.group, name=entry.name, value=entry.value)
            for entry in distribution.entry_points
        )
        key = canonical(name)
        found.append(
            Installed(
                name=name,
                version=distribution.version or "?",
                where=str(getattr(distribution, "_path", "?")),
                entries=entries,
                shadowed=key in seen,
            )
        )
        seen.add(key)
    return found


def entries_of(group: str, installed: Sequence[Installed]) -> Iterator[tuple[Installed, Entry]]:
    """Entry points that an engine sees in a group."""
    for distribution in installed:
        if not distribution.shadowed:
            for entry in distribution.entries:
                if entry.group == group:
                    yield distribution, entry


def check_entry_point(
    installed: Sequence[Installed], version: str, seam: Seam = VLLM
) -> list[Finding]:
    """Is exactly one entry point of ours visible, and is it this code's?"""
    check = "entry point"
    findings = list(_check_copies(installed, version))
    ours = [
        (distribution, entry)
        for distribution, entry in entries_of(seam.group, installed)
        if entry.name == PLUGIN_NAME
    ]
    if not ours:
        return [*findings, _why_missing(installed, seam)]
    if len(ours) > 1:
        names = ", ".join(
            f"{distribution.label} ({distribution.where})" for distribution, _ in ours
        )
        findings.append(
            problem(
                check,
                f"{len(ours)} distributions define {PLUGIN_NAME!r} in {seam.group}: {names}; the "
                "engine silently takes the last",
                "pip uninstall all but one of them",
            )
        )
    for distribution, entry in ours:
        if entry.value != seam.entry:
            findings.append(
                problem(
                    check,
                    f"{PLUGIN_NAME!r} in {seam.group} is {entry.value} ({distribution.label}, "
                    f"{distribution.where}), not {seam.entry}",
                    _REINSTALL,
                )
            )
    if not any(finding.level == "problem" for finding in findings):
        findings.append(ok(check, f"{seam.group}: {PLUGIN_NAME} from {ours[0][0].label}"))
    return findings


def _check_copies(installed: Sequence[Installed], version: str) -> Iterator[Finding]:
    """Metadata of our own distribution: stale or doubled?"""
    check = "installation"
    copies = [found for found in installed if canonical(found.name) == PLUGIN_DISTRIBUTION]
    if not copies:
        return
    first = copies[0]
    if first.version != version:
        yield problem(
            check,
            f"the metadata at {first.where} says {first.version}, the code is {version}",
            _REINSTALL,
        )
    for other in copies[1:]:
        if (other.version, set(other.entries)) == (first.version, set(first.entries)):
            yield note(check, f"a second copy of the same metadata lies at {other.where}")
        else:
            yield problem(
                check,
                f"two different installations: {first.label} at {first.where} hides {other.label} "
                f"at {other.where}",
                f"delete the stale one of the two, then {_REINSTALL}",
            )


def _why_missing(installed: Sequence[Installed], seam: Seam) -> Finding:
    check = "entry point"
    for distribution in installed:
        for entry in distribution.entries:
            of_ours = entry.value == seam.entry
            if not distribution.shadowed and of_ours and entry.group != seam.group:
                return problem(
                    check,
                    f"{entry.name!r} of {distribution.label} is in the group {entry.group!r}; "
                    f"{seam.title} reads {seam.group!r}",
                    _REINSTALL,
                )
            if not distribution.shadowed and entry.value == seam.entry:
                return problem(
                    check,
                    f"{seam.entry} is called {entry.name!r}, expected {PLUGIN_NAME!r}",
                    _REINSTALL,
                )
    copies = [found for found in installed if canonical(found.name) == PLUGIN_DISTRIBUTION]
    if copies:
        return problem(
            check,
            f"{copies[0].label} at {copies[0].where} has no entry point in {seam.group}: stale "
            "metadata",
            f"delete {copies[0].where}, then {_REINSTALL}",
        )
    return problem(
        check,
        f"no distribution defines {PLUGIN_NAME!r} in {seam.group}: the plugin is not installed",
        f"pip install {PLUGIN_DISTRIBUTION} (or `pip install -e .` in the project)",
    )


def allow_list(environ: Mapping[str, str], seam: Seam = VLLM) -> list[str] | None:
    """The engine's list, cut exactly as it does; None when all plugins are loaded."""
    value = environ.get(seam.allow_list)
    if value is None:
        return None
    names = value.split(",")
    if seam.strips:
        return [name.strip() for name in names if name.strip()] or None
    return names


def check_allow_list(
    environ: Mapping[str, str], known: Sequence[str], seam: Seam = VLLM
) -> list[Finding]:
    """Will the engine load us?

    Args:
        environ: of the process.
        known: names of all entry points in the groups that the list filters.
        seam: of the engine.
    """
    check = "allow-list"
    variable = seam.allow_list
    names = allow_list(environ, seam)
    if names is None:
        said = "names no plugin" if environ.get(variable) is not None else "is not set"
        return [ok(check, f"{variable} {said}: all plugins are loaded")]
    shown = f"{variable}={environ[variable]!r}"
    fix = f"unset {variable} (it filters platform plugins too), or write exactly "
    others = [name for name in names if name in known and name != PLUGIN_NAME]
    fix += f"{variable}={','.join([*others, PLUGIN_NAME])}"
    if not any(name.strip() for name in names):
        return [problem(check, f"{shown}: an empty list loads no plugin at all", fix)]
    findings = []
    for name in names:
        if name in known:
            continue
        if name.strip() in known:
            text = f"{shown}: {name!r} has a space, names are compared exactly, so it loads nothing"
        else:
            close = nearest(name.strip(), known) if name.strip() else None
            guess = f"; did you mean {close!r}?" if close else ""
            text = f"{shown}: {name!r} is no installed plugin{guess}"
        findings.append(problem(check, text, fix))
    if PLUGIN_NAME not in names and not findings:
        findings.append(problem(check, f"{shown} leaves out {PLUGIN_NAME!r}", fix))
    return findings or [ok(check, f"{shown} holds {PLUGIN_NAME!r}")]
