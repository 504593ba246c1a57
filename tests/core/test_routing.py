# SPDX-License-Identifier: Apache-2.0
"""Routing: costs by hand, ties, sessions, reservations, media, roles, and that load stays even."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.kv_events import BlockStored
from mimo_plugin.core.load import Load, Speed
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.residency import ResidencyIndex
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import NoTargetError, Request, Target

UNIT = 16
SPEED = Speed(PrefillCost(1e9), tokens_per_s=1000.0, fixed_s=0.0)  # 1 ms a token


def prompt(*parts):
    """Hashes of a prompt of parts (name, blocks)."""
    found, so_far = [], 0
    for name, blocks in parts:
        for index in range(blocks):
            so_far = hash((so_far, name, index))
            found.append(so_far)
    return found


def request(name, hashes, **more):
    return Request(name, hashes, len(hashes) * UNIT + 1, **more)


class Fleet:
    """A router whose workers keep what they were sent, at once, as their events would say."""

    def __init__(self, names="abcd", *, seed=0, every_block=True, events=True, **settings):
        self.index = ResidencyIndex(UNIT)
        self.reservations = Reservations(UNIT, UNIT, every_block=every_block)
        self.router = Router(
            self.index.lookup, self.reservations, SPEED, random.Random(seed), **settings
        )
        self.seq = Counter()
        self.events = events
        for name in names:
            self.router.set_target(Target(name))

    def holds(self, name, hashes):
        event = BlockStored(hashes, None, len(hashes) * UNIT, UNIT)
        self.index.apply(name, self.seq[name], [event])
        self.seq[name] += 1

    def send(self, asked, now_s, **how):
        decision = self.router.choose(asked, now_s, **how)
        self.router.sent(asked, decision, now_s)
        return decision

    def serve(self, asked, now_s):
        """Send, and be done before anything else happens."""
        decision = self.send(asked, now_s)
        if self.events:
            self.holds(decision.target, asked.hashes)
        self.router.first_token(asked, now_s)
        self.router.done(asked, now_s)
        return decision


# Costs


def test_the_cost_is_wait_and_prefill_and_what_it_costs_others():
    fleet = Fleet("ab", queue_weight=1.0)
    fleet.holds("a", prompt(("chat", 40)))
    fleet.send(request("1", prompt(("x", 20))), 0.0, exclude="b")  # a: 321 tokens
    fleet.send(request("2", prompt(("y", 10))), 0.0, exclude="a")  # b: 161 tokens
    asked = request("3", prompt(("chat", 50)))  # 801 tokens, 640 of them on a
    by_name = {c.target: c for c in fleet.router.choose(asked, 0.1).candidates}
    assert (by_name["a"].hit_tokens, by_name["b"].hit_tokens) == (640, 0)
    assert by_name["a"].wait_s == pytest.approx(0.221)
    assert by_name["a"].cost == pytest.approx(0.221 + 2 * 0.161)  # one in flight on each
    assert by_name["b"].cost == pytest.approx(0.061 + 2 * 0.801)
    decision = fleet.router.choose(asked, 0.1)
    assert (decision.target, decision.reason, decision.queue) == ("a", "cost", 1.0)
    assert decision.chosen == by_name["a"]


def test_a_long_queue_outweighs_a_hit():
    fleet = Fleet("ab")
    fleet.holds("a", prompt(("chat", 10)))
    fleet.send(request("1", prompt(("x", 100))), 0.0, exclude="b")
    assert fleet.router.choose(request("2", prompt(("chat", 11))), 0.0).target == "b"
    # Its queue has been worked off; the hit decides.
    assert fleet.router.choose(request("2", prompt(("chat", 11))), 1.6).target == "a"


def test_what_a_prefill_costs_those_behind_it_counts():
    """An idle node would be the first choice but for the others' waiting."""
    targets = []
    for weight in (0.0, 1.0):
        fleet = Fleet("ab", queue_weight=weight)
        fleet.holds("a", prompt(("chat", 40)))
        fleet.send(request("1", prompt(("x", 50))), 0.0, exclude="b")
        targets.append(fleet.router.choose(request("2", prompt(("chat", 41))), 0.0).target)
    assert targets == ["b", "a"]  # 0.801 + 0.017 against 0.657; half a request more each


