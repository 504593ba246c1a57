# SPDX-License-Identifier: Apache-2.0
"""What is counted of the store reaches Prometheus once, and only where metrics are on."""

from __future__ import annotations

from typing import Any

from mimo_plugin.engines.sglang.storage.accounting import PERIOD_S, TierAccounting
from mimo_plugin.engines.tier_accounting import NAMES
from mimo_plugin.metrics import SPECS, TIER_MISSES, TIER_PAGES
from mimo_plugin.tiers.store import StoreStats


class Sink:
    """Adds up what is applied."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], float] = {}

    def apply(self, payload: dict[str, Any], engine_idx: int) -> None:
        for name, labels, value in payload["inc"]:
            key = (name, *labels)
            self.found[key] = self.found.get(key, 0) + value
        for name, labels, value in payload["set"]:
            self.found[(name, *labels)] = value


def stats(**counts: int) -> StoreStats:
    names = [name for name in StoreStats.__dataclass_fields__ if name != "bytes_held"]
    held = counts.pop("bytes_held", 0)
    return StoreStats(bytes_held=held, **{**dict.fromkeys(names, 0), **counts})


def accounting() -> tuple[TierAccounting, Sink, list[float]]:
    now, sink = [0.0], Sink()
    return TierAccounting(lambda: sink, lambda: now[0]), sink, now  # type: ignore[arg-type, return-value]


def test_every_asked_token_is_a_hit_or_a_miss_with_one_reason() -> None:
    target, sink, _ = accounting()
    target.looked_up(100, 100, 100)
    target.looked_up(100, 60, 40)
    target.looked_up(100, 0, 0)
    target.cut(30)
    target.cut(0)
    target.flush(stats)
    assert sink.found["tier_hit_tokens",] == 140
    misses = {reason: sink.found["tier_missed_tokens", reason] for reason in TIER_MISSES}
    assert misses == {"absent": 140, "no_window": 20, "host_capacity": 30}


def test_bytes_by_direction_and_kind() -> None:
    target, sink, _ = accounting()
    target.moved("read", "swa", 5)
    target.moved("read", "swa", 6)
    target.moved("written", "full", 7)
    target.moved("written", "full", 0)
    target.flush(stats)
    found = {key[1:]: value for key, value in sink.found.items() if key[0] == "tier_bytes"}
    assert found == {("read", "swa"): 11, ("written", "full"): 7}


def test_the_stores_own_counts_are_added_once() -> None:
    target, sink, now = accounting()
    target.flush(lambda: stats(pages_put=3, pages_damaged=1, bytes_held=9))
    # Too soon: the store is not even asked.
    target.flush(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    now[0] += PERIOD_S
    target.flush(lambda: stats(pages_put=5, pages_damaged=1, bytes_held=8))
    assert sink.found == {
        ("tier_pages", "written"): 5,
        ("tier_pages", "damaged"): 1,
        ("tier_held_bytes",): 8,
        ("tier_stores_down",): 0,
    }


def test_failing_stores_show() -> None:
    target, sink, now = accounting()
    target.flush(lambda: stats(calls_failed=3, stores_down=1))
    now[0] += PERIOD_S
    target.flush(lambda: stats(calls_failed=5, stores_down=2))
    assert sink.found["tier_failed_calls",] == 5
    assert sink.found["tier_stores_down",] == 2


def test_where_another_rank_speaks_nothing_is_made() -> None:
    target = TierAccounting(None)
    target.looked_up(10, 10, 10)
    target.flush(lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_names_and_labels_are_those_of_the_table() -> None:
    store = {name for name in SPECS if name.startswith("tier_")}
    assert {name for name in store if not name.startswith(("tier_host_", "tier_adopted_"))} == NAMES
    fields = [name for name in StoreStats.__dataclass_fields__ if name.startswith("pages_")]
    # Whether a page that is written was lost before, a store does not know.
    assert len({*TIER_PAGES} - {"repaired"}) == len(fields)
