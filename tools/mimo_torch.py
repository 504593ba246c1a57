# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2-Flash in plain torch, in float32: what an engine's numbers are compared with.

    model = mimo_torch.load(Path("tools/tiny_trained"))
    outputs = mimo_torch.greedy(model, prompt, outputs=32)

Hybrid full and sliding-window (SWA) attention with sinks on the SWA layers, rotary embedding on the
first part of each head, scaled values, dense MLPs, and multi-token-prediction (MTP) layers. An MTP
layer i has one row for each position p; the row's inputs are the embedding of token p+1+i and the
target's hidden state at p *after* the final norm, and the row predicts token p+2+i. Layers are not
chained: every layer gets the target's hidden state.

Parameters carry their published names, so ``state_dict`` is the checkpoint. One sequence or a batch
of equal lengths, no paging, no parallelism; mixtures of experts are refused.
:mod:`tools.mimo_torch_drafts` decodes speculatively with this model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

KV = tuple[Tensor, Tensor]
"""Keys (batch, KV heads, rows, head_dim) and values (batch, KV heads, rows, v_head_dim)."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


def rotate(x: Tensor, start: int, theta: float, rotary_dim: int) -> Tensor:
    """Rotary embedding of ``x`` (batch, heads, rows, dim) whose rows sit at ``start`` onwards.

    The first ``rotary_dim`` dimensions turn, in pairs half of them apart; the rest stays.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    positions = torch.arange(start, start + x.shape[-2], dtype=torch.float32)
    angles = positions[:, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, x[..., rotary_dim:]], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention; ``swa`` chooses the window, the sinks and the SWA sizes."""

    def __init__(self, config: dict[str, Any], swa: bool) -> None:
        super().__init__()
        kind = "swa_" if swa else ""
        hidden = config["hidden_size"]
        self.heads: int = config[f"{kind}num_attention_heads"]
        self.kv_heads: int = config[f"{kind}num_key_value_heads"]
        self.head_dim: int = config[f"{kind}head_dim"]
        self.value_dim: int = config[f"{kind}v_head_dim"]
        self.theta: float = config[f"{kind}rope_theta"]
        self.rotary_dim = int(self.head_dim * config["partial_rotary_factor"])
        self.value_scale: float = config["attention_value_scale"]
        self.window_tokens: int | None = config["sliding_window_size"] if swa else None
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.value_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden, bias=False)
        self.attention_sink_bias: Tensor | None = None
        if swa and config["add_swa_attention_sink_bias"]:
            self.attention_sink_bias = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x: Tensor, start: int, past: KV | None) -> tuple[Tensor, KV]:
        """Rows ``start`` onwards of ``x`` (batch, rows, hidden) over ``past`` rows before them.

        Rows of ``past`` at ``start`` and later are replaced. Returns the output, shaped as ``x``,
        and the keys and values of all rows up to the last new one.
        """
        batch, rows, _ = x.shape

        def heads(projection: nn.Linear, count: int) -> Tensor:
            return projection(x).view(batch, rows, count, -1).transpose(1, 2)

        query = rotate(heads(self.q_proj, self.heads), start, self.theta, self.rotary_dim)
        key = rotate(heads(self.k_proj, self.kv_heads), start, self.theta, self.rotary_dim)
        value = heads(self.v_proj, self.kv_heads) * self.value_scale
        if start:
            assert past is not None and past[0].shape[2] >= start, "rows before start are missing"
            key = torch.cat([past[0][:, :, :start], key], dim=2)
            value = torch.cat([past[1][:, :, :start], value], dim=2)
        # Rows that no query can see any more cost nothing.
        first = 0 if self.window_tokens is None else max(0, start - self.window_tokens + 1)
        seen_key, seen_value = key[:, :, first:], value[:, :, first:]

        # One product for all query heads of a KV head: (batch, KV heads, group * rows, keys).
        group = self.heads // self.kv_heads
        grouped = query.reshape(batch, self.kv_heads, group * rows, self.head_dim)
        scores = (grouped @ seen_key.transpose(-1, -2)) * self.head_dim**-0.5
        scores = scores.view(batch, self.heads, rows, -1)
        scores = scores.masked_fill(self.hidden_from(start, rows, first), float("-inf"))
        if self.attention_sink_bias is not None:
            sinks = self.attention_sink_bias.view(1, -1, 1, 1).expand(batch, -1, rows, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = weights.reshape(batch, self.kv_heads, group * rows, -1)
        mixed = (weights @ seen_value).view(batch, self.heads, rows, self.value_dim)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1)), (key, value)

    def hidden_from(self, start: int, rows: int, first: int) -> Tensor:
        """(rows, keys) bool: keys from position ``first`` on that the row must not see."""
        query = torch.arange(start, start + rows)[:, None]
        key = torch.arange(first, start + rows)[None, :]
        hidden = key > query
        if self.window_tokens is not None:
            hidden |= query - key >= self.window_tokens
        return hidden


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer of the target."""

    def __init__(self, config: dict[str, Any], swa: bool) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["layernorm_epsilon"]
        self.self_attn = Attention(config, swa)
        self.mlp = MLP(hidden, config["intermediate_size"])
        self.input_layernorm = RMSNorm(hidden, epsilon)
        self.post_attention_layernorm = RMSNorm(hidden, epsilon)

    def forward(self, x: Tensor, start: int, past: KV | None) -> tuple[Tensor, KV]:
        attended, kv = self.self_attn(self.input_layernorm(x), start, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class MTPLayer(nn.Module):
    """One multi-token-prediction layer: SWA attention and a dense MLP; its output is normed."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["layernorm_epsilon"]
        self.enorm = RMSNorm(hidden, epsilon)
        self.hnorm = RMSNorm(hidden, epsilon)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn = Attention(config, swa=True)
        self.mlp = MLP(hidden, config["intermediate_size"])
        self.input_layernorm = RMSNorm(hidden, epsilon)
        self.pre_mlp_layernorm = RMSNorm(hidden, epsilon)
        self.final_layernorm = RMSNorm(hidden, epsilon)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, start: int = 0, past: KV | None = None
    ) -> tuple[Tensor, KV]:
        """Rows ``start`` onwards; ``embeddings`` and ``hidden`` are (batch, rows, hidden_size)."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        attended, kv = self.self_attn(self.input_layernorm(x), start, past)
        x = x + attended
        return self.final_layernorm(x + self.mlp(self.pre_mlp_layernorm(x))), kv


class MiMo(nn.Module):
    """The target and its MTP layers; embeddings and output head are shared by all."""

    def __init__(self, config: dict[str, Any], mtp_layers: int) -> None:
        super().__init__()
        if any(config.get("moe_layer_freq", [])):
            raise ValueError("mimo_torch: the checkpoint has MoE layers; only dense MLPs are built")
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.model.layers = nn.ModuleList(
            DecoderLayer(config, bool(swa)) for swa in config["hybrid_layer_pattern"]
        )
        self.model.norm = RMSNorm(hidden, config["layernorm_epsilon"])
        self.model.mtp = nn.Module()
        self.model.mtp.layers = nn.ModuleList(MTPLayer(config) for _ in range(mtp_layers))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    @property
    def mtp(self) -> nn.ModuleList:
        """The MTP layers, layer i at index i."""
        return self.model.mtp.layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, rows) to embeddings (batch, rows, hidden_size)."""
        return self.model.embed_tokens(tokens)

    def forward(
        self, tokens: Tensor, start: int = 0, past: Sequence[KV] | None = None
    ) -> tuple[Tensor, list[KV]]:
        """Final-normed hidden states (batch, rows, hidden_size) of ``tokens`` (batch, rows).

        ``tokens`` sit at positions ``start`` onwards; ``past`` holds each layer's earlier rows.
        """
        x = self.embed(tokens)
        kept: list[KV] = []
        for i, layer in enumerate(self.model.layers):
            x, kv = layer(x, start, past[i] if past else None)
            kept.append(kv)
        return self.model.norm(x), kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's normed hidden states or of an MTP layer's output."""
        return self.lm_head(hidden)