def test_a_wait_is_the_queue_behind_the_one_that_runs():
    load = Load()
    load.start("1", 2.0, 10.0)
    load.start("2", 3.0, 10.5)
    assert load.wait_s(11.0) == pytest.approx(4.0)
    assert load.wait_s(20.0) == pytest.approx(3.0)  # the first is late; the second was not begun
    load.prefilled("2", 11.0)  # overtook it
    assert load.wait_s(11.0) == pytest.approx(1.0)
    load.start("3", 5.0, 11.0)
    load.prefilled("1", 14.0)
    assert (load.wait_s(15.0), load.in_flight) == (pytest.approx(4.0), 1)
    load.end("3", 16.0)
    load.end("3", 16.0)
    assert (load.wait_s(16.0), load.in_flight) == (0.0, 0)
    assert load.recent_work_s(11.0 + 60.0) == pytest.approx(load.recent_work_s(11.0) / 2)


# Ties


def test_chance_decides_among_equals():
    seen = Counter(
        Fleet(seed=seed).router.choose(request("1", prompt(("x", 5))), 0.0).target
        for seed in range(200)
    )
    assert set(seen) == set("abcd") and min(seen.values()) > 25
    assert Fleet().router.choose(request("1", prompt(("x", 5))), 0.0).reason == "chance"


def test_a_cold_start_spreads():
    """40 cold prompts one after the other, each done before the next one comes."""
    fleet = Fleet()
    seen = Counter(
        fleet.serve(request(str(i), prompt((f"cold {i}", 20))), float(i)).target for i in range(40)
    )
    assert max(seen.values()) <= 1.25 * 40 / 4


def test_a_session_stays_while_workers_tie():
    """Case B26: four idle ranks, four turns of one chat, no events; then somebody else."""
    fleet = Fleet("", events=False)
    for rank in range(4):
        fleet.router.set_target(Target("http://w:8000", rank))
    turns = [
        fleet.serve(request(f"t{turn}", prompt(("chat", 4 + turn)), session="chat"), float(turn))
        for turn in range(4)
    ]
    assert len({turn.target for turn in turns}) == 1
    assert [turn.reason for turn in turns[1:]] == ["session"] * 3
    home = turns[0].target
    others = {fleet.serve(request(f"u{i}", prompt((f"u{i}", 4))), 5.0 + i).target for i in range(3)}
    assert len(others) == 3 and home not in others
    # A lower load always wins.
    fleet.send(request("v", prompt(("v", 1))), 10.0, exclude=set(fleet.router.targets) - {home})
    fifth = fleet.router.choose(request("t5", prompt(("chat", 9)), session="chat"), 10.0)
    assert fifth.target != home


@pytest.mark.parametrize("events", [True, False], ids=["events", "no events"])
@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_with_a_common_head_stick_and_spread(events, together, seed):
    """Case B27: 16 sessions with the same first 4K tokens, different bodies."""
    fleet = Fleet(seed=seed, events=events)
    rnd, homes, now_s = random.Random(seed), {}, 0.0
    work = Counter()
    for turn in range(4):
        order = [f"s{i}" for i in range(16)]
        rnd.shuffle(order)
        asked = {
            s: request(f"{s}.{turn}", prompt(("head", 256), (s, 20 * (turn + 1))), session=s)
            for s in order
        }
        if together and turn == 0:
            for name in order:
                homes[name] = fleet.send(asked[name], now_s).target
                work[homes[name]] += 1
            for name in order:
                fleet.holds(homes[name], asked[name].hashes)
                fleet.router.first_token(asked[name], now_s + 60)
                fleet.router.done(asked[name], now_s + 60)
        else:
            for name in order:
                now_s += 1  # longer than a reservation outlives its request
                target = fleet.serve(asked[name], now_s + 60).target
                assert homes.setdefault(name, target) == target
                work[target] += 1
        now_s += 100
    assert max(work.values()) <= 1.25 * sum(work.values()) / 4
    assert max(Counter(homes.values()).values()) <= 5


