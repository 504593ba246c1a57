# SPDX-License-Identifier: Apache-2.0
"""Make a small MiMo-V2-Flash checkpoint, in seconds and always the same for one seed.

    python -m tools.tiny_mimo OUT --dtype float32 --layers 8 --window 64

The directory holds what a published checkpoint holds: ``config.json`` with the architecture
``MiMoV2FlashForCausalLM``, weights under their published names in safetensors, a fast tokenizer
with a chat template in the ChatML form that MiMo uses, and ``generation_config.json``. Stock vLLM
loads it with the load format ``auto``.

Geometry (every size is a field of :class:`TinyMiMo`): full-attention layers at a fixed distance,
sliding-window (SWA) layers with sinks between them, unequal KV heads (SWA twice the full ones by
default, which doubles the full block in vLLM), a dense first MLP and MoE after it, and three
multi-token-prediction layers ``model.mtp.layers.{0,1,2}`` that stock ignores while no speculation
is on.

``v_head_dim`` differs from ``head_dim`` in the published model. vLLM then wants one of its
``*_DIFFKV`` attention backends, and those exist for GPUs only, so the default keeps both equal;
give ``--v-head-dim`` on a GPU.

Weights are random, but scaled so that attention, not the last token alone, decides the next token:
changing one early token changes the output, and outputs seldom fall into a loop. Rows of the output
head that belong to bytes outside printable ASCII and to structural tokens are zero, so that greedy
text is readable and ends only where a request says so (``<|im_end|>`` stays reachable).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Structural tokens, the first ids of the vocabulary, in this order."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in (message.tool_calls or []) %}"
    "{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class TinyMiMo:
    """Sizes of the checkpoint. Defaults run at interactive speed on one CPU core."""

    seed: int = 0
    dtype: str = "float32"
    layers: int = 8
    full_every: int = 4
    """Layer i is full attention when i is a multiple of this; the others are SWA."""
    moe_layers: int | None = None
    """How many of the last layers are MoE, never the first layer. None: two, if there are."""
    mtp_layers: int = 3
    window_tokens: int = 64
    hidden_size: int = 128
    intermediate_size: int = 256
    heads: int = 4
    full_kv_heads: int = 1
    swa_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int | None = None
    """None: equal to head_dim (the only choice that CPU attention takes)."""
    experts: int = 8
    experts_per_token: int = 2
    moe_intermediate_size: int = 64
    vocab_size: int = 1024
    max_position_embeddings: int = 131072
    attention_gain: float = 2.0
    """Standard deviation of attention logits and values, relative to a unit-variance input."""
    own_config: bool = False
    """Ship a configuration class with the checkpoint, as the published one does. SGLang needs it:
    the class of transformers nests the rope settings where SGLang's model looks for plain ones."""

    def __post_init__(self) -> None:
        """Refuse sizes that no engine could load, each with one clear line."""
        floor = len(SPECIAL_TOKENS) + 256
        checks = (
            (self.dtype in DTYPES, f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}"),
            (self.layers >= 2, f"layers is {self.layers}; at least 2 are needed"),
            (self.full_every >= 2, f"full_every is {self.full_every}; at least 2 is needed"),
            (
                0 <= self.moe_count < self.layers,
                f"moe_layers is {self.moe_layers}; allowed: 0 to {self.layers - 1}",
            ),
            (self.window_tokens >= 1, f"window_tokens is {self.window_tokens}; at least 1"),
            (
                self.heads % self.full_kv_heads == 0,
                f"heads is {self.heads}; allowed: multiples of full_kv_heads={self.full_kv_heads}",
            ),
            (
                self.heads % self.swa_kv_heads == 0,
                f"heads is {self.heads}; allowed: multiples of swa_kv_heads={self.swa_kv_heads}",
            ),
            (
                1 <= self.experts_per_token <= self.experts,
                f"experts_per_token is {self.experts_per_token}; allowed: 1 to {self.experts}",
            ),
            (self.vocab_size >= floor, f"vocab_size is {self.vocab_size}; at least {floor}"),
        )
        for good, message in checks:
            if not good:
                raise ValueError(f"tiny MiMo: {message}")

    @property
    def hybrid_pattern(self) -> list[int]:
        """One entry a layer: 0 full attention, 1 SWA (the published config's notation)."""
        return [0 if i % self.full_every == 0 else 1 for i in range(self.layers)]

    @property
    def moe_count(self) -> int:
        """Number of MoE layers."""
        return min(2, self.layers - 1) if self.moe_layers is None else self.moe_layers

    @property
    def moe_pattern(self) -> list[int]:
        """One entry a layer: 1 where the MLP is a mixture of experts."""
        return [1 if i >= self.layers - self.moe_count else 0 for i in range(self.layers)]

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


