# SPDX-License-Identifier: Apache-2.0
"""The stores as an L2 of LMCache, through LMCache's own controllers; no engine, no server.

Needs LMCache: in this environment, or in the folder ``MIMO_LMCACHE``.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("MIMO_LMCACHE"):
    sys.path.append(os.environ["MIMO_LMCACHE"])
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
pytest.importorskip(
    "lmcache",
    reason="LMCache is not here: pip install --no-deps lmcache==0.5.6 "
    "opentelemetry-exporter-prometheus==0.60b1, or set MIMO_LMCACHE to a folder with both",
)

from lmcache.lmcache_native import Bitmap  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.bitmap_ops.fold import fold_unfold_grouped  # noqa: E402
from lmcache.v1.distributed.l2_adapters.factory import (  # noqa: E402
    create_l2_adapter_from_registry,
    ensure_adapter_loaded,
)

from mimo_plugin.errors import MimoError  # noqa: E402
from mimo_plugin.tiers import lmcache_adapter  # noqa: E402
from mimo_plugin.tiers.lmcache_adapter import MimoL2Adapter  # noqa: E402
from mimo_plugin.tiers.lmcache_plan import longest_hit  # noqa: E402

SIZE_BYTES = 4096
PAGE_GIB = (SIZE_BYTES + 32) / (1 << 30)


class Memory:
    """An object's memory, named as LMCache names it: through ctypes."""

    def __init__(self, fill: int = 0, size_bytes: int = SIZE_BYTES) -> None:
        import ctypes

        self._bytes = (ctypes.c_ubyte * size_bytes)(*([fill] * size_bytes))

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self._bytes)

    def __bytes__(self) -> bytes:
        return bytes(self._bytes)


def keys_of(prompt: int, chunks: int, groups: int = 2) -> list[Any]:
    """One prompt's objects, group by group, as LMCache asks for them."""
    return [
        ObjectKey(
            chunk_hash=bytes([prompt, chunk]) * 16,
            model_name="org/tiny",
            kv_rank=1,
            object_group_id=group,
        )
        for group in range(groups)
        for chunk in range(chunks)
    ]


def wait(event_fd: int) -> None:
    ready, _, _ = select.select([event_fd], [], [], 10)
    assert ready, "no event in 10 s"
    os.eventfd_read(event_fd)


def store(adapter: Any, keys: list[Any], fill: int = 1) -> bool:
    task = adapter.submit_store_task(keys, [Memory(fill + n) for n in range(len(keys))])
    wait(adapter.get_store_event_fd())
    done = adapter.pop_completed_store_tasks()
    assert list(done) == [task] and adapter.pop_completed_store_tasks() == {}
    return bool(done[task].is_successful())


def look_up(adapter: Any, keys: list[Any]) -> list[int]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None, "told twice"
    adapter.submit_unlock(keys)
    return list(found.get_indices_list())


def load(adapter: Any, keys: list[Any], size_bytes: int = SIZE_BYTES) -> list[bytes | None]:
    into = [Memory(0, size_bytes) for _ in keys]
    task = adapter.submit_load_task(keys, into)
    wait(adapter.get_load_event_fd())
    read = set(adapter.query_load_result(task).get_indices_list())
    return [bytes(memory) if n in read else None for n, memory in enumerate(into)]


