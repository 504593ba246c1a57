# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, stock or with the affinity queue, without a model.

``Engine`` builds ``Scheduler`` or ``AsyncScheduler`` (run in step: a step's output arrives before
the next step is scheduled, or ``depth`` steps later), plays the model's part, and keeps a book of
what each step scheduled. The clock is the test's.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from benchmarks.sim import HASH, Geometry, engine_config, scheduler_arguments  # noqa: E402
from mimo_plugin.core.cost import PrefillCost  # noqa: E402
from mimo_plugin.engines.vllm.kv.settings import KvSettings  # noqa: E402
from mimo_plugin.engines.vllm.sched.install import install  # noqa: E402
from mimo_plugin.engines.vllm.sched.settings import SchedSettings  # noqa: E402
from mimo_plugin.engines.vllm.scheduler import build  # noqa: E402

BASES = (Scheduler, AsyncScheduler)
#: full attention only, one group
FULL = Geometry(swa_groups=0, full_block_tokens=16)
#: one full and two sliding-window groups
HYBRID = Geometry(swa_groups=2, full_block_tokens=32, swa_block_tokens=16, window_tokens=64)
#: sliding-window blocks larger than the full ones: hits are multiples of several full blocks
WIDE_SWA = Geometry(swa_groups=1, full_block_tokens=16, swa_block_tokens=32, window_tokens=64)
COST = PrefillCost(80_000.0)
KV = KvSettings()


def sched_settings(**kwargs: Any) -> SchedSettings:
    """Settings that are deterministic (nothing is calibrated) and know a cost."""
    return SchedSettings(**{"calibrate": False, "cost": COST, **kwargs})


