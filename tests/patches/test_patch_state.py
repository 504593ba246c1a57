# SPDX-License-Identifier: Apache-2.0
"""``mimo patches apply`` and ``--undo``: all or nothing, and back without a trace."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli import _patch_queue as queue
from mimo_plugin.cli import _patch_state as source
from mimo_plugin.cli import patches as cli
from mimo_plugin.cli._patch_queue import load_series
from tests.patches.patch_trees import installed, plain_files

NAMES = ("vllm/one.py", "vllm/core/two.py")
BODY = "\n".join(f"line_{number} = {number}" for number in range(30)) + "\n"


def snapshot(base: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and time of every file under ``base``."""
    return {
        str(path.relative_to(base)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(base.rglob("*"))
        if path.is_file()
    }


def write_engine(base: Path, version: str = "0.32.0") -> None:
    """An engine package of three files."""
    for name in ("vllm/__init__.py", *NAMES):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(BODY if name in NAMES else "", encoding="utf-8")
        os.utime(base / name, (1_600_000_000, 1_600_000_000))
    (base / NAMES[0]).chmod(0o640)
    (base / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")


def write_queue(root: Path, base: Path) -> None:
    """Two patches: the first changes both files, the second the second file again."""
    work = root / "work"
    git = ["git", "-C", str(work), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    write_engine(work)
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "base"], check=True)
    fields = "".join(
        f"{name}: {value}\n"
        for name, value in {
            "Description": "d",
            "Origin": "o",
            "Author": "a",
            "Bug": "b",
            "Forwarded": "no",
            "Last-Update": "2026-01-01",
            "Applied-Upstream": "no",
            "Applies-To": "vllm >=0.32,<0.33",
            "Test": "t",
            "Drop-When": "w",
            "Reason": "temporary",
        }.items()
    )
    edits = (((NAMES[0], "line_3 "), (NAMES[1], "line_9 ")), ((NAMES[1], "line_20 "),))
    for number, edit in enumerate(edits, 1):
        for name, found in edit:
            text = (work / name).read_text().replace(found, f"patched_{number} ")
            (work / name).write_text(text)
        subprocess.run([*git, "commit", "-qam", f"Patch {number}\n\n{fields}"], check=True)
    out = root / "vllm"
    subprocess.run([*git, "format-patch", "-q", "-2", "-N", "-o", str(out)], check=True)
    names = sorted(path.name for path in out.glob("*.patch"))
    (out / "series").write_text("\n".join(names) + "\n")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Base directory of a small engine, with a queue for it."""
    base = tmp_path / "site-packages"
    write_engine(base)
    write_queue(tmp_path / "queue", base)
    monkeypatch.setattr(queue, "queue_root", lambda: tmp_path / "queue")
    return base


def mimo(*arguments: str) -> int:
    """Run ``mimo patches ...``."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["patches", *arguments])
    return int(args.run(args))


def test_apply_and_undo(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("--target", str(engine))
    before = snapshot(engine)
    assert mimo("check", *target) == 0
    assert snapshot(engine) == before
    assert mimo("apply", *target) == 0
    assert "patched_1" in (engine / NAMES[0]).read_text()
    assert {"patched_1", "patched_2"} <= set((engine / NAMES[1]).read_text().split())
    assert (engine / NAMES[0]).stat().st_mode & 0o777 == 0o640
    record = json.loads((engine / "vllm" / source.RECORD).read_text())
    assert record["version"] == "0.32.0" and set(record["files"]) == set(NAMES)
    for name in NAMES:
        original = (engine / "vllm" / source.ORIGINALS / name).read_bytes()
        assert hashlib.sha256(original).hexdigest() == record["files"][name]["original"]
        assert record["files"][name]["original"] == before[name][0]
    patched = snapshot(engine)
    assert mimo("apply", *target) == 0 and mimo("check", *target) == 0
    assert mimo("list", *target) == 0
    assert snapshot(engine) == patched
    out = capsys.readouterr().out
    assert "already applied" in out and out.count("] applied") == 2
    assert mimo("apply", "--undo", "--target", str(engine / "vllm")) == 0
    assert snapshot(engine) == before
    assert mimo("apply", "--undo", *target) == 0
    assert "nothing to undo" in capsys.readouterr().out


@pytest.mark.parametrize("name", queue.ENGINES)
def test_real_series_on_the_installed_engine(name: str, tmp_path: Path) -> None:
    base, series = installed(name), load_series(name)
    files = {file for patch in series for file in patch.files} | {f"{name}/_version.py"}
    plain_files(base, name, [*sorted(files), f"{name}/__init__.py"], tmp_path)
    target = ("--engine", name, "--target", str(tmp_path))
    before = snapshot(tmp_path)
    assert mimo("apply", *target) == 0
    assert all(snapshot(tmp_path)[file] != before[file] for p in series for file in p.files)
    assert mimo("check", *target) == 0
    assert mimo("apply", "--undo", *target) == 0
    assert snapshot(tmp_path) == before


def test_locates_the_engine_without_importing_it() -> None:
    base = installed("vllm")
    code = (
        "import sys; from mimo_plugin.cli._patch_state import locate, engine_version as v; "
        "b = locate('vllm'); print(b, v(b, 'vllm')); assert 'vllm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == str(base) and done.stdout.split()[1][0].isdigit()


def refused(capsys: pytest.CaptureFixture[str], base: Path, *arguments: str, says: str) -> None:
    """The command fails with one clear line and changes nothing."""
    before = snapshot(base)
    capsys.readouterr()
    assert mimo(*arguments, "--target", str(base)) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "Traceback" not in err
    assert snapshot(base) == before


def test_other_source_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = engine / NAMES[1]
    path.write_text(path.read_text().replace("line_19 ", "moved "))  # context of patch 2 only
    refused(capsys, engine, "apply", says="0002-Patch-2.patch does not apply")
    refused(capsys, engine, "check", says="does not apply")
    path.unlink()
    refused(capsys, engine, "apply", says="does not exist")


def test_other_version_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_engine(engine, version="0.33.1")
    refused(capsys, engine, "apply", says="is for vllm >=0.32,<0.33, installed is 0.33.1")
    assert mimo("check", "--target", str(engine)) == 1


def test_change_made_by_others_is_found(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert source.git_apply(load_series("vllm")[0], engine)
    refused(capsys, engine, "apply", says="already has this change")
    assert mimo("check", "--target", str(engine)) == 1
    assert "already has this change" in capsys.readouterr().out


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_can_be_undone(
    engine: Path,
    renames: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, real, done = snapshot(engine), os.replace, []

    def replace(source_path: Any, target: Any) -> None:
        if len(done) == renames:
            raise OSError("the disk is full")
        done.append(target)
        real(source_path, target)

    monkeypatch.setattr(os, "replace", replace)
    assert mimo("apply", "--target", str(engine)) == 1
    assert "the disk is full" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(queue, "queue_root", lambda: engine.parent / "queue")
    if renames == 2:  # the record and the first file
        assert source.status(engine, "vllm").state == "partial"
        refused(capsys, engine, "apply", says="only partly on")
        assert mimo("check", "--target", str(engine)) == 1
        assert mimo("apply", "--undo", "--target", str(engine)) == 0
        assert snapshot(engine) == before
    # Before that no file was changed: applying again works, and comes off.
    assert mimo("apply", "--target", str(engine)) == 0
    assert mimo("apply", "--undo", "--target", str(engine)) == 0
    assert snapshot(engine) == before


def test_edit_after_apply_is_kept(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mimo("apply", "--target", str(engine)) == 0
    with (engine / NAMES[0]).open("a") as file:
        file.write("mine = 1\n")
    for arguments in (("apply",), ("apply", "--undo")):
        refused(capsys, engine, *arguments, says="was edited after the patches were applied")
    assert mimo("check", "--target", str(engine)) == 1


def test_damaged_originals_are_not_restored(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mimo("apply", "--target", str(engine)) == 0
    (engine / "vllm" / source.ORIGINALS / NAMES[1]).write_text("x")
    refused(capsys, engine, "apply", "--undo", says="missing or damaged")
    (engine / "vllm" / source.RECORD).write_text("{")
    refused(capsys, engine, "apply", "--undo", says="is damaged")


def test_reinstalled_engine(engine: Path) -> None:
    """The same version again: the record is stale. Another version: it is dropped."""
    target = ("--target", str(engine))
    assert mimo("apply", *target) == 0
    write_engine(engine)
    assert source.status(engine, "vllm").state == "stale"
    assert mimo("check", *target) == 0 and mimo("apply", *target) == 0
    assert source.status(engine, "vllm").state == "applied"
    write_engine(engine, version="0.32.9")
    for name in NAMES:
        with (engine / name).open("a") as file:
            file.write("new = 1\n")
    assert mimo("apply", *target) == 0
    assert "new = 1" in (engine / NAMES[0]).read_text()
    assert json.loads((engine / "vllm" / source.RECORD).read_text())["version"] == "0.32.9"
    assert mimo("apply", "--undo", *target) == 0
    assert (engine / NAMES[0]).read_text() == BODY + "new = 1\n"


def test_another_series_is_on(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mimo("apply", "--target", str(engine)) == 0
    series = engine.parent / "queue" / "vllm" / "series"
    first, second = series.read_text().split()
    series.write_text(first + "\n")
    (series.parent / second).unlink()
    refused(capsys, engine, "apply", says="another patch series is on")


def test_hard_linked_cache_is_not_written_through(engine: Path) -> None:
    cache = engine.parent / "cache.py"
    os.link(engine / NAMES[0], cache)
    assert mimo("apply", "--target", str(engine)) == 0
    assert cache.read_text() == BODY


def test_one_at_a_time(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = os.open(engine / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused(capsys, engine, "apply", says="another process")
    finally:
        os.close(handle)


def test_result_must_compile(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((engine.parent / "queue" / "vllm").glob("0001*"))
    path.write_text(path.read_text().replace("+patched_1 =", "+patched_1 = ="))
    refused(capsys, engine, "apply", says="does not compile")


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mimo("list", "--undo") == 2
    refused(capsys, tmp_path, "check", says="no package 'vllm' there")
    assert mimo("check", "--engine", "sglang", "--target", str(tmp_path)) == 1


def test_readme_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mimo("readme") == 0
    assert capsys.readouterr().out == queue.readme()
