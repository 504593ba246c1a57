# SPDX-License-Identifier: Apache-2.0
"""Where the feature dp_affinity runs, and what it says where it can't."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mimo_plugin.engines.vllm.dp_affinity import fit
from mimo_plugin.errors import ConfigError

PARALLEL = {
    "data_parallel_size": 4,
    "data_parallel_size_local": 4,
    "data_parallel_rank_local": None,
    "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False,
}


def config(caching: bool = True, section: dict | None = None, **parallel) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**PARALLEL, **parallel}),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
        additional_config={"mimo": {"dp_affinity": section or {}}},
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"data_parallel_size_local": 0},  # all ranks on other nodes
        {"data_parallel_size_local": 2},
        {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2},
    ],
)
def test_it_runs_where_vllm_balances(parallel):
    assert fit.why_not(config(**parallel)) is None
    assert not fit.unused(config(**parallel))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"data_parallel_size": 1}, "--data-parallel-size is 1"),
        ({"data_parallel_external_lb": True}, "external"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1}, "this node has one"),
        ({"data_parallel_rank_local": 0}, "VLLM_DP_RANK"),
        ({"caching": False}, "prefix caching is off"),
    ],
)
def test_it_says_why_not(parallel, words):
    reason = fit.why_not(config(**parallel))
    assert reason and words in reason and "leave dp_affinity out" in reason and "\n" not in reason


def test_one_rank_is_no_news():
    assert fit.unused(config(data_parallel_size=1))


def test_the_front_end_in_rust_balances_by_itself(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND" in fit.why_not(config())


def test_ids_outside_the_vocabulary_are_refused():
    assert fit.why_not(config(section={"answer_token_ids": [0, 99]})) is None
    with pytest.raises(ConfigError, match="answer_token_ids.*100.*0 to 99"):
        fit.why_not(config(section={"answer_token_ids": [5, 100]}))
