# SPDX-License-Identifier: Apache-2.0
"""Put a patch series onto an engine's source, and take it off again.

The engine's own files are kept byte for byte. For an engine package at
``<target>/<engine>`` two names are added inside the package:

- ``.mimo-patches.json``: the record (version, patches with their hashes, and
  for each touched file the hash before and after);
- ``.mimo-patches/``: the files as they were.

Patching happens in a scratch copy. Only when the whole series applied there
and every touched file still compiles are the record and the originals
written, and only then the files replaced, one rename each (a file shared with
a package cache through a hard link is never written through). If the process
dies between two renames, the record says so and ``undo`` restores all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo_plugin.cli._patch_queue import Patch, PatchError, applies_to

RECORD = ".mimo-patches.json"
ORIGINALS = ".mimo-patches"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is on an engine's source.

    Attributes:
        state: ``plain`` (no record), ``applied`` (every file as recorded),
            ``stale`` (a record, but every file is the original again: the
            engine was reinstalled), ``partial`` (some files patched, some
            original) or ``changed`` (a file is neither).
        record: the record, ``None`` when plain.
        files: for ``partial`` and ``changed``, the files that aren't patched.

    """

    state: str
    record: dict[str, Any] | None = None
    files: tuple[str, ...] = field(default=())


def locate(engine: str, target: Path | None = None) -> Path:
    """Return the directory that holds the package ``engine``; imports nothing.

    Args:
        engine: import name of the engine.
        target: that directory, or the package directory itself; ``None`` looks
            at the running interpreter's path.

    Raises:
        PatchError: no such package.

    """
    if target is not None:
        for base in (target, target.parent):
            package = base / engine
            same = base == target or target.name == engine
            if same and (package / "__init__.py").is_file():
                return base.resolve()
        raise PatchError(
            f"--target {target}: no package {engine!r} there; give the directory that holds it "
            "(site-packages)"
        )
    spec = importlib.util.find_spec(engine)
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        raise PatchError(
            f"engine {engine!r} is not installed for this Python; run the command with the "
            "engine's interpreter, or give --target DIR"
        )
    # Not through the origin: that may be a link into another tree.
    return Path(spec.submodule_search_locations[0]).resolve().parent


def engine_version(base: Path, engine: str) -> str | None:
    """Return the version that the source states of itself, if it does."""
    for name in ("_version.py", "version.py"):
        path = base / engine / name
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            match = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", text, re.MULTILINE)
            if match:
                return match.group(1)
    return None


def version_problems(series: Sequence[Patch], base: Path, engine: str) -> list[str]:
    """Return one line for each patch that isn't meant for this version."""
    version = engine_version(base, engine)
    if version is None:
        return []
    return [
        f"{patch.name} is for {patch.fields['Applies-To']}, installed is {version}"
        for patch in series
        if not applies_to(patch, version)
    ]


def status(base: Path, engine: str) -> Status:
    """Compare the engine's files with the record.

    Raises:
        PatchError: the record can't be read.

    """
    path = base / engine / RECORD
    if not path.is_file():
        return Status(state="plain")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise PatchError(
                f"{path} was written by another version of mimo-plugin (format "
                f"{record['format']}, this one reads {_FORMAT}); undo with that version"
            )
        files = {
            name: (str(h["original"]), str(h["patched"])) for name, h in record["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(
            f"{path} is damaged ({error!r}); reinstall {engine} and remove that file"
        ) from error
    found = {name: _digest(base / name) for name in files}
    other = tuple(name for name, hashes in files.items() if found[name] not in hashes)
    original = tuple(name for name, (before, _) in files.items() if found[name] == before)
    if other:
        return Status(state="changed", record=record, files=other)
    if original:
        state = "stale" if len(original) == len(files) else "partial"
        return Status(state=state, record=record, files=original)
    return Status(state="applied", record=record)


def trial(series: Sequence[Patch], base: Path, scratch: Path) -> list[str]:
    """Apply ``series`` to a copy of the touched files under ``scratch``.

    Returns:
        The touched files, relative to ``base`` and to ``scratch``.

    Raises:
        PatchError: a file is missing, a patch doesn't apply, or one applies
            backwards (the engine already has it).

    """
    files = sorted({name for patch in series for name in patch.files})
    for name in files:
        source = base / name
        if not source.is_file():
            raise PatchError(f"{source} does not exist: this engine is not the one patched")
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, scratch / name)
    for patch in series:
        if not git_apply(patch, scratch):
            if git_apply(patch, scratch, "--reverse", "--check"):
                raise PatchError(
                    f"{patch.name}: the engine's source already has this change, and not by "
                    "'mimo patches apply'; drop the patch from the series"
                )
            raise PatchError(
                f"{patch.name} does not apply: the engine's source differs from "
                f"{patch.fields.get('Applies-To', 'the expected one')}; nothing was changed"
            )
    return files


