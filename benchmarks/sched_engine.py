# SPDX-License-Identifier: Apache-2.0
"""The scheduler's policies on a real engine in this process, in virtual time.

Virtual time is the number of scheduled tokens, so results don't depend on the machine. The same
workloads also run without a model (:class:`ModelFree`): which request is scheduled when is then
the same to the token, in a hundredth of the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workloads import prefix_groups

BURST_REQUESTS, OPEN_REQUESTS = 80, 120
OUTPUT_TOKENS = 4
POOL_BLOCKS, BLOCK_TOKENS, MAX_REQUESTS = 160, 128, 8
MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 1024, 8192
#: prefill tokens that stock computes per token of virtual time while the open loop's requests come
OPEN_LOAD = 1.36
#: only the plugin's bound on waiting, in seconds, looks at this
TOKENS_PER_S = 20_000.0


@dataclass
class Run:
    """One policy on one workload and seed; token counts, and TTFT in tokens of virtual time."""

    workload: str
    policy: str
    seed: int
    backend: str
    prompt_tokens: int
    computed_tokens: int
    scheduled_tokens: int
    preemptions: int
    ttft: list[float] = field(repr=False)
    outputs: list[tuple[int, ...]] = field(repr=False)
    computed: list[int] = field(repr=False)

    def stats(self) -> dict[str, float]:
        """Mean, p50, p90, p99 and maximum of the TTFT, in thousands of virtual tokens."""
        return {name: value / 1000 for name, value in ttft_stats(self.ttft).items()}

    def document(self) -> dict[str, Any]:
        """What goes into the JSON file."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "outputs"}
        return out | {"stats": {name: round(value, 3) for name, value in self.stats().items()}}


def ttft_stats(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum."""
    ordered = sorted(values)
    out = {"mean": sum(ordered) / len(ordered)}
    for percent in (50, 90, 99):
        out[f"p{percent}"] = quantile(ordered, percent / 100)
    return out | {"max": ordered[-1]}


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True, slots=True)
class Progress:
    """Output tokens so far, and prompt tokens taken from the cache at first admission."""

    output: tuple[int, ...]
    cached_tokens: int


class Backend(Protocol):
    """What runs requests: the engine, or its scheduler alone."""

    name: str
    seam: Any
    parity_tokens: float

    def submit(self, request_id: str, prompt: list[int]) -> None:
        """Queue a request."""

    def step(self) -> dict[str, Progress]:
        """One engine step; the requests that have output tokens and were in it."""

    def busy(self) -> bool:
        """Whether requests run or wait."""

    def clear(self) -> None:
        """Forget the cached prefixes."""


def _tiny() -> Any:
    """The engine's model. Equal KV heads make blocks of full and SWA layers equally large."""
    from tools.tiny_mimo import TinyMiMo

    return TinyMiMo(window_tokens=128, full_kv_heads=2, swa_kv_heads=2)


def _parity_tokens() -> float:
    from mimo_plugin.core.cost import parity_tokens
    from tools.tiny_mimo import config_json

    return parity_tokens(config_json(_tiny()))


class RealEngine:
    """``LLMEngine`` on a tiny MiMo with float32 weights: one full and three SWA groups."""

    name = "engine"

    def __init__(self) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        from benchmarks.sched_policies import Seam
        from tools.tiny_mimo import make

        self._folder = tempfile.TemporaryDirectory(prefix="mimo-bench-")
        arguments = EngineArgs(
            str(make(Path(self._folder.name), _tiny())),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            num_gpu_blocks_override=POOL_BLOCKS,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._sampling = SamplingParams(
            max_tokens=OUTPUT_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True
        )
        self.parity_tokens = _parity_tokens()
        scheduler = self._engine.engine_core.engine_core.scheduler
        groups = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_config.kv_cache_groups]
        if groups != [BLOCK_TOKENS] * 4 or scheduler.kv_cache_config.num_blocks != POOL_BLOCKS:
            raise RuntimeError(f"not the pool of this benchmark: groups of {groups} tokens a block")
        self.seam = Seam(scheduler)

    def submit(self, request_id: str, prompt: list[int]) -> None:
        """Queue a request."""
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, self._sampling)

    def step(self) -> dict[str, Progress]:
        """One engine step."""
        return {
            out.request_id: Progress(tuple(out.outputs[0].token_ids), out.num_cached_tokens or 0)
            for out in self._engine.step()
            if out.outputs and out.outputs[0].token_ids
        }

    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._engine.has_unfinished_requests())

    def clear(self) -> None:
        """Forget the cached prefixes."""
        if not self.seam.scheduler.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: blocks are still in use")


