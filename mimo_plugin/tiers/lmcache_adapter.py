# SPDX-License-Identifier: Apache-2.0
"""Our stores as an L2 of LMCache's server (MP mode), with prefixes kept alive.

    lmcache server … --l2-adapter '{"type": "plugin",
      "module_path": "mimo_plugin.tiers.lmcache_adapter", "class_name": "MimoL2Adapter",
      "adapter_params": {"path": "/data/kv", "capacity_gib": 200, "window_chunks": {"1": 1}}}'

LMCache asks its L2 for every prompt, also where its host memory (L1) or the engine has all of it,
but renews an object only when it is read. So what is hot in an upper tier grows old in L2 and is
evicted there first; after a restart it is gone. This adapter touches, at each look-up, the objects
that the hit needs, each at most once in ``touch_interval_s`` seconds.

This module runs in LMCache's process and is the only one here that imports it.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from mimo_plugin.config_tiers import STORE_SETTINGS, TiersConfig, parse_tiers
from mimo_plugin.config_values import number
from mimo_plugin.core.touches import Touches
from mimo_plugin.errors import nearest, setting_error
from mimo_plugin.tiers.lmcache_plan import needed
from mimo_plugin.tiers.open import each_guarded, open_store
from mimo_plugin.tiers.store import PageStore, Parts

logger = logging.getLogger("mimo_plugin.tiers")

SECTION = "adapter_params"
TOUCH_INTERVAL_S = 30.0
MAX_REMEMBERED = 1 << 18
MAX_TOUCHES_WAITING = 256
THREADS = 4
_OURS = ("touch_interval_s", "window_chunks")


class MimoL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See the module.

    Args:
        params: ``store``, ``path``, ``capacity_gib``, ``verify`` and ``name`` of the section
            ``tiers``; ``touch_interval_s`` (30), seconds, >= 0, null: never touch; and
            ``window_chunks``, for an object group (its number as a text) the chunks at the end of
            a hit that it needs, >= 1: of the others of that group none is kept alive. Groups that
            are not named need all chunks.
        l1_memory_desc: not used.
        clock_s: monotonic seconds.

    Raises:
        ConfigError: a setting is unknown or out of range.
        StoreError: the store can't be opened.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        l1_memory_desc: Any = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        config, interval_s, self._windows = _settings(params)
        self._space = f"lmcache/{config.name}/"
        self._store: PageStore = open_store(each_guarded(config), where=SECTION)
        self._clock_s = clock_s
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._stored, self._looked_up, self._loaded = self._notifiers
        self._workers = ThreadPoolExecutor(THREADS, "mimo-lmcache")
        self._toucher = ThreadPoolExecutor(1, "mimo-lmcache-touch")
        self._touches_waiting = threading.BoundedSemaphore(MAX_TOUCHES_WAITING)
        self._lock = threading.Lock()
        self._touches: Touches[str] | None = None
        if interval_s is not None:
            self._touches = Touches(interval_s, MAX_REMEMBERED)
        self._results: dict[int, Any] = {}
        self._store_results: dict[int, Any] = {}
        self._tasks = 0
        self._touches_dropped = 0

    # -- events ------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Signalled when a store task is done."""
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a look-up is done."""
        return int(self._looked_up.fileno())

    def get_load_event_fd(self) -> int:
        """Signalled when a load task is done."""
        return int(self._loaded.fileno())

    # -- tasks -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Write objects; those that are there already are kept alive instead."""

        def work() -> Any:
            pages = [_page(item) for item in objects]
            written = self._store.put(self._names(keys), pages)
            sizes = [sum(part.nbytes for part in page) for page in pages]
            kept = [
                (key, size) for key, size, well in zip(keys, sizes, written, strict=True) if well
            ]
            if kept:
                self._notify_keys_stored([key for key, _ in kept], [size for _, size in kept])
            return L2StoreResult(all(written), sum(size for _, size in kept))

        return self._submit(work, self._stored, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of the store tasks that ended since the last call."""
        with self._lock:
            done, self._store_results = self._store_results, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any = None) -> int:
        """Which objects are there; those of the longest hit are kept alive. Nothing is locked: an
        object that goes before it is read is a miss."""

        def work() -> Any:
            names = self._names(keys)
            found = self._store.exists(names)
            self._keep_alive(keys, names, found)
            return _bitmap(found)

        return self._submit(work, self._looked_up, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The result of a look-up, once; None while it runs."""
        with self._lock:
            return self._results.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read objects into memory; one that is damaged or of another size is a miss."""

        def work() -> Any:
            well = self._store.get(self._names(keys), [_page(item) for item in objects])
            read = [key for key, ok in zip(keys, well, strict=True) if ok]
            if read:
                self._notify_keys_accessed(read)
            return _bitmap(well)

        return self._submit(work, self._loaded, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """The result of a load task, once; None while it runs."""
        with self._lock:
            return self._results.pop(task_id, None)

    # -- the rest ----------------------------------------------------------------------------------

    def get_usage(self) -> Any:
        """Bytes that the store holds, where it tells; it evicts by itself, so no capacity."""
        held = self._store.stats().bytes_held
        return AdapterUsage(total_bytes_used=held or 0, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        """The store's counters; not healthy while all its parts are left alone."""
        stats = self._store.stats()
        with self._lock:
            dropped = self._touches_dropped
        return {
            "is_healthy": not stats.stores_down,
            "touches_dropped": dropped,
            **{name: getattr(stats, name) for name in vars(stats)},
        }

    def close(self) -> None:
        """End the tasks and let go of the store; a second call does nothing."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._toucher.shutdown(wait=True, cancel_futures=True)
        self._store.close()
        for notifier in self._notifiers:
            notifier.close()

    # -- inside ------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], Any], signal: Any, failed: Any) -> int:
        """Run ``work`` on a thread; ``failed`` is its result when it raises."""
        with self._lock:
            self._tasks += 1
            task = self._tasks

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # each task must end, or LMCache waits for it for ever
                logger.warning("mimo store for LMCache: a task failed: %s", error)
                result = failed
            with self._lock:
                (self._store_results if signal is self._stored else self._results)[task] = result
            signal.notify()

        self._workers.submit(run)
        return task

    def _names(self, keys: Iterable[Any]) -> list[str]:
        return [
            f"{self._space}{key.model_name}@{key.kv_rank:x}@{key.object_group_id:x}"
            f"@{key.chunk_hash.hex()}@{key.cache_salt}"
            for key in keys
        ]

    def _keep_alive(self, keys: Sequence[Any], names: Sequence[str], found: Sequence[bool]) -> None:
        if self._touches is None:
            return
        rows = [(key.model_name, key.cache_salt, key.kv_rank, key.object_group_id) for key in keys]
        groups = [key.object_group_id for key in keys]
        wanted = [names[index] for index in needed(rows, groups, found, self._windows)]
        with self._lock:
            due = self._touches.due(wanted, self._clock_s())
        if not due:
            return
        if not self._touches_waiting.acquire(blocking=False):
            with self._lock:
                self._touches_dropped += len(due)
            return
        self._toucher.submit(self._touch, due)

    def _touch(self, names: Sequence[str]) -> None:
        try:
            self._store.touch(names)
        except Exception as error:  # the thread goes on; the objects are touched again later
            logger.warning("mimo store for LMCache: keeping objects alive failed: %s", error)
        finally:
            self._touches_waiting.release()


def _page(memory_object: Any) -> Parts:
    """An object's memory; LMCache names it in a format that a memoryview can't cast."""
    return [pickle.PickleBuffer(memory_object.byte_array).raw()]


def _bitmap(found: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(found))
    for index, there in enumerate(found):
        if there:
            bitmap.set(index)
    return bitmap


def _settings(params: Mapping[str, Any]) -> tuple[TiersConfig, float | None, dict[int, int]]:
    allowed = (*STORE_SETTINGS, *_OURS)
    for setting, value in params.items():
        if setting not in allowed:
            hint = nearest(setting, allowed)
            raise setting_error(
                f"{SECTION}.{setting}",
                value,
                f"one of {', '.join(allowed)}",
                f"write {hint}" if hint else "remove it",
            )
    config = parse_tiers(SECTION, {name: params[name] for name in STORE_SETTINGS if name in params})
    interval_s = params.get("touch_interval_s", TOUCH_INTERVAL_S)
    if interval_s is not None:
        interval_s = float(number(least=0)(f"{SECTION}.touch_interval_s", interval_s))
    return config, interval_s, _windows(params.get("window_chunks", {}))


def _windows(raw: object) -> dict[int, int]:
    setting, allowed = f"{SECTION}.window_chunks", 'groups and chunks >= 1, such as {"1": 1}'
    if not isinstance(raw, Mapping):
        raise setting_error(setting, raw, allowed, "write it like that")
    found: dict[int, int] = {}
    for group, chunks in raw.items():
        whole = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
        if not str(group).isdecimal() or not whole:
            raise setting_error(setting, {group: chunks}, allowed, "write it like that")
        found[int(group)] = chunks
    return found
