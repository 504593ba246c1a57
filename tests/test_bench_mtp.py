# SPDX-License-Identifier: Apache-2.0
"""The MTP benchmark's arithmetic."""

import pytest

from benchmarks.mtp_claims import emitted, same_outputs
from benchmarks.mtp_engine import Result
from benchmarks.mtp_reference import acceptance, gain_interval, gain_pct

# request, outputs before the round, drafted, accepted
ROUNDS = [(0, 1, 3, 3), (0, 5, 3, 0), (1, 1, 3, 1), (1, 3, 2, 2)]


def result(outputs, rounds):
    return Result(outputs, rounds, [0] * len(outputs), 0, 1.0, 1.0, 1.0)


def test_acceptance_is_conditional_on_the_earlier_positions():
    found = acceptance(ROUNDS)
    assert (found.rounds, found.length_tokens) == (4, 1 + 6 / 4)
    # The third position of the last round was not drafted, so it is not a miss.
    assert found.reached == (4, 3, 1)
    assert found.conditional == (3 / 4, 2 / 3, 1.0)


def test_acceptance_takes_the_rounds_that_begin_in_the_range():
    assert acceptance(ROUNDS, 0, 5).length_tokens == 3.0
    assert acceptance(ROUNDS, 5).length_tokens == 1.0
    assert acceptance([]).rounds == 0


def test_gain_and_its_interval():
    stock = [(0, 1, 3, 1), (1, 1, 3, 1)]
    ours = [(0, 1, 3, 1), (1, 1, 3, 3), (1, 9, 3, 0)]
    assert gain_pct(ours, stock, 6) == pytest.approx(50.0)
    assert gain_pct(ours, stock, 16) == pytest.approx(100 * (7 / 3 / 2 - 1))
    low, high = gain_interval(ours, stock, 6, prompts=2)
    assert (low, high) == (pytest.approx(0.0), pytest.approx(100.0))
    assert gain_interval(stock, stock, 6, prompts=2) == (0.0, 0.0)


def test_emitted_counts_steps_without_drafts_and_not_what_passes_the_end():
    # 8 outputs: one from the prompt, rounds of 3 + 1 and 1 + 1 (of 3 + 1), one step undrafted.
    one = result([[0] * 8], [(0, 1, 3, 3), (0, 6, 3, 3)])
    assert emitted(one) == (7 / 3, 7 / 9)
    assert emitted(result([[0] * 5], [])) == (1.0, 1.0)


def test_same_outputs_compares_as_far_as_a_pass_goes():
    assert same_outputs(result([[1, 2], [3, 4]], []), [[1, 2, 9], [3, 5, 9]]) == 0.5
