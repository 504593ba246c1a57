# SPDX-License-Identifier: Apache-2.0
"""Make a small multimodal MiMo-V2 checkpoint, in seconds and always the same for one seed.

    python -m tools.tiny_omni OUT --dtype float32 --image-max-pixels 262144

The language model is that of :mod:`tools.tiny_mimo`. Before it stands a vision tower with the
published layout (patches over two frames, merged two by two), under the architecture
``MiMoV2OmniForCausalLM``; a tokenizer with the tokens for images, videos and sounds, a chat
template that takes them, and a ``preprocessor_config.json``. There is no audio encoder. Stock vLLM
serves images and videos with it.

The blocks of the tower are all full attention: the sliding-window blocks of the published model
need a GPU kernel. Mean and standard deviation in ``preprocessor_config.json`` are CLIP's, which
differ from those that vLLM has built in; with ``--image-mean`` others can be written.

Weights are random and scaled so that what an image shows decides the output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import tiny_mimo
from tools.tiny_mimo import TinyMiMo, write_json

MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|video_start|>",
    "<|video_end|>",
    "<|audio_pad|>",
    "<|mimo_audio_start|>",
    "<|mimo_audio_end|>",
)
"""Tokens around and for media; the last ids of the vocabulary, in this order."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class TinyOmni:
    """Sizes of the checkpoint; ``text`` holds those of the language model."""

    text: TinyMiMo = field(default_factory=lambda: TinyMiMo(layers=4, full_every=2, mtp_layers=0))
    vision_depth: int = 2
    vision_hidden_size: int = 64
    vision_heads: int = 4
    vision_kv_heads: int = 2
    vision_head_dim: int = 16
    vision_intermediate_size: int = 128
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_min_pixels: int = 8192
    image_max_pixels: int = 512 * 512
    video_min_pixels: int = 8192
    video_max_pixels: int = 256 * 256
    video_total_max_pixels: int = 4 * 256 * 256
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self) -> None:
        """Refuse sizes that no engine could load."""
        if self.vision_heads % self.vision_kv_heads:
            raise ValueError(
                f"tiny omni: vision_heads is {self.vision_heads}; allowed: multiples of "
                f"vision_kv_heads={self.vision_kv_heads}"
            )
        for kind in ("image", "video"):
            least = getattr(self, f"{kind}_min_pixels")
            most = getattr(self, f"{kind}_max_pixels")
            if not 0 < least <= most:
                raise ValueError(
                    f"tiny omni: {kind}_min_pixels is {least}; allowed: 1 to "
                    f"{kind}_max_pixels={most}"
                )

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids of ``MEDIA_TOKENS``."""
        first = self.text.vocab_size - len(MEDIA_TOKENS)
        return {token: first + i for i, token in enumerate(MEDIA_TOKENS)}


def config_json(size: TinyOmni) -> dict[str, Any]:
    """The checkpoint's ``config.json``."""
    ids = size.token_ids
    return {
        **tiny_mimo.config_json(size.text),
        "architectures": ["MiMoV2OmniForCausalLM"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden_size,
            "hidden_act": "silu",
            "intermediate_size": size.vision_intermediate_size,
            "num_heads": size.vision_heads,
            "num_key_value_heads": size.vision_kv_heads,
            "num_query_groups": size.vision_kv_heads,
            "qk_channels": size.vision_head_dim,
            "kv_channels": size.vision_head_dim,
            "in_channels": 3,
            "patch_size": size.patch_size,
            "spatial_merge_size": size.merge_size,
            "temporal_patch_size": size.temporal_patch_size,
            "tokens_per_second": 2,
            "out_hidden_size": size.text.hidden_size,
            "fullatt_block_indexes": list(range(size.vision_depth)),
            "vit_window_attn_types": [-1] * size.vision_depth,
            "use_sink": False,
            "visual_token_window_size": 64,
            "window_size": 128,
        },
        "processor_config": {
            "image_min_pixels": size.image_min_pixels,
            "image_max_pixels": size.image_max_pixels,
            "video_min_pixels": size.video_min_pixels,
            "video_max_pixels": size.video_max_pixels,
            "video_total_max_pixels": size.video_total_max_pixels,
            "fps": 1.0,
            "max_frames": 3600,
            "patch_size": size.patch_size,
            "merge_size": size.merge_size,
            "temporal_patch_size": size.temporal_patch_size,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "audio_token_id": ids["<|audio_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "video_start_token_id": ids["<|video_start|>"],
            "video_end_token_id": ids["<|video_end|>"],
            "audio_start_token_id": ids["<|mimo_audio_start|>"],
            "audio_end_token_id": ids["<|mimo_audio_end|>"],
            "rope_type": "rope",
            "use_video_timestamps": True,
            "video_audio_interleave_length": 0,
        },
    }


def preprocessor_json(size: TinyOmni) -> dict[str, Any]:
    """The checkpoint's ``preprocessor_config.json``."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": size.image_min_pixels,
        "max_pixels": size.image_max_pixels,
        "patch_size": size.patch_size,
        "merge_size": size.merge_size,
        "temporal_patch_size": size.temporal_patch_size,
        "image_mean": list(size.image_mean),
        "image_std": list(size.image_std),
    }


def write_tokenizer(size: TinyOmni, out: Path) -> dict[str, int]:
    """Write ``tokenizer.json`` and its configuration; return the vocabulary of plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = size.token_ids
    plain = dataclasses.replace(size.text, vocab_size=min(ids.values()))
    vocab, merges = tiny_mimo.vocabulary(plain)
    if len(vocab) != plain.vocab_size:
        raise ValueError(
            f"tiny omni: vocab_size is {size.text.vocab_size}; at most "
            f"{len(vocab) + len(MEDIA_TOKENS)}"
        )
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **ids}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*tiny_mimo.SPECIAL_TOKENS, *MEDIA_TOKENS)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = out / "tokenizer_config.json"
    written = json.loads(settings.read_text())
    written.update(additional_special_tokens=list(special), chat_template=CHAT_TEMPLATE)
    write_json(settings, written)
    return vocab


