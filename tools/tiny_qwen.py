# SPDX-License-Identifier: Apache-2.0
"""Make a small Qwen-VL checkpoint, in seconds and always the same for one seed.

    python -m tools.tiny_qwen OUT --family qwen3_vl --dtype float32

Families are those whose images the feature ``vision`` takes: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and
its mixture of experts. The layout (patch sizes, windows, features of several depths, limits and
names in ``preprocessor_config.json``) is that of the published checkpoints of the family, the sizes
are not. Structure and names of the weights come from transformers, the tokenizer from
:mod:`tools.tiny_omni`. Stock vLLM serves images and videos with it, on the CPU as well.

Weights are random and scaled so that what an image shows decides the output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import tiny_mimo, tiny_omni
from tools.tiny_mimo import TinyMiMo, write_json


@dataclass(frozen=True)
class Family:
    """What the published checkpoints of a family have in common.

    Attributes:
        classes: prefix of its classes in transformers.
        patch_size: side of a patch.
        image_processor: its name in ``preprocessor_config.json``.
        mean_std: of values 0..1, of every channel; None: CLIP's.
        vision: what its vision tower has besides the sizes that all have.
    """

    classes: str
    patch_size: int
    image_processor: str
    mean_std: float | None
    vision: dict[str, Any]


_DEEPSTACK = {
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
FAMILIES = {
    "qwen2_vl": Family(
        "Qwen2VL", 14, "Qwen2VLImageProcessor", None, {"embed_dim": 64, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        14,
        "Qwen2VLImageProcessor",
        None,
        {
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    ),
    "qwen3_vl": Family("Qwen3VL", 16, "Qwen2VLImageProcessorFast", 0.5, _DEEPSTACK),
    "qwen3_vl_moe": Family("Qwen3VLMoe", 16, "Qwen2VLImageProcessorFast", 0.5, _DEEPSTACK),
}
HIDDEN_SIZE, HEADS, HEAD_DIM = 128, 4, 32


@dataclass(frozen=True, kw_only=True)
class TinyQwen:
    """Choices for the checkpoint."""

    family: str = "qwen2_5_vl"
    seed: int = 0
    dtype: str = "float32"
    layers: int = 4
    vision_depth: int = 3
    min_pixels: int = 8192
    max_pixels: int = 512 * 512
    video_max_pixels: int = 8 * 128 * 128
    """Of all frames of a Qwen3-VL video; the other families take the limits of images."""

    def __post_init__(self) -> None:
        """Refuse choices that no engine could load."""
        checks = (
            (self.family in FAMILIES, f"family is {self.family!r}; allowed: {', '.join(FAMILIES)}"),
            (self.dtype in tiny_mimo.DTYPES, f"dtype is {self.dtype!r}"),
            (self.layers >= 2, f"layers is {self.layers}; at least 2 are needed"),
            (self.vision_depth >= 2, f"vision_depth is {self.vision_depth}; at least 2 are needed"),
            (
                0 < self.min_pixels <= self.max_pixels,
                f"min_pixels is {self.min_pixels}; allowed: 1 to max_pixels={self.max_pixels}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(f"tiny qwen: {message}")

    @property
    def text(self) -> TinyMiMo:
        """What the tokenizer is made of."""
        return TinyMiMo(seed=self.seed, dtype=self.dtype)

    @property
    def has_scopes(self) -> bool:
        """Whether the family is of the third generation: limits as ``size``, others for videos."""
        return self.family.startswith("qwen3")


def hf_config(size: TinyQwen) -> Any:
    """The configuration as transformers has it."""
    import transformers

    family = FAMILIES[size.family]
    ids = tiny_omni.TinyOmni(text=size.text).token_ids
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    text: dict[str, Any] = {
        "vocab_size": size.text.vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tiny_mimo.SPECIAL_TOKENS.index("<|im_end|>"),
    }
    if size.has_scopes:
        rope["mrope_interleaved"] = True
        text["head_dim"] = HEAD_DIM
    if size.family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return getattr(transformers, f"{family.classes}Config")(
        architectures=[f"{family.classes}ForConditionalGeneration"],
        text_config=text,
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": HIDDEN_SIZE if size.family == "qwen2_vl" else 64,
            "num_heads": HEADS,
            "patch_size": family.patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **family.vision,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype=size.dtype,
    )


def preprocessor_json(size: TinyQwen) -> dict[str, Any]:
    """The checkpoint's ``preprocessor_config.json``."""
    family = FAMILIES[size.family]
    mean, std = tiny_omni.CLIP_MEAN, tiny_omni.CLIP_STD
    if family.mean_std is not None:
        mean = std = (family.mean_std,) * 3
    limits: dict[str, Any] = {"min_pixels": size.min_pixels, "max_pixels": size.max_pixels}
    if size.has_scopes:
        limits = {"size": {"shortest_edge": size.min_pixels, "longest_edge": size.max_pixels}}
    return {
        "image_processor_type": family.image_processor,
        "processor_class": f"{family.classes.removesuffix('Moe')}Processor",
        "patch_size": family.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(mean),
        "image_std": list(std),
        **limits,
    }