def test_a_prefix_without_windows_breaks_a_tie():
    """No hit anywhere; the worker that has the full attention of it will learn the junction."""
    index = ResidencyIndex(UNIT)
    shared = prompt(("system", 10))
    window = BlockStored([], None, 0, UNIT, 1, "sliding_window", 2 * UNIT)
    for name in "abcd":
        index.apply(name, 0, [window])
    index.apply("c", 1, [BlockStored(shared, None, 10 * UNIT, UNIT, 0)])
    router = Router(
        index.lookup,
        Reservations(UNIT, UNIT, every_block=False),
        SPEED,
        random.Random(0),
        prefixes=index.full_prefixes,
    )
    for name in "abcd":
        router.set_target(Target(name))
    asked = request("1", [*shared, 1, 2])
    decision = router.choose(asked, 0.0)
    assert (decision.target, decision.reason) == ("c", "prefix")
    assert decision.chosen.hit_tokens == 0
    # What is known to nobody goes by work and chance as before.
    assert router.choose(request("2", prompt(("new", 5))), 0.0).reason == "chance"
    router.sent(asked, decision, 0.0)
    assert router.choose(request("3", [*shared, 3]), 0.0).target != "c"  # not for a wait


def test_many_sessions_of_one_prompt_do_not_wait_for_the_bound():
    """The bound takes away the pull of a hit; it sends nobody into a queue."""
    fleet = Fleet("ab")
    for i in range(4):
        fleet.send(request(f"long{i}", prompt((f"long{i}", 200))), 0.0, exclude="b")
    seen = {
        fleet.serve(request(f"s{i}", prompt((f"s{i}", 2)), session=f"s{i}"), 0.0).target
        for i in range(8)
    }
    assert seen == {"b"}


def test_silent_sessions_are_forgotten():
    fleet = Fleet("ab", session_ttl_s=10.0, max_sessions=5)
    for i in range(20):
        fleet.serve(request(str(i), prompt((f"{i}", 2)), session=f"s{i}"), 0.0)
    assert len(fleet.router._sessions) == 5 and fleet.router._homes.total() == 5
    fleet.router.choose(request("x", prompt(("x", 2))), 20.0)
    assert not fleet.router._sessions and fleet.router._homes.total() == 0


# Reservations


def test_a_request_on_its_way_counts_as_a_hit():
    fleet = Fleet("ab", events=False)
    first = fleet.send(request("1", prompt(("head", 100), ("x", 2))), 0.0).target
    second = request("2", prompt(("head", 100), ("y", 2)))
    decision = fleet.router.choose(second, 1.6)
    assert decision.target == first
    assert (decision.chosen.hit_tokens, decision.chosen.reserved) == (1600, True)


def test_reservations_expire():
    fleet = Fleet("ab", events=False, reservation_s=10.0, grace_s=0.5)
    asked = request("1", prompt(("head", 100)))
    fleet.send(asked, 0.0)
    again = request("2", prompt(("head", 100), ("y", 1)))

    def most(now_s):
        return max(c.hit_tokens for c in fleet.router.choose(again, now_s).candidates)

    assert most(10.0) == 1600
    assert most(2 * 1.601 + 10.1) == 0 and len(fleet.reservations) == 0  # it was lost somewhere
    fleet.send(asked, 20.0)
    fleet.router.first_token(asked, 21.0)
    assert (most(21.4), most(21.6)) == (1600, 0)  # from here on the events tell
    fleet.send(asked, 30.0)
    fleet.router.done(asked, 30.1, failed=True)
    assert most(30.1) == 0 and len(fleet.reservations) == 0


def test_the_last_token_is_always_computed():
    fleet = Fleet("a")
    hashes = prompt(("chat", 10))
    fleet.holds("a", hashes)
    asked = Request("1", hashes, 10 * UNIT)
    assert fleet.router.choose(asked, 0.0).chosen.hit_tokens == 9 * UNIT


def test_a_late_first_token_does_not_bring_back_what_has_expired():
    kept = Reservations(UNIT, UNIT, every_block=True)
    kept.add("1", "a", prompt(("x", 4)), 5.0, prompt_tokens=4 * UNIT)
    kept.expire("1", 50.0)
    assert kept.lookup(prompt(("x", 4)), 1000, 4.0) == {"a": 4 * UNIT}
    assert kept.lookup(prompt(("x", 4)), 1000, 6.0) == {}


