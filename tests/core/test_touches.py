# SPDX-License-Identifier: Apache-2.0
"""A key is touched once in an interval, and what is remembered is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.touches import Touches

calls = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 9), max_size=12)))


@given(calls, st.integers(0, 20))
def test_with_memory_enough_each_key_is_due_once_in_an_interval(calls, interval):
    target, now, last = Touches(interval, 10), 0, {}
    for step, keys in calls:
        now += step
        expected = []
        for key in keys:
            if (key not in last or now - last[key] >= interval) and key not in expected:
                expected.append(key)
        last.update(dict.fromkeys(expected, now))
        assert target.due(keys, now) == expected


@given(calls, st.integers(1, 20), st.integers(1, 5))
def test_memory_is_bounded_and_only_makes_keys_due_sooner(calls, interval, most):
    target, now, history = Touches(interval, most), 0, []
    for step, keys in calls:
        now += step
        found = target.due(keys, now)
        assert len(target) <= most and len(found) == len(set(found))
        for key in dict.fromkeys(keys):
            before = [i for i, (at, k) in enumerate(history) if k == key and now - at < interval]
            if key not in found:
                assert before, "held back though it was not due lately"
            elif before:
                # Forgotten only because so many others came behind it.
                others = {k for _, k in history[before[-1] + 1 :]}
                assert len(others) >= most
        history += [(now, key) for key in found]


def test_the_newest_are_remembered():
    target = Touches(10.0, 2)
    assert target.due("abc", 0.0) == ["a", "b", "c"]
    assert target.due("cba", 1.0) == ["a"]
    assert target.due("ab", 2.0) == ["b"]


def test_an_interval_of_nothing_is_always_due():
    target = Touches(0.0, 4)
    assert target.due("aab", 1.0) == target.due("aab", 1.0) == ["a", "b"]


@pytest.mark.parametrize(("interval_s", "most_keys"), [(-1.0, 1), (0.0, 0)])
def test_what_makes_no_sense(interval_s, most_keys):
    with pytest.raises(AssertionError):
        Touches(interval_s, most_keys)
