# SPDX-License-Identifier: Apache-2.0
"""Configurations of published models, reduced to the keys that matter for KV and for cost."""

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
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_layer_freq": [0] + [1] * 47,
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
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "mlp_layer_types": ["dense"] + ["sparse"] * 47,
    "dtype": "bfloat16",
}
# MiMo-V2.5: the values of Flash with another name and a longer context.
MIMO_V2_5 = MIMO_V2_FLASH | {
    "architectures": ["MiMoV2OmniForCausalLM"],
    "model_type": "mimo_v2",
    "max_position_embeddings": 1048576,
}
# MiMo-V2.5-Pro, from its model card as an article quotes it: 70 layers, 10 full, 60 sliding; hidden
# 6144, 128 heads, 8 KV heads, 192/128; 1 dense layer, 69 of 384 experts, 8 active. Assumed: Flash's
# MLP widths (they give the published 1.02T parameters), its number of sliding-window KV heads, and
# 128 sliding-window query heads (they give the published 42B active; Flash's 64 would give 34B).
MIMO_V2_5_PRO = MIMO_V2_5 | {
    "architectures": ["MiMoV2ForCausalLM"],
    "hidden_size": 6144,
    "num_hidden_layers": 70,
    "num_attention_heads": 128,
    "swa_num_attention_heads": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 384,
    "moe_layer_freq": [0] + [1] * 69,
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
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
}
GPT_OSS_120B = {k: v for k, v in GPT_OSS_20B.items() if k != "layer_types"} | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
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
        "intermediate_size": 21504,
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
    "intermediate_size": 14336,
    "sliding_window": 4096,
}
LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
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
# Qwen/Qwen3-30B-A3B config.json: every layer is full attention and a mixture of experts.
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "sliding_window": None,
    "use_sliding_window": False,
}
# deepseek-ai/DeepSeek-V3 config.json: latent attention, 3 dense layers, a shared expert.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
