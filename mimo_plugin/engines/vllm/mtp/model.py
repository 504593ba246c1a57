# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2's MTP draft model with all its layers.

vLLM's own class builds one layer and runs it for every draft step. MiMo's layers are not chained:
layer i reads the *target's* hidden state at position p and the embedding of token p+1+i
(checkpoint tensors ``model.mtp.layers.{i}``). So ``forward`` hands the hidden states it was given
back as those of the next step, which the multi-module speculator feeds in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import mimo_v2_mtp as upstream
from vllm.model_executor.models.utils import maybe_prefix

from mimo_plugin.core.draft import layer_of_step
from mimo_plugin.engines.vllm.mtp.names import ARCHITECTURE, OMNI_ARCHITECTURE


class Predictor(upstream.MiMoV2MultiTokenPredictor):  # type: ignore[misc]
    """The layers ``0 … n-1`` over one embedding; parameters named as in the checkpoint."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        # The target's configuration; what was overridden for the draft lies beside it.
        config = vllm_config.model_config.hf_config
        spec = vllm_config.speculative_config
        self.num_mtp_layers = min(
            spec.draft_model_config.hf_config.num_nextn_predict_layers,
            spec.num_speculative_tokens,
        )
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.mtp = upstream._MiMoV2MTPLayers(
            config=config,
            num_mtp_layers=self.num_mtp_layers,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "mtp.layers"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        limit = getattr(config, "max_position_embeddings", 32768)
        past_rope = vllm_config.model_config.max_model_len > limit
        #: drafting has stopped there; the rows must not read past the rope table
        self.last_position: int | None = limit - 1 if past_rope else None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        previous_hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """(rows, hidden) of the layer of this draft step, normed, ready for the output head."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        if self.last_position is not None:
            positions = positions.clamp(max=self.last_position)
        layer = self.mtp.layers[str(layer_of_step(spec_step_idx, self.num_mtp_layers))]
        out: torch.Tensor = layer(inputs_embeds, positions, previous_hidden_states)
        return out


class _AllLayers:
    """What both draft classes share; stands before the upstream class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.model_config.hf_config
        self.model = Predictor(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            prefix=maybe_prefix(prefix, "lm_head"),
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the output head, and the target's for the next step: no chaining."""
        out = self.model(input_ids, positions, hidden_states, inputs_embeds, spec_step_idx)
        return out, hidden_states


class MimoMTP(_AllLayers, upstream.MiMoV2MTP):  # type: ignore[misc]
    """Draft model of MiMo-V2-Flash and of the text model of V2 / V2.5."""


class MimoOmniMTP(_AllLayers, upstream.MiMoV2OmniMTP):  # type: ignore[misc]
    """Draft model of the multimodal MiMo-V2.5: embeddings of images and sounds go in too."""


def register() -> None:
    """Make both classes known in this process under names that only our configuration uses."""
    from vllm.model_executor.models import ModelRegistry

    for name, model in ((ARCHITECTURE, MimoMTP), (OMNI_ARCHITECTURE, MimoOmniMTP)):
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, model)