def test_with_sliding_windows_a_hit_on_its_way_ends_where_a_window_is_kept():
    kept = Reservations(UNIT, 2 * UNIT, every_block=False)
    mine = prompt(("head", 10), ("x", 11))
    kept.add("1", "a", mine, 9.0, (10 * UNIT, 7 * UNIT), prompt_tokens=21 * UNIT)
    other = prompt(("head", 10), ("y", 30))
    assert kept.lookup(other, 1000, 0.0) == {"a": 10 * UNIT}
    assert kept.lookup(other, 10 * UNIT - 1, 0.0) == {"a": 6 * UNIT}  # aligned to two blocks
    assert kept.lookup([*mine, 7], 1000, 0.0) == {"a": 20 * UNIT}  # the prompt's own end
    assert kept.lookup(prompt(("head", 5), ("z", 9)), 1000, 0.0) == {}
    assert kept.lookup(other, 1000, 9.0) == {} and len(kept) == 0


def test_the_window_at_a_prompts_end_is_where_the_same_prompt_would_hit():
    """Its last token is always computed; and of a prompt that is known in part the end is not."""
    kept = Reservations(UNIT, 2 * UNIT, every_block=False)
    hashes = prompt(("x", 8))
    for tokens, hit in ((8 * UNIT, 6), (8 * UNIT + 1, 8), (9 * UNIT, 8), (50 * UNIT, 0)):
        kept.add("1", "a", hashes, 9.0, prompt_tokens=tokens)
        expected = {"a": hit * UNIT} if hit else {}
        assert kept.lookup(prompt(("x", 8), ("y", 4)), 1000, 0.0) == expected, tokens
    assert len(kept) == 0, "where nothing can hit, nothing is kept"