def touched(adapter: Any, count: int) -> int:
    """Pages touched so far, once there are as many or after a while."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        found = int(adapter.report_status()["pages_touched"])
        if found >= count:
            break
        time.sleep(0.01)
    time.sleep(0.05)  # more than expected would show too
    return int(adapter.report_status()["pages_touched"])


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def factory(**params: Any) -> Any:
        given = {"path": str(tmp_path / "kv"), "capacity_gib": 1, **params}
        made.append(MimoL2Adapter(given, clock_s=clock))
        return made[-1]

    yield factory
    for adapter in made:
        adapter.close()


def test_what_is_stored_is_found_and_read_by_another_process_of_the_server(
    make: Callable[..., Any],
) -> None:
    adapter, keys = make(), keys_of(1, 3)
    assert look_up(adapter, keys) == []
    assert store(adapter, keys[:4])
    adapter.close()
    again = make()
    assert look_up(again, keys) == [0, 1, 2, 3]
    read = load(again, keys)
    assert read == [*(bytes([1 + n]) * SIZE_BYTES for n in range(4)), None, None]


def test_salts_groups_ranks_and_names_share_nothing(make: Callable[..., Any]) -> None:
    import dataclasses

    adapter, (key,) = make(), keys_of(1, 1, 1)
    store(adapter, [key])
    others = [
        dataclasses.replace(key, cache_salt="a"),
        dataclasses.replace(key, object_group_id=1),
        dataclasses.replace(key, kv_rank=2),
        dataclasses.replace(key, model_name="org/other"),
    ]
    assert look_up(adapter, [key, *others]) == [0]
    assert look_up(make(name="other"), [key]) == []


def test_damaged_and_short_objects_are_misses(make: Callable[..., Any], tmp_path: Path) -> None:
    adapter, keys = make(), keys_of(1, 3, 1)
    store(adapter, keys)
    assert load(adapter, keys[:1], SIZE_BYTES // 2) == [None], "of another size"
    first, second = sorted(tmp_path.glob("kv/*/*.page"))[:2]
    data = bytearray(first.read_bytes())
    data[-7] ^= 1
    first.write_bytes(data)
    read = [item for item in load(adapter, keys) if item is not None]
    assert len(read) == 1 and read[0] in (bytes([n]) * SIZE_BYTES for n in (1, 2, 3))
    assert adapter.report_status()["pages_damaged"] == 2


def test_a_look_up_keeps_alive_what_the_hit_needs(make: Callable[..., Any]) -> None:
    """All of full attention (group 0), the last chunk of the window (group 1), once each."""
    adapter, keys = make(window_chunks={"1": 1}), keys_of(1, 5)
    store(adapter, keys)
    look_up(adapter, keys)
    assert touched(adapter, 6) == 6
    look_up(adapter, keys)
    assert touched(adapter, 7) == 6, "again before the interval"


def test_a_longer_hit_soon_after_touches_only_what_is_new(
    make: Callable[..., Any], clock: Clock
) -> None:
    adapter, keys = make(window_chunks={"1": 1}), keys_of(1, 5)
    store(adapter, keys)
    shorter = [*keys[:3], *keys[5:8]]
    look_up(adapter, shorter)
    assert touched(adapter, 4) == 4
    look_up(adapter, keys)
    assert touched(adapter, 7) == 4 + 2 + 1
    clock.now_s += 31
    look_up(adapter, keys)
    assert touched(adapter, 13) == 7 + 6


def test_without_windows_all_that_a_hit_may_use_is_kept_alive(make: Callable[..., Any]) -> None:
    adapter, keys = make(), keys_of(1, 5)
    store(adapter, keys)
    look_up(adapter, keys)
    assert touched(adapter, 10) == 10


def test_a_group_that_lost_its_window_keeps_nothing_of_that_length_alive(
    make: Callable[..., Any],
) -> None:
    adapter, keys = make(window_chunks={"1": 1}), keys_of(1, 5)
    store(adapter, [*keys[:5], keys[5 + 1]])  # the window of two chunks only
    look_up(adapter, keys)
    assert touched(adapter, 3) == 3


def test_no_touch_where_it_is_switched_off(make: Callable[..., Any]) -> None:
    adapter, keys = make(touch_interval_s=None), keys_of(1, 5)
    store(adapter, keys)
    assert look_up(adapter, keys) == list(range(10))
    assert touched(adapter, 1) == 0


def test_touches_that_wait_are_bounded_and_let_others_follow(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_adapter, "MAX_TOUCHES_WAITING", 1)
    adapter = make()
    touch, go = adapter._store.touch, threading.Event()
    monkeypatch.setattr(adapter._store, "touch", lambda keys: go.wait(10) and touch(keys))
    for prompt in (1, 2):
        store(adapter, keys_of(prompt, 2))
        look_up(adapter, keys_of(prompt, 2))
    assert adapter.report_status()["touches_dropped"] == 4
    go.set()
    assert touched(adapter, 4) == 4
    store(adapter, keys_of(3, 2))
    look_up(adapter, keys_of(3, 2))
    assert touched(adapter, 8) == 8


def test_a_store_task_that_kept_less_than_all_has_failed(make: Callable[..., Any]) -> None:
    adapter, keys = make(capacity_gib=PAGE_GIB / 2), keys_of(1, 1, 1)
    assert not store(adapter, keys)
    assert look_up(adapter, keys) == []


@pytest.mark.parametrize(("interval_s", "left"), [(None, 0), (0.0, 6)])
def test_a_hot_prompt_outlives_cold_ones_in_a_full_store(
    make: Callable[..., Any], interval_s: float | None, left: int
) -> None:
    """LMCache answers the hot prompt from L1, so it only looks it up here, and never reads it."""
    # Room for four prompts of three chunks in two groups.
    adapter = make(capacity_gib=26 * PAGE_GIB, touch_interval_s=interval_s)
    hot = keys_of(0, 3)
    store(adapter, hot)
    for cold in range(1, 12):
        time.sleep(0.02)  # between the times of files
        look_up(adapter, hot)
        if interval_s is not None:
            assert touched(adapter, 6 * cold) == 6 * cold
        time.sleep(0.02)
        store(adapter, keys_of(cold, 3))
        time.sleep(0.05)  # room is made on a thread
    assert len(look_up(adapter, hot)) == left


def test_a_store_that_fails_ends_each_task_with_a_miss(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, keys = make(), keys_of(1, 2)

    def fail(*_: Any) -> Any:
        raise OSError("no disk")

    for name in ("put", "exists", "get", "touch"):
        monkeypatch.setattr(adapter._store, name, fail)
    assert not store(adapter, keys)
    assert look_up(adapter, keys) == []
    assert load(adapter, keys) == [None] * 4


def test_a_second_close_does_nothing(make: Callable[..., Any]) -> None:
    adapter = make()
    adapter.close()
    adapter.close()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"pth": "/x"}, "adapter_params.pth"),
        ({"touch_interval": 3}, "touch_interval_s"),
        ({"touch_interval_s": -1}, "a number >= 0"),
        ({"window_chunks": {"1": 0}}, "window_chunks"),
        ({"window_chunks": {"one": 1}}, "window_chunks"),
        ({"window_chunks": [1]}, "window_chunks"),
        ({"capacity_gib": None}, "capacity_gib"),
        ({"path": ""}, "path"),
        ({"prefetch_tokens": 3}, "prefetch_tokens"),
        ({"store": "mooncake", "path": "127.0.0.1:1", "capacity_gib": None}, "ooncake"),
    ],
)
def test_wrong_settings_are_named(
    make: Callable[..., Any], params: dict[str, Any], words: str
) -> None:
    with pytest.raises(MimoError, match=words) as caught:
        make(**params)
    assert "\n" not in str(caught.value)


def test_lmcache_makes_it_from_its_command_line(tmp_path: Path) -> None:
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    ensure_adapter_loaded("plugin")
    config = get_l2_adapter_config_class("plugin").from_dict(
        {
            "type": "plugin",
            "module_path": "mimo_plugin.tiers.lmcache_adapter",
            "class_name": "MimoL2Adapter",
            "adapter_params": {"path": str(tmp_path), "capacity_gib": 1},
        }
    )
    adapter = create_l2_adapter_from_registry(config, object())
    try:
        assert isinstance(adapter, MimoL2Adapter)
        descriptors = {
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        }
        assert len(descriptors) == 3
        assert adapter.get_usage().total_capacity_bytes == 0
        assert not adapter.supports_global_eviction
    finally:
        adapter.close()


def test_lmcache_takes_the_same_least_over_all_groups() -> None:
    """Its own rule for a hit is ours: what this adapter keeps alive is what LMCache would use."""
    import itertools

    windows = [-1, 2]
    for bits in itertools.product((0, 1), repeat=8):
        rows = [list(map(bool, bits[:4])), list(map(bool, bits[4:]))]
        grids = []
        for row in rows:
            grid = Bitmap(4)
            for at, there in enumerate(row):
                if there:
                    grid.set(at)
            grids.append(grid)
        hit, kept = fold_unfold_grouped(grids, windows)
        assert hit == longest_hit(rows, [None, 2]), bits
        assert [len(list(row.get_indices_list())) for row in kept] == [hit, min(hit, 2)]
