# SPDX-License-Identifier: Apache-2.0
"""B62: every method that SGLang calls on its pools and caches is there, on the ones that we run.

A pool that lacks one ends the scheduler on the day that path is taken, not on the first. So the
source of the installed SGLang is read: what is called on a request pool, an allocator, a KV pool or
a tree, by these names, must exist there and be more than a refusal.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang_pools import Pools
from benchmarks.sglang_sim import SglangSimulator

pytestmark = [pytest.mark.sglang]

CALLERS = (
    "managers/**/*.py",
    "mem_cache/allocation.py",
    "mem_cache/common.py",
    "mem_cache/prefill_budget.py",
    "mem_cache/unified_radix_cache.py",
    "mem_cache/unified_cache/components/base.py",
    "mem_cache/unified_cache/components/full.py",
    "mem_cache/unified_cache/components/swa.py",
)

ELSEWHERE = frozenset({"managers/hisparse_coordinator.py"})
"""Callers that never meet these pools: HiSparse has an allocator of its own."""

OTHERS = {
    "aggregate_free_size": "page shards",
    "class_free_page_counts": "page shards",
    "set_inflight_forward": "one memory for all pools",
    "set_latest_forward_done_event": "one memory for all pools",
    "flush_opportunistic": "one memory for all pools",
    "prewarm_compaction": "one memory for all pools",
    "set_disagg_move_gate": "one memory for all pools",
    "set_host_transfer_move_gate": "one memory for all pools",
    "can_reserve": "one memory for all pools",
    "ensure_c128_capacity": "compressed attention",
    "c128_num_pages_needed": "compressed attention",
    "alloc_logical_only": "HiSparse",
    "schedulable_available_size": "recurrent layers",
    "mamba_slot_full_token_cost": "recurrent layers",
    "get_mamba_ping_pong_other_idx": "recurrent layers",
    "has_pending_cache_operations": "LMCache",
}
"""Methods that only what else may stand in the same place has; callers look at that before."""


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """What stands behind the names that callers use."""
    simulator = SglangSimulator(
        Pools(full_tokens=1600, swa_tokens=800), {"message_start_token_ids": []}
    )
    return {
        "token_to_kv_pool_allocator": simulator.allocator,
        "allocator": simulator.allocator,
        "req_to_token_pool": simulator.rows,
        "tree_cache": simulator.cache,
    }


def calls(names: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """``(name, method, file)`` of every call of ``….<name>.<method>(…)``."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "srt"
    for path in (path for pattern in CALLERS for path in sorted(root.glob(pattern))):
        file = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            name = getattr(owner, "attr", None) or getattr(owner, "id", None)
            if name in names and file not in ELSEWHERE:
                yield name, node.func.attr, file


def refuses(method: Any) -> bool:
    """Whether a method does nothing but raise."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError):
        return False
    body = [s for s in getattr(tree, "body", []) if not isinstance(s, ast.Expr)]
    return bool(body) and isinstance(body[0], ast.Raise)


def test_every_method_is_there(objects: dict[str, Any]) -> None:
    found = set(calls(frozenset(objects)))
    assert len({method for _, method, _ in found}) > 60, "the source is not where it is looked for"
    wrong = [
        f"{file}: {name}.{method}"
        for name, method, file in sorted(found)
        if method not in OTHERS
        and (not hasattr(objects[name], method) or refuses(getattr(type(objects[name]), method)))
    ]
    assert wrong == []


def test_the_exceptions_are_needed(objects: dict[str, Any]) -> None:
    called = {method: name for name, method, _ in calls(frozenset(objects))}
    for method in OTHERS:
        assert method in called, f"{method} is not called any more"
        assert not hasattr(objects[called[method]], method), f"{method} is there now"


def test_a_pool_that_only_refuses_is_noticed() -> None:
    class Pool:
        def full_available_size(self) -> int:
            """Not offered."""
            raise NotImplementedError

        def available_size(self) -> int:
            return 0

    assert refuses(Pool.full_available_size)
    assert not refuses(Pool.available_size)
