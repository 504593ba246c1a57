# SPDX-License-Identifier: Apache-2.0
"""Patch 0005: on CPU, speculation keeps the target's law and seeded prefills may be chunked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.server import is_cpu_build
from tools.tiny_mimo import TinyMiMo, make

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_cpu_build(), reason="needs the CPU build of vLLM"),
]
TIGHT = 5.0
"""Chi-square per degree of freedom that right samples stay below (4 or more degrees)."""
ENOUGH_TOKENS = 300
KINDS = [f"{draft}/{law}" for draft in ("sampled", "fixed") for law in ("temperature", "filtered")]


@pytest.fixture
def patched(probe: Callable[..., Any], vllm_patched: Callable[[str], Path]) -> Any:
    return probe("cpu_sampling.py", vllm_patched("0005"))


@pytest.fixture
def plain(probe: Callable[..., Any], vllm_plain: Path) -> Any:
    return probe("cpu_sampling.py", vllm_plain)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    size = TinyMiMo(layers=2, full_every=2, moe_layers=0, hidden_size=64)
    return str(make(tmp_path_factory.mktemp("tiny") / "model", size))


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_sampling_has_the_law_of_plain_sampling(patched: Any, kind: str) -> None:
    laws = patched["laws"][kind]
    judged = [name for name, (_, _, tokens) in laws.items() if tokens >= ENOUGH_TOKENS]
    # First tokens of all groups, and tokens after an accepted draft.
    assert {"warm/0", "top_k/0", "top_p/0", "warm/1"} <= set(judged)
    for name, (distance, outside, _) in laws.items():
        assert outside == 0, name
        assert name not in judged or distance < TIGHT, name


def test_parameters_of_every_dtype_are_expanded(patched: Any) -> None:
    assert patched["expanded"] == {
        "temperature": [1.0, 0.75, 0.75, 0.75],  # 0 (greedy) is replaced by 1
        "top_k": [3, 9, 9, 9],
        "int64": [3, 9, 9, 9],
    }


def test_seeded_requests_repeat_and_others_do_not(patched: Any) -> None:
    seeded_repeat, others_repeat = patched["seeded"]
    assert seeded_repeat and others_repeat < 0.95


def test_plain_source_leaves_parameters_unwritten(plain: Any) -> None:
    """When this fails, the engine is mended: drop this part of the patch."""
    assert plain["expanded"]["temperature"] == [-7.0] * 4
    assert plain["expanded"]["top_k"] == [-7] * 4
    for kind in KINDS:
        laws = plain["laws"][kind]
        assert "error" in laws or min(laws[f"{group}/0"][0] for group in ("warm", "top_k")) > 50


def test_a_seeded_prefill_may_be_chunked(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path], tiny: str
) -> None:
    """Discarded samples of its chunks don't shift the request's random numbers."""
    served = probe("cpu_seeded_chunks.py", vllm_patched("0005"), tiny)
    assert served["hit_tokens"] >= 192
    assert served["cold"] == served["cached"] != served["other"]


def test_plain_source_stops_at_a_seeded_chunk(
    probe: Callable[..., Any], vllm_plain: Path, tiny: str
) -> None:
    """When this fails, the engine is mended: drop this part of the patch."""
    served = probe("cpu_seeded_chunks.py", vllm_plain, tiny)
    assert "does not use offset" in served["error"]
