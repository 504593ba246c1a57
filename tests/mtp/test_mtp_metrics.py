# SPDX-License-Identifier: Apache-2.0
"""Counters of drafts: exact on known histories, and one warning when nothing is ever accepted."""

from __future__ import annotations

from collections import Counter

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from mimo_plugin import metrics
from mimo_plugin.core import draft
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.engines.vllm.mtp.lengths import MtpSettings
from mimo_plugin.engines.vllm.mtp.report import DraftReport
from tests.mtp.harness import BASES, HYBRID, AsyncScheduler, Engine, K, Scheduler
from tests.sched.harness import grammar, unique

CASES = [(Scheduler, 1), (AsyncScheduler, 1), (AsyncScheduler, 2)]
by_case = pytest.mark.parametrize(("base", "depth"), CASES)


def test_labels_are_core_s():
    assert metrics.OUTPUT_BINS == draft.OUTPUT_BINS


@by_case
def test_acceptance_per_position_and_bin(base, depth):
    """Drafts of three of which two are right."""

    def two(request_id: str, drafts: int, index: int) -> int:
        return min(drafts, 2)

    engine = Engine(MtpSettings(), base=base, depth=depth, accepts=two)
    engine.submit(unique(1, 40), 1 + 3 * 100)
    engine.run()
    rounds = engine.counters("mtp_draft_rounds")
    # Rounds begin at the outputs 1, 4, 7, ..., 298.
    assert rounds == {("0-127",): 43, ("128-255",): 42, ("256+",): 15}
    for output, count in ((key[0], n) for key, n in rounds.items()):
        for name, per_position in (
            ("mtp_drafted_tokens", (count, count, count)),
            ("mtp_checked_tokens", (count, count, count)),
            ("mtp_accepted_tokens", (count, count, 0)),
        ):
            values = engine.counters(name)
            found = tuple(values[(str(j), output)] for j in range(K))
            if name != "mtp_drafted_tokens" or output != "256+":
                assert found == per_position, (name, output)
    assert engine.counters("mtp_wasted_drafts")[("rejected",)] == 100
    # The drafts for behind the end: of a step under way, and those that were ready.
    unverified = engine.counters("mtp_wasted_drafts")[("unverified",)]
    assert 0 <= unverified <= K * depth
    assert engine.total("mtp_drafted_tokens") == 300 + unverified == engine.proposed


@by_case
def test_a_position_is_checked_only_behind_accepted_ones(base, depth):
    history = [0, 3, 1, 2, 0, 1, 3]
    expected_checked: Counter[str] = Counter()
    expected_accepted: Counter[str] = Counter()
    played: list[int] = []

    def accepts(request_id: str, drafts: int, index: int) -> int:
        if not drafts:
            return 0
        accepted = history[len(played) % len(history)]
        played.append(accepted)
        for j in range(K):
            expected_checked[str(j)] += j <= accepted
            expected_accepted[str(j)] += j < accepted
        return accepted

    engine = Engine(MtpSettings(), base=base, depth=depth, accepts=accepts)
    engine.submit(unique(1, 40), 100)
    for _ in range(30):
        engine.step()
    assert len(played) > 20

    def by_position(name: str) -> Counter[str]:
        out: Counter[str] = Counter()
        for (position, _), value in engine.counters(name).items():
            out[position] += value
        return out

    assert by_position("mtp_checked_tokens") == +expected_checked
    assert by_position("mtp_accepted_tokens") == +expected_accepted
    assert by_position("mtp_drafted_tokens") == {str(j): len(played) for j in range(K)}
    # What is not counted yet is under way or ready.
    pending = engine.proposed - engine.total("mtp_drafted_tokens")
    assert 0 < pending <= K * depth


@by_case
def test_lengths_are_counted_at_each_request_and_step(base, depth):
    engine = Engine(MtpSettings(limit_tokens=60), base=base, depth=depth)
    engine.submit(unique(1, 40), 50)
    engine.run()
    lengths = engine.counters("mtp_draft_length")
    assert lengths[("0",)] > 20 and lengths[(str(K),)] >= 2
    assert sum(int(key[0]) * n for key, n in lengths.items()) == engine.proposed


@by_case
def test_padding_is_no_draft(base, depth):
    """A request with one token to compute is padded with drafts that nobody made."""
    engine = Engine(MtpSettings(), base=base, depth=depth)
    engine.submit(unique(2, 30), 300)
    for _ in range(6):
        engine.step()
    padded = 0
    for i in range(4):
        name = engine.submit(unique(10 + i, 1), 6)
        output = engine.step()
        padded += output.scheduled_spec_decode_tokens.get(name) == [-1] * K
        for _ in range(6):
            engine.step()
    assert padded == 4
    engine.run()
    assert engine.total("mtp_drafted_tokens") == engine.proposed
    assert engine.counters("mtp_wasted_drafts")[("rejected",)] == 0
    engine.check_outputs()


