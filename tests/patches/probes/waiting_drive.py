# SPDX-License-Identifier: Apache-2.0
"""Drive vLLM's scheduler, without a model, while one request waits for blocks.

Usage: ``waiting_drive.py [HIT_TOKENS ...]`` (default 4096). With lengths given, it measures times
and counts no probes. The pool is full: requests decode and
evict cached blocks, and a request whose first HIT_TOKENS are cached doesn't fit. Two cases: its
hit is whole (``hit``), or the sliding-window tail is gone (``no_tail``), so that the hit is 0. Then
the running requests end and it is admitted. A third drive aborts it instead.

Prints JSON by case and length: ``probes`` (cache probes of each step's look-up), ``changed_steps``
(steps since whose predecessor the cache map changed, out of ``steps``), ``look_up_s`` and
``schedule_s`` (CPU seconds a step, median), ``scheduled`` (digest of what each step scheduled),
``hit`` (tokens found at the last look-up while waiting), ``admitted_hit``, ``waiting_memos`` and
``kept`` (memos alive while it waits, and after admission or abort).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import digest, swa_spec
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import get_group_id, get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

FULL_TOKENS, SWA_TOKENS, WINDOW_TOKENS, SWA_GROUPS = 32, 16, 128, 6
STEPS = 48
DECODES = 32
CHUNK_TOKENS = 1024
#: what the waiting request needs beside its hit: its suffix, and SWA blocks for a chunk
SUFFIX_BLOCKS = 1024
SWA_BLOCKS = SWA_GROUPS * ((CHUNK_TOKENS + WINDOW_TOKENS) // SWA_TOKENS + 1)
#: the pool beside the hit: less than the requests that decode hold is left over
SPARE_BLOCKS = SUFFIX_BLOCKS + SWA_BLOCKS + 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 21,
    "torch_dtype": "bfloat16",
}


class Drive:
    """A scheduler over MiMo-V2's groups; every request decodes token 7."""

    def __init__(self, vllm_config: Any, pool_blocks: int) -> None:
        vllm_config.cache_config.num_gpu_blocks = pool_blocks
        full = FullAttentionSpec(
            block_size=FULL_TOKENS,
            num_kv_heads=4,
            head_size=192,
            head_size_v=128,
            dtype=torch.bfloat16,
        )
        groups = [KVCacheGroupSpec(["full"], full)]
        swa = swa_spec(SWA_TOKENS, WINDOW_TOKENS)
        groups += [KVCacheGroupSpec([f"swa{i}"], swa) for i in range(SWA_GROUPS)]
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=pool_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=0,
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=FULL_TOKENS,
            hash_block_size=SWA_TOKENS,
            log_stats=False,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.look_ups: list[tuple[str, int, float]] = []
        self._get_computed_blocks = self.manager.get_computed_blocks
        self.manager.get_computed_blocks = self.look_up

    def look_up(self, request: Any, *args: Any) -> Any:
        """The manager's look-up; its hit and CPU time are recorded."""
        start = time.process_time()
        found = self._get_computed_blocks(request, *args)
        self.look_ups.append((request.request_id, found[1], time.process_time() - start))
        return found

    def add(self, name: str, tokens: list[int], outputs: int) -> Any:
        """Queue a request."""
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=outputs, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(SWA_TOKENS, digest),
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> tuple[dict[str, int], float]:
        """One step: tokens scheduled by request, CPU seconds of the scheduler."""
        start = time.process_time()
        out = self.scheduler.schedule()
        seconds = time.process_time() - start
        names = list(out.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(out, result)
        return dict(out.num_scheduled_tokens), seconds

    def serve(self, name: str, tokens: list[int]) -> None:
        """Run one request to its end; its blocks stay cached."""
        self.add(name, tokens, 1)
        while self.scheduler.has_unfinished_requests():
            tokens, _ = self.step()
            assert tokens, f"{name} doesn't fit"


def count_probes(on: bool) -> list[int]:
    """Count reads of the cache map, if ``on``; returns the counter."""
    counter = [0]
    if not on:
        return counter
    original = BlockHashToBlockMap.get_one_block

    def get_one_block(self: Any, key: Any) -> Any:
        counter[0] += 1
        return original(self, key)

    BlockHashToBlockMap.get_one_block = get_one_block
    return counter


def memos() -> int:
    """Memos in this process."""
    kind = getattr(kv_cache_manager, "PrefixHitMemo", None)
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects()) if kind else 0


