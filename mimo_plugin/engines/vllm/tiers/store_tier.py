# SPDX-License-Identifier: Apache-2.0
"""L3 on vLLM: any store of pages as a secondary tier below host memory.

A page is what a group really fills of a row of host memory, of all ranks. Nothing here waits for
the store: look-ups, transfers and touches go on threads, through stores that give up in bounded
time. A row stays pinned in host memory while its page waits to be written, so only a part of all
rows may wait; what comes on top is dropped, and written the next time that it is found missing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from mimo_plugin.config_tiers import parse_tiers
from mimo_plugin.engines.vllm.tiers.accounting import TierAccounting
from mimo_plugin.engines.vllm.tiers.keepalive import KeepAlive
from mimo_plugin.engines.vllm.tiers.layout import RowLayout
from mimo_plugin.engines.vllm.tiers.transfers import Job, Transfers
from mimo_plugin.engines.vllm.version import installed_vllm
from mimo_plugin.tiers.breaker import Breaker
from mimo_plugin.tiers.keys import key_space
from mimo_plugin.tiers.open import each_guarded, open_store, share_memory
from mimo_plugin.tiers.ring import RingStore
from mimo_plugin.tiers.store import PageStore, Parts, StoreStats

logger = logging.getLogger("vllm.mimo_plugin")

SECTION = "mimo.tiers"
THREADS = 4
BATCH_BYTES = 8 << 20
BATCH_PAGES = 256
WAITING_PART = 0.25
"""Part of all rows that may wait to be written."""

FLUSH_S = 3.0
"""Time that the engine's end gives to what waits to be written."""

REPAIR = "mimo-repair"
"""Request id of what is written again."""