@settings(max_examples=100)
@given(data=st.data())
def test_reserved_hits_are_common_prefixes(data):
    """Against comparing block by block; and nothing is left of what was released."""
    every, aligned = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, 3]))
    kept = Reservations(UNIT, aligned * UNIT, every_block=every)
    words = st.lists(st.sampled_from("ab"), max_size=10)
    prompts = {}
    for number in range(data.draw(st.integers(0, 6))):
        hashes = prompt(*[(word, 1) for word in data.draw(words)])
        ends = data.draw(st.lists(st.integers(0, 12).map(lambda n: n * UNIT), max_size=2))
        name = str(number % 4)
        tokens = len(hashes) * UNIT + data.draw(st.integers(0, UNIT))
        kept.add(name, f"w{number % 2}", hashes, 1.0, ends, prompt_tokens=tokens)
        prompts[name] = f"w{number % 2}", hashes, [*ends, max(0, tokens - 1)]
    asked = prompt(*[(word, 1) for word in data.draw(words)])
    limit = data.draw(st.integers(0, 12)) * UNIT
    expected = {}
    for target, hashes, ends in prompts.values():
        common = 0
        for a, b in zip(asked, hashes, strict=False):
            if a != b:
                break
            common += 1
        common = min(common, limit // UNIT) // aligned * aligned
        if not every:
            possible = {end // UNIT // aligned * aligned for end in ends}
            common = max((n for n in possible if n <= common), default=0)
        if common:
            expected[target] = max(expected.get(target, 0), common * UNIT)
    assert kept.lookup(asked, limit, 0.0) == expected
    for name in prompts:
        kept.release(name)
    assert len(kept) == 0 and not kept._by_start


# Media, roles, workers that come and go


def test_media_go_to_their_owner_and_come_back_to_it():
    fleet = Fleet(events=False)
    owners = {
        key: fleet.serve(request(key, prompt((key, 2)), media_keys=[key]), 0.0).target
        for key in [f"image {i}" for i in range(200)]
    }
    assert min(Counter(owners.values()).values()) > 25
    fleet.router.drain("a")
    for key, owner in owners.items():
        # Another chat, long after the first one: only the medium is the same.
        decision = fleet.serve(request(key, prompt((f"{key} again", 2)), media_keys=[key]), 99.0)
        assert decision.target == owner or owner == "a"
        assert decision.reason == "cost"
        assert [c.media_s for c in decision.candidates] == [0.0, 0.2, 0.2]


def test_a_popular_medium_overloads_nobody():
    fleet = Fleet("abcdefgh")
    for name in "abcdefgh":
        fleet.router.set_target(Target(name, role="encode"))
    seen = Counter()
    for i in range(160):
        asked = request(str(i), prompt((f"{i}", 1)), media_keys=["the same"])
        seen[fleet.send(asked, 0.0, role="encode").target] += 1
        assert max(seen.values()) <= 1.25 * (sum(seen.values()) + 1) / 8 + 1
    assert len(seen) >= 7


def test_roles():
    fleet = Fleet("")
    for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"), ("b", "both")):
        fleet.router.set_target(Target(name, role=role))
    asked = request("1", prompt(("x", 10)))
    decision = fleet.router.choose(asked, 0.0)
    assert {c.target for c in decision.candidates} == {"p", "b"}
    fleet.router.sent(asked, decision, 0.0)
    fleet.router.first_token(asked, 1.0, decode_on="d")
    assert fleet.router.loads["d"].decode_tokens == 161
    other = fleet.router.choose(request("2", prompt(("y", 1))), 1.0, role="decode")
    assert {c.target for c in other.candidates} == {"d", "e", "b"} and other.target != "d"
    fleet.router.done(asked, 2.0)
    assert fleet.router.loads["d"].decode_tokens == 0
    with pytest.raises(NoTargetError, match="no target for encode: 4 known"):
        fleet.router.choose(asked, 0.0, role="encode")
    with pytest.raises(ValueError, match="role: found 'both'"):
        fleet.router.choose(asked, 0.0, role="both")
    with pytest.raises(ValueError, match="role: found 'x'"):
        Target("w", role="x")


def test_a_drained_worker_gets_nothing_on_any_rank():
    fleet = Fleet("")
    for worker in ("v", "w"):
        for rank in range(2):
            fleet.router.set_target(Target(worker, rank))
    fleet.holds("w#1", prompt(("chat", 50)))
    asked = request("1", prompt(("chat", 60)), session="s")
    assert fleet.serve(asked, 0.0).target == "w#1"
    fleet.router.drain("w")
    for i in range(20):
        again = request(f"r{i}", prompt(("chat", 60)), session="s")
        assert fleet.serve(again, 1.0).target.startswith("v#")
    fleet.router.drain("v")
    with pytest.raises(NoTargetError, match="4 drained"):
        fleet.router.choose(asked, 2.0)
    fleet.router.drain("w", False)
    assert fleet.router.choose(asked, 2.0).target == "w#1"
    assert fleet.router.choose(asked, 2.0, exclude=["w#1"]).reason == "only"


def test_a_removed_worker_takes_its_load_and_reservations_with_it():
    fleet = Fleet("ab", events=False)
    asked = request("1", prompt(("x", 50)), session="s")
    name = fleet.send(asked, 0.0).target
    fleet.router.remove_target(name)
    fleet.router.first_token(asked, 1.0)
    fleet.router.done(asked, 1.0)
    assert len(fleet.reservations) == 0 and name not in fleet.router.loads
    assert fleet.router.choose(request("2", prompt(("x", 51)), session="s"), 0.0).target != name


@settings(max_examples=60)
@given(data=st.data())
def test_nothing_is_left_when_all_is_done(data):
    """Any order of sending, retrying, first tokens and ends: loads come back to zero."""
    fleet, flying, now_s = Fleet("abc"), {}, 0.0
    for number in range(data.draw(st.integers(1, 30))):
        now_s += data.draw(st.sampled_from([0.0, 0.01, 1.0]))
        act = data.draw(st.sampled_from(["send", "send", "retry", "first", "done"]))
        if act == "send":
            name = data.draw(st.sampled_from("xyz"))
            asked = request(str(number), prompt((name, 1 + number % 7)), session=name)
            flying[asked.id] = asked
            fleet.send(asked, now_s)
        elif flying:
            asked = flying[data.draw(st.sampled_from(sorted(flying)))]
            if act == "retry":
                fleet.send(asked, now_s, exclude=data.draw(st.sampled_from("abc")))
            elif act == "first":
                fleet.router.first_token(asked, now_s)
            else:
                fleet.router.done(flying.pop(asked.id), now_s, failed=data.draw(st.booleans()))
    for asked in flying.values():
        fleet.router.done(asked, now_s)
    assert not fleet.router._where
    for load in fleet.router.loads.values():
        assert (load.in_flight, load.decode_tokens, load.wait_s(now_s)) == (0, 0, 0.0)
    last = request("last", prompt(("x", 9)))
    fleet.router.choose(last, now_s + 1e6)
    for name in "yz":
        fleet.router.choose(request("last", prompt((name, 9))), now_s + 1e6)
    assert len(fleet.reservations) == 0


# What other routers did


def elsewhere(fleet, number, target="a", blocks=10, at_s=0.0, session=None):
    asked = request(f"p/{number}", prompt((f"e{number}", blocks)), session=session)
    fleet.router.sent_elsewhere(asked, target, 0.5, 0.5, at_s)
    return asked


def test_what_another_router_sent_counts_like_ones_own():
    own, other = Fleet("ab", events=False), Fleet("ab", events=False)
    asked = request("p/1", prompt(("x", 50)), session="s")
    decision = own.send(asked, 1.0, exclude="b")
    other.router.sent_elsewhere(asked, "a", decision.chosen.prefill_s, decision.chosen.cost, 1.0)
    for fleet in (own, other):
        load = fleet.router.loads["a"]
        assert (load.in_flight, load.wait_s(1.2)) == (1, pytest.approx(0.601))
        again = fleet.router.choose(request("2", prompt(("x", 60)), session="s"), 1.2)
        by_name = {c.target: c for c in again.candidates}
        assert (by_name["a"].hit_tokens, by_name["a"].reserved) == (800, True)
        assert fleet.router.sessions() == [("s", "a", 1.0)]
    other.router.first_token_elsewhere("p/1", 801, 2.0)
    assert (load.in_flight, load.decode_tokens) == (0, 801)
    other.router.done_elsewhere("p/1", 3.0)
    assert load.decode_tokens == 0 and not other.router._where and not other.router._elsewhere


def test_news_may_come_late_twice_or_of_what_is_not_known():
    fleet = Fleet("a", events=False)
    fleet.router.done_elsewhere("p/1", 0.0)  # before it was sent
    elsewhere(fleet, 1)
    assert fleet.router.loads["a"].in_flight == 0 and not fleet.router._over
    fleet.router.first_token_elsewhere("p/2", 10, 0.0)  # of a request that nobody sent
    assert fleet.router.loads["a"].decode_tokens == 0
    for _ in range(2):
        elsewhere(fleet, 3)
    assert fleet.router.loads["a"].recent_work_s(0.0) == pytest.approx(0.5)
    for _ in range(2):
        fleet.router.first_token_elsewhere("p/3", 10, 1.0, decode_on="nobody")
        fleet.router.done_elsewhere("p/3", 2.0)
    assert fleet.router.loads["a"].in_flight == 0
    # A target that others know first is nobody's choice, and has its load when it comes.
    elsewhere(fleet, 4, "b")
    assert fleet.router.choose(request("5", prompt(("y", 1))), 0.0).reason == "only"
    fleet.router.set_target(Target("b"))
    assert fleet.router.loads["b"].in_flight == 1
    elsewhere(fleet, 6, "c")
    fleet.router.done_elsewhere("p/6", 1.0)
    assert "c" not in fleet.router.loads


def test_a_router_that_is_gone_takes_along_only_what_it_sent():
    fleet = Fleet("ab", events=False)
    mine = fleet.send(request("p", prompt(("mine", 5))), 0.0).target
    for number in range(5):
        elsewhere(fleet, number, session=f"s{number}")
    fleet.router.sent_elsewhere(request("pq/1", prompt(("z", 5))), "b", 1.0, 1.0, 0.0)
    fleet.router.release_process("p/", 1.0)
    assert sum(load.in_flight for load in fleet.router.loads.values()) == 2
    assert mine in "ab" and set(fleet.router._elsewhere) == {"pq/1"}
    assert len(fleet.reservations) == 2 and len(fleet.router.sessions()) == 5


def test_later_news_of_a_session_counts():
    fleet = Fleet("ab", events=False)
    fleet.router.session_elsewhere("s", "a", 5.0)
    fleet.router.session_elsewhere("s", "b", 4.0)
    assert fleet.router.sessions() == [("s", "a", 5.0)]
    elsewhere(fleet, 1, "b", at_s=6.0, session="s")
    assert fleet.router.sessions() == [("s", "b", 6.0)]
    assert +fleet.router._homes == Counter("b")


def test_what_is_known_of_others_is_bounded():
    fleet = Fleet("a", events=False, max_elsewhere=10, max_sessions=7)
    for number in range(30):
        elsewhere(fleet, number, session=f"s{number}")
    assert fleet.router.loads["a"].in_flight == len(fleet.router._elsewhere) == 10
    assert len(fleet.router.sessions()) == 7 and len(fleet.router._where) == 10
    for number in range(20_000):
        fleet.router.done_elsewhere(f"q/{number}", 1.0)
    assert len(fleet.router._over) == 10_000
