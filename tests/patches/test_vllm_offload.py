# SPDX-License-Identifier: Apache-2.0
"""Patches 0010 and 0011: what a hit means to the tiers below, and what it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.server import is_cpu_build
from tools.tiny_mimo import TinyMiMo, make

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not is_cpu_build(), reason="needs the CPU build of vLLM"),
]
HIT_TOKENS = 320
FULL_CHUNKS = [[0, chunk] for chunk in range(5)]
"""Chunks of 64 tokens, the whole hit."""
WINDOW_CHUNKS = [[group, chunk] for group in (1, 2, 3) for chunk in (8, 9)]
"""Chunks of 32 tokens; a window has 64."""
NEEDED = FULL_CHUNKS + WINDOW_CHUNKS
ANSWERED_BY = ("device", "device and host", "host", "files")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    size = TinyMiMo(layers=8, full_every=4, moe_layers=0, hidden_size=64)
    return str(make(tmp_path_factory.mktemp("tiny") / "model", size))


@pytest.fixture
def plain(probe: Callable[..., Any], vllm_plain: Path, tiny: str) -> Any:
    return probe("offload_engine.py", vllm_plain, tiny)


@pytest.fixture
def touches(probe: Callable[..., Any], vllm_patched: Callable[[str], Path], tiny: str) -> Any:
    return probe("offload_engine.py", vllm_patched("0010"), tiny)


@pytest.fixture
def speculating(probe: Callable[..., Any], vllm_patched: Callable[[str], Path], tiny: str) -> Any:
    return probe("offload_engine.py", vllm_patched("0011"), tiny, "mtp")


@pytest.fixture
def loads(probe: Callable[..., Any], vllm_patched: Callable[[str], Path], tiny: str) -> Any:
    return probe("offload_engine.py", vllm_patched("0011"), tiny)


# -- 0010 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ANSWERED_BY)
def test_a_hit_renews_its_files(touches: Any, tier: str) -> None:
    """All of the prefix in the full group, one window of the others, and no more."""
    assert touches["hit"][tier] == HIT_TOKENS
    assert touches["renewed"][tier] == NEEDED


def test_a_hit_that_ends_inside_a_block_renews_the_block(touches: Any) -> None:
    assert touches["hit"]["host, all but a token"] == HIT_TOKENS - 1
    assert touches["renewed"]["host, all but a token"] == NEEDED


def test_a_draft_models_group_needs_one_chunk_more(speculating: Any) -> None:
    """It matches a chunk past the hit, and drops it: without that there is no such hit again."""
    draft = speculating["eagle"].index(True)
    assert sum(speculating["eagle"]) == 1
    for tier in ANSWERED_BY:
        assert speculating["hit"][tier] == 288
        chunks = {group: [] for group in range(len(speculating["eagle"]))}
        for group, chunk in speculating["renewed"][tier]:
            chunks[group].append(chunk)
        assert chunks.pop(0) == [0, 1, 2, 3, 4]
        assert chunks.pop(draft) == [7, 8, 9]
        assert all(found == [7, 8] for found in chunks.values()) and len(chunks) >= 3


def test_files_are_renewed_now_and_then(touches: Any) -> None:
    assert touches["hit"]["device again"] == HIT_TOKENS and touches["hit"]["nothing"] == 0
    assert touches["renewed"]["device again"] == touches["renewed"]["nothing"] == []


def test_slow_files_hold_nobody_up(touches: Any) -> None:
    """Ten calls while files hang: none waits, a few run; nor does a shutdown wait."""
    busy = touches["busy"]
    assert busy["ran"] == 4 and busy["slowest_s"] < 0.1 and busy["stop_s"] < 15


@pytest.mark.parametrize("tier", ["device", "device and host"])
def test_a_hit_is_young_in_host_memory(touches: Any, tier: str) -> None:
    """Younger than a prompt stored after it, and the request's own chunks die tail first."""
    found = touches["order"][tier]
    assert found["hit"] == HIT_TOKENS
    order = found["order"]
    youngest_other = max(at for at, (name, *_) in enumerate(order) if name == "new")
    hit = {tuple(label) for label in NEEDED}
    renewed = [label for label in order[youngest_other + 1 :]]
    assert hit <= {(group, chunk) for _, group, chunk in renewed}
    ends = [(chunk + 1) * (64 if group == 0 else 32) for _, group, chunk in renewed]
    assert ends == sorted(ends, reverse=True) and ends[0] == 512 and ends[-1] == 64


def test_arc_counts_a_hit_once(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path]
) -> None:
    found = probe("offload_small.py", vllm_patched("0010"))["arc"]
    assert found["frequent"] == ["hit"], "what was only stored is not frequent"
    assert found["target_steps"] == 1, "one observation of a chunk that was evicted"


def test_plain_source_renews_nothing(plain: Any) -> None:
    """When this fails, the engine touches: drop the patch."""
    for tier in ANSWERED_BY:
        assert plain["hit"][tier] == HIT_TOKENS and plain["renewed"][tier] == []
    # The windows of the hit, and its head when only the rest is loaded, are older than the other.
    for tier, chunks in (("device", WINDOW_CHUNKS), ("device and host", [[0, 0], [0, 1]])):
        old = [["old", *chunk] for chunk in chunks]
        order = plain["order"][tier]["order"]
        first_other = next(at for at, (name, *_) in enumerate(order) if name == "new")
        assert all(label in order[:first_other] for label in old), tier


# -- 0011 ----------------------------------------------------------------------------------------


def test_windows_alone_are_loaded(touches: Any, loads: Any) -> None:
    before, after = touches["loads"], loads["loads"]
    for found in (before, after):
        assert found["hit"] == found["hit_again"] == HIT_TOKENS
        assert found["loads"] == 1 and found["same"] is True
        assert found["tokens_per_block"] == [64, 32, 32, 32]
    assert (before["blocks"], before["starts"]) == ([5, 2, 2, 2], [0, 8, 8, 8])
    assert (after["blocks"], after["starts"]) == ([0, 2, 2, 2], [5, 8, 8, 8])
    assert after["bytes"] * 11 == before["bytes"] * 6


@pytest.mark.parametrize("kind", ["loads", "speculating"])
def test_random_evictions_load_what_is_missing(kind: str, request: pytest.FixtureRequest) -> None:
    """Block by block as counted by hand, with the tokens of a run without a cache."""
    found = request.getfixturevalue(kind)["histories"]
    assert found["loads"] >= 15 and found["hits"] > 5_000 and found["longer"] >= 5
    assert found["wrong"] == found["tokens"] == found["adopted"] == found["lost_blocks"] == 0


def test_plain_source_loads_what_it_has(plain: Any) -> None:
    """When this fails, the engine loads less: drop the patch."""
    assert plain["loads"]["blocks"] == [5, 2, 2, 2]
    found = plain["histories"]
    assert found["wrong"] >= 5 and found["full_blocks"] > 1.3 * found["full_blocks_missing"]
    assert found["tokens"] == found["lost_blocks"] == 0


def test_only_hybrids_of_whole_blocks_keep_longer_hits(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path]
) -> None:
    found = probe("offload_small.py", vllm_patched("0011"))["retained"]
    assert found == {"hybrid": [0], "partial hits": [], "one group": []}


def test_connectors_that_write_to_the_whole_range_stay_out(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path]
) -> None:
    found = probe("offload_small.py", vllm_patched("0011"))
    assert found["known"] >= 10 and found["opted_in"] == ["OffloadingConnector"]
    assert found["says"] == [True, False], "loads within a step tell blocks by position"
