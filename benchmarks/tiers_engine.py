# SPDX-License-Identifier: Apache-2.0
"""Engines of the tiers benchmark, each in a process of its own.

Reads a list of :class:`Job` as JSON from standard input and writes what their scenarios found into
the folder that it is given. An engine runs inside its process, so that blocks can be taken away
from one tier, and bytes be read between two requests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 512, 4096
SETTLE_S, STILL_S, PAUSE_S = 30.0, 0.15, 0.02
#: shorter than a block, so nothing of it is stored
NUDGE = [300] * 20

STORED, LOADED, WRITTEN, READ = (
    "vllm:kv_offload_store_bytes",
    "vllm:kv_offload_load_bytes",
    "vllm:kv_offload_tiering_write_bytes",
    "vllm:kv_offload_tiering_read_bytes",
)
"""vLLM's counters: device to host memory, back, host memory to below it, back."""


@dataclass(frozen=True)
class Job:
    """One engine and what it is asked to do.

    Attributes:
        name: of the result.
        scenario: a name in :data:`benchmarks.tiers_scenarios.SCENARIOS`.
        model: folder of the checkpoint.
        settings: the plugin's section ``tiers``; None: no plugin.
        connector: vLLM's ``kv_transfer_config`` without the plugin; None: no connector either.
        arguments: of the engine, on top of the common ones.
        options: of the scenario.
        after: name of a job that must have ended before; empty: none.
    """

    name: str
    scenario: str
    model: str
    settings: dict[str, Any] | None = None
    connector: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    after: str = ""


def stock_connector(
    host_bytes: int, tiers: Sequence[dict[str, Any]] = (), *, over_store: bool = False
) -> dict[str, Any]:
    """vLLM's own tiering on a CPU, as ``kv_transfer_config``."""
    ours = {
        "kv_connector": "StockOverStore",
        "kv_connector_module_path": "benchmarks.tiers_stock",
    }
    return {
        **(ours if over_store else {"kv_connector": "OffloadingConnector"}),
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "StockTieringSpec",
            "spec_module_path": "benchmarks.tiers_stock",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
        },
    }


@dataclass(frozen=True)
class Answer:
    """Of one request: tokens taken from any tier, its output and the logprobs of that."""

    cached_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def same(self, other: Answer) -> bool:
        """Whether the outputs are those of one model: float32 noise aside."""
        close = all(abs(a - b) <= 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=False))
        return self.tokens == other.tokens and close


