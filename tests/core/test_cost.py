# SPDX-License-Identifier: Apache-2.0
"""The cost of a prefill: from configurations of published models and from step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.cost import (
    DEFAULT_PARITY_TOKENS,
    PrefillCost,
    StepTimes,
    parity_tokens,
    parity_tokens_or_default,
)
from mimo_plugin.core.geometry import GeometryError
from tests.published_models import (
    DEEPSEEK_V3,
    GEMMA3_27B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_31_8B,
    MIMO_V2_5,
    MIMO_V2_5_PRO,
    MIMO_V2_FLASH,
    MIMO_V2_FLASH_TRANSFORMERS,
    MISTRAL_7B_V01,
    QWEN3_30B_A3B,
)

TOKENS = st.integers(0, 1_000_000)
PARITIES = st.one_of(st.floats(1e3, 1e6), st.just(math.inf))


@given(parity=PARITIES, cached=TOKENS, first=TOKENS, second=TOKENS)
def test_chunks_add_up(parity: float, cached: int, first: int, second: int) -> None:
    cost = PrefillCost(parity)
    whole = cost.cost(cached, first + second)
    parts = cost.cost(cached, first) + cost.cost(cached + first, second)
    assert whole == pytest.approx(parts, rel=1e-9)


@given(parity=PARITIES, cached=TOKENS, uncached=st.integers(1, 1_000_000), more=TOKENS)
def test_more_work_never_costs_less(parity: float, cached: int, uncached: int, more: int) -> None:
    cost = PrefillCost(parity)
    base = cost.cost(cached, uncached)
    assert base >= uncached
    assert cost.cost(cached + more, uncached) >= base
    assert cost.cost(cached, uncached + more) >= base + more
    # The same prompt with more of it cached.
    hit = min(more, uncached - 1)
    assert cost.cost(cached + hit, uncached - hit) <= base


def test_cost_in_numbers() -> None:
    cost = PrefillCost(1000)
    assert cost.cost(0, 0) == 0
    assert cost.cost(500, 0) == 0
    assert cost.cost(1000, 10) == pytest.approx(10 + 10 * 1005 / 1000)
    assert cost.attention_tokens(1000, 10) == 10_050
    assert cost.cost(0, 2000) == pytest.approx(4000)  # 2000 tokens see 1000 keys on average
    assert PrefillCost(math.inf).cost(1_000_000, 7) == 7


@pytest.mark.parametrize("parity", [0, -1, math.nan, -math.inf])
def test_a_parity_is_positive(parity: float) -> None:
    with pytest.raises(ValueError, match="parity_tokens"):
        PrefillCost(parity)
    with pytest.raises(ValueError, match="parity_tokens"):
        StepTimes(parity)


@pytest.mark.parametrize(
    ("config", "active", "per_key", "window_flops"),
    [
        # Published active parameters less embedding and output head (vocabulary x hidden each):
        # 15B - 1.25B, 42B - 1.87B; both published to the billion, hence the tolerance of 5 %.
        (MIMO_V2_FLASH, 13.75e9, 9 * 2 * 64 * 320, 39 * 2 * 64 * 320 * 128),
        (MIMO_V2_FLASH_TRANSFORMERS, 13.75e9, 9 * 2 * 64 * 320, 39 * 2 * 64 * 320 * 128),
        (MIMO_V2_5, 13.75e9, 9 * 2 * 64 * 320, 39 * 2 * 64 * 320 * 128),
        (MIMO_V2_5_PRO, 40.13e9, 10 * 2 * 128 * 320, 60 * 2 * 128 * 320 * 128),
        # 3.61B and 5.13B with the output head of 201088 x 2880.
        (GPT_OSS_20B, 3.03e9, 12 * 2 * 64 * 128, 12 * 2 * 64 * 128 * 128),
        (GPT_OSS_120B, 4.55e9, 18 * 2 * 64 * 128, 18 * 2 * 64 * 128 * 128),
        # 25.6B without embeddings.
        (GEMMA3_27B, 25.6e9, 10 * 2 * 32 * 256, 52 * 2 * 32 * 256 * 1024),
        # 8.03B less 2 x 128256 x 4096.
        (LLAMA_31_8B, 6.98e9, 32 * 2 * 32 * 256, 0),
        # 3.3B less 2 x 151936 x 2048.
        (QWEN3_30B_A3B, 2.68e9, 48 * 2 * 32 * 256, 0),
        # 37B less 2 x 129280 x 7168; latent attention in its expanded form.
        (DEEPSEEK_V3, 35.1e9, 61 * 2 * 128 * 320, 0),
    ],
)
def test_parity_of_published_models(
    config: dict[str, Any], active: float, per_key: int, window_flops: int
) -> None:
    expected = (2 * active + window_flops) / per_key
    assert parity_tokens(config) == pytest.approx(expected, rel=0.05)
    assert parity_tokens_or_default(config) == (parity_tokens(config), True)


def test_parity_of_flash_is_near_the_prototypes() -> None:
    """81,000 took all of the 15B for linear; without embeddings it is a few percent less."""
    assert parity_tokens(MIMO_V2_FLASH) == pytest.approx(81_000, rel=0.06)


def test_parity_of_a_dense_model_exactly() -> None:
    attention = 4096 * 4096 * 2 + 2 * 4096 * 8 * 128
    linear = 2 * 32 * (attention + 3 * 4096 * 14336)
    assert parity_tokens(LLAMA_31_8B) == linear / (32 * 2 * 32 * 256)


def test_without_full_attention_nothing_grows() -> None:
    assert parity_tokens(MISTRAL_7B_V01) == math.inf
    assert PrefillCost(parity_tokens(MISTRAL_7B_V01)).cost(100_000, 5) == 5


def test_query_heads_of_sliding_layers_are_their_own() -> None:
    """64 heads fewer in each of 60 layers: 64 * 320 * hidden parameters and their window."""
    fewer = MIMO_V2_5_PRO | {"swa_num_attention_heads": 64}
    saved = 60 * 64 * 320 * 2 * (6144 + 128)
    difference = parity_tokens(MIMO_V2_5_PRO) - parity_tokens(fewer)
    assert difference == pytest.approx(saved / (10 * 2 * 128 * 320))


EXPERTS = {"moe_intermediate_size": 100, "n_routed_experts": 8, "num_experts_per_tok": 2}
DENSE_MLP, SPARSE_MLP = 3 * 4096 * 14336, 3 * 4096 * 200 + 4096 * 8


@pytest.mark.parametrize(
    ("keys", "sparse_layers", "extra_per_sparse"),
    [
        ({}, 32, 0),
        ({"moe_layer_freq": [0] * 30 + [1] * 2}, 2, 0),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 27}, 27, 0),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 1}, 29, 0),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 15, 0),  # layers 2, 4 ... 30
        ({"decoder_sparse_step": 4}, 8, 0),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 7]}, 30, 0),
        ({"n_shared_experts": 3}, 32, 3 * 4096 * 300),
        ({"shared_expert_intermediate_size": 50}, 32, 3 * 4096 * 50),
        ({"n_shared_experts": 3, "shared_expert_intermediate_size": 50}, 32, 3 * 4096 * 50),
        ({"n_shared_experts": None, "mlp_only_layers": None}, 32, 0),
    ],
)
def test_layouts_of_experts(
    keys: dict[str, Any], sparse_layers: int, extra_per_sparse: int
) -> None:
    change = sparse_layers * (SPARSE_MLP + extra_per_sparse - DENSE_MLP)
    expected = parity_tokens(LLAMA_31_8B) + 2 * change / (32 * 2 * 32 * 256)
    assert parity_tokens(LLAMA_31_8B | EXPERTS | keys) == pytest.approx(expected)


def test_experts_of_the_dense_size() -> None:
    """Mixtral and gpt-oss have no moe_intermediate_size."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1}
    router = 2 * 32 * 4096 * 8 / (32 * 2 * 32 * 256)
    parity = parity_tokens(LLAMA_31_8B | experts)
    assert parity == pytest.approx(parity_tokens(LLAMA_31_8B) + router)


