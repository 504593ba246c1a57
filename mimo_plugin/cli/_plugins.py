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
ALLOW_LIST = "VLLM_PLUGINS"

# `vllm.general_plugins` and its siblings, which the same allow-list filters.
VLLM_GROUPS = (
    VLLM_GROUP,
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)

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


def check_entry_point(installed: Sequence[Installed], version: str) -> list[Finding]:
    """Is exactly one entry point of ours visible, and is it this code's?"""
    check = "entry point"
    findings = list(_check_copies(installed, version))
    ours = [
        (distribution, entry)
        for distribution, entry in entries_of(VLLM_GROUP, installed)
        if entry.name == PLUGIN_NAME
    ]
    if not ours:
        return [*findings, _why_missing(installed)]
    if len(ours) > 1:
        names = ", ".join(
            f"{distribution.label} ({distribution.where})" for distribution, _ in ours
        )
        findings.append(
            problem(
                check,
                f"{len(ours)} distributions define {PLUGIN_NAME!r} in {VLLM_GROUP}: {names}; the "
                "engine silently takes the last",
                "pip uninstall all but one of them",
            )
        )
    for distribution, entry in ours:
        if entry.value != VLLM_ENTRY:
            findings.append(
                problem(
                    check,
                    f"{PLUGIN_NAME!r} in {VLLM_GROUP} is {entry.value} ({distribution.label}, "
                    f"{distribution.where}), not {VLLM_ENTRY}",
                    _REINSTALL,
                )
            )
    if not any(finding.level == "problem" for finding in findings):
        findings.append(ok(check, f"{VLLM_GROUP}: {PLUGIN_NAME} from {ours[0][0].label}"))
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


def _why_missing(installed: Sequence[Installed]) -> Finding:
    check = "entry point"
    for distribution in installed:
        for entry in distribution.entries:
            of_ours = entry.value.partition(".")[0] == "mimo_plugin" and "vllm" in entry.value
            if not distribution.shadowed and of_ours and entry.group != VLLM_GROUP:
                return problem(
                    check,
                    f"{entry.name!r} of {distribution.label} is in the group {entry.group!r}; vLLM "
                    f"reads {VLLM_GROUP!r}",
                    _REINSTALL,
                )
            if not distribution.shadowed and entry.value == VLLM_ENTRY:
                return problem(
                    check,
                    f"{VLLM_ENTRY} is called {entry.name!r}, expected {PLUGIN_NAME!r}",
                    _REINSTALL,
                )
    copies = [found for found in installed if canonical(found.name) == PLUGIN_DISTRIBUTION]
    if copies:
        return problem(
            check,
            f"{copies[0].label} at {copies[0].where} has no entry point in {VLLM_GROUP}: stale "
            "metadata",
            f"delete {copies[0].where}, then {_REINSTALL}",
        )
    return problem(
        check,
        f"no distribution defines {PLUGIN_NAME!r} in {VLLM_GROUP}: the plugin is not installed",
        f"pip install {PLUGIN_DISTRIBUTION} (or `pip install -e .` in the project)",
    )


def allow_list(environ: Mapping[str, str]) -> list[str] | None:
    """The engine's list, cut exactly as it does (no stripping); None when there is none."""
    value = environ.get(ALLOW_LIST)
    return None if value is None else value.split(",")


def check_allow_list(environ: Mapping[str, str], known: Sequence[str]) -> list[Finding]:
    """Will the engine load us?

    Args:
        known: names of all entry points in the groups that the list filters.
    """
    check = "allow-list"
    names = allow_list(environ)
    if names is None:
        return [ok(check, f"{ALLOW_LIST} is not set: all plugins are loaded")]
    shown = f"{ALLOW_LIST}={environ[ALLOW_LIST]!r}"
    fix = f"unset {ALLOW_LIST} (it filters platform plugins too), or write exactly "
    others = [name for name in names if name in known and name != PLUGIN_NAME]
    fix += f"{ALLOW_LIST}={','.join([*others, PLUGIN_NAME])}"
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
