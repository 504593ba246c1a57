# SPDX-License-Identifier: Apache-2.0
"""Are host memory and the store of the tiers there?  Nothing is made or written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mimo_plugin.cli._report import Finding, note, ok, problem
from mimo_plugin.config_tiers import FILE, TiersConfig, require_place
from mimo_plugin.errors import MimoError, one_line
from mimo_plugin.tiers.open import open_store, require_store
from mimo_plugin.tiers.shared_memory import SHM, memory_limit_bytes, why_no_room

GIB = 1 << 30
_PROBE_KEY = "mimo-doctor"


def check_tiers(config: TiersConfig, *, engines: int = 1) -> Iterator[Finding]:
    """What is wrong with the places that the settings name.

    Args:
        config: the section, which is well-formed.
        engines: of this machine, each with host memory of its own.
    """
    yield from _host(int((config.host_gib or 0.0) * GIB) * engines)
    if not config.path:
        yield note("tiers", "no store (path): what is kept in host memory ends with the engine")
        return
    try:
        require_place("mimo.tiers", config)
    except MimoError as error:
        yield problem("tiers", str(error), "as the line says")
        return
    if config.store == FILE:
        yield from _folders(config)
    else:
        yield _servers(config)


def _host(needed_bytes: int) -> Iterator[Finding]:
    reason = why_no_room(needed_bytes)
    if reason is not None:
        text, _, fix = reason.partition("; ")
        yield problem("host memory", text, fix)
        return
    free = shutil.disk_usage(SHM).free
    limit = memory_limit_bytes()
    if limit is not None and needed_bytes > limit:
        yield problem(
            "host memory",
            f"{needed_bytes / GIB:.2f} GiB are asked for, the container's limit is "
            f"{limit / GIB:.2f} GiB for all of its memory, {SHM} included",
            "lower host_gib, or raise the container's memory limit",
        )
        return
    yield ok(
        "host memory", f"{needed_bytes / GIB:.2f} GiB fit into {SHM}, {free / GIB:.2f} GiB free"
    )


def _folders(config: TiersConfig) -> Iterator[Finding]:
    given = config.capacity_gib
    several = isinstance(given, tuple)
    sizes = given if isinstance(given, tuple) else (given or 0.0,) * len(config.paths)
    for folder, size in zip(config.paths, sizes, strict=True):
        there = Path(folder)
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield problem(
                "store", f"{folder}: {there} can't be written to", "name another folder in path"
            )
            continue
        free = shutil.disk_usage(there).free / GIB
        share = size if several or len(config.paths) == 1 else size / len(config.paths)
        if free < share:
            yield note(
                "store",
                f"{folder}: {free:.1f} GiB are free, capacity_gib leaves it {share:g}; a full disk "
                "takes no new pages",
            )
        else:
            yield ok("store", f"{folder} can be written to, {free:.1f} GiB free")


def _servers(config: TiersConfig) -> Finding:
    """Ask each server for a page that is not there."""
    try:
        require_store(config)
        store = open_store(config)
    except MimoError as error:
        return problem("store", one_line(error), "as the line says")
    try:
        store.exists([f"{_PROBE_KEY}-{number}" for number in range(64 * len(config.paths))])
        failed = store.stats().calls_failed
    finally:
        store.close()
    if failed:
        return problem(
            "store",
            f"{config.store}: {failed} of the calls to {len(config.paths)} servers failed",
            "start the server, or correct path; the engine would run without the store",
        )
    return ok("store", f"{config.store}: all of {len(config.paths)} answer")