def mtp_layers_in(names: Sequence[str]) -> int:
    """Number of MTP layers among a checkpoint's tensor names."""
    prefix = "model.mtp.layers."
    return len({name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)})


def load(path: Path) -> MiMo:
    """The model of the checkpoint directory ``path``, in float32, whatever the stored dtype."""
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    tensors = load_file(str(path / "model.safetensors"))
    model = MiMo(config, mtp_layers_in(list(tensors)))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval().requires_grad_(False)


def save_weights(model: MiMo, path: Path, dtype: torch.dtype) -> None:
    """Write all parameters to the safetensors file ``path`` under their published names."""
    from safetensors.torch import save_file

    state = sorted(model.state_dict().items())
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state}
    save_file(tensors, str(path), metadata={"format": "pt"})


@torch.inference_mode()
def hidden_states(model: MiMo, tokens: Sequence[int]) -> Tensor:
    """The target's final-normed hidden states of one sequence, (tokens, hidden_size)."""
    return model(torch.tensor([list(tokens)]))[0][0]


@torch.inference_mode()
def target_logits(model: MiMo, tokens: Sequence[int]) -> Tensor:
    """The target's logits of one sequence, (tokens, vocab); row p predicts token p+1."""
    return model.logits(hidden_states(model, tokens))


@torch.inference_mode()
def mtp_logits(model: MiMo, tokens: Sequence[int], hidden: Tensor) -> list[Tensor]:
    """Each MTP layer's logits; layer i's are (len(tokens) - 1 - i, vocab), row p predicts p+2+i.

    ``hidden`` (tokens, hidden_size) are the target's, as :func:`hidden_states` returns them.
    """
    embeddings = model.embed(torch.tensor([list(tokens)]))
    return [
        model.logits(layer(embeddings[:, 1 + i :], hidden[None, : len(tokens) - 1 - i])[0])[0]
        for i, layer in enumerate(model.mtp)
    ]


@torch.inference_mode()
def greedy(model: MiMo, prompt: Sequence[int], outputs: int) -> list[int]:
    """The ``outputs`` most likely next tokens after ``prompt``, one after the other."""
    hidden, past = model(torch.tensor([list(prompt)]))
    tokens: list[int] = []
    while True:
        tokens.append(int(model.logits(hidden[0, -1]).argmax()))
        if len(tokens) >= outputs:
            return tokens
        start = len(prompt) + len(tokens) - 1
        hidden, past = model(torch.tensor([tokens[-1:]]), start, past)