@pytest.mark.parametrize(
    "keys",
    [
        {"full_attention_interval": 4},
        {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8},
        {"layer_types": (["mamba"] * 3 + ["attention"]) * 8},
        {"layers_block_type": (["mamba"] * 3 + ["attention"]) * 8},
        {"hybrid_override_pattern": "MMM*" * 8},
        {"attn_type_list": [0, 0, 0, 1] * 8},
        {"attn_layer_period": 4, "attn_layer_offset": 2},
        {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 28, 32]}},
    ],
)
def test_layers_with_a_state_attend_to_no_keys(keys: dict[str, Any]) -> None:
    assert parity_tokens(LLAMA_31_8B | keys) == 4 * parity_tokens(LLAMA_31_8B)


def test_other_attention() -> None:
    plain = parity_tokens(LLAMA_31_8B)
    chunked = {"layer_types": ["chunked_attention", "full_attention"] * 16}
    assert parity_tokens(LLAMA_31_8B | chunked | {"attention_chunk_size": 8192}) == pytest.approx(
        2 * plain + 4096
    )
    sparse = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    pair, index = 2 * 128 * 320, 2 * 64 * 128
    assert parity_tokens(DEEPSEEK_V3 | sparse) == pytest.approx(
        (parity_tokens(DEEPSEEK_V3) + 2048) * pair / index
    )
    # A query without a latent, as in the small DeepSeek models: 7168 -> 128 x 192 at once.
    wide = parity_tokens(DEEPSEEK_V3 | {"q_lora_rank": None}) - parity_tokens(DEEPSEEK_V3)
    more = 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)
    assert wide == pytest.approx(2 * more / pair)


