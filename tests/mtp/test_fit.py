# SPDX-License-Identifier: Apache-2.0
"""What stops start-up, each with one line that says what was found, what is needed and the fix."""

from types import SimpleNamespace as Fake

import pytest

from mimo_plugin.engines.vllm.mtp import fit


@pytest.fixture
def config(tmp_path):
    """A configuration that fits: what ``fit`` reads of vLLM's, weights made up (3 layers)."""
    draft = Fake(model="model", revision=None, architectures=["MiMoV2MTPModel"])
    return Fake(
        additional_config={"mimo": {"features": ["mtp"]}},
        model_config=Fake(architectures=["MiMoV2FlashForCausalLM"]),
        load_config=Fake(load_format="dummy"),
        parallel_config=Fake(prefill_context_parallel_size=1),
        kv_transfer_config=None,
        num_speculative_tokens=3,
        use_v2_model_runner=True,
        speculative_config=Fake(
            method="mtp",
            num_speculative_tokens=3,
            draft_model_config=draft,
            disable_eagle_block_drop=False,
            enable_adaptive_verification=False,
        ),
    )


def test_the_published_model_fits(config):
    assert fit.why_not(config) is None
    assert not fit.unused(config)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_drafts_than_layers_fit(config, steps):
    config.speculative_config.num_speculative_tokens = config.num_speculative_tokens = steps
    assert fit.why_not(config) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c, "speculative_config", None), "speculative decoding is off"),
        (lambda c: setattr(c.speculative_config, "method", "eagle3"), "method is 'eagle3'"),
        (
            lambda c: setattr(c.model_config, "architectures", ["LlamaForCausalLM"]),
            "the model is LlamaForCausalLM",
        ),
        (
            lambda c: setattr(
                c.speculative_config.draft_model_config, "architectures", ["MiMoMTPModel"]
            ),
            "the draft model 'model' is MiMoMTPModel",
        ),
        (lambda c: setattr(c.speculative_config, "num_speculative_tokens", 4), "found 4"),
        (lambda c: setattr(c, "use_v2_model_runner", False), "Model Runner V1"),
        (
            lambda c: setattr(c.speculative_config, "disable_eagle_block_drop", True),
            "disable_eagle_block_drop is set",
        ),
        (
            lambda c: setattr(c.speculative_config, "enable_adaptive_verification", True),
            "enable_adaptive_verification",
        ),
        (
            lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
            "prefill context parallel size is 2",
        ),
        (
            lambda c: setattr(
                c,
                "kv_transfer_config",
                Fake(kv_connector="LMCacheConnectorV1", kv_connector_extra_config={}),
            ),
            "KV connector LMCacheConnectorV1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_said_in_one_line(config, change, words):
    change(config)
    reason = fit.why_not(config)
    assert words in reason
    assert "fix:" in reason and "\n" not in reason


def test_one_draft_token_fits_the_first_model_runner(config):
    config.use_v2_model_runner = False
    config.speculative_config.num_speculative_tokens = config.num_speculative_tokens = 1
    assert fit.why_not(config) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "speculative_config", None),
        lambda c: setattr(c.speculative_config, "method", "ngram"),
        lambda c: setattr(c.model_config, "architectures", ["DeepseekV3ForCausalLM"]),
    ],
)
def test_where_nothing_asks_for_it_leaving_it_out_is_no_news(config, change):
    change(config)
    assert fit.unused(config)