class Probe:
    """An engine with some of its inside in reach."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        arguments: dict[str, Any] = dict(job.arguments)
        if job.settings is not None:
            arguments["additional_config"] = {
                "mimo": {"features": ["tiers"], "tiers": job.settings}
            }
        if job.connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**job.connector)
        common: dict[str, Any] = {
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        self.llm = LLM(job.model, **{**common, **arguments})
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        connector = getattr(self.scheduler, "connector", None)
        self.connector: Any = getattr(connector, "connector_scheduler", None)
        if job.settings is not None:
            assert type(self.connector).__name__ == "TieredScheduler", "the feature is not on"
        self.manager: Any = getattr(self.connector, "manager", None)
        self.longest_prompt: Any = None
        self._add_request = self.scheduler.add_request
        self.scheduler.add_request = self._seen

    def _seen(self, request: Any) -> None:
        self._add_request(request)
        longest = self.longest_prompt
        if longest is None or request.num_prompt_tokens >= longest.num_prompt_tokens:
            self.longest_prompt = request

    # -- requests ------------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], outputs: int = 16) -> Answer:
        """One request alone."""
        return self.ask_all([prompt], outputs)[0]

    def ask_all(self, prompts: Sequence[Sequence[int]], outputs: int = 16) -> list[Answer]:
        """Several requests at once, greedily."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True, logprobs=1)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [
            Answer(
                int(found.num_cached_tokens or 0),
                tuple(found.outputs[0].token_ids),
                tuple(
                    step[token].logprob
                    for step, token in zip(
                        found.outputs[0].logprobs, found.outputs[0].token_ids, strict=True
                    )
                ),
            )
            for found in self.llm.generate(given, wanted, use_tqdm=False)
        ]

    def settle(self) -> None:
        """Until nothing moves between the tiers any more."""
        end_s = time.monotonic() + SETTLE_S
        seen, since_s = self.moved(), time.monotonic()
        while time.monotonic() - since_s < STILL_S:
            assert time.monotonic() < end_s, f"the tiers were not still after {SETTLE_S} s"
            self.ask(NUDGE, 1)
            time.sleep(PAUSE_S)
            now = self.moved()
            if now != seen:
                seen, since_s = now, time.monotonic()

    def moved(self) -> dict[str, int]:
        """Bytes that were moved so far, by :data:`STORED` and so on."""
        found = dict.fromkeys((STORED, LOADED, WRITTEN, READ), 0)
        for metric in self.llm.get_metrics():
            if metric.name in found:
                found[metric.name] += int(getattr(metric, "value", 0))
        return found

    def during(self, work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
        """What ``work`` gives, and the bytes that it moved."""
        before = self.moved()
        found = work()
        self.settle()
        after = self.moved()
        return found, {name: after[name] - before[name] for name in after}

    # -- tiers ---------------------------------------------------------------------------------

    def forget_device(self) -> None:
        """The device's cache is empty."""
        assert self.llm.reset_prefix_cache()

    def forget_host(self) -> None:
        """The device's cache and host memory are empty; stores are not."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def host_keys(self) -> list[Any]:
        """Of what host memory has."""
        return list(self.manager.primary_tier._policy.chunks)

    def drop_host(self, wanted: Callable[[int], bool]) -> int:
        """Take away from host memory what belongs to groups; how many rows."""
        from vllm.v1.kv_offload.base import get_offload_group_idx

        host, count = self.manager.primary_tier, 0
        for key in self.host_keys():
            if wanted(get_offload_group_idx(key)):
                chunk = host._policy.get(key)
                assert chunk.ref_cnt == 0, "somebody uses it"
                host._policy.remove(key)
                host._free_chunk(chunk)
                host._num_evictable_cache_chunks -= 1
                count += 1
        return count

    def device_blocks(self, group: int, positions: Iterable[int] | None = None) -> list[Any]:
        """Cached blocks of a group on the device, all copies.

        Args:
            group: as vLLM counts them.
            positions: of the longest prompt so far, in blocks; None: any.
        """
        from vllm.v1.core.kv_cache_utils import get_group_id, make_block_hash_with_group_id

        wanted = None
        if positions is not None:
            hashes = [self.longest_prompt.block_hashes[position] for position in positions]
            wanted = {make_block_hash_with_group_id(each, group) for each in hashes}
        found = [
            block
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None
            and not block.is_null
            and get_group_id(block.block_hash) == group
            and (wanted is None or block.block_hash in wanted)
        ]
        assert all(block.ref_cnt == 0 for block in found), "somebody uses them"
        return found

    def drop_device(self, blocks: Sequence[Any]) -> int:
        """Take cached blocks away from the device."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in blocks:
            pool._maybe_evict_cached_block(block)
        return len(blocks)

    @property
    def row_bytes(self) -> int:
        """Of a row of host memory: one block of one group, as groups are equally large here."""
        return int(self.manager.primary_tier.get_kv_memoryview().strides[0])

    def groups(self) -> list[Any]:
        """The connector's groups."""
        return list(self.connector.config.kv_group_configs)

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def run_job(job: Job, out: Path) -> None:
    """Run one job in this process; its result, and what it says, go into the folder ``out``."""
    from benchmarks.tiers_scenarios import SCENARIOS

    log = os.open(out / f"{job.name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    started_s = time.monotonic()
    found = SCENARIOS[job.scenario](job)
    found["seconds"] = round(time.monotonic() - started_s, 1)
    (out / f"{job.name}.json").write_text(json.dumps(found), encoding="utf-8")


def run_jobs(jobs: Sequence[Job], out: Path, workers: int) -> list[str]:
    """Run jobs in processes of their own, some at a time; names of those that failed.

    They are forked from this one when it has imported the engine, which takes longer than to make
    one of a tiny model.
    """
    import vllm  # noqa: F401
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting, failed = list(jobs), list[str]()
    running: dict[str, Any] = {}
    ended: set[str] = set()
    while waiting or running:
        ready = [job for job in waiting if not job.after or job.after in ended]
        for job in ready[: workers - len(running)]:
            waiting.remove(job)
            running[job.name] = context.Process(target=run_job, args=(job, out))
            running[job.name].start()
        for name, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[name]
            ended.add(name)
            done = (out / f"{name}.json").exists() and process.exitcode == 0
            failed += [] if done else [name]
            print(f"  {name}{'' if done else ' failed'}", file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs that standard input holds: folder for the results, and jobs at a time."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    folder, workers = sys.argv[1:] if argv is None else argv
    jobs = [Job(**job) for job in json.load(sys.stdin)]
    return 1 if run_jobs(jobs, Path(folder), int(workers)) else 0


if __name__ == "__main__":
    sys.exit(main())