def test_layers_that_share_keys_attend_but_project_none() -> None:
    shared = GEMMA3_27B["text_config"] | {"num_kv_shared_layers": 20}
    saved = 2 * 20 * 5376 * 16 * 256
    difference = parity_tokens(GEMMA3_27B) - parity_tokens({"text_config": shared})
    assert difference == pytest.approx(saved / (10 * 2 * 32 * 256))


ODD: list[Any] = [
    {},
    None,
    [],
    {"num_hidden_layers": 0},
    {"text_config": {"num_hidden_layers": "many"}},
    LLAMA_31_8B | {"intermediate_size": None},
    LLAMA_31_8B | {"intermediate_size": [14336]},
    LLAMA_31_8B | {"hidden_size": None},
    LLAMA_31_8B | {"num_attention_heads": [32] * 32},
    LLAMA_31_8B | {"layer_types": 7},
    LLAMA_31_8B | {"layer_types": ["full_attention"]},
    LLAMA_31_8B | {"linear_attn_config": 7},
    LLAMA_31_8B | EXPERTS | {"num_experts_per_tok": None},
    LLAMA_31_8B | EXPERTS | {"moe_layer_freq": [1]},
    LLAMA_31_8B | EXPERTS | {"moe_layer_freq": 1.5},
    DEEPSEEK_V3 | {"qk_nope_head_dim": None},
]


@pytest.mark.parametrize("config", ODD)
def test_what_is_not_understood_has_a_default(config: Any) -> None:
    assert parity_tokens_or_default(config) == (DEFAULT_PARITY_TOKENS, False)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            key: st.one_of(st.none(), st.integers(-3, 99), st.text(max_size=3), st.floats())
            for key in [
                *MIMO_V2_FLASH,
                *DEEPSEEK_V3,
                *QWEN3_30B_A3B,
                "layer_types",
                "attn_type_list",
            ]
        },
    )
)
def test_no_configuration_raises(change: dict[str, Any]) -> None:
    parity, _ = parity_tokens_or_default(MIMO_V2_FLASH | change)
    assert parity > 0


def test_what_is_missing_is_said() -> None:
    with pytest.raises(GeometryError, match="intermediate_size"):
        parity_tokens(LLAMA_31_8B | {"intermediate_size": None})
    with pytest.raises(GeometryError, match="moe layers"):
        parity_tokens(LLAMA_31_8B | EXPERTS | {"moe_layer_freq": [1]})


PRIOR = 80_000.0
Shape = Callable[[random.Random], tuple[int, int]]


def mixed(rng: random.Random) -> tuple[int, int]:
    """Uncached and cached tokens of a step: small to large, without context to long."""
    return rng.choice([16, 256, 1024, 2048, 8192]), rng.choice([0, 0, 4_000, 30_000, 120_000])


class Engine:
    """Step times with a known truth, noise of a step's size and steps that take ten times long."""

    def __init__(self, parity: float, *, rate: float = 20_000.0, seed: int = 0) -> None:
        self.cost = PrefillCost(parity)
        self.rate = rate
        self.rng = random.Random(seed)

    def run(
        self,
        times: StepTimes,
        steps: int,
        *,
        noise: float = 0.05,
        outliers: float = 0.0,
        shape: Shape = mixed,
    ) -> None:
        for _ in range(steps):
            uncached, cached = shape(self.rng)
            seconds = 0.004 + self.cost.cost(cached, uncached) / self.rate
            seconds *= max(0.2, self.rng.gauss(1, noise))
            if self.rng.random() < outliers:
                seconds *= 10
            times.observe(uncached, self.cost.attention_tokens(cached, uncached), seconds)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.3, 0.5, 1, 2, 3])
def test_finds_the_truth_under_noise_and_outliers(factor: float, seed: int) -> None:
    """Within 10 %: the cut outliers (5 % of the steps) bias it by some percent."""
    times = StepTimes(PRIOR)
    engine = Engine(PRIOR * factor, seed=seed)
    engine.run(times, 4, outliers=1.0)  # compilation
    engine.run(times, 1000, outliers=0.05)
    assert times.parity_tokens == pytest.approx(PRIOR * factor, rel=0.1)
    assert times.tokens_per_s == pytest.approx(20_000, rel=0.05)
    assert times.num_observed == 1004


