# SPDX-License-Identifier: Apache-2.0
"""Patch 0001: a prompt edited or grown in its last aligned unit keeps its prefix hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
NAMES = (
    *("full", "block", "window", "groups", "eagle", "chunk", "retention"),
    *("prompt", "common", "hit", "swa_blocks"),
)


def rows(probe: Callable[..., Any], tree: Path) -> list[dict[str, Any]]:
    return [dict(zip(NAMES, row, strict=True)) for row in probe("prompt_edit.py", tree)]


def reachable(row: dict[str, Any]) -> int:
    """Tokens of the longest hit that the common prefix allows."""
    unit = max(row["full"], row["block"])
    common = row["common"] // unit * unit
    grown_from_aligned = row["common"] == row["prompt"] == common
    # EAGLE drops one unit of a match. Without it, an aligned prompt is kept for its resend,
    # which recomputes the last token: one unit below the prompt's end.
    return common - unit if row["eagle"] or grown_from_aligned else common


def test_every_edit_hits_the_common_prefix(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path]
) -> None:
    found = rows(probe, vllm_patched("0001"))
    assert len(found) > 900
    assert [row for row in found if row["hit"] != reachable(row)] == []


def test_case_b01(probe: Callable[..., Any], vllm_patched: Callable[[str], Path]) -> None:
    hits = {
        (row["prompt"], row["eagle"]): row["hit"]
        for row in rows(probe, vllm_patched("0001"))
        if row["retention"] == 0 and row["full"] == row["block"] and row["common"] < row["prompt"]
    }
    assert hits[321, False] == 256 and hits[257, False] == 192
    assert hits[321, True] == 192 and hits[257, True] == 128


def test_plain_source_loses_everything(probe: Callable[..., Any], vllm_plain: Path) -> None:
    """When this fails, the engine is mended: drop the patch."""
    lost = {
        row["prompt"]
        for row in rows(probe, vllm_plain)
        if row["hit"] == 0 and row["retention"] == 0 and row["full"] == row["block"]
    }
    assert lost == {*range(257, 266), *range(321, 330)}


def test_nothing_else_changes(
    probe: Callable[..., Any], vllm_plain: Path, vllm_patched: Callable[[str], Path]
) -> None:
    for plain, patched in zip(
        rows(probe, vllm_plain), rows(probe, vllm_patched("0001")), strict=True
    ):
        assert patched["hit"] >= plain["hit"]
        more = patched["swa_blocks"] - plain["swa_blocks"]
        unit_blocks = max(patched["full"], patched["block"]) // patched["block"]
        window_blocks = -(-(patched["window"] - 1) // patched["block"]) + patched["eagle"]
        assert 0 <= more <= min(unit_blocks, window_blocks)
        if plain["retention"] is None:
            assert more == 0 and patched["hit"] == plain["hit"]
