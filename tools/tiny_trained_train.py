# SPDX-License-Identifier: Apache-2.0
"""Train the tiny MiMo checkpoint: its tokenizer, then the target and the MTP layers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools import mimo_torch
from tools.tiny_mimo import SPECIAL_TOKENS, TinyMiMo, config_json

SIZE = TinyMiMo(
    dtype="bfloat16",
    layers=4,
    full_every=3,
    moe_layers=0,
    window_tokens=128,
    intermediate_size=320,
)
"""Full, SWA, SWA, full; 4 heads of 32; 1 and 2 KV heads; 3 MTP layers; 1.6 million parameters."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the text and the machine's arithmetic.

    The target is trained first; then the MTP layers alone, on the frozen target's hidden states.
    """

    seed: int = 0
    steps: int = 880
    mtp_steps: int = 540
    batch: int = 6
    sequence_tokens: int = 384
    """Longer than the window, so that the window matters in training."""
    learning_rate: float = 4e-3
    mtp_learning_rate: float = 5e-3
    warmup_steps: int = 40
    final_rate: float = 0.05
    """Learning rate at the end of the cosine, as a part of its peak."""
    weight_decay: float = 0.05
    initial_deviation: float = 0.05

    def rate(self, step: int, steps: int) -> float:
        """Part of the peak learning rate in ``step`` of ``steps``: warm-up, then a cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return warm * (self.final_rate + (1 - self.final_rate) * cosine)


def train_tokenizer(texts: Sequence[str], vocab_size: int, path: Path) -> None:
    """Write a byte-level BPE ``tokenizer.json`` whose first ids are the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def token_stream(texts: Sequence[str], tokenizer: Path) -> Tensor:
    """All texts as one tensor of token ids (int64), each text followed by ``<|endoftext|>``."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = SPECIAL_TOKENS.index("<|endoftext|>")
    ids: list[int] = []
    for text in texts:
        ids += encoder.encode(text).ids
        ids.append(end)
    return torch.tensor(ids)


def new_model(size: TinyMiMo, recipe: Recipe) -> mimo_torch.MiMo:
    """An untrained model: matrices normal, norms one, sinks zero."""
    torch.manual_seed(recipe.seed)
    model = mimo_torch.MiMo(config_json(size), size.mtp_layers)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=recipe.initial_deviation)
    return model


def losses(model: mimo_torch.MiMo, windows: Tensor, *, drafts: bool = True) -> list[Tensor]:
    """Cross entropies (nats a token): the target's, then each MTP layer's.

    ``windows`` is (batch, rows + 1 + MTP layers), so that every head has a label for every row.
    Without ``drafts`` the MTP layers are left out.
    """
    layers = len(model.mtp)
    rows = windows.shape[1] - 1 - layers
    hidden, _ = model(windows[:, :rows])

    def loss(output: Tensor, first_label: int) -> Tensor:
        labels = windows[:, first_label : first_label + rows]
        return functional.cross_entropy(model.logits(output).flatten(0, 1), labels.flatten())

    result = [loss(hidden, 1)]
    embeddings = model.embed(windows)
    for i, layer in enumerate(model.mtp if drafts else ()):
        output, _ = layer(embeddings[:, 1 + i : 1 + i + rows], hidden)
        result.append(loss(output, 2 + i))
    return result


def train(
    model: mimo_torch.MiMo,
    tokens: Tensor,
    recipe: Recipe,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train on one thread; return the mean losses of the last 50 steps and the CPU time in s."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(recipe.seed)
    began_s = time.process_time()
    layers = list(model.mtp.parameters())
    own = [parameter for parameter in model.parameters() if all(parameter is not p for p in layers)]
    plan = (recipe.steps, recipe.learning_rate)
    history = [_phase(model, own, tokens, recipe, plan, generator, report, drafts=False)]
    for parameter in own:
        parameter.requires_grad_(False)
    plan = (recipe.mtp_steps, recipe.mtp_learning_rate)
    history.append(_phase(model, layers, tokens, recipe, plan, generator, report, drafts=True))
    for parameter in own:
        parameter.requires_grad_(True)
    last = [*mean(history[0][-50:]), *mean(history[1][-50:])[1:]]
    return {
        "losses": [round(value, 4) for value in last],
        "cpu_s": round(time.process_time() - began_s),
    }


def _phase(
    model: mimo_torch.MiMo,
    parameters: list[Any],
    tokens: Tensor,
    recipe: Recipe,
    plan: tuple[int, float],
    generator: torch.Generator,
    report: Callable[[str], None],
    *,
    drafts: bool,
) -> list[list[float]]:
    """Train ``parameters`` for the MTP layers' losses or else for the target's.

    ``plan``: number of steps and peak learning rate. Returns the losses of every step.
    """
    steps, peak = plan
    span = recipe.sequence_tokens + 1 + len(model.mtp)
    optimizer = torch.optim.AdamW(
        parameters, lr=peak, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    began_s = time.process_time()
    history: list[list[float]] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * recipe.rate(step, steps)
        starts = torch.randint(0, len(tokens) - span + 1, (recipe.batch,), generator=generator)
        windows = torch.stack([tokens[i : i + span] for i in starts.tolist()])
        parts = losses(model, windows, drafts=drafts)
        total = torch.stack(parts[1:]).sum() if drafts else parts[0]
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        history.append([part.item() for part in parts])
        if (step + 1) % 50 == 0:
            text = " ".join(f"{value:.3f}" for value in mean(history[-50:]))
            report(f"step {step + 1}: losses {text}, {time.process_time() - began_s:.0f} CPU s")
    return history


def mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """Column means."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def one_thread() -> None:
    """Keep tokenizer and torch on one thread: what is trained must not depend on the machine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