def test_many_slow_first_steps_are_forgotten() -> None:
    times = StepTimes(PRIOR)
    engine = Engine(2 * PRIOR)
    engine.run(times, 24, outliers=1.0)  # most of those that are fitted first
    engine.run(times, 3000)
    assert times.parity_tokens == pytest.approx(2 * PRIOR, rel=0.1)
    assert times.tokens_per_s == pytest.approx(20_000, rel=0.05)


def test_one_outlier_moves_little() -> None:
    times = StepTimes(PRIOR)
    engine = Engine(PRIOR)
    engine.run(times, 500)
    parity, speed = times.parity_tokens, times.tokens_per_s
    for seconds in (3000.0, 1e-5):
        times.observe(8192, engine.cost.attention_tokens(120_000, 8192), seconds)
    assert times.parity_tokens == pytest.approx(parity, rel=0.05)
    assert times.tokens_per_s == pytest.approx(speed, rel=0.05)


def test_a_lasting_change_is_followed() -> None:
    times = StepTimes(PRIOR)
    Engine(PRIOR).run(times, 1000)
    Engine(PRIOR / 2, rate=10_000).run(times, 4000)
    assert times.parity_tokens == pytest.approx(PRIOR / 2, rel=0.1)
    assert times.tokens_per_s == pytest.approx(10_000, rel=0.05)


def test_prior_until_there_are_data() -> None:
    times = StepTimes(PRIOR)
    assert (times.parity_tokens, times.tokens_per_s, times.num_observed) == (PRIOR, None, 0)
    Engine(3 * PRIOR).run(times, 31)
    assert (times.parity_tokens, times.tokens_per_s, times.num_observed) == (PRIOR, None, 31)
    Engine(3 * PRIOR).run(times, 1)
    assert times.tokens_per_s is not None


@pytest.mark.parametrize(
    "shape", [lambda rng: (rng.choice([512, 2048]), 0), lambda _: (2048, 30_000)]
)
def test_prior_where_the_steps_tell_nothing(shape: Shape) -> None:
    """Without context the attention is lost in the noise; equal steps can't be told apart."""
    times = StepTimes(PRIOR)
    Engine(3 * PRIOR).run(times, 2000, shape=shape)
    assert times.parity_tokens == pytest.approx(PRIOR, rel=0.1)


@pytest.mark.parametrize(("factor", "bound"), [(40, 4), (1 / 40, 1 / 4)])
def test_bounded(factor: float, bound: float) -> None:
    times = StepTimes(PRIOR)
    Engine(PRIOR * factor).run(times, 2000)
    assert times.parity_tokens == pytest.approx(PRIOR * bound)
    assert times.tokens_per_s is not None and times.tokens_per_s > 0


def test_a_model_without_full_attention_stays_so() -> None:
    times = StepTimes(math.inf)
    Engine(math.inf).run(times, 500)
    assert times.parity_tokens == math.inf
    assert times.tokens_per_s == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "attention", "seconds"),
    [
        (0, 0.0, 0.1),
        (-5, 0.0, 0.1),
        (100, 0.0, 0.0),
        (100, 0.0, -1.0),
        (100, 0.0, math.nan),
        (100, 0.0, math.inf),
        (100, 0.0, 1e-300),
        (100, 0.0, 1e300),
        (100, math.nan, 0.1),
        (100, math.inf, 0.1),
        (100, -1.0, 0.1),
        (100, 1e300, 0.1),
        (math.nan, 0.0, 0.1),
        (math.inf, 0.0, 0.1),
    ],
)
def test_garbage_is_ignored(tokens: int, attention: float, seconds: float) -> None:
    times, same = StepTimes(PRIOR), StepTimes(PRIOR)
    for steps in (10, 40):  # before and after the first fit
        times.observe(tokens, attention, seconds)
        for each in (times, same):
            Engine(2 * PRIOR, seed=steps).run(each, steps)
    times.observe(tokens, attention, seconds)
    assert times.num_observed == same.num_observed == 50
    assert times.parity_tokens == same.parity_tokens
    assert times.tokens_per_s == same.tokens_per_s


@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 1e6), st.floats(1e-6, 3600)),
        min_size=30,
        max_size=80,
    ),
    st.sampled_from([100.0, PRIOR, 1e9, math.inf]),
)
def test_nothing_that_is_observed_breaks_it(
    steps: list[tuple[int, float, float]], prior: float
) -> None:
    times = StepTimes(prior)
    for tokens, context, seconds in steps:
        times.observe(tokens, tokens * context, seconds)
        assert prior / 4 <= times.parity_tokens <= prior * 4
        speed = times.tokens_per_s
        assert speed is None or 0 < speed < math.inf
