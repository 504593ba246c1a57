# SPDX-License-Identifier: Apache-2.0
"""What each property of the MTP feature is worth: the feature with one of them taken away.

Each change holds for the process that makes it, and must be made before the engine starts. None is
of any use but to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: a slot that nothing is written to
NO_SLOT = -1


def chain() -> None:
    """Layers after the first get the previous layer's output, not the target's hidden state."""
    from mimo_plugin.engines.vllm.mtp import model

    stock = model._AllLayers.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, _ = stock(self, *args, **kwargs)
        return out, out

    model._AllLayers.forward = forward  # type: ignore[method-assign]


def stock_window() -> None:
    """vLLM's own multi-module speculator, with the plugin's draft model."""
    from mimo_plugin.engines.vllm.mtp import configure

    configure.install_speculator = lambda worker: None


def prompts_in_first_layer() -> None:
    """Layers after the first have no KV of prompts."""
    _without_prompts(first_layer=1)


def prompts_in_no_layer() -> None:
    """No layer has KV of prompts."""
    _without_prompts(first_layer=0)


def _without_prompts(first_layer: int) -> None:
    """Layers from ``first_layer`` on write no KV of prompts.

    Only the row that the first draft comes from is written: attention reads a row's own key and
    value from the cache.
    """
    from mimo_plugin.engines.vllm.mtp import speculator

    stock = speculator.MimoMTPSpeculator._attention

    def _attention(
        self: Any,
        input_batch: Any,
        batch_desc: Any,
        num_reqs: int,
        num_rows: int,
        lengths: Any,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        metadata, slots = stock(self, input_batch, batch_desc, num_reqs, num_rows, lengths)
        starts = self.input_buffers.query_start_loc[: num_reqs + 1].tolist()
        skipped = [
            row
            for request in range(num_reqs)
            if input_batch.is_prefilling_np[request]
            for row in range(starts[request], starts[request + 1])
        ]
        drafting = (self.draft_input_id_overrides[:num_reqs, 0] < 0).tolist()
        last = self.last_token_indices[:num_reqs].tolist()
        kept = {row for row, drafts in zip(last, drafting, strict=True) if drafts}
        rows = [row for row in skipped if row not in kept]
        for name in slots:
            if layer_number(name) >= first_layer:
                slots[name] = slots[name].clone()
                slots[name][rows] = NO_SLOT
        return metadata, slots

    speculator.MimoMTPSpeculator._attention = _attention  # type: ignore[method-assign]


def layer_number(name: str) -> int:
    """The MTP layer's number in the name of its attention; -1 for the target's layers."""
    _, found, rest = name.partition("mtp.layers.")
    return int(rest.split(".")[0]) if found else -1


CHANGES: dict[str, Callable[[], None]] = {
    "chained": chain,
    "stock_window": stock_window,
    "first_layer_prompt": prompts_in_first_layer,
    "no_prompt": prompts_in_no_layer,
}
