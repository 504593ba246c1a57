# SPDX-License-Identifier: Apache-2.0
"""The rows that the MTP layers compute in one step, so that their KV stays exact.

Row p of MTP layer i is made from the target's hidden state at p and the embedding of token p+1+i.
When a step ends with the last known token at p+1, the rows p-i+1 … p of layer i rest on drafts.
They are exact only where the drafts were accepted; the others are computed again in the next
step, from inputs that the previous step saved. vLLM's own speculator derives their number from the
rejected drafts, which holds while every request has all k drafts verified. Here it follows from the
accepted ones, so that it also holds for requests with fewer drafts or none:

    rows to repeat = (k - 1) - accepted drafts

Each decoding request gets a window of k + 1 rows, whatever the number of its drafts: the repeated
rows, then the newly known ones, then padding. A prefilling request gets its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = Any
"""A numpy array (its own annotation wants type arguments that would say nothing here)."""


def window_lengths(
    query_lens: Array,
    decoding: Array,
    end_upper_bounds: Array,
    num_steps: int,
    max_model_len: int,
) -> Array:
    """Rows of each request's window, known on the host.

    Args:
        query_lens: (num_reqs,) tokens that the target computed.
        decoding: (num_reqs,) bool, requests whose prompt was complete before this step.
        end_upper_bounds: (num_reqs,) at least the sequence length after this step.
        num_steps: draft steps k.
        max_model_len: no window may pass it, attention would read past the block table.

    Returns:
        (num_reqs,) int32: k + 1 for decoding requests where that fits, else the query's length.
    """
    wide = decoding & (end_upper_bounds + num_steps + 1 <= max_model_len)
    lengths: Array = np.where(wide, np.maximum(query_lens, num_steps + 1), query_lens)
    return lengths.astype(np.int32)


@dataclass
class SavedRows:
    """Inputs of the last k - 1 rows of each request slot, aligned to the right.

    Attributes:
        input_ids: (max_num_reqs, k-1) int64.
        hidden_states: (max_num_reqs, k-1, hidden) of the target.
        counts: (max_num_reqs,) int64, how many of them are valid.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    counts: torch.Tensor