class ModelFree:
    """The same pool and scheduler without a model; outputs are drawn from a generator."""

    name = "model-free"

    def __init__(self) -> None:
        from benchmarks.sched_policies import Seam
        from benchmarks.sim import Geometry, Simulator

        geometry = Geometry(
            swa_groups=3,
            layers_per_group=2,
            full_block_tokens=BLOCK_TOKENS,
            swa_block_tokens=BLOCK_TOKENS,
            window_tokens=128,
        )
        self._simulator = Simulator(
            POOL_BLOCKS,
            geometry=geometry,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_requests=MAX_REQUESTS,
            watch_lookups=False,
        )
        self.parity_tokens = _parity_tokens()
        self._names: dict[str, str] = {}
        self.seam = Seam(self._simulator.scheduler)

    def submit(self, request_id: str, prompt: list[int]) -> None:
        """Queue a request."""
        self._names[self._simulator.submit(prompt, OUTPUT_TOKENS)] = request_id

    def step(self) -> dict[str, Progress]:
        """One scheduler step."""
        scheduler = self._simulator.scheduler
        scheduled = scheduler.schedule()
        requests = {i: scheduler.requests[i] for i in scheduled.num_scheduled_tokens}
        self._simulator.update(scheduled)
        cached = self.seam.cached_tokens
        return {
            self._names[own]: Progress(tuple(request.output_token_ids), cached[own])
            for own, request in requests.items()
            if request.num_output_tokens
        }

    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._simulator.scheduler.requests)

    def clear(self) -> None:
        """Forget the cached prefixes."""
        self._simulator.scheduler.reset_prefix_cache()


def run(
    backend: Backend,
    workload: str,
    policy: str,
    seed: int,
    *,
    gap_tokens: float = 0.0,
    changes: dict[str, Any] | None = None,
) -> Run:
    """Serve one workload (``burst`` or ``open``) under one policy, from an empty cache.

    ``gap_tokens`` of virtual time lie between two arrivals of the open loop.
    """
    from benchmarks.sched_policies import use

    prompts = prefix_groups(seed, OPEN_REQUESTS if workload == "open" else BURST_REQUESTS)
    gap = 0.0 if workload == "burst" else gap_tokens
    arrivals = [index * gap for index in range(len(prompts))]
    seam = backend.seam
    idle_tokens = 0.0
    backend.clear()
    use(
        policy,
        seam,
        parity_tokens=backend.parity_tokens,
        clock_s=lambda: (seam.scheduled_tokens + idle_tokens) / TOKENS_PER_S,
        changes=changes,
    )
    count = len(prompts)
    prefix = f"{workload}-{policy}-{seed}-{id(arrivals)}-"
    ttft = [0.0] * count
    outputs: list[tuple[int, ...]] = [()] * count
    computed = [0] * count
    submitted = 0
    while submitted < count or backend.busy():
        now = seam.scheduled_tokens + idle_tokens
        if submitted < count and not backend.busy() and arrivals[submitted] > now:
            idle_tokens += arrivals[submitted] - now
            now = arrivals[submitted]
        while submitted < count and arrivals[submitted] <= now:
            backend.submit(f"{prefix}{submitted}", prompts[submitted])
            submitted += 1
        for request_id, progress in backend.step().items():
            index = int(request_id.rsplit("-", 1)[1])
            if not outputs[index]:
                ttft[index] = seam.scheduled_tokens + idle_tokens - arrivals[index]
                computed[index] = len(prompts[index]) - progress.cached_tokens
            outputs[index] = progress.output
    if any(len(output) != OUTPUT_TOKENS for output in outputs):
        raise RuntimeError(f"{workload}, {policy}, seed {seed}: a request was not served whole")
    return Run(
        workload,
        policy,
        seed,
        backend.name,
        sum(map(len, prompts)),
        sum(computed),
        seam.scheduled_tokens,
        seam.preemptions,
        ttft,
        outputs,
        computed,
    )


def open_gaps(seeds: Sequence[int]) -> dict[int, float]:
    """By seed: time between arrivals, in tokens, at which stock is offered :data:`OPEN_LOAD`.

    Stock computes the same tokens however close together requests come, as long as some wait.
    """
    backend = ModelFree()
    return {
        seed: float(
            round(run(backend, "open", "fcfs", seed).computed_tokens / (OPEN_REQUESTS * OPEN_LOAD))
        )
        for seed in seeds
    }