class Engine:
    """One scheduler, the requests it was given, and what it made of them.

    ``settings=None`` is stock vLLM (or only ``kv``).
    """

    def __init__(
        self,
        settings: SchedSettings | None = None,
        *,
        base: type[Any] = Scheduler,
        blocks: int = 400,
        geometry: Geometry = FULL,
        kv: Any = None,
        policy: str = "fcfs",
        max_batched_tokens: int = 256,
        max_requests: int = 8,
        max_model_len: int = 8192,
        retention_interval: int | None = 0,
        log_stats: bool = False,
        depth: int = 1,
        v2_runner: bool | None = None,
        chunked_prefill: bool = True,
    ) -> None:
        config = copy.copy(engine_config(max_batched_tokens, max_model_len, max_requests))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.policy = policy
        config.scheduler_config.enable_chunked_prefill = chunked_prefill
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.prefix_cache_retention_interval = retention_interval
        self.geometry = geometry
        self.depth = depth
        self.now_s = 0.0
        arguments = scheduler_arguments(config, geometry, log_stats=log_stats)
        if settings is None and kv is None:
            self.scheduler = base(**arguments)
        else:
            self.scheduler = build(base, kv, **arguments)
        if v2_runner is not None:
            self.scheduler.use_v2_model_runner = v2_runner
        if settings is not None:
            install(self.scheduler, settings, clock_s=lambda: self.now_s)
        self.settings = settings
        self._hasher = get_request_block_hasher(geometry.hash_block_tokens, HASH)
        self._flying: deque[tuple[Any, dict[str, bool]]] = deque()
        self._count = 0
        self.steps = 0
        #: request id -> its Request, for all that were ever submitted
        self.known: dict[str, Request] = {}
        #: ids in the order in which they started (again after a preemption)
        self.started: list[str] = []
        #: request id -> hit at its last start
        self.hits: dict[str, int] = {}
        #: request id -> tokens of its first step
        self.first_chunks: dict[str, int] = {}
        #: request id -> tokens scheduled in all
        self.computed: Counter[str] = Counter()
        self.finished: set[str] = set()
        self.engine_outputs: list[Any] = []
        self._inc: Counter[tuple[str, str]] = Counter()
        self._obs: dict[tuple[str, str], list[float]] = {}
        self._set: dict[str, float] = {}

    # -- requests ----------------------------------------------------------------------------

    def request(
        self,
        prompt: Sequence[int],
        output_tokens: int = 1,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora: int | None = None,
        extra_args: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Request:
        """A request that was not added yet."""
        name = request_id or f"r{self._count}"
        self._count += 1
        return Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=kwargs.pop("sampling_params", None)
            or SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra_args),
            pooling_params=None,
            priority=priority,
            lora_request=None if lora is None else LoRARequest(f"l{lora}", lora, "/nowhere"),
            arrival_time=kwargs.pop("arrival_time", float(self._count)),
            block_hasher=self._hasher,
            **kwargs,
        )

    def add(self, request: Request) -> str:
        """Hand a request to the scheduler."""
        self.known[request.request_id] = request
        self.scheduler.add_request(request)
        return request.request_id

    def submit(self, prompt: Sequence[int], output_tokens: int = 1, **kwargs: Any) -> str:
        """Make and add a request; its id."""
        return self.add(self.request(prompt, output_tokens, **kwargs))

    def abort(self, *ids: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(list(ids), RequestStatus.FINISHED_ABORTED)

    # -- steps -------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """The first half of a step."""
        output = self.scheduler.schedule()
        self.steps += 1
        fresh = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        fresh.update(
            (name, computed)
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in cached.resumed_req_ids
        )
        for name, count in output.num_scheduled_tokens.items():
            if name in fresh:
                self.started.append(name)
                self.first_chunks.setdefault(name, count)
                self.hits[name] = fresh[name]
            self.computed[name] += count
        samples = {
            name: not self.scheduler.requests[name].is_prefill_chunk
            for name in output.num_scheduled_tokens
        }
        self._flying.append((output, samples))
        return output

    def update(self) -> None:
        """The second half of the oldest step that is under way."""
        output, samples = self._flying.popleft()
        ids = list(samples)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[
                [3 + self.known[name].num_output_tokens % 500] if samples[name] else []
                for name in ids
            ],
        )
        outputs = self.scheduler.update_from_output(output, result)
        self.engine_outputs.append(outputs)
        for out in outputs.values():
            stats = out.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._take(stats.kv_connector_stats.get("mimo"))
        for name, request in self.known.items():
            if name not in self.finished and request.is_finished():
                self.finished.add(name)

    def step(self, seconds: float = 0.0) -> Any:
        """One engine step; returns what was scheduled."""
        output = self.schedule()
        while len(self._flying) >= self.depth:
            self.update()
        self.now_s += seconds
        return output

    def run(self, most_steps: int = 2000, seconds: float = 0.0) -> int:
        """Steps until nothing is left, and their number. Fails when it takes more than that."""
        for count in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                while self._flying:
                    self.update()
                return count
            self.step(seconds)
        raise AssertionError(f"still {self.scheduler.get_request_counts()} after {most_steps}")

    def serve(self, prompt: Sequence[int], output_tokens: int = 1) -> str:
        """One request to its end."""
        name = self.submit(prompt, output_tokens)
        self.run()
        return name

    # -- views -------------------------------------------------------------------------------

    @property
    def queue(self) -> Any:
        """The affinity queue."""
        return self.scheduler.affinity

    @property
    def running(self) -> list[str]:
        """Ids of the running requests, in the engine's order."""
        return [r.request_id for r in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Ids of the waiting requests, in the queue's order."""
        return [r.request_id for r in self.scheduler.waiting]

    def counters(self, name: str) -> Counter[str]:
        """A counter's values so far, by its first label ("" without labels)."""
        self._take(self.scheduler.affinity_payload())
        return Counter({label: n for (metric, label), n in self._inc.items() if metric == name})

    def observations(self, name: str) -> dict[str, list[float]]:
        """A histogram's values so far, by its first label."""
        self._take(self.scheduler.affinity_payload())
        return {label: values for (metric, label), values in self._obs.items() if metric == name}

    def gauges(self) -> dict[str, float]:
        """The gauges' last values."""
        self._take(self.scheduler.affinity_payload())
        return dict(self._set)

    def _take(self, payload: dict[str, Any] | None) -> None:
        if payload is None:
            return
        for name, labels, value in payload["inc"]:
            self._inc[(name, "".join(labels[:1]))] += value
        for name, labels, values in payload["obs"]:
            self._obs.setdefault((name, "".join(labels[:1])), []).extend(values)
        self._set.update((name, value) for name, labels, value in payload["set"] if not labels)


def count_lookups(engine: Engine) -> list[str]:
    """Ids of the requests that are looked up for scoring, as it happens."""
    asked: list[str] = []
    original = engine.queue.hits.look_up

    def look_up(entry: Any, **kwargs: Any) -> int:
        asked.append(entry.item.request_id)
        return original(entry, **kwargs)

    engine.queue.hits.look_up = look_up
    return asked


def grammar_request(engine: Engine, prompt: list[int], output_tokens: int = 1, **kwargs: Any):
    """A request that waits for its grammar."""
    params = SamplingParams(
        max_tokens=output_tokens,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(regex="a*"),
    )
    request = engine.request(prompt, sampling_params=params, **kwargs)
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return request


def grammar() -> Any:
    """A grammar that takes any token."""
    fake = MagicMock()
    fake.accept_tokens.return_value = True
    fake.is_terminated.return_value = False
    return fake


def snapshot(output: Any) -> dict[str, Any]:
    """All that a ``SchedulerOutput`` tells the workers, in its order."""
    cached = output.scheduled_cached_reqs
    return {
        "tokens": list(output.num_scheduled_tokens.items()),
        "new": [
            (r.req_id, r.num_computed_tokens, r.block_ids, list(r.prompt_token_ids or ()))
            for r in output.scheduled_new_reqs
        ],
        "cached": list(
            zip(
                cached.req_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                cached.new_block_ids,
                strict=True,
            )
        ),
        "resumed": sorted(cached.resumed_req_ids),
        "all_token_ids": dict(cached.all_token_ids),
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "total": output.total_num_scheduled_tokens,
    }


def unique(start: int, count: int) -> list[int]:
    """``count`` token ids that occur in no other call with another ``start`` (in millions)."""
    return [start * 1_000_000 + i for i in range(count)]


def empty(engine: Engine) -> None:
    """Nothing of any request is left in the queue, its parts and its index."""
    queue = engine.queue
    assert len(queue) == 0 and not list(queue) and not queue
    assert len(queue.line) == 0 and queue.line.num_parked == 0
    assert queue.line.uncached_tokens == 0
    parts = {"queue": queue, "hits": queue.hits, "watch": queue.hits._watch}
    if hasattr(queue, "followers"):
        parts["followers"] = queue.followers
    for part, owner in parts.items():
        names = getattr(owner, "__slots__", None) or vars(owner)
        for name in names:
            value = getattr(owner, name)
            assert not isinstance(value, (dict, set, list)) or not value, f"{part}.{name}: {value}"
    assert not engine.scheduler.deferred_waiting
    # What is gone leaves the heaps late, but not never.
    assert len(queue.line._arrivals) <= 64 + 4 and len(queue.line._deadlines) <= 64 + 4


def parked(engine: Engine) -> list[str]:
    """Ids of the requests that wait for a leader."""
    line = engine.queue.line
    return [entry.item.request_id for entry in line if line.is_parked(entry)]