@dataclass
class Batch:
    """What the target computed, and where its requests' windows lie.

    Attributes:
        slots: (num_reqs,) int64 request slots.
        query_start_loc: (num_reqs + 1,) of the target's rows.
        window_start_loc: (num_reqs + 1,) int64 of the draft rows.
        window_lens: (num_reqs,) int64.
        row_request: (rows,) int64, the request of each draft row.
        row_offset: (rows,) int64, its place in the window.
        repeat_rows: (n,) int64, the draft rows that may be repeated ones (the first k - 1 of each
            decoding request).
        decoding: (num_reqs,) bool.
        host_lens: ``window_lens`` on the host.
        host_starts: ``window_start_loc`` on the host.
        host_decoding: ``decoding`` on the host.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    window_start_loc: torch.Tensor
    window_lens: torch.Tensor
    row_request: torch.Tensor
    row_offset: torch.Tensor
    repeat_rows: torch.Tensor
    decoding: torch.Tensor
    host_lens: Array
    host_starts: Array
    host_decoding: Array


@dataclass
class Window:
    """Where each row comes from.

    Attributes:
        source: (rows,) int64, row of the target (clamped; read it where ``fresh`` holds).
        fresh: (rows,) bool, rows newly known in this step.
        repeated: (rows,) bool, rows computed again from saved inputs.
        num_repeated: (num_reqs,) int64.
        last: (num_reqs,) int64, the draft row of the last known position.
        seq_lens: (num_reqs,) int64, end of each window in the sequence.
        positions: (rows,) int64.
    """

    source: torch.Tensor
    fresh: torch.Tensor
    repeated: torch.Tensor
    num_repeated: torch.Tensor
    last: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor


def host_batch(
    window_lens: Array, decoding: Array, num_steps: int
) -> tuple[Array, Array, Array, Array]:
    """Index arrays of a step, int64: window_start_loc, row_request, row_offset, repeat_rows."""
    starts: Array = np.zeros(len(window_lens) + 1, dtype=np.int64)
    np.cumsum(window_lens, out=starts[1:])
    row_request: Array = np.repeat(np.arange(len(window_lens), dtype=np.int64), window_lens)
    row_offset = np.arange(starts[-1], dtype=np.int64) - starts[row_request]
    may_repeat = decoding[row_request] & (row_offset < num_steps - 1)
    return starts, row_request, row_offset, np.flatnonzero(may_repeat)


def place(
    batch: Batch,
    target_positions: torch.Tensor,
    num_rejected: torch.Tensor,
    saved: SavedRows,
    max_model_len: int,
) -> Window:
    """Lay out the windows; no host synchronisation.

    Args:
        batch: the step.
        target_positions: (target rows,) int64.
        num_rejected: (num_reqs,) scheduled drafts that were not accepted.
        saved: what the previous steps left; ``counts`` is brought up to date.
        max_model_len: positions of padding rows stay below it.
    """
    num_steps = saved.input_ids.shape[1] + 1
    query_starts = batch.query_start_loc[:-1].long()
    query_lens = batch.query_start_loc[1:].long() - query_starts
    known = query_lens - num_rejected.long()
    counts = saved.counts[batch.slots]
    wanted = (num_steps - 1) - (known - 1)
    room = batch.window_lens - known
    repeated = torch.minimum(torch.minimum(wanted, counts), room).clamp_(min=0)
    repeated = torch.where(batch.decoding, repeated, torch.zeros_like(repeated))
    saved.counts[batch.slots] = (repeated + known).clamp_(max=num_steps - 1)

    first = target_positions[query_starts] - repeated
    shift = repeated[batch.row_request]
    source_offset = batch.row_offset - shift
    is_fresh = (source_offset >= 0) & (source_offset < known[batch.row_request])
    source = query_starts[batch.row_request] + source_offset.clamp(min=0)
    return Window(
        source=torch.where(is_fresh, source, query_starts[batch.row_request]),
        fresh=is_fresh,
        repeated=batch.row_offset < shift,
        num_repeated=repeated,
        last=batch.window_start_loc[:-1] + repeated + known - 1,
        seq_lens=first + batch.window_lens,
        positions=(first[batch.row_request] + batch.row_offset).clamp_(max=max_model_len - 1),
    )


def fill_ids(
    batch: Batch,
    window: Window,
    target_input_ids: torch.Tensor,
    next_tokens: torch.Tensor,
    saved: SavedRows,
) -> torch.Tensor:
    """(rows,) ids for layer 0: of each row the token after it; 0 in padding.

    Args:
        batch: the step.
        window: from ``place``.
        target_input_ids: (target rows,) of the target.
        next_tokens: (num_reqs,) the token after the last known position.
        saved: inputs of the repeated rows.
    """
    after = (window.source + 1).clamp_(max=target_input_ids.shape[0] - 1)
    ids = target_input_ids[after].long()
    ids = torch.where(window.fresh, ids, torch.zeros_like(ids))
    ids[window.last] = next_tokens.long()
    rows = batch.repeat_rows
    if rows.numel():
        kept = _saved_at(batch, window, saved.input_ids, rows)
        ids[rows] = torch.where(window.repeated[rows], kept, ids[rows])
    return ids


def fill_vectors(
    batch: Batch,
    window: Window,
    fresh_rows: torch.Tensor,
    kept: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write (rows, hidden) vectors: fresh ones taken from ``fresh_rows``, repeated from ``kept``.

    Args:
        batch: the step.
        window: from ``place``.
        fresh_rows: (target rows, hidden).
        kept: (max_num_reqs, k-1, hidden) saved vectors.
        out: (at least rows, hidden); padding rows get some finite vector.
    """
    torch.index_select(fresh_rows, 0, window.source, out=out[: window.source.shape[0]])
    repeat(batch, window, kept, out)


def repeat(batch: Batch, window: Window, kept: torch.Tensor, out: torch.Tensor) -> None:
    """Write the repeated rows of ``out``, (at least rows, hidden), from the saved ``kept``."""
    rows = batch.repeat_rows
    if rows.numel():
        vectors = _saved_at(batch, window, kept, rows)
        out[rows] = torch.where(window.repeated[rows][:, None], vectors, out[rows])


def mm_mask(batch: Batch, query_starts: Array, mask: torch.Tensor) -> torch.Tensor:
    """Which draft rows hold an embedding of an image or a sound, on the host.

    Only prompts do, and their rows are the target's in their order. On the host, because vLLM's
    merge would otherwise wait for the device.

    Args:
        batch: the step.
        query_starts: (at least num_reqs,) first row of each request in the target's batch.
        mask: (target rows,) bool on the host, moved on by one token as the draft's input is.
    """
    out = torch.zeros(int(batch.host_starts[-1]), dtype=torch.bool)
    for request in np.flatnonzero(~batch.host_decoding):
        first, start = int(query_starts[request]), int(batch.host_starts[request])
        length = int(batch.host_lens[request])
        out[start : start + length] = mask[first : first + length]
    return out


def _saved_at(
    batch: Batch, window: Window, saved: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The saved entries that belong to the draft rows ``rows`` (any entry where not repeated)."""
    request = batch.row_request[rows]
    column = saved.shape[1] - window.num_repeated[request] + batch.row_offset[rows]
    return saved[batch.slots[request], column.clamp_(0, saved.shape[1] - 1)]
