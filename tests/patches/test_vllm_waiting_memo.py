# SPDX-License-Identifier: Apache-2.0
"""Patch 0003: a waiting request is looked up once, until a block of its own prefix changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture
def before(vllm_patched: Callable[[str], Path]) -> Path:
    """The series without this patch."""
    return vllm_patched("0002")


@pytest.fixture
def after(vllm_patched: Callable[[str], Path]) -> Path:
    """The series with this patch."""
    return vllm_patched("0003")


def test_every_look_up_is_what_a_fresh_one_finds(probe: Callable[..., Any], after: Path) -> None:
    """Random histories: the same block objects, length and junction."""
    for name, result in probe("waiting_histories.py", after).items():
        assert result["mismatch"] is None, name
        # Not empty: memos were used, hits were found, and results did change.
        assert result["asked"] < 0.5 * result["lookups"], name
        assert result["hits"] > 1000 and result["changed"] > 300, name


def test_histories_go_as_without_the_patch(
    probe: Callable[..., Any], before: Path, after: Path
) -> None:
    """Results and KV events of whole histories, on both trees."""
    plain, patched = (probe("waiting_histories.py", tree) for tree in (before, after))
    for name, result in plain.items():
        assert result["asked"] == result["lookups"] == patched[name]["lookups"], name
        assert result["events"] == patched[name]["events"] > 1000, name
        assert result["digest"] == patched[name]["digest"], name


def test_a_short_record_of_changes_asks_more(probe: Callable[..., Any], after: Path) -> None:
    """The histories do reach the end of the record."""
    results = probe("waiting_histories.py", after)
    for name, result in results.items():
        geometry, record = name.split("/")
        if record != "None":
            assert result["asked"] > results[f"{geometry}/None"]["asked"], name


def test_one_look_up_while_the_map_changes_every_step(
    probe: Callable[..., Any], after: Path
) -> None:
    for name, drive in probe("waiting_drive.py", after).items():
        assert drive["changed_steps"] == drive["steps"] == len(drive["probes"]), name
        assert drive["probes"][0] > 0 and set(drive["probes"][1:]) == {0}, name


def test_same_schedule_and_hits(probe: Callable[..., Any], before: Path, after: Path) -> None:
    plain, patched = (probe("waiting_drive.py", tree) for tree in (before, after))
    for name, drive in plain.items():
        for key in ("scheduled", "hit", "admitted_hit"):
            assert drive[key] == patched[name][key], (name, key)
    assert plain["hit/4096"]["hit"] == 4096 and plain["no_tail/4096"]["hit"] == 0


def test_no_memo_is_left_after_admission_or_abort(probe: Callable[..., Any], after: Path) -> None:
    for name, drive in probe("waiting_drive.py", after).items():
        assert drive["waiting_memos"] == 1 and drive["kept"] == 0, name


def test_plain_source_looks_up_at_every_step(probe: Callable[..., Any], vllm_plain: Path) -> None:
    """When this fails, the engine remembers: drop the patch."""
    for name, drive in probe("waiting_drive.py", vllm_plain).items():
        first = drive["probes"][0]
        # As many reads as the hit has full blocks, in every step.
        assert first >= 4096 // 32 and drive["probes"] == [first] * drive["steps"], name
