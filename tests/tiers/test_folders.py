# SPDX-License-Identifier: Apache-2.0
"""The file store over several folders: one that is lost costs its own pages only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mimo_plugin.core.circuit import OPEN
from mimo_plugin.tiers.breaker import BreakerLimits
from mimo_plugin.tiers.file_store import HEADER_BYTES, StoreError
from mimo_plugin.tiers.folders import open_folders
from tests.tiers.stores import PAGE_BYTES, empty, page

KEYS = [f"space/{number:x}" for number in range(300)]
PAGES = [page(number) for number in range(300)]
GIB = 1 << 30
#: so long that no healthy folder is given up in a test
PATIENT = BreakerLimits(timeout_s=60.0)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where pages lie follows from the names, so these are the same in every run."""
    monkeypatch.chdir(tmp_path)
    return [Path(name) for name in ("a", "b", "c")]


def opened(folders, capacity=GIB, limits=PATIENT):
    return open_folders(folders, capacity, limits=limits)


def hits(target):
    """Which keys are read; each page must be its own."""
    found = [empty() for _ in KEYS]
    well = target.get(KEYS, found)
    assert all(parts == own for parts, own, hit in zip(found, PAGES, well, strict=True) if hit)
    return well


def test_pages_are_found_again_whatever_the_order_of_the_folders(folders):
    assert opened(folders).put(KEYS, PAGES) == [True] * 300
    assert all(list(folder.rglob("*.page")) for folder in folders)
    assert all(hits(opened(folders[::-1])))


@pytest.mark.parametrize("loss", ["gone", "empty", "file"])
def test_losing_one_of_three_keeps_most_and_fails_nothing(folders, loss):
    target = opened(folders)
    target.put(KEYS, PAGES)
    lost = folders[1]
    shutil.rmtree(lost)
    if loss == "empty":
        lost.mkdir()  # the drive is not mounted any more
    elif loss == "file":
        lost.write_text("")
    elsewhere = [target.ring.store_of(key) != str(lost) for key in KEYS]
    assert sum(elsewhere) >= 0.6 * len(KEYS)
    assert hits(target) == elsewhere
    assert target.exists(KEYS) == target.touch(KEYS) == elsewhere
    stats = target.stats()
    assert stats.stores_down == 1 and stats.calls_failed == 3
    assert target.stores[str(lost)].state == OPEN

    # It is left alone now, and the others take its part meanwhile.
    assert hits(target) == target.exists(KEYS) == elsewhere
    assert target.put(KEYS, PAGES) == [True] * 300
    assert all(hits(target)) and all(target.touch(KEYS))
    assert target.stats().calls_failed == 3

    # Without it, the next start finds all of that.
    smaller = opened([folders[0], folders[2]])
    assert all(hits(smaller))


def test_a_file_that_hangs_is_a_miss_and_memory_is_left(folders):
    """A real one: reading from a pipe that nobody writes to."""
    target = opened(folders[:1], limits=BreakerLimits(timeout_s=0.05))
    (guarded,) = target.stores.values()
    path = guarded._store._path("a")
    os.mkfifo(path)
    memory = page(5)
    assert target.get(["a"], [memory]) == [False]
    assert target.stats().calls_failed == 1 and memory == page(5)
    os.close(os.open(path, os.O_WRONLY))  # lets it go on


def test_capacity_is_for_all_together_or_for_each(folders):
    page_bytes = PAGE_BYTES + HEADER_BYTES
    together = opened(folders, 30 * page_bytes)
    sizes = [guarded._store.capacity_bytes for guarded in together.stores.values()]
    assert sizes == [10 * page_bytes] * 3
    assert max(together.ring.shares().values()) < 1.2 / 3

    each = opened(folders, [100 * GIB, 100 * GIB, 200 * GIB])
    sizes = [guarded._store.capacity_bytes for guarded in each.stores.values()]
    assert sizes == [100 * GIB, 100 * GIB, 200 * GIB]
    assert each.ring.shares()[str(folders[2])] == pytest.approx(0.5, abs=0.12)


def test_a_folder_that_cannot_be_used_at_start_is_named(folders):
    folders[1].write_text("")
    with pytest.raises(StoreError, match=r"page store b: .*needed: a folder"):
        opened(folders)
