# SPDX-License-Identifier: Apache-2.0
"""Attention over SGLang's paged pools in plain PyTorch, one request at a time, in float32.

SGLang's ``torch_native`` backend refuses sinks, and reads sliding-window layers with the slots of
the full pool. Here both are right: a window layer reads the slots of its own pool, and only those
of the window; a sink takes its share of the softmax and gives no value.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_key: int,
    first_query: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of one sequence.

    Args:
        q: [queries, heads, qk_dim].
        k: [keys, kv_heads, qk_dim]; heads is a multiple of kv_heads.
        v: [keys, kv_heads, v_dim].
        first_key: position of the first key in the sequence.
        first_query: position of the first query.
        scale: of the logits.
        window: how far a query sees behind itself, None for everything.
        sinks: [heads] logits that take part in the softmax without a value, or None.

    Returns:
        [queries, heads, v_dim] in the dtype of ``q``.
    """
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(groups, dim=1)
    values = v.float().repeat_interleave(groups, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    query_at = torch.arange(first_query, first_query + q.shape[0])[:, None]
    key_at = torch.arange(first_key, first_key + k.shape[0])[None, :]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at >= query_at - window
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        column = sinks.float()[:, None, None].expand(heads, q.shape[0], 1)
        weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


class ReferenceAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """``--attention-backend torch_sink``."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Prefill: each request brings ``extend_seq_lens`` tokens."""
        lengths = forward_batch.extend_seq_lens.tolist()
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, lengths)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Decode: each request brings one token."""
        lengths = [1] * forward_batch.batch_size
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, lengths)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
        lengths: list[int],
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # A batch may be padded; padding is not attended to and stays zero.
        out = queries.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        window = layer.sliding_window_size
        window = window if window is not None and window > -1 else None
        requests = zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.seq_lens.tolist(),
            lengths,
            strict=True,
        )
        start = 0
        for slot, total, count in requests:
            first_query = total - count
            first_key = 0 if window is None else max(0, first_query - window)
            keys, values = self._read(layer, slot, first_key, total, window is not None)
            out[start : start + count] = attend(
                queries[start : start + count],
                keys,
                values,
                first_key=first_key,
                first_query=first_query,
                scale=layer.scaling,
                window=window,
                sinks=sinks,
            )
            start += count
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _read(
        self, layer: Any, slot: int, first: int, end: int, windowed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first to end of one request."""
        pool = self.token_to_kv_pool
        places = self.req_to_token_pool.req_to_token[slot, first:end].to(torch.int64)
        if windowed and self.use_sliding_window_kv_pool:
            places = pool.translate_loc_from_full_to_swa(places).to(torch.int64)
        return (
            pool.get_key_buffer(layer.layer_id)[places],
            pool.get_value_buffer(layer.layer_id)[places],
        )