CONFIG_MODULE = "configuration_mimo_v2_flash"
CONFIG_SOURCE = '''"""Configuration of the checkpoint: every value under its own name."""

from transformers import PretrainedConfig


class MiMoV2FlashConfig(PretrainedConfig):
    model_type = "mimo_v2_flash"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, rope_theta=5000000.0, rope_scaling=None, **values):
        super().__init__(**values)
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
'''
"""What ``own_config`` writes beside the weights."""


def config_json(size: TinyMiMo) -> dict[str, Any]:
    """The checkpoint's ``config.json`` in the notation of the published MiMo-V2-Flash."""
    own = {"auto_map": {"AutoConfig": f"{CONFIG_MODULE}.MiMoV2FlashConfig"}}
    return {
        **(own if size.own_config else {}),
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.full_kv_heads,
        "head_dim": size.head_dim,
        "v_head_dim": size.value_dim,
        "swa_num_attention_heads": size.heads,
        "swa_num_key_value_heads": size.swa_kv_heads,
        "swa_head_dim": size.head_dim,
        "swa_v_head_dim": size.value_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_position_embeddings,
        "initializer_range": 0.02,
        "layernorm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": size.hybrid_pattern,
        "sliding_window": size.window_tokens,
        "sliding_window_size": size.window_tokens,
        "n_routed_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "moe_intermediate_size": size.moe_intermediate_size,
        "moe_layer_freq": size.moe_pattern,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "torch_dtype": size.dtype,
        "bos_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    }


def vocabulary(size: TinyMiMo) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary and merges: special tokens, bytes, syllables, two-syllable words.

    Every string can be encoded (all 256 bytes are tokens); plain text costs about a token for
    every two letters.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    merges: list[tuple[str, str]] = []
    space = "Ġ"
    candidates = [(s[0], s[1]) for s in syllables] + [(space, s) for s in syllables]
    count = len(syllables)
    candidates += [
        (space + syllables[i * 7 % count], syllables[(i * 31 + i // count) % count])
        for i in range(count * count)
    ]
    known = set(pieces)
    for left, right in candidates:
        if len(pieces) >= size.vocab_size:
            break
        if left in known and right in known and left + right not in known:
            merges.append((left, right))
            pieces.append(left + right)
            known.add(left + right)
    return {piece: i for i, piece in enumerate(pieces)}, merges


def write_tokenizer(size: TinyMiMo, out: Path) -> dict[str, int]:
    """Write ``tokenizer.json``; return the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = vocabulary(size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    return vocab


def write_configs(size: TinyMiMo, out: Path) -> None:
    """Write the JSON files beside weights and vocabulary: model, tokenizer and generation."""
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "clean_up_tokenization_spaces": False,
            "model_max_length": size.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(out / "config.json", config_json(size))
    if size.own_config:
        (out / f"{CONFIG_MODULE}.py").write_text(CONFIG_SOURCE)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
            "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
            "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
            "do_sample": False,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_weights(size: TinyMiMo, vocab: dict[str, int]) -> dict[str, Any]:
    """All tensors by their published names, in ``size.dtype`` (router tensors in float32)."""
    import torch

    generator = torch.Generator().manual_seed(size.seed)
    dtype = getattr(torch, size.dtype)
    hidden, gain = size.hidden_size, size.attention_gain

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        """Random (rows, columns) that maps unit variance to variance gain squared."""
        values = torch.randn(rows, columns, generator=generator)
        return (values * (gain / math.sqrt(columns))).to(dtype)

    def ones() -> Any:
        return torch.ones(hidden, dtype=dtype)

    tensors: dict[str, Any] = {}

    def attention(prefix: str, kv_heads: int, sinks: bool) -> None:
        tensors[f"{prefix}.q_proj.weight"] = matrix(size.heads * size.head_dim, hidden, gain)
        tensors[f"{prefix}.k_proj.weight"] = matrix(kv_heads * size.head_dim, hidden, gain)
        tensors[f"{prefix}.v_proj.weight"] = matrix(kv_heads * size.value_dim, hidden, gain)
        tensors[f"{prefix}.o_proj.weight"] = matrix(hidden, size.heads * size.value_dim, 2 * gain)
        if sinks:
            values = torch.randn(size.heads, generator=generator)
            tensors[f"{prefix}.attention_sink_bias"] = values.to(dtype)

    def mlp(prefix: str, width: int) -> None:
        tensors[f"{prefix}.gate_proj.weight"] = matrix(width, hidden)
        tensors[f"{prefix}.up_proj.weight"] = matrix(width, hidden)
        tensors[f"{prefix}.down_proj.weight"] = matrix(hidden, width)

    tensors["model.embed_tokens.weight"] = torch.randn(
        size.vocab_size, hidden, generator=generator
    ).to(dtype)
    for i, swa in enumerate(size.hybrid_pattern):
        layer = f"model.layers.{i}"
        attention(f"{layer}.self_attn", size.swa_kv_heads if swa else size.full_kv_heads, bool(swa))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = ones()
        if size.moe_pattern[i]:
            tensors[f"{layer}.mlp.gate.weight"] = matrix(size.experts, hidden).float()
            tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(size.experts)
            for expert in range(size.experts):
                mlp(f"{layer}.mlp.experts.{expert}", size.moe_intermediate_size)
        else:
            mlp(f"{layer}.mlp", size.intermediate_size)
    for i in range(size.mtp_layers):
        layer = f"model.mtp.layers.{i}"
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = ones()
        tensors[f"{layer}.eh_proj.weight"] = matrix(hidden, 2 * hidden)
        attention(f"{layer}.self_attn", size.swa_kv_heads, True)
        mlp(f"{layer}.mlp", size.intermediate_size)
    tensors["model.norm.weight"] = ones()
    head = matrix(size.vocab_size, hidden, 2.0)
    head[[i for piece, i in vocab.items() if not speakable(piece)]] = 0.0
    head[len(vocab) :] = 0.0
    tensors["lm_head.weight"] = head
    return tensors


def speakable(piece: str) -> bool:
    """Whether greedy decoding may choose ``piece``: printable ASCII or the end of a message."""
    if piece in SPECIAL_TOKENS:
        return piece == "<|im_end|>"
    text = piece.replace("Ġ", " ")
    return all(" " <= character <= "~" for character in text)


def make(out: Path, size: TinyMiMo | None = None) -> Path:
    """Write the checkpoint of ``size`` to the directory ``out`` and return it.

    A directory that already holds exactly this checkpoint is left as it is.
    """
    size = TinyMiMo() if size is None else size
    recipe = {"maker": 1, **dataclasses.asdict(size)}
    done = out / "tiny_mimo.json"
    if done.is_file() and json.loads(done.read_text()) == recipe:
        return out
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    vocab = write_tokenizer(size, out)
    tensors = make_weights(size, vocab)
    save_file(
        {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
        str(out / "model.safetensors"),
        metadata={"format": "pt"},
    )
    write_configs(size, out)
    write_json(done, recipe)
    return out


def maker(description: str, sizes: Any = None) -> argparse.ArgumentParser:
    """A maker's command line: where to write, and an option for each field of ``sizes``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help="directory to write")
    for field in dataclasses.fields(sizes) if sizes else ():
        option = "--" + field.name.replace("_", "-")
        if str(field.type) == "bool":
            parser.add_argument(option, action="store_true")
            continue
        kind = {"str": str, "float": float}.get(str(field.type), int)
        choices = DTYPES if field.name == "dtype" else None
        parser.add_argument(option, type=kind, default=field.default, choices=choices)
    return parser


def run_maker(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    sizes: Callable[..., Any],
    make: Callable[[Path, Any], Path],
    said: Callable[[Any], str],
) -> int:
    """Make what the command line asks for; ``said`` describes it in a few words."""
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    try:
        size = sizes(**options)
    except ValueError as error:
        parser.error(str(error))
    make(out, size)
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {said(size)}, {total / 1e6:.1f} MB")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one option for each field of :class:`TinyMiMo`."""
    parser = maker("Make a tiny MiMo-V2-Flash checkpoint.", TinyMiMo)
    words = "{0.layers} layers, window {0.window_tokens}".format
    return run_maker(parser, argv, TinyMiMo, make, words)


if __name__ == "__main__":
    sys.exit(main())