@by_case
def test_drafts_that_a_step_has_no_room_for_are_wasted(base, depth):
    """Five requests with drafts of three want 20 tokens of a step's 18."""
    engine = Engine(MtpSettings(), base=base, depth=depth, max_batched_tokens=18)
    for i in range(5):
        engine.submit(unique(i + 1, 3), 60)
    for _ in range(12):
        engine.step()
    rows = engine.verified_lengths[-1]
    assert sorted(rows.values()) == [1, K, K, K, K]
    assert engine.counters("mtp_wasted_drafts")[("unverified",)] > 0
    engine.run()
    engine.check_outputs()
    assert engine.total("mtp_drafted_tokens") == engine.proposed


@pytest.mark.parametrize("base", BASES)
def test_a_preempted_and_an_aborted_request_s_drafts_are_wasted(base):
    engine = Engine(MtpSettings(), base=base)
    first, second = (engine.submit(unique(i, 40), 200) for i in (1, 2))
    for _ in range(5):
        engine.step()
    before = engine.counters("mtp_wasted_drafts")
    assert not before
    engine.abort(first)
    assert engine.counters("mtp_wasted_drafts") == {("unverified",): K}
    engine.preempt_all()
    assert engine.counters("mtp_wasted_drafts") == {("unverified",): 2 * K}
    engine.run()
    engine.check_outputs(but=(first,))
    assert engine.known[second].num_preemptions == 1
    assert engine.total("mtp_drafted_tokens") == engine.proposed


@by_case
def test_what_a_grammar_refuses_is_not_verified(base, depth):
    """The grammar takes the first token of each draft only."""
    engine = Engine(
        MtpSettings(), base=base, depth=depth, accepts=lambda request_id, drafts, index: 0
    )
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a*")
    )
    name = engine.submit(unique(1, 40), 30, sampling_params=params)
    only_first = grammar()
    only_first.validate_tokens.side_effect = lambda tokens: tokens[:1]
    engine.known[name].structured_output_request.grammar = only_first
    engine.run()
    engine.check_outputs()
    rounds = engine.total("mtp_draft_rounds")
    assert rounds >= 28
    drafted, checked = (
        [engine.counters(f"mtp_{what}_tokens")[(str(j), "0-127")] for j in range(K)]
        for what in ("drafted", "checked")
    )
    assert checked == [rounds, 0, 0]
    assert rounds <= drafted[0] <= rounds + depth
    assert drafted[1] == drafted[2] >= rounds
    wasted = engine.counters("mtp_wasted_drafts")
    assert wasted[("rejected",)] == rounds
    assert wasted[("unverified",)] == sum(drafted) - rounds


@by_case
def test_one_warning_when_nothing_is_accepted(base, depth, caplog):
    def none(request_id: str, drafts: int, index: int) -> int:
        return 0

    engine = Engine(MtpSettings(warn_after_drafts=20), base=base, depth=depth, accepts=none)
    engine.submit(unique(1, 40), 100)
    for _ in range(18):
        engine.step()
    assert not caplog.records and not engine.total("mtp_self_check_failures")
    engine.run()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "in 20 drafts" in record.getMessage()
    assert "\n" not in record.getMessage() and "fix:" in record.getMessage()
    assert engine.total("mtp_self_check_failures") == 1
    engine.check_outputs()


@pytest.mark.parametrize(
    ("warn_after", "lucky"), [(200, 150), (0, None)], ids=["one-accepted", "switched-off"]
)
def test_no_warning(warn_after, lucky, caplog):
    report = DraftReport(warn_after)
    for number in range(1000):
        report.verified(K, int(number == lucky), number)
    assert not caplog.records
    assert all(name != "mtp_self_check_failures" for name, _, _ in report.drain()["inc"])


def test_long_drafts_share_the_last_labels():
    report = DraftReport(0)
    report.proposed(12)
    report.verified(10, 9, 5)
    report.unverified(6, 4, 300)
    rows = {(name, *labels): value for name, labels, value in report.drain()["inc"]}
    assert rows[("mtp_draft_length", "8")] == 1
    assert rows[("mtp_drafted_tokens", "7", "0-127")] == 3
    assert rows[("mtp_accepted_tokens", "7", "0-127")] == 2
    assert rows[("mtp_drafted_tokens", "6", "256+")] == 1
    assert rows[("mtp_drafted_tokens", "7", "256+")] == 3
    assert rows[("mtp_wasted_drafts", "rejected")] == 1
    assert rows[("mtp_wasted_drafts", "unverified")] == 4
    assert report.drain() is None


@pytest.mark.parametrize("base", BASES)
def test_counters_travel_with_those_of_other_features(base):
    engine = Engine(MtpSettings(), base=base, geometry=HYBRID, kv=KvSettings())
    engine.submit(unique(1, 100), 40)
    engine.run()
    names = {key[0] for key in engine._inc}
    assert {"mtp_drafted_tokens", "mtp_draft_rounds", "prompt_lookup_tokens"} <= names
