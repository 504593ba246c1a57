# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of tiers over a real region of shared memory, with the worker's part played here.

The harness keeps what was stored under each key, so that a test can tell a hit on the right bytes
from one on others. What lies between the bytes of a group is filled with noise, as it is in a row
that another group used before.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager  # noqa: E402

from mimo_plugin.engines.vllm.tiers.layout import RowLayout  # noqa: E402
from mimo_plugin.engines.vllm.tiers.manager import MimoTieringManager  # noqa: E402

MODULE = "mimo_plugin.engines.vllm.tiers.store_tier"
ROW_BYTES = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
#: three groups that overlay each other: one fills the row's areas, the others parts of them
LAYOUT = RowLayout(
    row_bytes=ROW_BYTES,
    parts=(((0, 300), (400, 700)), ((0, 100), (400, 500)), ((10, 20),)),
    kinds=("full", "swa", "draft"),
    group_ids=(0, 2, 3),
)
PATIENCE_S = 30.0


def key(number: int, group: int = 0) -> OffloadKey:
    """A key of a group, by its position."""
    name = hashlib.sha256(f"block {number}".encode()).digest()
    return make_offload_key(name, LAYOUT.group_ids[group])


def offloading_config(**changes: Any) -> OffloadingConfig:
    values: dict[str, Any] = {
        "groups": tuple(
            OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"l{i}",), group_id=i)
            for i in LAYOUT.group_ids
        ),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "test",
        "model": OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        "kv_cache_layout": "LBHNC",
        **changes,
    }
    return OffloadingConfig(**values)


class Spec:
    """As much of a spec as a tier asks for."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config


class Tiers:
    """Host memory of some rows and a store below it.

    Args:
        settings: of the store; None: host memory alone.
    """

    def __init__(
        self,
        settings: dict[str, Any] | None,
        *,
        rows: int = 64,
        config: OffloadingConfig | None = None,
        touch_interval_s: float = 30.0,
        layout: RowLayout = LAYOUT,
        **more: Any,
    ) -> None:
        self.now_s, self.layout = 0.0, layout
        self.closed = False
        self.region = SharedOffloadRegion(
            engine_id=uuid.uuid4().hex,
            num_chunks=rows,
            rank=None,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=rows, mmap_region=self.region)
        view = self.primary.get_kv_memoryview()
        self.memory = np.frombuffer(view, np.uint8).reshape(rows, ROW_BYTES)
        entry = {"type": "StoreTier", "module_path": MODULE, "settings": settings, **more}
        tiers = []
        if settings is not None:
            spec = Spec(config or offloading_config())
            tiers.append(SecondaryTierFactory.create_secondary_tier(entry, view, spec))
        self.manager = MimoTieringManager(
            primary_tier=self.primary,
            secondary_tiers=tiers,
            touch_interval_s=touch_interval_s,
            clock_s=lambda: self.now_s,
        )
        self.manager.set_layout(layout)
        self.tier: Any = tiers[0] if tiers else None
        self._contexts = 0
        self._noise = random.Random(1)

    # -- the engine's part ---------------------------------------------------------------------

    def request(self) -> ReqContext:
        self._contexts += 1
        context = ReqContext(req_id=f"r{self._contexts}")
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Steps until nothing is under way any more."""
        end_s = time.monotonic() + PATIENCE_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "still work to be done"
            time.sleep(0.001)
            self.step()

    def store(self, keys: Sequence[OffloadKey], data: Sequence[bytes]) -> list[OffloadKey]:
        """As a request that has computed these keys; which of them went to host memory."""
        context = self.request()
        output = self.manager.prepare_store(keys, context)
        stored = []
        if output is not None:
            stored = output.keys_to_store
            given = dict(zip(keys, data, strict=True))
            for k, row in zip(stored, output.store_spec.chunk_ids, strict=True):
                self._write(k, int(row), given[k])
            if stored:
                self.manager.complete_store(stored, context)
        self.finish(context)
        return list(stored)

    def look_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool]:
        """Until every answer is final; what the store has is in host memory then."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            found = [self.manager.lookup(k, context) for k in keys]
            if all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in found):
                return [answer is LookupResult.HIT for answer in found]
            assert time.monotonic() < end_s, found
            self.step()
            time.sleep(0.001)

    def load(self, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        """As a request that looks keys up and loads what is there."""
        context = self.request()
        found = self.look_up(keys, context)
        hits = [k for k, hit in zip(keys, found, strict=True) if hit]
        output: dict[OffloadKey, bytes] = {}
        if hits:
            rows = self.manager.prepare_load(hits, context).chunk_ids
            output = {k: self._read(k, int(row)) for k, row in zip(hits, rows, strict=True)}
            self.manager.complete_load(hits, context)
        self.finish(context)
        return [output.get(k) for k in keys]

    def keep_alive(self, keys: Sequence[OffloadKey]) -> None:
        """As a request that the device answers."""
        context = self.request()
        self.manager.keep_alive(keys, context)
        self.finish(context)

    # -- the worker's part ---------------------------------------------------------------------

    def _write(self, some_key: OffloadKey, row: int, data: bytes) -> None:
        self.memory[row] = np.frombuffer(self._noise.randbytes(ROW_BYTES), np.uint8)
        start = 0
        for first, last in self._parts(some_key):
            part = data[start : start + last - first]
            self.memory[row, first:last] = np.frombuffer(part, np.uint8)
            start += last - first
        assert start == len(data)

    def _read(self, some_key: OffloadKey, row: int) -> bytes:
        parts = self._parts(some_key)
        return b"".join(self.memory[row, first:last].tobytes() for first, last in parts)

    def _parts(self, some_key: OffloadKey) -> tuple[tuple[int, int], ...]:
        return self.layout.parts[self.layout.position(get_offload_group_idx(some_key))]

    # -- the rest ------------------------------------------------------------------------------

    def forget_host(self) -> None:
        """Host memory loses all it has, bytes too."""
        self.manager.reset_cache()
        noise = self._noise.randbytes(self.memory.size)
        self.memory[:] = np.frombuffer(noise, np.uint8).reshape(self.memory.shape)

    def counts(self) -> dict[tuple[str, ...], float]:
        """What was counted, since the last call."""
        self.manager.accounting._due_s = 0.0
        payload = self.manager.accounting.drain() or {"inc": [], "set": []}
        return {(name, *labels): value for name, labels, value in payload["inc"] + payload["set"]}

    def close(self) -> None:
        self.closed = True
        del self.memory
        self.manager.shutdown()


def data_of(some_key: OffloadKey) -> bytes:
    """Bytes of a key's page, which no other key has."""
    group = LAYOUT.position(get_offload_group_idx(some_key))
    return random.Random(some_key).randbytes(LAYOUT.group_bytes(group))
