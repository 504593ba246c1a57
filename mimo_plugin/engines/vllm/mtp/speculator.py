# SPDX-License-Identifier: Apache-2.0
"""The speculator of Model Runner V2 with a draft window of our own.

vLLM's multi-module speculator runs every MTP layer over the tokens of a step. This one replaces how
it lays out the rows (``window.py`` says why), and when no draft is wanted it fills the layers' KV
without sampling from them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as upstream
from vllm.v1.worker.utils import get_uniform_decode_token_count

from mimo_plugin.engines.vllm.mtp.window import (
    Array,
    Batch,
    SavedRows,
    Window,
    fill_ids,
    fill_vectors,
    host_batch,
    mm_mask,
    place,
    repeat,
    window_lengths,
)


class MimoMTPSpeculator(upstream.MultiModuleMTPSpeculator):  # type: ignore[misc]
    """One MTP layer a draft step; exact KV in every layer at any number of verified drafts."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # Windows of requests with fewer drafts are wider than their queries.
        self.max_rows = self.max_num_tokens + self.num_speculative_steps * self.max_num_reqs
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_rows, device)
        self.hidden_states = torch.zeros(
            self.max_rows, self.hidden_size, dtype=self.dtype, device=device
        )
        self.saved_counts = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """As upstream."""
        super().load_model(target_model)
        if self.supports_mm_inputs:
            self.inputs_embeds: torch.Tensor | None = torch.zeros_like(self.hidden_states)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; by now a length that was to be fitted to the memory is known."""
        super().set_attn(*args, **kwargs)
        self.max_model_len = self.vllm_config.model_config.max_model_len
        stock = self.block_tables.slot_mappings
        self.slots = torch.full(
            (stock.shape[0], max(stock.shape[1], self.max_rows)),
            PAD_SLOT_ID,
            dtype=stock.dtype,
            device=stock.device,
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft tokens (num_reqs, k) int64; meaningless where ``num_speculative_tokens`` is 0."""
        num_reqs = input_batch.num_reqs
        self._copy_request_inputs(
            num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run=dummy_run
        )
        lengths = self._window_lengths(input_batch, dummy_run)
        num_rows = int(lengths.sum())
        batch = self._batch(input_batch, lengths, dummy_run)
        self._lay_out(
            batch,
            input_batch,
            num_rows,
            last_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            mm_inputs,
            dummy_run,
        )

        widened = num_rows != input_batch.num_tokens
        # With data parallelism all ranks have to run alike.
        wanted = num_speculative_tokens is None or num_speculative_tokens > 0 or self.dp_size > 1
        batch_desc, batch_sync = dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            num_reqs,
            num_rows if widened else input_batch.num_tokens_after_padding,
            get_uniform_decode_token_count(
                num_reqs, num_rows, int(lengths.max()), input_batch.decode_graph_eligible
            ),
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile or not wanted,
            dp_sync_state=dp_sync_state,
        )
        across_dp = batch_sync.num_tokens_across_dp if batch_sync is not None else None
        if not (dummy_run and skip_attn_for_dummy_run):
            attn_metadata, slot_mappings = self._attention(
                batch, input_batch, batch_desc, num_reqs, num_rows
            )
        self._prepare_eplb_forward(num_rows)

        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            assert self.cudagraph_manager is not None
            self.cudagraph_manager.run_fullgraph(batch_desc)
        else:
            run = self._generate_drafts if wanted else self._fill_layers
            run(
                num_reqs,
                batch_desc.num_tokens,
                attn_metadata,
                slot_mappings,
                num_tokens_across_dp=across_dp,
                cudagraph_runtime_mode=batch_desc.cg_mode,
            )
        return self.draft_tokens[:num_reqs]

    def _window_lengths(self, input_batch: Any, dummy_run: bool) -> Array:
        num_reqs = input_batch.num_reqs
        queries: Array = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
        # The ranks of data parallelism agreed on the target's rows, so they can't be widened.
        if dummy_run or self.dp_size > 1:
            return queries
        return window_lengths(
            queries,
            ~input_batch.is_prefilling_np[:num_reqs],
            input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy(),
            self.num_speculative_steps,
            self.max_model_len,
        )

    def _batch(self, input_batch: Any, lengths: Array, dummy_run: bool) -> Batch:
        num_reqs = input_batch.num_reqs
        decoding = (
            np.zeros(num_reqs, dtype=bool)
            if dummy_run
            else ~input_batch.is_prefilling_np[:num_reqs]
        )
        host = host_batch(lengths, decoding, self.num_speculative_steps)
        starts, row_request, row_offset, repeat_rows, lens, decoding_dev = (
            async_tensor_h2d(array, device=self.device) for array in (*host, lengths, decoding)
        )
        return Batch(
            host_lens=lengths,
            host_starts=host[0],
            host_decoding=decoding,
            slots=input_batch.idx_mapping.long(),
            query_start_loc=input_batch.query_start_loc[: num_reqs + 1],
            window_start_loc=starts,
            window_lens=lens.long(),
            row_request=row_request,
            row_offset=row_offset,
            repeat_rows=repeat_rows,
            decoding=decoding_dev,
        )

    def _saved(self, dummy_run: bool) -> SavedRows:
        return SavedRows(
            input_ids=self.cached_draft_input_ids,
            hidden_states=self.cached_target_hidden_states,
            # a dummy batch names slots that belong to real requests
            counts=self.saved_counts.clone() if dummy_run else self.saved_counts,
        )

    def _lay_out(
        self,
        batch: Batch,
        input_batch: Any,
        num_rows: int,
        target_hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
        dummy_run: bool,
    ) -> None:
        """Fill the persistent input buffers that eager runs and CUDA graphs read."""
        num_reqs, buffers, saved = input_batch.num_reqs, self.input_buffers, self._saved(dummy_run)
        window = place(batch, input_batch.positions, num_rejected, saved, self.max_model_len)
        sampled = num_sampled > 0
        known_ahead = next_prefill_tokens[:, batch.slots].long()
        drawn = last_sampled.reshape(last_sampled.shape[0], -1)[batch.slots, 0].long()
        next_tokens = torch.where(sampled, drawn, known_ahead[0])
        ahead = known_ahead[1 : self.num_speculative_steps]
        self.draft_input_id_overrides[:num_reqs] = torch.where(
            sampled, torch.full_like(ahead, -1), ahead
        ).T

        buffers.input_ids[:num_rows] = fill_ids(
            batch, window, input_batch.input_ids, next_tokens, saved
        )
        buffers.positions[:num_rows] = window.positions
        buffers.seq_lens[:num_reqs] = window.seq_lens
        buffers.seq_lens[num_reqs:] = 0
        buffers.query_start_loc[: num_reqs + 1] = batch.window_start_loc
        buffers.query_start_loc[num_reqs + 1 :] = num_rows
        self.last_token_indices[:num_reqs] = window.last
        self.last_token_indices[num_reqs:] = 0
        fill_vectors(batch, window, target_hidden_states, saved.hidden_states, self.hidden_states)
        if self.inputs_embeds is not None:
            self._embed(batch, window, input_batch, num_rows, mm_inputs)

    def _embed(
        self,
        batch: Batch,
        window: Window,
        input_batch: Any,
        num_rows: int,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Embeddings of the rows, those of images and sounds merged in."""
        assert self.inputs_embeds is not None and self.cached_draft_input_embeds is not None
        mm_embeds, mask = mm_inputs if mm_inputs is not None else ([], None)
        if mm_embeds:
            mask = mm_mask(batch, input_batch.query_start_loc_np, mask)
        embeds = self.model.embed_input_ids(
            self.input_buffers.input_ids[:num_rows],
            multimodal_embeddings=mm_embeds or None,
            is_multimodal=mask if mm_embeds else None,
        )
        self.inputs_embeds[:num_rows] = embeds
        repeat(batch, window, self.cached_draft_input_embeds, self.inputs_embeds)

    def _attention(
        self,
        batch: Batch,
        input_batch: Any,
        batch_desc: Any,
        num_reqs: int,
        num_rows: int,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        # A captured graph reads the buffer that vLLM owns; its shapes always fit there.
        captured = batch_desc.cg_mode != CUDAGraphMode.NONE
        slots = self.block_tables.compute_slot_mappings(
            self.idx_mapping[:num_reqs],
            self.input_buffers.query_start_loc,
            self.input_buffers.positions,
            batch_desc.num_tokens,
            out=None if captured else self.slots,
        )
        upstream.pad_trailing_draft_slots(
            slots,
            self.input_buffers.query_start_loc,
            self.last_token_indices[:num_reqs],
            num_reqs,
        )
        full = batch_desc.cg_mode == CUDAGraphMode.FULL
        queries = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
        ends = input_batch.seq_lens_cpu_upper_bound[:num_reqs] + torch.from_numpy(
            (batch.host_lens - queries).astype(np.int32)
        )
        self.draft_max_seq_len = min(int(ends.max()), self.max_model_len)
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=batch_desc,
            query_start_loc_np=batch.host_starts.astype(np.int32),
            seq_lens_cpu_upper_bound=ends,
            step=0,
            slot_mappings=slots if full else slots[:, :num_rows],
        )
        assert metadata is not None
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def _fill_layers(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Run the layers for their KV alone.

        Rows that need a token not known yet get the last known one; they are repeated in the next
        steps, as rows that rest on rejected drafts are.
        """
        last = self.last_token_indices[:num_reqs]
        slots = self.idx_mapping[:num_reqs]
        upstream.cache_inputs(
            self.input_buffers,
            self.inputs_embeds,
            self.hidden_states,
            self.cached_draft_input_ids,
            self.cached_draft_input_embeds,
            self.cached_target_hidden_states,
            last,
            slots,
            num_reqs,
            self.num_speculative_steps,
            use_input_embeds=self.inputs_embeds is not None,
        )
        known = self.input_buffers.input_ids[last].long()
        for step in range(self.num_speculative_steps):
            self._run_model(
                num_tokens,
                attn_metadata,
                slot_mappings,
                num_tokens_across_dp=num_tokens_across_dp,
                spec_module_idx=step,
                cudagraph_runtime_mode=cudagraph_runtime_mode,
            )
            if step == self.num_speculative_steps - 1:
                break
            ahead = self.draft_input_id_overrides[:num_reqs, step]
            tokens = torch.where(ahead >= 0, ahead, known)
            upstream.update_draft_inputs(
                tokens,
                self.model.embed_input_ids(tokens) if self.inputs_embeds is not None else None,
                self.input_buffers,
                self.inputs_embeds,
                last,
                slots,
                num_reqs,
            )
