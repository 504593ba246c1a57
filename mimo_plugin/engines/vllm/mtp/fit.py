# SPDX-License-Identifier: Apache-2.0
"""Does the MTP feature fit this model and these engine settings?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.core.draft import check_steps
from mimo_plugin.engines.vllm.mtp.checkpoint import available_layers
from mimo_plugin.engines.vllm.mtp.names import REPLACES
from mimo_plugin.engines.vllm.mtp.transfer import why_transfer_unsafe
from mimo_plugin.errors import FeatureUnavailable

TARGETS = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM")
DRAFTS = (*REPLACES, *REPLACES.values())


def unused(vllm_config: Any) -> bool:
    """Whether nothing here asks for MTP: a plain ``--plugin mimo`` then leaves it out silently."""
    spec = vllm_config.speculative_config
    return spec is None or spec.method != "mtp" or not _is_mimo(vllm_config)


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    return _why_model(vllm_config) or _why_engine(vllm_config) or why_transfer_unsafe(vllm_config)


def draft_layers(vllm_config: Any) -> int:
    """MTP layers that the draft checkpoint of this engine holds.

    Raises:
        FeatureUnavailable: the number can't be found out or is 0.
    """
    from mimo_plugin.engines.vllm.register import config_from

    config = config_from(vllm_config)
    assert config is not None
    draft = vllm_config.speculative_config.draft_model_config
    load_format = getattr(vllm_config.load_config, "load_format", "auto")
    return available_layers(config.mtp, draft.model, draft.revision, str(load_format))


def _is_mimo(vllm_config: Any) -> bool:
    architectures = vllm_config.model_config.architectures or []
    return any(name in TARGETS for name in architectures)


def _why_model(vllm_config: Any) -> str | None:
    spec = vllm_config.speculative_config
    if not _is_mimo(vllm_config):
        found = ", ".join(vllm_config.model_config.architectures or ["none"])
        return (
            f"the model is {found}, whose draft layers this feature does not know; needed: one of "
            f"{', '.join(TARGETS)}; fix: leave mtp out of --plugin mimo:…"
        )
    if spec is None:
        return (
            "speculative decoding is off; needed: the method 'mtp'; fix: start with "
            '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
        )
    if spec.method != "mtp":
        return (
            f"the speculative method is {spec.method!r}; needed: 'mtp'; fix: set it in "
            "--speculative-config, or leave mtp out of --plugin mimo:…"
        )
    draft = spec.draft_model_config
    names = list(draft.architectures or [])
    if not any(name in DRAFTS for name in names):
        return (
            f"the draft model {draft.model!r} is {', '.join(names) or 'unknown'}, not MiMo's MTP "
            "layers; fix: drop model from --speculative-config, the layers are in the checkpoint"
        )
    try:
        check_steps(spec.num_speculative_tokens, draft_layers(vllm_config))
    except (FeatureUnavailable, ValueError) as error:
        return str(error)
    return None


def _why_engine(vllm_config: Any) -> str | None:
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if spec.num_speculative_tokens > 1 and not vllm_config.use_v2_model_runner:
        return (
            "this engine runs Model Runner V1, which drafts every token with the same MTP layer; "
            "needed: Model Runner V2 (it wants Triton, so a GPU); fix: set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or num_speculative_tokens 1"
        )
    if getattr(spec, "disable_eagle_block_drop", False):
        return (
            "disable_eagle_block_drop is set, so prefix hits would keep draft KV that depends on "
            "another request's tokens; fix: drop it from --speculative-config"
        )
    if getattr(spec, "enable_adaptive_verification", False):
        return (
            "enable_adaptive_verification moves drafts between requests on the device only, where "
            "the MTP layers' rows can't follow; fix: drop it and use mimo.mtp.adaptive_length"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return (
            "prefill context parallel size is "
            f"{parallel.prefill_context_parallel_size}; needed: 1; fix: drop the option"
        )
    return None