def git_apply(patch: Patch, directory: Path, *options: str) -> bool:
    """Run ``git apply`` on the files under ``directory``; no fuzz.

    Inside a repository git takes the paths from the repository's top and skips
    what isn't below the working directory, with exit status 0. So it may not
    look above ``directory``, and every file must be named as checked.

    Raises:
        PatchError: git isn't installed.

    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    command = ["git", "apply", "--verbose", "-p1", *options, str(patch.path.resolve())]
    try:
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PatchError("git is not installed; 'mimo patches' needs it to apply") from error
    seen = set(re.findall(r"^Checking patch (\S+?)(?: => \S+)?\.\.\.$", done.stderr, re.MULTILINE))
    skipped = "Skipped patch" in done.stderr
    return done.returncode == 0 and not skipped and seen == set(patch.files)


def reverse_applies(patch: Patch, base: Path) -> bool:
    """Say whether the source already holds what ``patch`` adds."""
    with tempfile.TemporaryDirectory(prefix="mimo-patches-") as name:
        scratch = Path(name)
        for file in patch.files:
            if not (base / file).is_file():
                return False
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / file, scratch / file)
        return git_apply(patch, scratch, "--reverse", "--check")


def apply(series: Sequence[Patch], base: Path, engine: str) -> bool:
    """Put the series on; all of it or nothing.

    Returns:
        False when exactly this series is on already.

    Raises:
        PatchError: the source or its record isn't in a state to patch.

    """
    with _locked(base, engine):
        now = status(base, engine)
        wanted = [_entry(patch) for patch in series]
        if now.state == "applied" and now.record and now.record["patches"] == wanted:
            return False
        if now.state == "applied":
            raise PatchError(
                f"another patch series is on {base / engine}; run 'mimo patches apply --undo' first"
            )
        if now.state == "partial":
            raise PatchError(
                f"the patches are only partly on ({now.files[0]} is not patched); "
                "run 'mimo patches apply --undo' first"
            )
        version = engine_version(base, engine)
        if now.state == "changed":
            _refuse_or_forget_changed(now, base, engine, version)
        problems = version_problems(series, base, engine)
        if problems:
            raise PatchError("; ".join(problems))
        with tempfile.TemporaryDirectory(prefix="mimo-patches-") as name:
            scratch = Path(name)
            files = trial(series, base, scratch)
            for file in files:
                _must_compile(scratch / file, file)
            hashes = {
                file: {"original": _digest(base / file), "patched": _digest(scratch / file)}
                for file in files
            }
            package = base / engine
            shutil.rmtree(package / ORIGINALS, ignore_errors=True)
            for file in files:
                kept = package / ORIGINALS / file
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(base / file, kept)
            record = {
                "format": _FORMAT,
                "engine": engine,
                "version": version,
                "patches": wanted,
                "files": hashes,
            }
            _write(package / RECORD, json.dumps(record, indent=1).encode() + b"\n")
            for file in files:
                _write(base / file, (scratch / file).read_bytes(), like=base / file)
    return True


def undo(base: Path, engine: str) -> bool:
    """Restore the engine's own files and remove the record.

    Returns:
        False when nothing was on.

    Raises:
        PatchError: a file is neither the original nor the patched one, or a
            kept original is damaged; nothing is changed then.

    """
    with _locked(base, engine):
        now = status(base, engine)
        if now.record is None:
            return False
        if now.state == "changed":
            _refuse_or_forget_changed(now, base, engine, engine_version(base, engine))
            return True
        kept = base / engine / ORIGINALS
        if now.state != "stale":
            for name, hashes in now.record["files"].items():
                if _digest(kept / name) != hashes["original"]:
                    raise PatchError(
                        f"the kept original {kept / name} is missing or damaged; "
                        f"reinstall {engine}, then remove {base / engine / RECORD}"
                    )
            for name, hashes in now.record["files"].items():
                if _digest(base / name) != hashes["original"]:
                    _write(base / name, (kept / name).read_bytes(), like=kept / name)
        _forget(base, engine)
    return True


def _refuse_or_forget_changed(now: Status, base: Path, engine: str, version: str | None) -> None:
    """Drop the record of an engine that another version replaced; else refuse."""
    assert now.record is not None
    untouched = set(now.record["files"]) == set(now.files)
    if untouched and version is not None and version != now.record["version"]:
        _forget(base, engine)
        return
    raise PatchError(
        f"{base / now.files[0]} was edited after the patches were applied; bring back that file "
        f"(originals are in {base / engine / ORIGINALS}) or reinstall {engine} and remove "
        f"{base / engine / RECORD}"
    )


def _forget(base: Path, engine: str) -> None:
    (base / engine / RECORD).unlink(missing_ok=True)
    shutil.rmtree(base / engine / ORIGINALS, ignore_errors=True)


def _entry(patch: Patch) -> dict[str, str]:
    return {"name": patch.name, "sha256": _digest(patch.path)}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def _must_compile(path: Path, name: str) -> None:
    if path.suffix != ".py":
        return
    try:
        compile(path.read_bytes(), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PatchError(f"{name} does not compile after patching ({error})") from error


def _write(path: Path, content: bytes, like: Path | None = None) -> None:
    """Replace ``path`` by one rename; mode and times as those of ``like``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if like is None:
            os.chmod(name, 0o644)
        elif like == path:
            shutil.copymode(like, name)
        else:
            shutil.copystat(like, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(base: Path, engine: str) -> Iterator[None]:
    """Let one process at a time change this engine.

    Raises:
        PatchError: the package isn't writable, or another process is at it.

    """
    package = base / engine
    if not os.access(package, os.W_OK):
        raise PatchError(f"{package} is not writable; run as the user who installed {engine}")
    handle = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PatchError(f"another process is changing {package}; try again") from error
        yield
    finally:
        os.close(handle)