def video_preprocessor_json(size: TinyQwen) -> dict[str, Any]:
    """``video_preprocessor_config.json``, which checkpoints of the third generation have."""
    limits = {"shortest_edge": size.min_pixels, "longest_edge": size.video_max_pixels}
    common = preprocessor_json(size)
    del common["image_processor_type"]
    return {**common, "video_processor_type": "Qwen3VLVideoProcessor", "size": limits}


def make_weights(size: TinyQwen, config: Any, vocab: dict[str, int]) -> dict[str, Any]:
    """All tensors by the names of transformers, in ``size.dtype``."""
    import torch
    import transformers

    dtype = getattr(torch, size.dtype)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    generator = torch.Generator().manual_seed(size.seed)
    tensors = {}
    for name, found in sorted(model.state_dict().items()):
        values = torch.randn(found.shape, generator=generator)
        if name.endswith(".bias"):
            values *= 0.1
        elif found.ndim == 1:  # of a norm
            values = torch.ones(found.shape)
        elif "embed_tokens" not in name:
            values *= _gain(name) / math.sqrt(math.prod(found.shape[1:]))
        # Published checkpoints have the matrices of experts the other way round.
        tensors[name] = values.transpose(1, 2) if ".experts." in name else values
    head = tensors["lm_head.weight"]
    head[[i for piece, i in vocab.items() if not tiny_mimo.speakable(piece)]] = 0.0
    head[len(vocab) :] = 0.0
    return {name: values.to(dtype).contiguous() for name, values in tensors.items()}


def _gain(name: str) -> float:
    """Standard deviation of what a matrix makes of unit variance."""
    if "patch_embed" in name:
        return 4.0  # what an image shows must outweigh its mean colour
    return 2.0 if "language_model" in name and "self_attn" in name or "lm_head" in name else 1.0


def make(out: Path, size: TinyQwen | None = None) -> Path:
    """Write the checkpoint of ``size`` to the directory ``out`` and return it.

    A directory that already holds exactly this checkpoint is left as it is.
    """
    size = TinyQwen() if size is None else size
    recipe = {"maker": 1, **dataclasses.asdict(size)}
    done = out / "tiny_qwen.json"
    if done.is_file() and json.loads(done.read_text()) == recipe:
        return out
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    tiny_mimo.write_configs(size.text, out)
    vocab = tiny_omni.write_tokenizer(tiny_omni.TinyOmni(text=size.text), out)
    config = hf_config(size)
    write_json(out / "config.json", json.loads(config.to_json_string()))
    write_json(out / "preprocessor_config.json", preprocessor_json(size))
    if size.has_scopes:
        write_json(out / "video_preprocessor_config.json", video_preprocessor_json(size))
    tensors = make_weights(size, config, vocab)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    write_json(done, recipe)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one option for each field of :class:`TinyQwen`."""
    parser = tiny_mimo.maker("Make a tiny Qwen-VL checkpoint.", TinyQwen)
    words = "{0.family}, {0.layers} layers, {0.vision_depth} for vision".format
    return tiny_mimo.run_maker(parser, argv, TinyQwen, make, words)


if __name__ == "__main__":
    sys.exit(main())
