# SPDX-License-Identifier: Apache-2.0
"""Configurations of published models, reduced to the keys that matter for KV."""

from __future__ import annotations

from typing import Any


def _every(count: int, period: int) -> list[int]:
    """0 for the first and every ``period``-th layer, else 1."""
    return [0 if i == 0 or (i + 1) % period == 0 else 1 for i in range(count)]


# MiMo-V2-Flash: values of the configuration class in transformers, under the key names that vLLM's
# model code reads (48 layers, 5:1, window 128). Not compared with the published config.json.
MIMO_V2_FLASH: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": _every(48, 6),
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
# The form transformers writes: a layer list, no swa_* keys (its code doubles the SWA heads).
MIMO_V2_FLASH_TRANSFORMERS: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "dtype": "bfloat16",
}
# MiMo-V2.5: the values of Flash with another name and a longer context.
MIMO_V2_5 = MIMO_V2_FLASH | {
    "architectures": ["MiMoV2OmniForCausalLM"],
    "model_type": "mimo_v2",
    "max_position_embeddings": 1048576,
}
# MiMo-V2.5-Pro, from its model card as an article quotes it: 70 layers, 10 full, 60 sliding; hidden
# 6144, 128 heads, 8 KV heads, 192/128. The number of sliding-window heads is assumed to be Flash's.
MIMO_V2_5_PRO = MIMO_V2_5 | {
    "architectures": ["MiMoV2ForCausalLM"],
    "hidden_size": 6144,
    "num_hidden_layers": 70,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "hybrid_layer_pattern": [0 if i % 7 == 0 else 1 for i in range(70)],
}
# The inference report's geometry: 10 full layers of 4 KV heads, 60 sliding ones of 8.
REPORT_10F_60S = MIMO_V2_5_PRO | {"num_key_value_heads": 4}
# openai/gpt-oss-20b config.json.
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}
GPT_OSS_120B = {k: v for k, v in GPT_OSS_20B.items() if k != "layer_types"} | {
    "num_hidden_layers": 36
}
GEMMA2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
}
GEMMA3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "torch_dtype": "bfloat16",
}
# Defaults of the Gemma 4 text configuration in transformers 5.
GEMMA4_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
}
MISTRAL_7B_V01: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
EXAONE4_32B: dict[str, Any] = {
    "model_type": "exaone4",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}
