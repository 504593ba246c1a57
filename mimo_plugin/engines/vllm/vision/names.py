# SPDX-License-Identifier: Apache-2.0
"""Names that several modules of the feature share, readable without importing a model."""

ARCHITECTURE = "MimoPluginOmniForCausalLM"
STOCK_ARCHITECTURE = "MiMoV2OmniForCausalLM"
QWEN_FAMILIES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
"""Of Qwen-VL, whose images are ours and whose videos stay vLLM's."""

_QWEN = {
    f"{family}ForConditionalGeneration": f"MimoPlugin{family}ForConditionalGeneration"
    for family in QWEN_FAMILIES
}
REPLACES = {STOCK_ARCHITECTURE: ARCHITECTURE, **_QWEN}
"""vLLM's architectures and ours. A name of our own leaves other engines' models alone."""

SETUP_KEY = "mimo_plugin_vision"
"""Attribute of the model's configuration that carries the feature's set-up to every process."""


def is_qwen(names: list[str]) -> bool:
    """Whether the architectures ``names`` are of the Qwen-VL family, vLLM's or ours."""
    return bool({*_QWEN, *_QWEN.values()}.intersection(names))