def measure(vllm_config: Any, hit: int, case: str, abort: bool, counter: list[int]) -> Any:
    """Play one drive."""
    drive = Drive(vllm_config, hit // FULL_TOKENS + SPARE_BLOCKS)
    # The pool becomes full of hashed blocks, and these are evicted first.
    for name, first in (("filler0", 100_000), ("filler1", 200_000)):
        drive.serve(name, list(range(first, first + SUFFIX_BLOCKS * FULL_TOKENS)))
    prefix = list(range(500_000, 500_000 + hit))
    drive.serve("prefix", prefix + [5])
    if case == "no_tail":
        swa = {
            block.block_id
            for block in drive.pool.blocks
            if block.block_hash is not None and get_group_id(block.block_hash) > 0
        }
        drive.pool.evict_blocks(swa)
    for index in range(DECODES):
        # Lengths differ, so that a block becomes full in every step.
        drive.add(f"run{index}", [index] * (64 - index), STEPS)
    drive.step()
    drive.step()
    assert len(drive.scheduler.running) == DECODES
    suffix = list(range(3_000_000, 3_000_000 + SUFFIX_BLOCKS * FULL_TOKENS))
    waiting = drive.add("waiting", prefix + suffix, 1)
    drive.look_ups.clear()
    probes, seconds, scheduled = [], [], []
    versions = [getattr(drive.pool.cached_block_hash_to_block, "num_changes", 0)]
    for _ in range(STEPS - 8):
        before = counter[0]
        tokens, cpu_s = drive.step()
        assert "waiting" not in tokens and len(tokens) == DECODES
        probes.append(counter[0] - before)
        seconds.append(cpu_s)
        scheduled.append(tokens)
        versions.append(getattr(drive.pool.cached_block_hash_to_block, "num_changes", 0))
    look_ups = drive.look_ups[:]
    assert len(look_ups) == STEPS - 8
    waiting_memos = memos()
    if abort:
        drive.scheduler.finish_requests("waiting", RequestStatus.FINISHED_ABORTED)
        del waiting
    else:
        for _ in range(STEPS):
            tokens, _ = drive.step()
            scheduled.append(tokens)
            if "waiting" in tokens:
                break
        assert "waiting" in tokens
    return {
        "steps": STEPS - 8,
        "probes": probes,
        "changed_steps": sum(a != b for a, b in zip(versions, versions[1:], strict=False)),
        "look_up_s": statistics.median(cpu_s for _, _, cpu_s in look_ups[2:]),
        "schedule_s": statistics.median(seconds[2:]),
        "scheduled": digest([sorted(step.items()) for step in scheduled]).hex(),
        "hit": look_ups[-1][1],
        "admitted_hit": drive.look_ups[-1][1],
        "waiting_memos": waiting_memos,
        "kept": memos(),
    }


def main() -> None:
    """Drive every case and length."""
    counter = count_probes(on=len(sys.argv) == 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=1 << 21,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=DECODES + 1,
            enforce_eager=True,
            enable_prefix_caching=True,
            async_scheduling=False,
        ).create_engine_config()
    result = {
        f"{case}/{hit}": measure(vllm_config, hit, case.split("+")[0], "abort" in case, counter)
        for hit in map(int, sys.argv[1:] or ["4096"])
        for case in ("hit", "no_tail", "hit+abort")
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
