# SPDX-License-Identifier: Apache-2.0
"""One look-up over exact and approximate targets, and the requests that it follows."""

from __future__ import annotations

import random

from mimo_plugin.core.beliefs import Cache
from mimo_plugin.core.block_hashes import block_hashes
from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.engine_events import EngineStored
from mimo_plugin.core.load import Speed
from mimo_plugin.core.lookups import Exactness, Lookups
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Request, Target

UNIT = 16
TOKENS = [*range(20 * UNIT)]
HASHES = block_hashes(TOKENS, UNIT)
LENGTH = len(TOKENS)


def request(name="r", length=LENGTH):
    return Request(name, HASHES[: length // UNIT], length)


def told(first, last):
    """An event; the names are the engine's own."""
    names = [-1 - at for at in range(first, last)]
    parent = -first if first else None
    return EngineStored(names, parent, TOKENS[first * UNIT : last * UNIT], UNIT)


def lookups_for():
    lookups = Lookups(UNIT, clock=lambda: 0.0)
    lookups.add_exact("exact")
    lookups.add_approximate("events", Cache(told=True), window_tokens=3 * UNIT)
    lookups.add_approximate("blind", Cache())
    return lookups


def test_each_kind_answers_for_its_own():
    lookups = lookups_for()
    lookups.index("exact").apply("exact", 0, [told(0, 12)])
    lookups.index("events").apply("events", 0, [told(0, 10)])
    lookups.sent(request(length=8 * UNIT), "blind", 1.0)
    lookups.first_token(request(length=8 * UNIT), 2.0)
    wanted = {"exact": 12 * UNIT, "events": 10 * UNIT, "blind": 8 * UNIT}
    assert lookups.lookup(HASHES, LENGTH) == wanted
    assert lookups.lookup(HASHES, 9 * UNIT) == {"exact": 9 * UNIT, "blind": 8 * UNIT}
    assert lookups.prefixes(HASHES, 9 * UNIT) == {**wanted, "exact": 9 * UNIT, "events": 9 * UNIT}
    lookups.remove("exact")
    lookups.remove("blind")
    lookups.remove("never there")
    assert lookups.lookup(HASHES, LENGTH) == {"events": 10 * UNIT}


def test_what_is_exact_is_said():
    lookups = lookups_for()
    found = {name: lookups.exactness(name) for name in ("exact", "events", "blind")}
    assert found == {
        "exact": Exactness("events", "events"),
        "events": Exactness("events", "believed"),
        "blind": Exactness("believed", "none"),
    }
    assert [e.exact for e in found.values()] == [True, False, False]
    full = Lookups(UNIT)
    full.add_approximate("w", Cache(told=True))
    assert full.exactness("w").exact  # no windows to be believed


def test_a_request_is_followed_until_it_is_done():
    lookups = lookups_for()
    assert lookups.done(request(), 0.5, cached_tokens=0) is None  # not sent
    lookups.sent(request(), "blind", 1.0)
    assert lookups.lookup(HASHES, LENGTH) == {}
    lookups.first_token(request(), 2.0)
    assert lookups.done(request(), 3.0, cached_tokens=4 * UNIT, output_tokens=5) == 0
    assert lookups.done(request(), 3.0, cached_tokens=0) is None  # once
    lookups.sent(request("again"), "blind", 4.0)
    assert lookups.done(request("again"), 5.0, cached_tokens=LENGTH - UNIT) == LENGTH - UNIT
    lookups.sent(request("third"), "blind", 6.0)
    assert lookups.done(request("third"), 7.0, cached_tokens=0) == LENGTH - UNIT
    assert lookups.index("blind").corrections == {"less": 1, "same": 1, "more": 1}


def test_a_failed_request_teaches_nothing():
    lookups = lookups_for()
    lookups.sent(request(), "blind", 1.0)
    lookups.done(request(), 2.0)
    assert lookups.lookup(HASHES, LENGTH) == {}


def test_exact_targets_are_not_followed():
    lookups = lookups_for()
    lookups.sent(request(), "exact", 1.0)
    lookups.first_token(request(), 2.0)
    assert lookups.done(request(), 3.0, cached_tokens=64) is None
    assert lookups.lookup(HASHES, LENGTH) == {}


def test_a_target_may_become_another():
    lookups = lookups_for()
    lookups.sent(request(), "blind", 1.0)
    lookups.first_token(request(), 2.0)
    lookups.add_approximate("blind", Cache(capacity_tokens=4 * UNIT))
    assert lookups.lookup(HASHES, LENGTH) == {"blind": 4 * UNIT}
    lookups.add_approximate("blind", Cache(told=True))  # its events will tell
    assert lookups.lookup(HASHES, LENGTH) == {}
    lookups.add_exact("blind")
    assert lookups.exactness("blind").exact
    lookups.index("blind").apply("blind", 0, [told(0, 3)])
    assert lookups.lookup(HASHES, LENGTH) == {"blind": 3 * UNIT}


def test_requests_that_never_end_are_forgotten():
    lookups = Lookups(UNIT, max_in_flight=2)
    lookups.add_approximate("w", Cache())
    for number in range(4):
        lookups.sent(request(str(number)), "w", 1.0)
    done = [lookups.done(request(str(n)), 2.0, cached_tokens=0) for n in range(4)]
    assert done == [None, None, 0, 0]


def test_a_router_routes_by_it():
    lookups = lookups_for()
    router = Router(
        lookups.lookup,
        Reservations(UNIT, UNIT, every_block=False),
        Speed(PrefillCost(100_000)),
        random.Random(0),
        prefixes=lookups.prefixes,
    )
    for name in ("exact", "events", "blind"):
        router.set_target(Target(name))
    lookups.index("events").apply("events", 0, [told(0, 19)])
    decision = router.choose(request(), 0.0)
    assert (decision.target, decision.chosen.hit_tokens) == ("events", 19 * UNIT)
