# SPDX-License-Identifier: Apache-2.0
"""Failures that random histories found, each as the shortest history that shows it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from mimo_plugin.engines.vllm.kv.settings import KvSettings
from tests.kv.harness import Group, KvHarness, full, swa
from tests.kv.test_property import CASES, History

GROUPS = (full(4), swa(4, 6))


def plugin(groups: tuple[Group, ...] = GROUPS, blocks: int = 24, **kwargs: Any) -> KvHarness:
    return KvHarness(groups, blocks, plugin=KvSettings(ladder_min_tokens=12), **kwargs)


def test_a_waiting_request_forgets_its_hit_when_the_cache_is_reset() -> None:
    kv = plugin()
    prompt = list(range(100, 120))
    kv.run(prompt)
    waiting = kv.request(prompt)
    assert kv.look_up(waiting)[1] == 16
    assert kv.manager.reset_prefix_cache()
    assert not kv.hashed()
    assert kv.look_up(waiting)[1] == 0


def test_fork_when_every_group_looks_ahead() -> None:
    """A draft model without a group of its own: every group drops its last block."""
    kv = plugin(blocks=60, use_eagle=True)
    first = list(range(100, 140))
    kv.run(first, range(500, 510))
    assert kv.run(first[:30] + list(range(300, 320)), range(600, 610)) in (0, 24)
    assert kv.run(first[:30] + list(range(400, 420))) == 24


def test_pool_is_whole_after_a_failed_load_and_a_reset() -> None:
    """A connector invalidates a running request's block; later the cache is reset."""
    kv = plugin()
    request = kv.request(range(100, 120))
    kv.admit(request, 8)
    kv.manager.evict_blocks({kv.coordinator.get_blocks(request.request_id)[0][0].block_id})
    assert kv.step(request)
    kv.append(request, [1])
    assert kv.step(request)
    kv.finish(request)
    assert kv.manager.reset_prefix_cache()
    count = kv.pool.get_num_free_blocks()
    assert count == 23
    blocks = kv.pool.get_new_blocks(count)
    assert len({b.block_id for b in blocks}) == count


def test_memo_sees_a_boundary_that_a_later_checkpoint_completes() -> None:
    history = History(CASES["two-windows"])
    for operation in [
        *[("edit", 2, 8), ("load", 0, 12), ("finish", 0, 1), ("edit", 0, 7), ("edit", 0, 1)],
        *[("new", 0, 18), ("admit", 2, 9), ("step", 0, 10), ("finish", 0, 1), ("abort", 1, 1)],
        *[("edit", 0, 10), ("resend", 0, 1), ("admit", 4, 11), ("load", 0, 4)],
        *[("invalidate", 0, 18), ("look", 0, 1), ("finish", 0, 1), ("admit", 0, 1)],
    ]:
        history.play(*operation)


def test_gauges_by_class_follow_a_split() -> None:
    kv = plugin(blocks=60)
    first = list(range(100, 140))
    kv.run(first)
    kv.run(first[:22] + list(range(300, 320)))
    kv.run(first[:22] + list(range(400, 420)))
    assert all(count >= 0 for count in kv.coordinator.order.cached.values()), (
        kv.coordinator.order.cached
    )


#: shortest histories of failures that have no simpler story
FOUND: dict[str, tuple[str, list[tuple[str, int, int]]]] = {
    "a doomed copy is adopted": (
        "plain",
        [
            *[("new", 0, 16), ("admit", 0, 17), ("finish", 0, 1), ("resend", 0, 1), ("new", 0, 1)],
            *[("invalidate", 2, 17), ("abort", 1, 1), ("admit", 0, 8), ("resend", 0, 1)],
            *[("load", 0, 1), ("finish", 0, 1), ("preempt", 0, 1), ("load", 0, 1)],
        ],
    ),
    "a loaded prefix ends inside a span": (
        "mimo-shape",
        [
            *[("fork", 2, 1), ("extend", 0, 16), ("new", 0, 8), ("load", 4, 16), ("finish", 0, 1)],
            *[("load", 0, 4), ("load", 0, 5), ("resend", 0, 1), ("admit", 0, 1), ("finish", 0, 1)],
            *[("resend", 3, 1), ("decode", 1, 8), ("decode", 7, 4), ("load", 0, 4)],
        ],
    ),
    "two loads of one prefix": (
        "multi-module-mtp",
        [
            *[("new", 0, 8), ("load", 0, 1), ("abort", 0, 1), ("fork", 0, 5), ("resend", 0, 1)],
            *[("load", 1, 1), ("decode", 0, 8), ("load", 0, 4)],
        ],
    ),
    "a full gauge by class turns negative": (
        "swa-block-larger",
        [
            *[("fork", 1, 1), ("admit", 0, 1), ("preempt", 0, 1), ("resend", 0, 1)],
            *[("admit", 0, 4), ("extend", 0, 1), ("invalidate", 0, 9), ("admit", 0, 4)],
            ("admit", 0, 1),
        ],
    ),
    "a memo of no hit outlives a new checkpoint": (
        "multi-module-mtp",
        [
            *[("fork", 4, 1), ("admit", 0, 1), ("abort", 0, 1), ("extend", 0, 7), ("new", 0, 13)],
            *[("admit", 7, 1), ("resend", 0, 1), ("decode", 0, 19), ("load", 0, 1)],
            *[("preempt", 0, 1), ("admit", 0, 14), ("invalidate", 0, 2), ("admit", 0, 1)],
            *[("finish", 5, 1), ("load", 0, 1)],
        ],
    ),
}


@pytest.mark.parametrize("story", FOUND)
def test_found_history(story: str) -> None:
    name, operations = FOUND[story]
    history = History(CASES[name], with_counts=True)
    for operation in operations:
        history.play(*operation)
    history.check_handing_out()


@pytest.mark.parametrize("last_chunk", [False, True])
def test_preempted_in_the_step_it_was_scheduled_in(last_chunk: bool) -> None:
    """Priority scheduling may take back a chunk that was allocated and hashed, but never ran."""
    kv = KvHarness((full(16), swa(16, 64)), 2000, plugin=KvSettings())
    request = kv.request(range(1000, 2000))
    kv.admit(request, 128)
    while last_chunk and request.num_tokens - request.num_computed_tokens > 128:
        kv.step(request, 128)
    computed = request.num_computed_tokens
    kv.manager.allocate_slots(request, min(128, request.num_tokens - computed))
    kv.preempt(request)
    blocks, hit, _ = kv.look_up(request)
    kv.check_contents(request, blocks, hit)
    assert 0 < hit <= computed


def test_a_finished_request_s_blocks_are_not_released_under_a_connector() -> None:
    """While a connector delays the free, another request in need must not take held blocks."""
    kv = plugin(blocks=60)
    request = kv.request(range(100, 130))
    kv.admit(request, 30)
    request.status = RequestStatus.FINISHED_STOPPED
    assert not kv.coordinator.release_hold(request.request_id)
