# SPDX-License-Identifier: Apache-2.0
"""What is counted of host memory and stores goes out once, in the payload of the scheduler."""

from __future__ import annotations

from mimo_plugin.engines.vllm.tiers.accounting import PERIOD_S, TierAccounting
from mimo_plugin.tiers.store import StoreStats


def stats(**counts):
    names = [name for name in StoreStats.__dataclass_fields__ if name != "bytes_held"]
    held = counts.pop("bytes_held", 0)
    return StoreStats(bytes_held=held, **{**dict.fromkeys(names, 0), **counts})


def counted(payload):
    found = {}
    for name, labels, value in (payload or {"inc": [], "set": []})["inc"]:
        found[(name, *labels)] = value
    return found


def test_hits_misses_and_bytes():
    target = TierAccounting()
    target.looked_up(100, 60, 40)
    target.cut(5)
    target.found_in_host(30)
    target.found_in_host(0)
    target.moved("read", "full", 7)
    target.host_moved("written", "draft", 8)
    target.host_moved("read", "swa", 0)
    target.pages("repaired", 2)
    target.pages("dropped", 0)
    payload = target.drain()
    assert counted(payload) == {
        ("tier_hit_tokens",): 40,
        ("tier_missed_tokens", "absent"): 40,
        ("tier_missed_tokens", "no_window"): 20,
        ("tier_missed_tokens", "host_capacity"): 5,
        ("tier_host_hit_tokens",): 30,
        ("tier_bytes", "read", "full"): 7,
        ("tier_host_bytes", "written", "draft"): 8,
        ("tier_pages", "repaired"): 2,
    }
    assert payload["set"] == [] and target.drain() is None


def test_stores_are_asked_once_in_a_period_and_counted_together():
    now, found = [0.0], [stats(pages_put=2, bytes_held=10), stats(pages_put=3, stores_down=1)]
    target = TierAccounting([lambda: found[0], lambda: found[1]], lambda: now[0])
    first = target.drain()
    assert counted(first) == {("tier_pages", "written"): 5}
    assert sorted(first["set"]) == [["tier_held_bytes", [], 10], ["tier_stores_down", [], 1]]
    found[0] = stats(pages_put=9, pages_missed=1, calls_failed=4)
    assert target.drain() is None
    now[0] += PERIOD_S
    found[1] = stats(pages_put=3, bytes_held=None)
    second = target.drain()
    assert counted(second) == {
        ("tier_pages", "written"): 7,
        ("tier_pages", "missed"): 1,
        ("tier_failed_calls",): 4,
    }
    assert second["set"] == [["tier_stores_down", [], 0]]