class LookUps(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store, on vLLM's look-up thread, and keeps what is known up to date."""

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Which pages are there."""
        return self._tier.store.exists(self._tier.texts(keys))

    def mark(self, keys: Iterable[OffloadKey], there: bool) -> None:
        """Correct answers that were given; a look-up under way brings its own."""
        for key in keys:
            state = self._lookup_state.get(key)
            if state is not None and state.phase is LookupPhase.RESOLVED:
                state.result = there


class StoreTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. Made by vLLM's factory from its entry in ``secondary_tiers``.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: host memory, rows x bytes of a row.
        tier_type: of the entry.
        backpressure_detector: vLLM's own, on top of the bound for what waits.
        settings: those of the section ``tiers``.
        facts: what else decides the meaning of the bytes, such as the model's revision.

    Raises:
        ConfigError: a setting is out of range.
        StoreError: the store can't be opened.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        settings: Mapping[str, Any],
        facts: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = parse_tiers(SECTION, dict(settings))
        self.accounting = TierAccounting()
        self.store = guarded(open_store(each_guarded(config), where=SECTION))
        self._memory = primary_kv_view.cast("B")
        self._most_waiting = max(1, int(WAITING_PART * len(primary_kv_view)))
        self._waiting_rows = 0
        self._being_written: set[OffloadKey] = set()
        self._facts = {"name": config.name, **facts_of(offloading_spec.config), **(facts or {})}
        self._layout: RowLayout | None = None
        self._space = ""
        self._look_ups = LookUps(self)
        self._keep_alive: KeepAlive[OffloadKey] = KeepAlive(self._touch)
        self._transfers: Transfers[TransferJob] = Transfers(self._move, THREADS)

    def set_layout(self, layout: RowLayout, facts: Mapping[str, object] | None = None) -> None:
        """Tell which bytes of a row are whose; before anything is asked for.

        Args:
            layout: of a row.
            facts: what else decides the meaning of the bytes; engines share pages only where all
                of it is the same.
        """
        assert layout.row_bytes == self.block_size_bytes, "rows of another size"
        self._layout = layout
        self._space = key_space({**self._facts, **(facts or {}), "parts": layout.parts})

    def share_memory(self, file: int) -> None:
        """Host memory is a mapping of this file: pages may go without a copy on their way."""
        share_memory(self.store, self._memory, file)

    @property
    def layout(self) -> RowLayout:
        """Which bytes of a row are whose."""
        assert self._layout is not None, "set_layout() comes first"
        return self._layout

    def texts(self, keys: Iterable[OffloadKey]) -> list[str]:
        """The store's names of pages: they tell the group, the hash, and what bytes mean."""
        assert self._space, "set_layout() comes first"
        return [
            f"{self._space}/{get_offload_group_idx(key)}/{get_offload_block_hash(key).hex()}"
            for key in keys
        ]

    def stats(self) -> StoreStats:
        """The store's counts."""
        return self.store.stats()

    # -- look-up -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the store has a page; RETRY until it has answered."""
        found = self._look_ups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are stored one by one."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked for."""
        self._look_ups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send off the step's look-ups."""
        self._look_ups.flush()

    # -- transfers -----------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read pages into host memory."""
        job = Job(job_metadata, len(job_metadata.keys), read=True)
        self._transfers.submit(job, self._batches(job_metadata.keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write pages from host memory, as many as may wait; the head of a prefix first."""
        keys = list(job_metadata.keys)
        taken = keys[: max(0, self._most_waiting - self._waiting_rows)]
        self.accounting.pages("dropped", len(keys) - len(taken))
        self._waiting_rows += len(keys)
        self._being_written.update(taken)
        job = Job(job_metadata, len(keys), read=False)
        self._transfers.submit(job, self._batches(taken))

    @property
    def room_rows(self) -> int:
        """Rows that may still be given to be written."""
        return max(0, self._most_waiting - self._waiting_rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call."""
        return [self._result(job) for job in self._transfers.finished()]

    def _result(self, job: Job[TransferJob]) -> JobResult:
        keys = list(job.payload.keys)
        good = [key for key, well in zip(keys, job.done, strict=True) if well]
        bad = [key for key, well in zip(keys, job.done, strict=True) if not well]
        moved = self._count_bytes("read" if job.read else "written", good)
        # What another request has asked for, and been told, changes with it.
        self._look_ups.mark(good, True)
        if job.read:
            self._look_ups.mark(bad, False)
        else:
            self._waiting_rows -= len(keys)
            self._being_written.difference_update(keys)
            self._keep_alive.written(good)
            if job.payload.req_context.req_id == REPAIR:
                self.accounting.pages("repaired", len(good))
        return JobResult(
            job_id=job.payload.job_id,
            success=not bad,
            successful_keys=tuple(good) if job.read and good else None,
            transfer_time=job.busy_s,
            transfer_bytes=moved,
        )

    def _count_bytes(self, direction: str, keys: Iterable[OffloadKey]) -> int:
        sizes = self.layout.bytes_by_kind(map(get_offload_group_idx, keys))
        for kind, count_bytes in sizes.items():
            self.accounting.moved(direction, kind, count_bytes)
        return sum(sizes.values())

    def _batches(self, keys: Collection[OffloadKey]) -> Iterator[tuple[int, int]]:
        """First and last index (exclusive) of what goes to the store at a time."""
        start = size = 0
        for index, key in enumerate(keys):
            more = self.layout.group_bytes(self.layout.position(get_offload_group_idx(key)))
            if index > start and (size + more > BATCH_BYTES or index - start >= BATCH_PAGES):
                yield start, index
                start, size = index, 0
            size += more
        if start < len(keys):
            yield start, len(keys)

    def _move(self, job: Job[TransferJob], start: int, end: int) -> list[bool]:
        """On a transfer thread."""
        keys = list(job.payload.keys)[start:end]
        rows = job.payload.chunk_ids[start:end]
        pages = [self._page(key, int(row)) for key, row in zip(keys, rows, strict=True)]
        return (self.store.get if job.read else self.store.put)(self.texts(keys), pages)

    def _page(self, key: OffloadKey, row: int) -> Parts:
        layout, start = self.layout, row * self.block_size_bytes
        parts = layout.parts[layout.position(get_offload_group_idx(key))]
        return [self._memory[start + first : start + last] for first, last in parts]

    # -- keeping alive -------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep pages alive, soon."""
        self._keep_alive.add(keys)

    def take_missing(self) -> list[OffloadKey]:
        """Keys that were touched and that the store does not have; each is handed out once."""
        missing = self._keep_alive.take_missing()
        return [key for key in missing if key not in self._being_written]

    def _touch(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        """On the thread that touches."""
        before = self.store.stats().pages_dropped
        found = self.store.touch(self.texts(keys))
        lost = self.store.stats().pages_dropped - before
        # A store that does not answer says nothing about what it has.
        return None if 0 < found.count(False) <= lost else found

    # -- the tier's life -----------------------------------------------------------------------

    def has_pending_work(self) -> bool:
        """Whether something may come back that has to be written again."""
        return self._keep_alive.busy

    def drain_jobs(self) -> None:
        """Until nothing uses host memory; what waits fails."""
        self._transfers.drain()

    def shutdown(self) -> None:
        """End everything; what waits to be written has a moment."""
        self._keep_alive.close()
        self._transfers.close(FLUSH_S)
        self.store.close()
        self._look_ups.shutdown()
        # Host memory is given back only when nobody looks at it any more.
        self._memory.release()
        self._primary_kv_view = memoryview(b"")


def guarded(store: PageStore) -> PageStore:
    """A store that gives up in bounded time, and uses host memory only while it is asked."""
    if isinstance(store, (RingStore, Breaker)):
        return store
    return Breaker(store, str(store))


def facts_of(config: Any) -> dict[str, object]:
    """What decides the meaning of a page's bytes, of vLLM's ``OffloadingConfig``."""
    parallel = config.parallel
    return {
        "engine": installed_vllm().label,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "kv_cache_layout": config.kv_cache_layout,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [
            (group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups
        ],
        "ranks": {
            name: getattr(parallel, name)
            for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        "replicated": config.replicated_layout,
    }
