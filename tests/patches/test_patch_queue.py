# SPDX-License-Identifier: Apache-2.0
"""What must hold for every patch of every series, and for the README made from them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mimo_plugin.cli import _patch_state as source
from mimo_plugin.cli._patch_queue import (
    ENGINES,
    Patch,
    PatchError,
    applies_to,
    header_problems,
    load_series,
    queue_root,
    read_patch,
    readme,
)
from tests.patches.patch_trees import installed, plain_files, source_trees

CHECKOUT = Path(__file__).resolve().parents[2]
QUEUES = {
    engine: load_series(engine)
    for engine in ENGINES
    if (queue_root() / engine / "series").is_file()
}
EACH = [
    pytest.param(engine, patch, id=f"{engine}-{patch.name[:4]}")
    for engine, series in QUEUES.items()
    for patch in series
]


def test_there_are_patches() -> None:
    assert len(QUEUES["vllm"]) >= 2 and len(QUEUES["sglang"]) >= 2


@pytest.mark.parametrize(("engine", "patch"), EACH)
def test_header_is_complete(engine: str, patch: Patch) -> None:
    assert header_problems(patch, CHECKOUT) == []
    assert patch.fields["Applies-To"].startswith(engine)
    assert "\n" not in patch.subject


@pytest.mark.parametrize("engine", QUEUES)
def test_series_applies_in_order(engine: str, tmp_path: Path) -> None:
    for number, base in enumerate(source_trees(engine)):
        files = sorted({name for patch in QUEUES[engine] for name in patch.files})
        plain, scratch = tmp_path / f"plain{number}", tmp_path / f"scratch{number}"
        plain_files(base, engine, files, plain)
        assert source.version_problems(QUEUES[engine], base, engine) == []
        assert source.trial(QUEUES[engine], plain, scratch) == files
        for name in files:
            text = (scratch / name).read_text(encoding="utf-8")
            assert text != (plain / name).read_text(encoding="utf-8")
            compile(text, name, "exec", dont_inherit=True)


@pytest.mark.parametrize(("engine", "patch"), EACH)
def test_plain_source_lacks_the_change(engine: str, patch: Patch, tmp_path: Path) -> None:
    """Otherwise the engine has it: drop the patch."""
    for number, base in enumerate(source_trees(engine)):
        plain = tmp_path / str(number)
        plain_files(base, engine, patch.files, plain)
        assert not source.reverse_applies(patch, plain)


@pytest.mark.parametrize(("engine", "patch"), EACH)
def test_reverse_check_finds_a_change_that_is_there(
    engine: str, patch: Patch, tmp_path: Path
) -> None:
    """The check above isn't empty: on a patched copy it says yes."""
    plain, scratch = tmp_path / "plain", tmp_path / "scratch"
    files = {name for p in QUEUES[engine] for name in p.files}
    plain_files(installed(engine), engine, sorted(files), plain)
    upto = QUEUES[engine][: QUEUES[engine].index(patch) + 1]
    source.trial(upto, plain, scratch)
    assert source.reverse_applies(patch, scratch)


@pytest.mark.parametrize(("engine", "patch"), EACH)
def test_applies_inside_a_repository(engine: str, patch: Patch, tmp_path: Path) -> None:
    """There ``git apply`` skips files silently; ours must not look at the repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = tmp_path / "site-packages"
    plain, series = tmp_path / "plain", QUEUES[engine]
    plain_files(installed(engine), engine, sorted({f for p in series for f in p.files}), plain)
    before = series[: series.index(patch)]
    source.trial(before, plain, tree)
    new = set(patch.files) - {name for earlier in before for name in earlier.files}
    plain_files(plain, engine, sorted(new), tree)
    trap = subprocess.run(
        ["git", "apply", "--check", "--verbose", str(patch.path)],
        cwd=tree,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
    assert trap.returncode == 0 and "Skipped" in trap.stderr, "git changed: simplify git_apply"
    content = {name: (tree / name).read_bytes() for name in patch.files}
    assert source.git_apply(patch, tree)
    assert all((tree / name).read_bytes() != old for name, old in content.items())


def test_readme_is_up_to_date() -> None:
    stored = (CHECKOUT / "patches" / "README.md").read_text(encoding="utf-8")
    assert stored == readme(), "run: mimo patches readme > patches/README.md"


def test_package_carries_the_queue() -> None:
    carried = CHECKOUT / "mimo_plugin" / "_patches"
    assert carried.resolve() == (CHECKOUT / "patches").resolve()
    assert queue_root().resolve() == carried.resolve()


@pytest.mark.parametrize(
    ("condition", "version", "allowed"),
    [
        (">=0.32,<0.34", "0.32.0", True),
        (">=0.32,<0.34", "0.33.4+cpu", True),
        (">=0.32,<0.34", "0.34.0rc1", False),
        (">=0.32,<0.34", "0.31.9", False),
        ("==0.32", "0.32.0", True),
        ("<=0.32.1, >0.31", "0.32.1", True),
        (">0.32", "0.32.0", False),
    ],
)
def test_version_range(condition: str, version: str, allowed: bool, tmp_path: Path) -> None:
    patch = Patch(
        path=tmp_path / "p.patch", fields={"Applies-To": f"vllm {condition}"}, files=("f",)
    )
    assert applies_to(patch, version) is allowed


HEADER = """From 0 Mon Sep 17 00:00:00 2001
Subject: [PATCH] A subject
 in two lines

Description: First.
 .
 Second.
Applies-To: {applies}
Last-Update: yesterday
Reason: whim
Test: tests/none.py
---
 stat

diff --git a/e/f.py b/e/f.py
"""


def test_bad_headers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.patch"
    path.write_text(HEADER.format(applies="engine 1"), encoding="utf-8")
    patch = read_patch(path)
    assert patch.subject == "A subject in two lines"
    assert patch.fields["Description"] == "First.\n\nSecond."
    problems = "\n".join(header_problems(patch, tmp_path))
    for word in ("no field Origin", "no field Drop-When", "whim", "yesterday", "none.py", "engine"):
        assert word in problems


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("a.patch\na.patch\n", "more than once"),
        ("a.patch\nb.patch\n", "does not exist"),
        ("# none\n", "is in no series"),
        ("text.patch\na.patch\n", "no git format-patch file"),
    ],
)
def test_broken_series_is_refused(series: str, message: str, tmp_path: Path) -> None:
    queue = tmp_path / "vllm"
    queue.mkdir()
    (queue / "series").write_text(series, encoding="utf-8")
    (queue / "a.patch").write_text(HEADER.format(applies="vllm >=1"), encoding="utf-8")
    if "text" in series:
        (queue / "text.patch").write_text("no diff", encoding="utf-8")
    with pytest.raises(PatchError, match=message):
        load_series("vllm", tmp_path)
    with pytest.raises(PatchError, match="no patch series"):
        load_series("sglang", tmp_path)
