# SPDX-License-Identifier: Apache-2.0
"""The rule that chooses a rank: stays while ranks tie, never where clearly less load is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.chat_key import named_key
from mimo_plugin.core.dp_affinity import MOVED, NEW, STAYED, DpAffinity, rank_load, rank_order


def rule(alone: bool = True, **settings) -> DpAffinity:
    values = {
        "slack_requests": 4,
        "slack_share": 0.25,
        "spread": 1.25,
        "session_ttl_s": 600.0,
        "max_sessions": 1000,
    }
    return DpAffinity(alone=alone, **{**values, **settings})


def key(chat: int) -> int:
    return named_key(str(chat))


@pytest.mark.parametrize("alone", [True, False])
def test_b26_a_chat_stays_while_ranks_tie(alone):
    affinity = rule(alone)
    found = [affinity.choose(key(1), [0.0] * 4, t) for t in range(4)]
    assert len({choice.rank for choice in found}) == 1
    assert [choice.outcome for choice in found] == [NEW, STAYED, STAYED, STAYED]


def test_b26_unrelated_requests_spread_at_once():
    affinity = rule()
    assert {affinity.choose(key(i), [0.0] * 4, i).rank for i in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_b27_sixteen_chats_on_their_ranks(ranks):
    affinity, used = rule(), {}
    for turn in range(4):
        for chat in range(16):
            used.setdefault(chat, set()).add(
                affinity.choose(key(chat), [0.0] * ranks, turn * 16.0 + chat).rank
            )
    assert all(len(places) == 1 for places in used.values())
    load = Counter(next(iter(places)) for places in used.values())
    assert len(load) == ranks and max(load.values()) * ranks / 16 <= 1.25


@given(
    alone=st.booleans(),
    loads=st.lists(st.integers(0, 60).map(float), min_size=1, max_size=9),
    chats=st.lists(st.integers(0, 30), min_size=1, max_size=40),
)
def test_clearly_less_load_always_wins(alone, loads, chats):
    affinity = rule(alone)
    for now_s, chat in enumerate(chats):
        chosen = affinity.choose(key(chat), loads, now_s)
        assert loads[chosen.rank] - min(loads) <= max(4, 0.25 * min(loads))


@given(
    seen=st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=2, max_size=4),
    chat=st.integers(0, 30),
    loads=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9),
)
def test_processes_agree_whatever_they_have_seen(seen, chat, loads):
    chosen = set()
    for before in seen:
        affinity = rule(alone=False)
        for now_s, other in enumerate(before):
            affinity.choose(key(other), [float((other * 7 + r) % 13) for r in range(5)], now_s)
        chosen.add(affinity.choose(key(chat), loads, 100).rank)
    assert len(chosen) == 1


def test_a_loaded_home_sends_its_chats_to_different_ranks():
    affinity, moved = rule(alone=False), set()
    for chat in range(200):
        home = rank_order(key(chat), 5)[0]
        loads = [9.0 if rank == home else 0.0 for rank in range(5)]
        choice = affinity.choose(key(chat), loads, chat)
        assert choice.outcome == MOVED and choice.rank == rank_order(key(chat), 5)[1]
        moved.add(choice.rank)
    assert moved == set(range(5))


def test_the_home_follows_in_a_process_that_is_alone():
    for alone in (True, False):
        affinity = rule(alone)
        home = affinity.choose(key(1), [0.0] * 3, 0).rank
        away = affinity.choose(key(1), [9.0 if r == home else 0.0 for r in range(3)], 1)
        back = affinity.choose(key(1), [0.0] * 3, 2)
        assert away.outcome == MOVED and away.rank != home
        assert back == ((away.rank if alone else home), STAYED)


def test_slack_grows_with_load():
    affinity = rule(alone=False)
    home = rank_order(key(1), 2)[0]
    for extra, outcome in ((25.0, NEW), (26.0, MOVED)):
        loads = [100.0 + (extra if rank == home else 0) for rank in range(2)]
        assert affinity.choose(key(1), loads, 0).outcome == outcome
        affinity = rule(alone=False)


def test_ranks_come_and_go():
    affinity = rule()
    homes = {chat: affinity.choose(key(chat), [0.0] * 4, chat).rank for chat in range(40)}
    fewer = {chat: affinity.choose(key(chat), [0.0] * 3, 50 + chat) for chat in range(40)}
    for chat, choice in fewer.items():
        if homes[chat] < 3:
            assert choice == (homes[chat], STAYED)
        else:
            assert choice.rank < 3 and choice.outcome == NEW
    more = [affinity.choose(key(chat), [0.0] * 4, 200 + chat) for chat in range(40, 60)]
    assert any(choice.rank == 3 for choice in more)


def test_a_rank_more_takes_chats_from_all_and_moves_no_other():
    before = {chat: rank_order(key(chat), 4)[0] for chat in range(2000)}
    after = {chat: rank_order(key(chat), 5)[0] for chat in range(2000)}
    assert all(after[c] in (before[c], 4) for c in before)
    assert {before[c] for c in before if after[c] == 4} == {0, 1, 2, 3}
    assert all(330 < count < 470 for count in Counter(after.values()).values())


def test_silent_chats_are_forgotten_and_count_no_more():
    affinity = rule(session_ttl_s=10.0, max_sessions=5)
    for chat in range(8):
        affinity.choose(key(chat), [0.0] * 2, 0)
    assert len(affinity) == 5 == affinity.chats(0) + affinity.chats(1)
    affinity.choose(key(99), [0.0] * 2, 10.0)
    assert len(affinity) == 1 == affinity.chats(0) + affinity.chats(1)


def test_chats_that_part_stay_where_they_were():
    affinity = rule()
    home = affinity.choose(key(1), [0.0] * 8, 0).rank
    affinity.part([], key(1), 0)
    assert affinity.chats(home) == 1
    affinity.part([key(2), key(3)], key(1), 0)
    assert affinity.chats(home) == 2 == len(affinity)
    assert {affinity.choose(key(chat), [0.0] * 8, 1) for chat in (2, 3)} == {(home, STAYED)}


def test_load_of_a_rank():
    assert rank_load(0, 3, 0.2, 0) == 3
    assert rank_load(2, 3, 0.5, 0) == 11  # one that waits is four
    assert rank_load(2, 3, 1.0, 0) == 17  # and three requests more where memory is full
    assert rank_load(0, 1, 0.0, 5) == 5  # what was sent since the counts came
