# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with the tiered connector, without a model: what is tracked is what KV *is*.

Each slot of a device block remembers which tokens its KV was computed from, each row of host memory
and each page of the store holds a digest of that. The worker's half moves these as
``OffloadingConnectorWorker`` does, which is the real one; the copies behind it come as late as they
may. Look-ups, transfers and touches of the store are the real ones too, but go when the simulator
says so, so that a seed gives one history.

Every step checks that the KV that the step reads is that of the request's own tokens.
"""

from __future__ import annotations

import copy
import hashlib
import os
import queue
import random
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (  # noqa: E402
    OffloadingConnectorWorker,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadingWorker,
    ReqContext,
    TransferResult,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.outputs import (  # noqa: E402
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from benchmarks.sim import HASH, model_dir  # noqa: E402
from mimo_plugin.config_tiers import TiersConfig  # noqa: E402
from mimo_plugin.core.cost import PrefillCost  # noqa: E402
from mimo_plugin.core.retention import CLASSES  # noqa: E402
from mimo_plugin.core.window import blocks_for_hit, longest_valid_hit  # noqa: E402
from mimo_plugin.engines.vllm.kv.settings import KvSettings  # noqa: E402
from mimo_plugin.engines.vllm.sched.install import install  # noqa: E402
from mimo_plugin.engines.vllm.sched.settings import SchedSettings  # noqa: E402
from mimo_plugin.engines.vllm.scheduler import build  # noqa: E402
from mimo_plugin.engines.vllm.tiers import lookups as tiers_lookups  # noqa: E402
from mimo_plugin.engines.vllm.tiers import store_tier  # noqa: E402
from mimo_plugin.engines.vllm.tiers.configure import transfer_config  # noqa: E402
from mimo_plugin.tiers.store import StoreStats  # noqa: E402
from tests.vllm_tiers.configs import config_of  # noqa: E402

STEP_S = 0.05
TAG = 16
"""Bytes of a digest; every part of a row begins with one."""

START = 7
"""The token that opens a message."""


# --- what is simulated ------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """KV cache groups: tokens of a block, and of the window."""

    full: int = 8
    swa: int = 4
    window: int = 12
    swa_groups: int = 2
    draft: bool = False

    def groups(self) -> list[Any]:
        """vLLM's groups; all pages are alike."""
        unit = max(self.full, self.swa)
        common = {"head_size": 8, "dtype": _bfloat16()}
        full = FullAttentionSpec(block_size=self.full, num_kv_heads=2 * unit // self.full, **common)
        swa = SlidingWindowSpec(
            block_size=self.swa,
            num_kv_heads=2 * unit // self.swa,
            sliding_window=self.window,
            **common,
        )
        found = [KVCacheGroupSpec(["layers.0"], full)]
        for index in range(self.swa_groups):
            last = self.draft and index == self.swa_groups - 1
            found.append(KVCacheGroupSpec([f"layers.{index + 1}"], swa, is_eagle_group=last))
        return found


def _bfloat16() -> Any:
    import torch

    return torch.bfloat16


@dataclass(frozen=True)
class Setup:
    """One engine.

    Attributes:
        blocks: of the device.
        rows: of host memory.
        store: there is one below it.
        plugin: the features kv and scheduler.
        overlap: AsyncScheduler, a step in flight.
        drafts: tokens of a draft model that are verified in a step.
        must_fit: requests are admitted only where all of their prompt fits.
    """

    shape: Shape = Shape()
    blocks: int = 60
    rows: int = 40
    store: bool = True
    plugin: bool = False
    overlap: bool = False
    drafts: int = 0
    batch_tokens: int = 24
    requests: int = 4
    retention: int | None = 0
    classes: tuple[str, ...] = tuple(CLASSES)
    outputs: bool = True
    must_fit: bool = True


@lru_cache(maxsize=8)
def _engine_config(drafts: int) -> Any:
    more: dict[str, Any] = {}
    if drafts:
        more["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    return EngineArgs(
        model=model_dir(),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        **more,
    ).create_engine_config()


class WrongKV(AssertionError):
    """KV that is read, or kept under a name, is not that of the tokens."""


# --- the store, at the simulator's pace -------------------------------------------------------


class Pages:
    """A store in memory that may fail."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.fails = False
        self.dropped = 0

    def _check(self) -> None:
        if self.fails:
            raise OSError("the store is away")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._check()
        return [key in self.pages for key in keys]

    def get(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        self._check()
        done = []
        for key, parts in zip(keys, pages, strict=True):
            data, at = self.pages.get(key), 0
            for part in parts if data is not None else ():
                part[:] = data[at : at + part.nbytes]
                at += part.nbytes
            done.append(data is not None)
        return done

    def put(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        self._check()
        for key, parts in zip(keys, pages, strict=True):
            self.pages[key] = b"".join(bytes(part) for part in parts)
        return [True] * len(keys)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        self._check()
        return [key in self.pages for key in keys]

    def stats(self) -> StoreStats:
        return StoreStats(
            bytes_held=0,
            pages_put=0,
            pages_got=0,
            pages_missed=0,
            pages_damaged=0,
            pages_touched=0,
            pages_dropped=self.dropped,
            pages_evicted=0,
        )

    def close(self) -> None:
        pass


class PacedTransfers:
    """``Transfers`` without threads: reads before writes, each batch when :meth:`pump` says."""

    def __init__(self, move: Any, threads: int) -> None:
        self._move = move
        self._reads: deque[Any] = deque()
        self._writes: deque[Any] = deque()
        self._finished: list[Any] = []

    def submit(self, job: Any, bounds: Any) -> None:
        batches = [(job, start, end) for start, end in bounds]
        job.left = len(batches)
        if not batches:
            self._finished.append(job)
        (self._reads if job.read else self._writes).extend(batches)

    def pump(self, rng: random.Random) -> bool:
        line = self._reads or self._writes
        if not line:
            return False
        job, start, end = line.popleft()
        try:
            done = self._move(job, start, end)
        except OSError:
            done = []
        job.done[start : start + len(done)] = done
        self._end(job)
        return True

    def _end(self, job: Any) -> None:
        job.left -= 1
        if not job.left:
            self._finished.append(job)

    def finished(self) -> list[Any]:
        found, self._finished = self._finished, []
        return found

    def drain(self, patience_s: float = 0.0) -> None:
        for job, _, _ in (*self._reads, *self._writes):
            self._end(job)
        self._reads.clear()
        self._writes.clear()

    def close(self, patience_s: float = 0.0) -> None:
        self.drain()


class PacedKeepAlive(store_tier.KeepAlive):  # type: ignore[misc]
    """``KeepAlive`` whose thread does nothing; :meth:`pump` does."""

    _answer: Any = None

    def _run(self) -> None:
        pass

    def pump(self, rng: random.Random) -> bool:
        if self._answer is not None:
            keys, found = self._answer
            self._answer = None
            for key, there in zip(keys, found or (), strict=False):
                if not there and key in self._asked:
                    self._missing[key] = None
            self._asked = set()
            return True
        if not self._waiting:
            return False
        keys = list(self._waiting)
        self._waiting.clear()
        self._asked = set(keys)
        try:
            found = self._touch(keys)
        except OSError:
            found = None
        self._answer = (keys, found)
        return True


class PacedLookUps(store_tier.LookUps):  # type: ignore[misc]
    """``LookUps`` whose thread does nothing; :meth:`pump` answers a step's questions."""

    def _worker(self) -> None:
        pass

    def pump(self, rng: random.Random) -> bool:
        try:
            item = self._lookup_queue.get_nowait()
        except queue.Empty:
            return False
        mine, self._lookup_queue = self._lookup_queue, queue.SimpleQueue()
        self._lookup_queue.put(item)
        self._lookup_queue.put(None)
        super()._worker()
        self._lookup_queue = mine
        return True


# --- the worker's half ------------------------------------------------------------------------


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies between device and host that come as late as they may, in order in each direction."""

    def __init__(self, sim: TiersSim) -> None:
        self.sim = sim
        self.lines: dict[str, deque[Any]] = {"store": deque(), "load": deque()}
        self.done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.lines["store"].append((job_id, src_spec, [int(r) for r in dst_spec.block_ids]))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for group, block in self.sim.targets(dst_spec):
            self.sim.device[block] = (group, [None] * self.sim.sizes[group])  # torn until it ends
        self.lines["load"].append((job_id, dst_spec, [int(r) for r in src_spec.block_ids]))
        return True

    def _one(self, direction: str) -> int:
        job_id, device, rows = self.lines[direction].popleft()
        targets = self.sim.targets(device)
        assert len(targets) == len(rows)
        for (group, block), row in zip(targets, rows, strict=True):
            if direction == "store":
                self.sim.write_row(group, row, block)
            else:
                self.sim.read_row(group, row, block)
        self.done.append(job_id)
        return int(job_id)

    def pump(self, rng: random.Random) -> bool:
        ready = [name for name, line in self.lines.items() if line]
        if not ready:
            return False
        self._one(rng.choice(ready))
        return True

    def get_finished(self) -> list[Any]:
        done, self.done = self.done, []
        late = [job for job in done if self.sim.rng.random() < self.sim.lateness]
        self.done = late
        return [TransferResult(job, True, 1, 0.001) for job in done if job not in late]

    def wait(self, job_ids: set[int]) -> None:
        for name, line in self.lines.items():
            while any(job[0] in job_ids for job in line):
                self._one(name)

    def shutdown(self) -> None:
        pass


@dataclass
class Runner:
    """What the worker knows of a request."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)


@dataclass
class Flight:
    """A step that was scheduled."""

    output: Any
    tokens: dict[str, list[int]]
    result: Any = None
    drafts: dict[str, list[int]] = field(default_factory=dict)


# --- the simulator ----------------------------------------------------------------------------


class TiersSim:
    """See the module.

    Args:
        setup: the engine.
        seed: of what is random.
    """

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup, self.rng = setup, random.Random(seed)
        self.now_s, self.lateness, self.pace = 0.0, 0.3, 0.7
        self.copies_pace = 0.4
        self.chain: dict[tuple[int, int], int] = {}
        self.device: dict[int, tuple[int, list[Any]]] = {}
        self.contents: dict[bytes, tuple[int, list[Any]]] = {}
        self.expected: dict[Any, bytes] = {}
        self.runners: dict[str, Runner] = {}
        self.flying: deque[Flight] = deque()
        self.known: dict[str, Request] = {}
        self.steps = self.loads = self.adoptions = self.joint_hits = 0
        self._stack = ExitStack()
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise

    # -- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        setup = self.setup
        groups = setup.shape.groups()
        self.sizes = [group.kv_cache_spec.block_size for group in groups]
        self.windows = [getattr(g.kv_cache_spec, "sliding_window", None) for g in groups]
        cache = config_of(groups, num_blocks=setup.blocks)
        cache.prefix_cache_retention_interval = setup.retention
        block_bytes = cache.kv_cache_tensors[0].size // cache.num_blocks
        row_bytes = -(-block_bytes // 4096) * 4096
        tiers = TiersConfig(
            host_gib=setup.rows * row_bytes / (1 << 30) + 1e-9,
            path="/nowhere" if setup.store else "",
            capacity_gib=1.0 if setup.store else None,
            classes=setup.classes,
            message_start_token_ids=(START,),
            outputs=setup.outputs,
            touch_interval_s=0.2,
        )
        config = copy.copy(_engine_config(setup.drafts))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.cache_config = copy.copy(config.cache_config)
        config.scheduler_config.max_num_batched_tokens = setup.batch_tokens
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.max_num_seqs = setup.requests
        config.scheduler_config.async_scheduling = setup.overlap
        config.scheduler_config.scheduler_reserve_full_isl = setup.must_fit
        config.cache_config.num_gpu_blocks = setup.blocks
        config.cache_config.prefix_cache_retention_interval = setup.retention
        config.kv_transfer_config = KVTransferConfig(
            **transfer_config(tiers), engine_id=uuid.uuid4().hex
        )
        self.pages = Pages()
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        self._stack.enter_context(
            patch.multiple(
                store_tier,
                open_store=lambda *args, **kwargs: self.pages,
                guarded=lambda store: store,
                share_memory=lambda *args: False,
                Transfers=PacedTransfers,
                KeepAlive=PacedKeepAlive,
                LookUps=PacedLookUps,
            )
        )
        self._stack.enter_context(patch.object(tiers_lookups, "time", clock))
        hash_tokens = min(self.sizes)
        arguments = {
            "vllm_config": config,
            "kv_cache_config": cache,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": max(self.sizes),
            "hash_block_size": hash_tokens,
        }
        base = AsyncScheduler if setup.overlap else Scheduler
        if setup.plugin:
            kv = KvSettings(message_start_token_ids=frozenset({START}))
            self.scheduler = build(base, kv, **arguments)
            install(
                self.scheduler,
                SchedSettings(calibrate=False, cost=PrefillCost(80_000.0)),
                clock_s=lambda: self.now_s,
            )
        else:
            self.scheduler = base(**arguments)
        self.connector = self.scheduler.connector
        self.tiered = self.connector.connector_scheduler
        self.manager = self.tiered.manager
        self.manager._clock_s = lambda: self.now_s
        self.primary = self.manager.primary_tier
        view = self.primary.get_kv_memoryview()
        self.memory = np.frombuffer(view, np.uint8).reshape(view.shape)
        self.layout = self.manager._layout
        tiers_below = self.manager.secondary_tiers
        self.tier = tiers_below[0] if tiers_below else None
        spec = SimpleNamespace(
            replicated_layout=False,
            config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
        )
        self.worker = OffloadingConnectorWorker(spec, config, cache)
        self.copies = self.worker.worker = Copies(self)
        self.hasher = get_request_block_hasher(hash_tokens, HASH)
        self.eagle = bool(setup.drafts)
        self._watch()

    def _watch(self) -> None:
        tiered = self.tiered
        lookup, submit = tiered._lookup, tiered._submit_load

        def checked_lookup(status: Any, most: int | None = None) -> int | None:
            self.expect_keys(status.req)
            before = self._resident(status)
            found: int | None = lookup(status, most)
            if found is not None:
                self._check_hit(status, found, before, most)
            return found

        def checked_submit(status: Any, keys: list[Any], target: Any) -> None:
            self.loads += 1
            for key in keys:
                group = get_offload_group_idx(key)
                full = self.windows[group] is None
                if tiered.device_blocks.find(group, key) is not None and not (
                    full and tiered.device_blocks.by_tree
                ):
                    raise AssertionError(f"loaded although the device has it: group {group}")
            submit(status, keys, target)

        tiered._lookup, tiered._submit_load = checked_lookup, checked_submit

    # -- content -------------------------------------------------------------------------------

    def chain_ids(self, tokens: Sequence[int]) -> list[int]:
        """For each position an id of all tokens up to it."""
        found, last = [], 0
        for token in tokens:
            last = self.chain.setdefault((last, token), len(self.chain) + 1)
            found.append(last)
        return found

    def next_token(self, tokens: Sequence[int]) -> int:
        """What the model says: the same after the same tokens."""
        text = ",".join(map(str, tokens[-6:])) + f"/{len(tokens)}"
        return 10 + hashlib.sha256(text.encode()).digest()[0] % 40

    def digest(self, group: int, slots: Sequence[Any]) -> bytes:
        name = hashlib.sha256(repr((group, list(slots))).encode()).digest()[:TAG]
        self.contents.setdefault(name, (group, list(slots)))
        return name

    def targets(self, spec: Any) -> list[tuple[int, int]]:
        """(group, block) of a transfer's device side."""
        found, at = [], 0
        for group, count in enumerate(spec.group_sizes):
            found += [(group, int(block)) for block in spec.block_ids[at : at + count]]
            at += count
        return found

    def write_row(self, group: int, row: int, block: int) -> None:
        owner, slots = self.device.get(block, (group, [None] * self.sizes[group]))
        name = self.digest(owner, slots)
        self.memory[row] = 255
        for first, _ in self.layout.parts[group]:
            self.memory[row, first : first + TAG] = np.frombuffer(name, np.uint8)

    def read_row(self, group: int, row: int, block: int) -> None:
        names = {
            self.memory[row, first : first + TAG].tobytes() for first, _ in self.layout.parts[group]
        }
        owner, slots = self.contents.get(names.pop(), (-1, [None] * self.sizes[group]))
        self.device[block] = (owner, list(slots)) if not names else (-1, [None])

    def expect_keys(self, request: Any) -> None:
        """Remember which content the keys of a request name."""
        ids = self.chain_ids(request.all_token_ids)
        for group, size in enumerate(self.sizes):
            scale = size // min(self.sizes)
            for block, name in enumerate(request.block_hashes[scale - 1 :: scale]):
                content = self.digest(group, ids[block * size : (block + 1) * size])
                key = make_offload_key(name, group)
                assert self.expected.setdefault(key, content) == content

    # -- checks --------------------------------------------------------------------------------

    def _host_ready(self, key: Any, context: Any) -> bool:
        return self.primary.lookup(key, context) is LookupResult.HIT

    def _resident(self, status: Any) -> set[tuple[int, int]]:
        """(group, block) of the request that the device or host memory has ready."""
        context = ReqContext(req_id="check")
        found = set()
        for group, state in enumerate(status.group_states):
            for block, key in enumerate(state.offload_keys):
                on_device = self.tiered.device_blocks.find(group, key) is not None
                if on_device or self._host_ready(key, context):
                    found.add((group, block))
        return found

    def _check_hit(
        self, status: Any, found: int, before: set[tuple[int, int]], most: int | None
    ) -> None:
        local = status.num_locally_computed_tokens
        hit = local + found
        geometry = self.tiered.geometry
        unit = self.tiered.unit_tokens
        assert hit % unit == 0 or not found
        assert hit < status.req.num_tokens
        if status.max_load_tokens is not None:
            assert found <= status.max_load_tokens
        after = self._resident(status)
        if found:
            self.joint_hits += 1
            for group, each in enumerate(geometry):
                for block in blocks_for_hit(each, hit):
                    mine = each.is_full and (block + 1) * self.sizes[group] <= local
                    assert mine or (group, block) in after, (
                        f"hit of {hit} (device {local}) lacks group {group}, block {block}"
                    )
        if status.max_load_tokens is None and most is None:
            lower = after & before
            longest = longest_valid_hit(
                geometry,
                unit,
                status.req.num_tokens - 1,
                lambda group, block: (
                    (group, block) in lower
                    or (geometry[group].is_full and (block + 1) * self.sizes[group] <= local)
                ),
            )
            device = self.tiered.device_blocks
            # What the device alone holds is the business of its own look-up, and behind a gap the
            # plugin's coordinator does not take full blocks from it.
            loads = any(
                device.find(group, status.group_states[group].offload_keys[block]) is None
                for group, each in enumerate(geometry)
                for block in blocks_for_hit(each, longest)
                if (block + 1) * self.sizes[group] > local or not each.is_full
            )
            assert hit >= longest or device.by_tree or not loads, f"hit {hit}, {longest} is there"

    def _check_reads(self, name: str, runner: Runner, ids: list[int]) -> None:
        start = runner.computed
        for group, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - (window - 1))
            for position in range(first, start):
                block = runner.tables[group][position // size]
                owner, slots = self.device.get(block, (-1, []))
                good = owner == group and slots[position % size] == ids[position]
                if not block or not good:
                    raise WrongKV(
                        f"step {self.steps}, request {name}: position {position} of {start} "
                        f"({runner.tables[group]}), group {group}, block {block}: has "
                        f"{(owner, slots)}, wants {ids[position]}"
                    )

    def check_tiers(self) -> None:
        """What host memory and the store hold under a key is what the key names."""
        for request in self.scheduler.requests.values():
            self.expect_keys(request)
        policy = self.primary._policy
        context = ReqContext(req_id="check")
        for key, name in self.expected.items():
            if not self._host_ready(key, context):
                continue
            group = get_offload_group_idx(key)
            row = policy.get(key).chunk_id
            for first, _ in self.layout.parts[group]:
                found = self.memory[row, first : first + TAG].tobytes()
                if found != name:
                    raise WrongKV(
                        f"step {self.steps}: host memory, group {group}: has "
                        f"{self.contents.get(found)}, wants {self.contents.get(name)}"
                    )
        if self.tier is not None:
            texts = self.tier.texts(self.expected)
            for text, name in zip(texts, self.expected.values(), strict=True):
                page = self.pages.pages.get(text)
                if page is not None and page[:TAG] != name:
                    raise WrongKV(
                        f"step {self.steps}: store: has {self.contents.get(page[:TAG])}, "
                        f"wants {self.contents.get(name)}"
                    )

    # -- requests ------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], output_tokens: int = 4, **more: Any) -> str:
        """Add a request; its id."""
        name = f"r{len(self.known)}"
        params = SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            skip_reading_prefix_cache=more.pop("skip_reading", None),
            extra_args={"kv_transfer_params": more.pop("transfer", None)},
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            arrival_time=float(len(self.known)),
            **more,
        )
        self.known[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [name for name, request in self.known.items() if not request.is_finished()]

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One engine step."""
        self.now_s += STEP_S
        self.steps += 1
        self._pump()
        output = self.scheduler.schedule()
        flight = Flight(output, {})
        cached = output.scheduled_cached_reqs
        fresh = [r.req_id for r in output.scheduled_new_reqs] + list(cached.resumed_req_ids)
        for name in fresh:
            flight.tokens[name] = list(self.known[name].all_token_ids)
        self.flying.append(flight)
        self._pump()
        if self.rng.random() < 0.5:
            self._execute_all()
        depth = 2 if self.setup.overlap and output.total_num_scheduled_tokens else 1
        while len(self.flying) >= depth:
            self._update()

    def _pump(self) -> None:
        rng = self.rng
        parts = [self.copies]
        pace = {id(self.copies): self.copies_pace}
        if self.tier is not None:
            parts += [self.tier._transfers, self.tier._look_ups, self.tier._keep_alive]
        for part in parts:
            while rng.random() < pace.get(id(part), self.pace) and part.pump(rng):
                pass

    def settle(self) -> None:
        """The steps under way end."""
        while self.flying:
            self._update()

    def _execute_all(self) -> None:
        for flight in self.flying:
            if flight.result is None:
                self._execute(flight)

    def _update(self) -> None:
        flight = self.flying[0]
        if flight.result is None:
            self._execute(flight)
        self.flying.popleft()
        self.scheduler.update_from_output(flight.output, flight.result)
        if self.setup.drafts and not self.setup.overlap:
            names = list(flight.drafts)
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(names, [list(flight.drafts[n]) for n in names])
            )
        self.check_tiers()

    def _execute(self, flight: Flight) -> None:
        """The worker's part of a step."""
        output, meta = flight.output, flight.output.kv_connector_metadata
        self.worker.handle_preemptions(meta)
        self._take_states(flight)
        writes = []
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            writes.append(self._forward(name, count, output, sampled, flight))
        # A layer writes the KV of all requests before any is read: a request may share blocks that
        # another fills in the same step.
        for _, runner, ids, _ in writes:
            self._write(runner, ids)
        for name, runner, ids, valid in writes:
            self._check_reads(name, runner, ids)
            runner.computed = valid
        self.worker.start_kv_transfers(meta)
        if self.rng.random() < 0.3:
            self._pump()
        self.worker.prepare_store_kv(meta)
        sent, received = self.worker.get_finished(output.finished_req_ids)
        names = list(output.num_scheduled_tokens)
        flight.result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            ),
        )

    def _take_states(self, flight: Flight) -> None:
        output = flight.output
        for name in output.finished_req_ids:
            self.runners.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.runners[new.req_id] = Runner(
                flight.tokens[new.req_id],
                new.num_computed_tokens,
                [list(ids) for ids in new.block_ids],
            )
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self.runners[name] = Runner(
                    flight.tokens[name],
                    cached.num_computed_tokens[index],
                    [list(ids) for ids in blocks],
                )
                continue
            runner = self.runners[name]
            if not (self.setup.overlap and self.setup.drafts):
                assert runner.computed == cached.num_computed_tokens[index]
            for table, more in zip(runner.tables, blocks or ([],) * 9, strict=False):
                table.extend(more)

    def _forward(
        self, name: str, count: int, output: Any, sampled: dict[str, list[int]], flight: Flight
    ) -> Any:
        runner = self.runners[name]
        start = runner.computed
        given = output.scheduled_spec_decode_tokens.get(name, ())
        drafts = [
            token if token >= 0 else mine
            for token, mine in zip(given, [*runner.drafts, 0, 0, 0, 0], strict=False)
        ]
        inputs = [*runner.tokens[: start + count - len(drafts)], *drafts]
        inputs = inputs[: start + count]
        assert len(inputs) == start + count, (len(runner.tokens), start, count, drafts)
        ids = self.chain_ids(inputs)
        sampled[name] = []
        valid = start + count
        if start + count - len(drafts) == len(runner.tokens):
            accepted = 0
            for token in drafts:
                if self.next_token(runner.tokens) != token:
                    break
                runner.tokens.append(token)
                sampled[name].append(token)
                accepted += 1
            valid = start + count - len(drafts) + accepted
            last = self.next_token(runner.tokens)
            runner.tokens.append(last)
            sampled[name].append(last)
            guess, drafts = list(runner.tokens), []
            for _ in range(self.setup.drafts):
                token = self.next_token(guess) if self.rng.random() < 0.7 else 99
                drafts.append(token)
                guess.append(token)
            runner.drafts = flight.drafts[name] = drafts
        return name, runner, ids, valid

    def _write(self, runner: Runner, ids: list[int]) -> None:
        end = len(ids)
        for group, size in enumerate(self.sizes):
            ahead = self.setup.drafts if group == len(self.sizes) - 1 else 0
            for position in range(runner.computed, end + ahead):
                at = position // size
                if at >= len(runner.tables[group]):
                    break
                block = runner.tables[group][at]
                if not block:
                    continue
                owner, slots = self.device.get(block, (-1, []))
                if owner != group:
                    slots = [None] * size
                slots = list(slots)
                slots[position % size] = ids[position] if position < end else None
                self.device[block] = (group, slots)

    def reset(self, *, running: bool, connector: bool) -> None:
        """Empty caches; vLLM refuses where requests hold blocks that it can't take away."""
        try:
            self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            assert "Failed to reset KV cache" in str(error)

    # -- the end -------------------------------------------------------------------------------

    def run(self, most_steps: int = 600) -> None:
        """Until nothing is left. Fails where that takes longer."""
        for _ in range(most_steps):
            if not self.live:
                break
            self.step()
        else:
            raise AssertionError(f"stuck: {[(n, self.known[n].status) for n in self.live]}")
        for _ in range(200):
            if not self.scheduler.has_requests() and not self.flying:
                break
            self.step()
        else:
            raise AssertionError(f"never idle: {self.tiered._jobs}, {self.manager._jobs}")
        self.settle()
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing of any request is left."""
        tiered = self.tiered
        device = tiered.device_blocks
        for what in (
            tiered._requests,
            tiered._early_jobs,
            tiered._jobs,
            tiered._req_status,
            tiered._block_id_to_pending_jobs,
            tiered._chunks_being_loaded,
            device._plans,
            device._fresh,
            self.manager._jobs,
            self.manager._req_state,
            self.scheduler.requests,
            self.scheduler.deferred_frees,
        ):
            assert not what, what
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            assert block.is_null or block.ref_cnt == 0, block
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not manager.req_to_blocks, manager.req_to_blocks
            assert not manager.num_cached_block
        primary = self.primary
        held = primary._num_allocated_chunks - len(primary._free_list)
        assert held == primary._num_evictable_cache_chunks, "rows stay pinned"

    def close(self) -> None:
        """End it, and check that what it did on the way leaves host memory."""
        del self.memory
        try:
            self.scheduler.shutdown()
        finally:
            self._stack.close()


# --- histories --------------------------------------------------------------------------------


class History:
    """Chats that share prompts, fork and are edited, on an engine that is disturbed meanwhile.

    Args:
        sim: the engine.
        longest: prompt, in tokens.
        resets: caches are emptied now and then.
    """

    def __init__(self, sim: TiersSim, *, longest: int = 90, resets: bool = True) -> None:
        self.sim, self.rng, self.longest, self.resets = sim, sim.rng, longest, resets
        self.systems = [self._tokens(self.rng.randrange(5, 40)) for _ in range(3)]
        self.chats: list[list[int]] = []
        self.open: dict[str, int] = {}

    def _tokens(self, count: int) -> list[int]:
        rng = self.rng
        return [START, *(rng.randrange(10, 60) for _ in range(count))]

    def run(self, steps: int) -> None:
        """So many steps with disturbances, then to the end."""
        for _ in range(steps):
            self._act()
            self.sim.step()
            self._collect()
        self.sim.pages.fails = False
        self.sim.pace = self.sim.copies_pace = 0.8
        self.sim.lateness = 0.2
        self.sim.run()
        self._collect()

    def _collect(self) -> None:
        for name in [n for n in self.open if self.sim.known[n].is_finished()]:
            self.chats[self.open.pop(name)] = list(self.sim.known[name].all_token_ids)

    def _act(self) -> None:
        rng, sim = self.rng, self.sim
        what = rng.random()
        if what < 0.35 and len(sim.live) < 7:
            self._submit()
        elif what < 0.42 and sim.live:
            sim.abort(rng.choice(sim.live))
        elif what < 0.46:
            sim.pace, sim.copies_pace = rng.choice([0.1, 0.5, 0.9]), rng.choice([0.0, 0.3, 0.8])
            sim.lateness = rng.choice([0.0, 0.3, 0.8])
        elif what < 0.49:
            sim.pages.fails = not sim.pages.fails
        elif what < 0.54:
            for key in rng.sample(sorted(sim.pages.pages), len(sim.pages.pages) // 2):
                del sim.pages.pages[key]
        elif what < 0.56:
            sim.now_s += rng.choice([1.0, 6.0])
        elif what < 0.58 and self.resets:
            sim.reset(running=rng.random() < 0.6, connector=rng.random() < 0.7)

    def _submit(self) -> None:
        rng = self.rng
        idle = [i for i in range(len(self.chats)) if i not in self.open.values()]
        kind = rng.random()
        if kind < 0.3 or not idle:
            prompt = rng.choice(self.systems) + self._tokens(rng.randrange(1, 30))
            self.chats.append(prompt)
            index = len(self.chats) - 1
        else:
            index = rng.choice(idle)
            prompt = list(self.chats[index])
            if kind < 0.6:  # the next turn
                prompt += self._tokens(rng.randrange(1, 12))
            elif kind < 0.75:  # the same again
                pass
            elif kind < 0.9:  # another way from somewhere
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
                prompt += self._tokens(rng.randrange(1, 12))
                self.chats.append(prompt)
                index = len(self.chats) - 1
            else:  # an edit
                prompt[rng.randrange(len(prompt))] = 61
        if len(prompt) > self.longest:
            prompt = prompt[: rng.randrange(8, self.longest)]
        transfer: dict[str, Any] = {}
        if rng.random() < 0.1:
            transfer["max_load_tokens"] = rng.randrange(0, 40)
        if rng.random() < 0.1:
            transfer["max_offload_tokens"] = rng.randrange(0, 60)
        name = self.sim.submit(
            prompt,
            rng.choice([1, 2, 5, 12, 20]),
            transfer=transfer or None,
            skip_reading=rng.random() < 0.05 or None,
        )
        self.open[name] = index
