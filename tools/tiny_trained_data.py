# SPDX-License-Identifier: Apache-2.0
"""Text for the trained tiny checkpoint: the Python standard library's sources, in two splits.

A file belongs to the held-out split when the hash of its name says so, whichever Python runs, so
prompts taken from that split were never trained on. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        # tests: large, and left out by some distributions
        "test",
        "tests",
        "idle_test",
        # data tables rather than code
        "encodings",
        "pydoc_data",
        # not part of the library
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
)
HELD_OUT_BYTE = 26
"""A file is held out when the first byte of its name's SHA-256 is below this: one in ten."""

MIN_FILES = 100
"""Fewer source files than this mean that the running Python came without its sources."""


def source_files(root: Path | None = None) -> list[Path]:
    """The standard library's source files, sorted by name. ``root`` defaults to this Python's.

    Raises RuntimeError when the sources are not there.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if len(files) < MIN_FILES:
        raise RuntimeError(
            f"the Python standard library's sources are absent: {len(files)} files in {root}, "
            f"at least {MIN_FILES} expected; use a Python that ships them"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_held_out(name: str) -> bool:
    """Whether the file ``name`` (relative, with slashes) is in the held-out split."""
    return hashlib.sha256(name.encode()).digest()[0] < HELD_OUT_BYTE


def split_texts(held_out: bool, root: Path | None = None) -> list[str]:
    """Texts of the files of one split, sorted by file name."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    return [
        path.read_text(encoding="utf-8", errors="ignore")
        for path in source_files(root)
        if is_held_out(path.relative_to(root).as_posix()) == held_out
    ]
