# SPDX-License-Identifier: Apache-2.0
"""When a failing store is left alone, and when it is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.circuit import CLOSED, HALF_OPEN, OPEN, Circuit, CircuitRule

RULE = CircuitRule(failures=3, period_s=30.0, jitter=0.5)


def circuit(draw=0.0):
    return Circuit(RULE, lambda: draw)


def opened(target, now_s=0.0):
    for _ in range(RULE.failures):
        target.failed(target.admit(now_s), now_s)
    assert target.state == OPEN
    return target


def test_failures_in_a_row_open_it():
    target = circuit()
    for _ in range(10):
        target.failed(target.admit(0), 0)
        target.failed(target.admit(0), 0)
        target.succeeded(target.admit(0))
    assert target.state == CLOSED
    opened(target)
    assert target.admit(0) is None


def test_after_a_period_one_attempt_goes_through():
    target = opened(circuit())
    assert target.admit(29.9) is None
    probe = target.admit(30)
    assert probe is not None and target.state == HALF_OPEN
    assert target.admit(30) is None
    target.succeeded(probe)
    assert target.state == CLOSED and target.admit(30) is not None


def test_an_attempt_that_fails_opens_it_for_another_period():
    target = opened(circuit())
    target.failed(target.admit(30), 32)
    assert target.state == OPEN
    assert target.admit(61.9) is None and target.admit(62) is not None


def test_chance_shortens_the_period():
    assert opened(circuit(draw=0.5)).admit(22.4) is None
    assert opened(circuit(draw=0.5)).admit(22.5) is not None


def test_outcomes_of_before_do_not_count():
    target = circuit()
    early = [target.admit(0) for _ in range(5)]
    opened(target)
    target.succeeded(early[0])
    assert target.state == OPEN
    probe = target.admit(30)
    target.failed(early[1], 30)
    target.succeeded(early[2])
    assert target.state == HALF_OPEN
    target.succeeded(probe)
    for ticket in early:
        target.failed(ticket, 31)
    assert target.state == CLOSED


def test_an_attempt_without_an_outcome_is_followed_by_another():
    target = opened(circuit())
    lost = target.admit(30)
    assert target.admit(59.9) is None
    probe = target.admit(60)
    target.succeeded(lost)
    assert target.state == HALF_OPEN
    target.succeeded(probe)
    assert target.state == CLOSED


@given(
    st.lists(st.tuples(st.sampled_from(["ok", "bad", "lost", "wait"]), st.floats(0, 40))),
    st.floats(0, 1, exclude_max=True),
)
def test_random_histories(steps, draw):
    """It always lets somebody through within a period, and one at most while it is not closed."""
    target, now, tries, since = Circuit(RULE, lambda: draw), 0.0, 0, 0.0
    for outcome, more in steps:
        now += more
        if outcome == "wait":
            continue
        before = target.state
        ticket = target.admit(now)
        if ticket is None:
            assert before != CLOSED and now - since < RULE.period_s
            continue
        assert before == CLOSED or target.state == HALF_OPEN
        tries, since = tries + 1, now
        if outcome == "ok":
            target.succeeded(ticket)
            assert target.state == CLOSED
        elif outcome == "bad":
            target.failed(ticket, now)
            assert target.state != HALF_OPEN
