# SPDX-License-Identifier: Apache-2.0
"""Patch 0002: the SWA look-up gives the same hits and strides over misses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
FILE = "vllm/v1/core/single_type_kv_cache_manager.py"


def scan(probe: Callable[..., Any], tree: Path, plain: Path) -> dict[str, Any]:
    result: dict[str, Any] = probe("swa_scan.py", tree, str(plain / FILE))
    assert result["source"] == str(tree / FILE)
    return result


@pytest.fixture
def patched(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path], vllm_plain: Path
) -> dict[str, Any]:
    return scan(probe, vllm_patched("0002"), vllm_plain)


def test_same_hits_as_plain(patched: dict[str, Any]) -> None:
    """All residencies of up to 8 blocks, and long ones at random."""
    assert patched["mismatch"] is None
    assert patched["exhaustive"] > 40_000
    assert patched["random"] >= 2_000


def test_a_miss_costs_one_probe_per_run(patched: dict[str, Any]) -> None:
    runs = -(-patched["blocks"] // patched["need"])
    for name in ("miss", "runs_one_short", "every_second"):
        assert patched["probes"][name] <= runs, name
    assert patched["probes"]["hit_at_start"] <= runs + patched["need"]


def test_never_more_probes_than_plain(patched: dict[str, Any]) -> None:
    for name, count in patched["probes"].items():
        assert count <= patched["reference_probes"][name], name


def test_plain_source_probes_every_block(probe: Callable[..., Any], vllm_plain: Path) -> None:
    """When this fails, the engine's look-up strides: drop the patch."""
    plain = scan(probe, vllm_plain, vllm_plain)
    assert plain["probes"]["miss"] == plain["blocks"]


@pytest.mark.slow
def test_a_miss_is_faster(patched: dict[str, Any]) -> None:
    """CPU time, least of five; the ratio leaves room for a busy machine."""
    for name, seconds in patched["seconds"].items():
        assert seconds <= 0.6 * patched["reference_seconds"][name], name
