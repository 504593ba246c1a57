# SPDX-License-Identifier: Apache-2.0
"""The draft window keeps every MTP layer's KV exact, whatever is drafted, accepted or chunked.

The model here is a table: running layer i over the rows of a step writes, for each row's position,
the pair (target hidden state, token) that made it. After every step all rows that can be exact must
hold the right pair.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.engines.vllm.mtp.window import (
    Batch,
    SavedRows,
    fill_ids,
    fill_vectors,
    host_batch,
    mm_mask,
    place,
    window_lengths,
)

MAX_MODEL_LEN = 64
SLOTS = 4


class Sequence:
    """One request: its true tokens, how far it is, and the rows of its layers."""

    def __init__(self, slot, prompt_len, rng):
        self.slot = slot
        self.tokens = [int(t) for t in rng.integers(1, 10_000, MAX_MODEL_LEN + 8)]
        self.prompt_len = prompt_len
        self.computed = 0
        self.rows = {}
        #: how many of the drafts that the next step proposes will turn out right
        self.good_drafts = 0

    def hidden(self, position):
        return 1000 * (self.slot + 1) + position


class Drafter:
    """Runs steps as the speculator does, with tables for layers."""

    def __init__(self, num_steps):
        self.k = num_steps
        self.saved = SavedRows(
            input_ids=torch.full((SLOTS, num_steps - 1), -7, dtype=torch.int64),
            hidden_states=torch.full((SLOTS, num_steps - 1, 1), -7.0),
            counts=torch.zeros(SLOTS, dtype=torch.int64),
        )

    def step(self, work):
        """work: list of (sequence, query_len, num_drafts, accepted); returns widths."""
        k = self.k
        queries = np.array([w[1] for w in work], dtype=np.int32)
        decoding = np.array([w[0].computed >= w[0].prompt_len for w in work])
        ends = np.array([w[0].computed + w[1] for w in work], dtype=np.int32)
        lengths = window_lengths(queries, decoding, ends, k, MAX_MODEL_LEN)
        starts, row_request, row_offset, repeat_rows = host_batch(lengths, decoding, k)
        query_starts = np.concatenate([[0], np.cumsum(queries)])
        as_tensor = torch.from_numpy
        batch = Batch(
            slots=torch.tensor([w[0].slot for w in work]),
            query_start_loc=as_tensor(query_starts.astype(np.int32)),
            window_start_loc=as_tensor(starts),
            window_lens=as_tensor(lengths.astype(np.int64)),
            row_request=as_tensor(row_request),
            row_offset=as_tensor(row_offset),
            repeat_rows=as_tensor(repeat_rows),
            decoding=as_tensor(decoding),
            host_lens=lengths,
            host_starts=starts,
            host_decoding=decoding,
        )
        ids, positions, hidden, rejected, next_tokens, overrides = [], [], [], [], [], []
        for seq, query_len, num_drafts, accepted in work:
            for j in range(query_len):
                position = seq.computed + j
                wrong = num_drafts and j > accepted  # a rejected draft
                ids.append(-5 if wrong else seq.tokens[position])
                positions.append(position)
                hidden.append([-5.0 if wrong else seq.hidden(position)])
            rejected.append(num_drafts - accepted if num_drafts else 0)
            known = query_len - rejected[-1]
            after = seq.computed + known
            next_tokens.append(seq.tokens[after])
            in_prompt = after < seq.prompt_len
            overrides.append([seq.tokens[after + i] if in_prompt else -1 for i in range(1, k)])
        window = place(
            batch, torch.tensor(positions), torch.tensor(rejected), self.saved, MAX_MODEL_LEN
        )
        row_ids = fill_ids(batch, window, torch.tensor(ids), torch.tensor(next_tokens), self.saved)
        vectors = torch.zeros(len(row_ids) + 3, 1)
        fill_vectors(
            batch,
            window,
            torch.tensor(hidden, dtype=torch.float32),
            self.saved.hidden_states,
            vectors,
        )
        self._run(work, batch, window, row_ids, vectors, overrides)
        for (seq, query_len, *_), dropped in zip(work, rejected, strict=True):
            seq.computed += query_len - dropped
        return lengths

    def _run(self, work, batch, window, row_ids, vectors, overrides):
        k = self.k
        for r, (seq, *_) in enumerate(work):
            first, last = int(batch.window_start_loc[r]), int(window.last[r])
            assert first <= last < int(batch.window_start_loc[r + 1])
            inputs = row_ids[first : last + 1].tolist()
            places = window.positions[first : last + 1].tolist()
            states = vectors[first : last + 1, 0].tolist()
            assert all(p >= 0 for p in places)
            assert int(window.seq_lens[r]) <= MAX_MODEL_LEN
            assert int(window.seq_lens[r]) - int(batch.window_lens[r]) == places[0]
            # what vLLM's cache_inputs kernel does
            begin = len(inputs) - (k - 1)
            for i in range(max(begin, 0), len(inputs)):
                self.saved.input_ids[seq.slot, i - begin] = inputs[i]
                self.saved.hidden_states[seq.slot, i - begin, 0] = states[i]
            for layer in range(k):
                for place_, token, state in zip(places, inputs, states, strict=True):
                    seq.rows[layer, place_] = (state, token)
                token = overrides[r][layer] if layer < k - 1 else -1
                if token < 0:
                    right = layer < seq.good_drafts
                    token = seq.tokens[places[-1] + 2 + layer] if right else -100 - layer
                inputs = [*inputs[1:], token]


def check(seq, k):
    """Every row whose token is known by now is exact, but for those the next step repeats."""
    known_tokens = seq.computed + 1
    for layer in range(k):
        for position in range(seq.computed):
            if position + 1 + layer >= known_tokens:
                continue  # rests on a draft
            repeats_next = position > seq.computed - 1 - (k - 1)
            if repeats_next and seq.computed > seq.prompt_len:
                continue
            expected = (seq.hidden(position), seq.tokens[position + 1 + layer])
            assert seq.rows[layer, position] == expected, (layer, position)


def finish(drafter, seq):
    """A step without drafts makes all rows exact that can be."""
    drafter.step([(seq, 1, 0, 0)])
    for layer in range(drafter.k):
        for position in range(seq.computed - layer):
            expected = (seq.hidden(position), seq.tokens[position + 1 + layer])
            assert seq.rows[layer, position] == expected, (layer, position)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_rows_are_exact_under_any_history(data):
    k = data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    drafter = Drafter(k)
    sequences = [
        Sequence(slot, data.draw(st.integers(1, 20)), rng)
        for slot in range(data.draw(st.integers(1, SLOTS)))
    ]
    for _ in range(data.draw(st.integers(1, 14))):
        work = []
        for seq in sequences:
            left = seq.prompt_len - seq.computed
            if seq.computed > MAX_MODEL_LEN - 12 or not data.draw(st.integers(0, 3)):
                continue
            if left > 0:
                chunk = data.draw(st.integers(1, left))
                if 0 < left - chunk < k:  # vLLM never ends a chunk that near to the prompt's end
                    chunk = left
                work.append((seq, chunk, 0, 0))
            else:
                drafts = data.draw(st.integers(0, k))
                accepted = min(drafts, seq.good_drafts)
                work.append((seq, 1 + drafts, drafts, accepted))
        if not work:
            continue
        for seq, *_ in work:
            seq.good_drafts = data.draw(st.integers(0, k))
        lengths = drafter.step(work)
        for (seq, query_len, num_drafts, _), width in zip(work, lengths, strict=True):
            assert width == (max(k + 1, query_len) if seq.computed > seq.prompt_len else query_len)
            assert num_drafts <= k
            check(seq, k)
    for seq in sequences:
        if seq.computed >= seq.prompt_len:
            finish(drafter, seq)


@pytest.mark.parametrize("prompt_len", [1, 2, 3])
def test_a_prompt_shorter_than_the_window_repeats_no_row_before_its_start(prompt_len):
    drafter = Drafter(3)
    seq = Sequence(0, prompt_len, np.random.default_rng(0))
    drafter.step([(seq, prompt_len, 0, 0)])
    drafter.step([(seq, 4, 3, 0)])
    assert min(position for _, position in seq.rows) == 0
    finish(drafter, seq)


def test_a_new_request_never_repeats_rows_of_the_slots_last_owner():
    drafter = Drafter(3)
    rng = np.random.default_rng(0)
    old, new = Sequence(0, 9, rng), Sequence(0, 1, rng)
    drafter.step([(old, 9, 0, 0)])
    drafter.step([(old, 4, 3, 0)])
    drafter.step([(new, 1, 0, 0)])
    drafter.step([(new, 4, 3, 0)])
    finish(drafter, new)


def test_windows_stay_within_the_model_length():
    """Near the end a window is no wider than the query; past it attention would read garbage."""
    lengths = window_lengths(
        np.array([1, 4, 1]),
        np.array([True, True, True]),
        np.array([MAX_MODEL_LEN - 4, MAX_MODEL_LEN, MAX_MODEL_LEN]),
        3,
        MAX_MODEL_LEN,
    )
    assert lengths.tolist() == [4, 4, 1]


def test_prefills_keep_their_chunk():
    lengths = window_lengths(
        np.array([1, 300]), np.array([False, False]), np.array([9, 300]), 3, 999
    )
    assert lengths.tolist() == [1, 300]


def test_only_the_rows_of_prompts_hold_images():
    """A decoding request between two prompts has a wider window and no image in it."""
    lengths, decoding = np.array([3, 4, 2]), np.array([False, True, False])
    starts, row_request, row_offset, repeat_rows = host_batch(lengths, decoding, 3)
    batch = Batch(
        slots=torch.arange(3),
        query_start_loc=torch.tensor([0, 3, 4, 6]),
        window_start_loc=torch.from_numpy(starts),
        window_lens=torch.from_numpy(lengths),
        row_request=torch.from_numpy(row_request),
        row_offset=torch.from_numpy(row_offset),
        repeat_rows=torch.from_numpy(repeat_rows),
        decoding=torch.from_numpy(decoding),
        host_lens=lengths,
        host_starts=starts,
        host_decoding=decoding,
    )
    target = torch.tensor([True, False, True, True, False, True])  # row 3 is the decoding one's
    expected = [True, False, True, False, False, False, False, False, True]
    assert mm_mask(batch, np.array([0, 3, 4, 6]), target).tolist() == expected
