# SPDX-License-Identifier: Apache-2.0
"""Names that several modules of the feature share, readable without importing a model."""

ARCHITECTURE = "MimoPluginOmniForCausalLM"
STOCK_ARCHITECTURE = "MiMoV2OmniForCausalLM"
REPLACES = {STOCK_ARCHITECTURE: ARCHITECTURE}
"""vLLM's architectures and ours. A name of our own leaves other engines' models alone."""

QWEN_ARCHITECTURES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Models whose pixels the kernels can make, but whose processors have no adapter yet."""

SETUP_KEY = "mimo_plugin_vision"
"""Attribute of the model's configuration that carries the feature's set-up to every process."""
