# SPDX-License-Identifier: Apache-2.0
"""What ``mimo doctor`` found, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

Level = Literal["ok", "note", "problem"]

_LABEL: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result. ``text`` says what was found; ``fix`` what to do about a problem."""

    check: str
    level: Level
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding(check=check, level="ok", text=text)


def note(check: str, text: str) -> Finding:
    """Something worth knowing that needs no repair."""
    return Finding(check=check, level="note", text=text)


def problem(check: str, text: str, fix: str) -> Finding:
    """Something that is wrong."""
    return Finding(check=check, level="problem", text=text, fix=fix)


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """Plugins of one entry-point group.

    Attributes:
        found: ``name (distribution version)`` of every entry point.
        allowed: names that the engine will load; None when there is no allow-list.
        active: our names that were loaded and ran without an error.
    """

    group: str
    found: tuple[str, ...]
    allowed: tuple[str, ...] | None
    active: tuple[str, ...]


@dataclass(kw_only=True)
class Report:
    """Everything one run found."""

    engine: str
    plugin_version: str
    python: str
    groups: list[GroupStatus] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Append results."""
        self.findings.extend(findings)

    @property
    def problems(self) -> list[Finding]:
        """The results that need a repair."""
        return [finding for finding in self.findings if finding.level == "problem"]

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps({"ok": not self.problems, **asdict(self)}, indent=1)

    def to_text(self) -> str:
        """The report for a person."""
        lines = [f"mimo-plugin {self.plugin_version}, engine {self.engine}, Python {self.python}"]
        for status in self.groups:
            allowed = "all" if status.allowed is None else ", ".join(status.allowed) or "none"
            lines += [
                f"group {status.group}",
                f"  found    {', '.join(status.found) or 'none'}",
                f"  allowed  {allowed}",
                f"  active   {', '.join(status.active) or 'none of ours'}",
            ]
        width = max((len(finding.check) for finding in self.findings), default=0)
        for finding in self.findings:
            label = _LABEL[finding.level]
            lines.append(f"{label:<8} {finding.check:<{width}}  {finding.text}")
            if finding.fix:
                lines.append(f"{'':<8} {'':<{width}}  fix: {finding.fix}")
        count = len(self.problems)
        lines.append(f"{count} problem{'' if count == 1 else 's'}" if count else "all is well")
        return "\n".join(lines)
