# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose MTP layers copy the target, so that wrong draft KV shows in the acceptance.

In the target only one sliding-window layer does anything; every MTP layer is a copy of it that
ignores the target's hidden state. Row p of MTP layer i holds token p+1+i, so the layer sees the
same window of tokens as the target does at p+1+i, at the same distances: once a window of tokens
has passed, its choice is the target's, if and only if all rows of its KV are right.

``weaken`` spoils the output of layer 0 alone. Some of its drafts are rejected then, and the rows of
the layers behind it have to be repaired; what they draft after an accepted token stays perfect.
``blind`` makes every layer draft token 0, which the target never chooses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tiny_mimo import TinyMiMo, make

WINDOW_TOKENS = 16
SIZE = TinyMiMo(
    layers=4,
    full_every=2,
    moe_layers=0,
    window_tokens=WINDOW_TOKENS,
    hidden_size=64,
    intermediate_size=64,
    heads=2,
    full_kv_heads=1,
    swa_kv_heads=1,
)
ACTIVE_LAYER = 1
EPS = 1e-5


def make_copy_draft(
    out: Path, *, weaken: float = 0.0, blind: bool = False, mtp_layers: int = 3
) -> Path:
    """Write the checkpoint to ``out``.

    Args:
        out: directory to write.
        weaken: standard deviation of the noise on layer 0's output norm; 0 makes a perfect copy.
        blind: draft what is never accepted.
        mtp_layers: how many layers the checkpoint holds.
    """
    import dataclasses

    import torch
    from safetensors.torch import load_file, save_file

    make(out, dataclasses.replace(SIZE, mtp_layers=mtp_layers))
    file = out / "model.safetensors"
    tensors: dict[str, Any] = load_file(str(file))
    generator = torch.Generator().manual_seed(1)

    embed = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embed / embed.pow(2).mean(-1, keepdim=True).sqrt()
    for i in range(SIZE.layers):
        if i != ACTIVE_LAYER:
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{i}.{name}.weight"].zero_()
    source, hidden = f"model.layers.{ACTIVE_LAYER}", SIZE.hidden_size
    for i in range(mtp_layers):
        layer = f"model.mtp.layers.{i}"
        for name in list(tensors):
            if name.startswith(f"{source}.self_attn.") or name.startswith(f"{source}.mlp."):
                tensors[name.replace(source, layer)] = tensors[name].clone()
        norm = torch.zeros(hidden) if blind else torch.ones(hidden)
        if i == 0 and weaken:
            norm += weaken * torch.randn(hidden, generator=generator)
        tensors[f"{layer}.input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.pre_mlp_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.final_layernorm.weight"] = norm
        # an embedding has mean square 1: undo what the norm's epsilon takes away
        tensors[f"{layer}.enorm.weight"] = torch.full((hidden,), (1 + EPS) ** 0.5)
        tensors[f"{layer}.hnorm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.eh_proj.weight"] = torch.cat(
            [torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1
        )
    save_file(
        {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
        str(file),
        metadata={"format": "pt"},
    )
    recipe = out / "tiny_mimo.json"  # no longer what the maker made: it must not be reused as that
    recipe.write_text(json.dumps({"maker": "copy_draft", "weaken": weaken}) + "\n")
    return out