def vision_weights(size: TinyOmni) -> dict[str, Any]:
    """The tensors of the vision tower by their published names, in the dtype of the text model."""
    import torch

    generator = torch.Generator().manual_seed(size.text.seed + 1)
    dtype = getattr(torch, size.text.dtype)
    hidden = size.vision_hidden_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        values = torch.randn(rows, columns, generator=generator)
        return (values * (gain / math.sqrt(columns))).to(dtype)

    def vector(length: int) -> Any:
        return (torch.randn(length, generator=generator) * 0.1).to(dtype)

    kernel = (3, size.temporal_patch_size, size.patch_size, size.patch_size)
    # What an image shows must outweigh its mean colour, so pixels go in with some gain.
    embed = matrix(hidden, math.prod(kernel), 4.0).view(hidden, *kernel)
    tensors = {"visual.patch_embed.proj.weight": embed}
    queries = size.vision_heads * size.vision_head_dim
    values = size.vision_kv_heads * size.vision_head_dim
    for i in range(size.vision_depth):
        block = f"visual.blocks.{i}"
        tensors[f"{block}.norm1.weight"] = torch.ones(hidden, dtype=dtype)
        tensors[f"{block}.norm2.weight"] = torch.ones(hidden, dtype=dtype)
        tensors[f"{block}.attn.qkv.weight"] = matrix(queries + 2 * values, hidden)
        tensors[f"{block}.attn.qkv.bias"] = vector(queries + 2 * values)
        tensors[f"{block}.attn.proj.weight"] = matrix(hidden, queries)
        tensors[f"{block}.attn.proj.bias"] = vector(hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{block}.mlp.{name}.weight"] = matrix(size.vision_intermediate_size, hidden)
            tensors[f"{block}.mlp.{name}.bias"] = vector(size.vision_intermediate_size)
        tensors[f"{block}.mlp.down_proj.weight"] = matrix(hidden, size.vision_intermediate_size)
        tensors[f"{block}.mlp.down_proj.bias"] = vector(hidden)
    merged = hidden * size.merge_size**2
    tensors["visual.merger.ln_q.weight"] = torch.ones(hidden, dtype=dtype)
    tensors["visual.merger.mlp.0.weight"] = matrix(merged, merged)
    tensors["visual.merger.mlp.2.weight"] = matrix(size.text.hidden_size, merged, 2.0)
    return tensors


def make(out: Path, size: TinyOmni | None = None) -> Path:
    """Write the checkpoint of ``size`` to the directory ``out`` and return it.

    A directory that already holds exactly this checkpoint is left as it is.
    """
    size = TinyOmni() if size is None else size
    recipe = json.loads(json.dumps({"maker": 1, **dataclasses.asdict(size)}))
    done = out / "tiny_omni.json"
    if done.is_file() and json.loads(done.read_text()) == recipe:
        return out
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    tiny_mimo.write_configs(size.text, out)
    vocab = write_tokenizer(size, out)
    write_json(out / "config.json", config_json(size))
    write_json(out / "preprocessor_config.json", preprocessor_json(size))
    tensors = {**tiny_mimo.make_weights(size.text, vocab), **vision_weights(size)}
    save_file(
        {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
        str(out / "model.safetensors"),
        metadata={"format": "pt"},
    )
    write_json(done, recipe)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: seed and dtype of the text model, and the pixel settings."""
    parser = tiny_mimo.maker("Make a tiny multimodal MiMo-V2 checkpoint.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=tiny_mimo.DTYPES, default="float32")
    for name in ("image_max_pixels", "video_max_pixels", "video_total_max_pixels"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(TinyOmni, name))
    for name in ("image_mean", "image_std"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=float, nargs=3, default=getattr(TinyOmni, name))

    def sizes(*, seed: int, dtype: str, **options: Any) -> TinyOmni:
        for name in ("image_mean", "image_std"):
            options[name] = tuple(options[name])
        text = dataclasses.replace(TinyOmni().text, seed=seed, dtype=dtype)
        return TinyOmni(text=text, **options)

    words = "{0.text.layers} layers, {0.vision_depth} for vision".format
    return tiny_mimo.run_maker(parser, argv, sizes, make, words)


if __name__ == "__main__":
    sys.exit(main())
