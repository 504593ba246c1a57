# SPDX-License-Identifier: Apache-2.0
"""Read the patch queue: series, headers and touched files.

A queue is a directory ``<root>/<engine>/`` that holds a file ``series`` (one
patch name a line, in the order they apply, ``#`` starts a comment) and the
patches. A patch is the output of ``git format-patch`` whose commit message
carries the DEP-3 fields and the fields of this project (see ``FIELDS``).

Nothing here writes, and nothing here imports an engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mimo_plugin.errors import MimoError

ENGINES = ("vllm", "sglang", "lmcache")
REASONS = ("temporary", "build-only", "permanent")
FIELDS = (
    "Subject",
    "Description",
    "Origin",
    "Author",
    "Bug",
    "Forwarded",
    "Last-Update",
    "Applied-Upstream",
    "Applies-To",
    "Test",
    "Drop-When",
    "Reason",
)
_FIELD = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)*):[ \t]*(.*)$")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_CONDITION = re.compile(r"(>=|<=|==|<|>)(\d+(?:\.\d+)*)")


class PatchError(MimoError):
    """A patch, a series or the engine's source isn't as the queue needs it."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch of a series.

    Attributes:
        path: the patch file.
        fields: header fields by name; folded lines are joined by a newline.
        files: touched files, as paths relative to the directory that holds
            the engine's package (``vllm/v1/core/...``).

    """

    path: Path
    fields: Mapping[str, str]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """File name of the patch."""
        return self.path.name

    @property
    def subject(self) -> str:
        """Subject without the ``[PATCH n/m]`` mark."""
        return re.sub(r"^\[PATCH[^\]]*\]\s*", "", self.fields.get("Subject", ""))


def queue_root() -> Path:
    """Return the directory that holds the queues.

    Installed packages carry it as ``mimo_plugin/_patches``; in a checkout that
    is a link to ``patches/``.

    Raises:
        PatchError: neither exists.

    """
    package = Path(__file__).resolve().parent.parent
    for root in (package / "_patches", package.parent / "patches"):
        if any((root / engine / "series").is_file() for engine in ENGINES):
            return root
    raise PatchError(
        f"patch queue not found at {package / '_patches'}: the installation is incomplete; "
        "reinstall mimo-plugin"
    )


def load_series(engine: str, root: Path | None = None) -> tuple[Patch, ...]:
    """Read the series of ``engine``, in the order in which the patches apply.

    Raises:
        PatchError: no series, a named patch is missing, a patch that no series
            names lies beside it, or a name comes twice.

    """
    directory = (root or queue_root()) / engine
    series = directory / "series"
    if not series.is_file():
        raise PatchError(f"no patch series for engine {engine!r}: {series} does not exist")
    names = [
        line.split("#", 1)[0].strip() for line in series.read_text(encoding="utf-8").splitlines()
    ]
    names = [name for name in names if name]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise PatchError(f"{series} names {doubles[0]} more than once; keep one line")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise PatchError(f"{series} names {missing[0]}, which does not exist in {directory}")
    stray = sorted(path.name for path in directory.glob("*.patch") if path.name not in names)
    if stray:
        raise PatchError(f"{directory / stray[0]} is in no series; name it in {series} or drop it")
    return tuple(read_patch(directory / name) for name in names)


def read_patch(path: Path) -> Patch:
    """Parse one patch file.

    Raises:
        PatchError: the file has no diff.

    """
    text = path.read_text(encoding="utf-8")
    head, mark, diff = text.partition("\n---\n")
    if not mark or "\ndiff --git " not in diff:
        raise PatchError(f"{path} is no git format-patch file: no '---' line or no diff")
    fields: dict[str, str] = {}
    current: str | None = None
    for line in head.splitlines():
        match = _FIELD.match(line)
        if match:
            current = match.group(1)
            fields[current] = match.group(2).strip()
        elif current and line.startswith((" ", "\t")):
            # A line of one dot is an empty line, as in DEP-3.
            piece = "" if line.strip() == "." else line.strip()
            joint = " " if current == "Subject" else "\n"
            fields[current] = f"{fields[current]}{joint}{piece}"
        else:
            current = None
    fields = {name: text.strip() for name, text in fields.items()}
    return Patch(path=path, fields=fields, files=tuple(_touched(diff)))


def _touched(diff: str) -> Iterator[str]:
    for line in diff.splitlines():
        match = re.match(r"diff --git a/(\S+) b/(\S+)$", line)
        if match:
            yield match.group(2)


def header_problems(patch: Patch, checkout: Path | None = None) -> list[str]:
    """Return what is wrong with a patch's header, one line each.

    Args:
        patch: the patch.
        checkout: root of a source tree; if given, the file named in ``Test``
            must exist there.

    """
    problems = [f"no field {name}" for name in FIELDS if not patch.fields.get(name)]
    get = patch.fields.get
    if get("Reason") and get("Reason") not in REASONS:
        problems.append(f"Reason is {get('Reason')!r}; allowed: {', '.join(REASONS)}")
    if get("Last-Update") and not _DATE.fullmatch(get("Last-Update", "")):
        problems.append(f"Last-Update is {get('Last-Update')!r}; use YYYY-MM-DD")
    if get("Applies-To"):
        try:
            applies_to(patch, "0")
        except PatchError as error:
            problems.append(str(error))
    if checkout and get("Test") and not (checkout / get("Test", "")).is_file():
        problems.append(f"Test names {get('Test')}, which does not exist")
    if not patch.files:
        problems.append("the diff touches no file")
    return problems


def applies_to(patch: Patch, version: str) -> bool:
    """Say whether ``version`` is in the patch's ``Applies-To`` range.

    The field reads ``ENGINE CONDITION[,CONDITION...]``, for example
    ``vllm >=0.32,<0.34``. Of a version only the leading numbers count:
    ``0.32.1rc1+cpu`` is 0.32.1.

    Raises:
        PatchError: the field can't be read.

    """
    found = patch.fields.get("Applies-To", "")
    engine, _, conditions = found.partition(" ")
    parsed = [_CONDITION.fullmatch(part.strip()) for part in conditions.split(",")]
    if engine not in ENGINES or not all(parsed):
        raise PatchError(
            f"Applies-To is {found!r} in {patch.name}; use 'ENGINE >=X,<Y', ENGINE one of "
            + ", ".join(ENGINES)
        )
    have = _numbers(version)
    for match in parsed:
        assert match is not None
        want = _numbers(match.group(2))
        order = (have > want) - (have < want)
        allowed = {">=": (0, 1), "<=": (-1, 0), "==": (0,), "<": (-1,), ">": (1,)}
        if order not in allowed[match.group(1)]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    return tuple((numbers + [0, 0, 0, 0])[:4])


def readme(root: Path | None = None) -> str:
    """Return the text of ``patches/README.md``, made from the headers."""
    root = root or queue_root()
    lines = [
        "# Patches",
        "",
        "<!-- Made by `mimo patches readme`; edit the patch headers, not this file. -->",
        "",
        "Changes to an engine that no plugin interface reaches. Every one is optional: the",
        "plugin runs on the engine as published. They apply to an installed engine and come",
        "off again without a trace:",
        "",
        "```",
        "mimo patches list            # what there is, and what is applied here",
        "mimo patches check           # would they apply to the installed engine?",
        "mimo patches apply           # all of the series, or nothing",
        "mimo patches apply --undo    # the engine's own files again, byte for byte",
        "```",
        "",
        "Restart running engines afterwards. `--engine sglang` works on SGLang's series,",
        "`--target DIR` on another copy of the engine (the directory that holds the package). A",
        "reason is one of: *temporary* (until the engine has it), *build-only* (needed to build or",
        "test), *permanent*.",
    ]
    for engine in ENGINES:
        if not (root / engine / "series").is_file():
            continue
        for number, patch in enumerate(load_series(engine, root), 1):
            get = patch.fields
            lines += ["", f"## {engine} {number}: {patch.subject}", "", get["Description"], ""]
            lines += [f"- File: `{engine}/{patch.name}`, changes `{'`, `'.join(patch.files)}`"]
            lines += [f"- {name}: {_one_line(get[name])}" for name in FIELDS[2:] if get.get(name)]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
