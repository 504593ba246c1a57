# SPDX-License-Identifier: Apache-2.0
"""Serve prompts with vLLM's tiers below: device, host memory, files; print as JSON.

Arguments: directory of a tiny checkpoint (``tools.tiny_mimo``; one full-attention group and several
of sliding windows), and ``mtp`` to speculate, without ``order`` and ``loads``. Answers

- ``eagle``: which groups hold a draft model's layers;
- ``renewed``: files whose modification time a request renewed, as [group, chunk], by what answered
  it; ``hit`` the tokens of each; ``busy``: calls of ``touch`` while files are slow, how many
  of them ran, seconds of the slowest one, seconds of a shutdown then;
- ``order``: keys in host memory from the oldest to the youngest, as [prompt, group, chunk];
- ``loads``: what was loaded when only the windows were gone, as blocks and first index by group,
  and bytes;
- ``histories``: random evictions, with ``wrong`` loads (against a count by hand), ``tokens`` that
  differ from a run without any cache, requests for which the device had full-attention blocks past
  the hit (``longer``), and how many of these the request would have written to (``adopted``).
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

import offload_host
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_group_id, resolve_block_hashes
from vllm.v1.kv_offload.tiering.fs import manager as fs

LONG_AGO_S = 1_000_000_000
OUTPUTS = 6
HISTORIES = 36


class Engine:
    """An engine with host memory of 64 MiB and a folder of files below it."""

    def __init__(self, model: str, folder: Path, speculate: bool) -> None:
        below = {"type": "fs", "root_dir": str(folder), "n_read_threads": 4, "n_write_threads": 4}
        extra = {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "offload_host",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [below],
        }
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=2048,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            block_size=32,
            num_gpu_blocks_override=800,
            enforce_eager=True,
            enable_prefix_caching=True,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1}
            if speculate
            else None,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        )
        self.folder = folder
        self.core: Any = self.llm.llm_engine.engine_core
        self.scheduler = self.core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.offload = self.connector.connector_scheduler
        self.files = self.offload.manager.secondary_tiers[0]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.groups = self.offload.config.kv_group_configs
        #: offload keys of each group, of the last request that finished
        self.keys: list[list[bytes]] = []
        finished = self.offload.request_finished

        def request_finished(request: Any) -> Any:
            answer = finished(request)
            status = self.offload._req_status[request.request_id]
            self.keys = [list(state.offload_keys) for state in status.group_states]
            return answer

        self.offload.request_finished = request_finished

    def serve(
        self, *prompts: list[int], cached: bool = True, load_tokens: int | None = None
    ) -> list[tuple[list[int], int]]:
        """Output tokens and cached tokens of requests that run together."""
        limit = {} if load_tokens is None else {"max_load_tokens": load_tokens}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=OUTPUTS,
            ignore_eos=True,
            skip_reading_prefix_cache=None if cached else True,
            extra_args={"kv_transfer_params": limit} if limit else None,
        )
        answers = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        self.settle()
        return [(list(a.outputs[0].token_ids), a.num_cached_tokens) for a in answers]

    def settle(self) -> None:
        """Let stores reach host memory and files."""
        for _ in range(4):
            self.llm.llm_engine.step()
            self.files.drain_jobs()

    def forget(self, *, host: bool) -> None:
        """Empty the device, and host memory if asked."""
        assert self.llm.reset_prefix_cache(reset_connector=host)

    def evict(self, groups: set[int], above_tokens: int = 0) -> None:
        """Drop cached device blocks of some groups that end above a position."""
        self.pool.evict_blocks(
            {
                block.block_id
                for block in self.pool.blocks
                if block.block_hash is not None
                and get_group_id(block.block_hash) in groups
                and block.block_hash_num_tokens > above_tokens
            }
        )

    def labels(self) -> dict[bytes, list[int]]:
        """[group, chunk] of each key of the last request."""
        return {
            key: [group, chunk]
            for group, keys in enumerate(self.keys)
            for chunk, key in enumerate(keys)
        }


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(tokens)]


# -- files ---------------------------------------------------------------------------------------


def renewed(engine: Engine, *prompts: list[int]) -> tuple[list[Any], int]:
    """Serve; [group, chunk] of the files that were there before and got younger, and the hit."""
    before = [path for path in engine.folder.rglob("*.bin")]
    for path in before:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    ((_, hit),) = engine.serve(*prompts)
    names = {engine.files.file_mapper.get_file_name(k): v for k, v in engine.labels().items()}
    young = [path for path in before if path.stat().st_mtime > LONG_AGO_S + 1]
    return sorted(names[str(path)] for path in young), hit


def file_cases(engine: Engine) -> tuple[dict[str, Any], dict[str, int]]:
    """Renewed files and hits, by what answers."""
    results: dict[str, Any] = {}
    everything = set(range(len(engine.groups)))
    hot, warm, cool, split = (prompt(seed, 330) for seed in range(4))
    whole = prompt(5, 320)
    # The second one keeps windows where it leaves the first one.
    for each in (hot, warm, cool, split[:130], split, whole, whole + prompt(16, 40)):
        engine.serve(each)
    results["device"] = renewed(engine, hot + prompt(10, 40))
    results["device again"] = renewed(engine, hot + prompt(11, 40))
    fs._TOUCH_INTERVAL_S = 0.0
    results["nothing"] = renewed(engine, prompt(12, 330))
    engine.evict(everything, 128)
    results["device and host"] = renewed(engine, split + prompt(13, 40))
    engine.forget(host=False)
    results["host"] = renewed(engine, warm + prompt(14, 40))
    results["host, all but a token"] = renewed(engine, whole)
    engine.forget(host=True)
    results["files"] = renewed(engine, cool + prompt(15, 40))
    return ({k: v[0] for k, v in results.items()}, {k: v[1] for k, v in results.items()})


def busy_files(engine: Engine) -> dict[str, Any]:
    """Touch ten prefixes while every file operation hangs, then a long one at shutdown."""
    started: list[str] = []
    go = threading.Event()
    plain = os.utime

    def hang(path: str, *args: Any) -> None:
        started.append(path)
        go.wait(20)

    os.utime = hang  # type: ignore[assignment]
    slowest = 0.0
    for index in range(10):
        start = time.monotonic()
        engine.files.touch([index.to_bytes(36, "big")], None)
        slowest = max(slowest, time.monotonic() - start)
    time.sleep(0.5)
    ran = len(started)
    go.set()
    engine.files.drain_jobs()
    engine.files.touch([index.to_bytes(36, "big") for index in range(5000)], None)
    go.clear()
    os.utime = lambda path, *args: time.sleep(0.01)  # type: ignore[assignment]
    start = time.monotonic()
    engine.core.shutdown()
    stop_s = time.monotonic() - start
    os.utime = plain
    return {"ran": ran, "slowest_s": slowest, "stop_s": stop_s}


# -- host memory ---------------------------------------------------------------------------------


def host_order(engine: Engine) -> dict[str, Any]:
    """Keys of two prompts by age: one is hit after the other was stored."""
    results = {}
    everything = set(range(len(engine.groups)))
    for name in ("device", "device and host"):
        engine.forget(host=True)
        for path in engine.folder.rglob("*.bin"):
            path.unlink()
        old, new = prompt(20, 330), prompt(21, 330)
        engine.serve(old[:130])
        engine.serve(old)
        engine.serve(new)
        labels = {key: ["new", *label] for key, label in engine.labels().items()}
        if name != "device":
            engine.evict(everything, 128)
        ((_, hit),) = engine.serve(old + prompt(22, 200))
        labels |= {key: ["old", *label] for key, label in engine.labels().items()}
        ranks = engine.offload.manager.primary_tier._policy._ranks
        order = [labels[key] for key in sorted(ranks, key=ranks.__getitem__) if key in labels]
        results[name] = {"hit": hit, "order": order}
    return results


# -- loads ---------------------------------------------------------------------------------------


def windows_gone(engine: Engine) -> dict[str, Any]:
    """Serve a prompt again after the device lost its windows, and only these."""
    text = prompt(30, 330)
    engine.serve(text)
    engine.evict({index for index, g in enumerate(engine.groups) if not full(g)})
    offload_host.LOADS.clear()
    longer = text + prompt(31, 40)
    ((tokens, hit),) = engine.serve(longer)
    (load,) = offload_host.LOADS
    ((again, hit_again),) = engine.serve(longer)
    ((cold, _),) = engine.serve(longer, cached=False)
    return {
        "hit": hit,
        "hit_again": hit_again,
        "loads": len(offload_host.LOADS),
        "blocks": [len(blocks) for blocks in load.blocks],
        "starts": load.starts,
        "bytes": load.size_bytes,
        "same": tokens == again == cold,
        "tokens_per_block": [group.tokens_per_block for group in engine.groups],
    }


def full(group: Any) -> bool:
    """Whether a group attends to everything."""
    return group.sliding_window_size_in_chunks is None


def resident_blocks(engine: Engine, request: Any, group: Any) -> list[int]:
    """Ids of the leading blocks of a request that the device holds for a group."""
    hashes = resolve_block_hashes(
        request.block_hashes, engine.pool.hash_block_size, group.tokens_per_block
    )
    found: list[int] = []
    for block_hash in hashes:
        cached = engine.pool.get_cached_block(block_hash, [group.group_idx])
        if not cached:
            break
        found.append(cached[0].block_id)
    return found


def missing(engine: Engine, local: int, hit: int, resident: list[list[int]]) -> Any:
    """(first index, blocks) to load of each group for a hit of ``hit`` tokens."""
    wanted = []
    for group, held in zip(engine.groups, resident, strict=True):
        end = -(-hit // group.tokens_per_block)
        if full(group):
            # The last block, if it is not reused to its end, is written to.
            start = max(
                local // group.tokens_per_block, min(len(held), hit // group.tokens_per_block)
            )
        else:
            first = max(0, hit - group.kv_cache_spec.sliding_window + 1)
            start = max(local, first) // group.tokens_per_block
        wanted.append([start, end - start])
    return wanted


def histories(engine: Engine) -> dict[str, Any]:
    """Random evictions before requests of shared prefixes, one or three at a time."""
    rng = random.Random(7)
    plans: list[Any] = []
    held: dict[str, list[list[int]]] = {}
    matched = engine.connector.get_num_new_matched_tokens
    allocated = engine.connector.update_state_after_alloc
    longer = adopted = 0

    def get_num_new_matched_tokens(request: Any, local: int) -> Any:
        held[request.request_id] = [
            resident_blocks(engine, request, group) if full(group) else []
            for group in engine.groups
        ]
        return matched(request, local)

    def update_state_after_alloc(request: Any, blocks: Any, external: int) -> None:
        nonlocal longer, adopted
        if external or not request.num_computed_tokens:
            local = engine.offload._req_status[request.request_id].num_locally_computed_tokens
            hit = local + external
            resident = held[request.request_id]
            if external:
                plans.append(missing(engine, local, hit, resident))
            for index, group in enumerate(engine.groups):
                reused = hit // group.tokens_per_block
                longer += len(resident[index]) > reused
                written = {block.block_id for block in blocks.blocks[index][reused:]}
                adopted += len(written.intersection(resident[index]))
        allocated(request, blocks, external)

    engine.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    engine.connector.update_state_after_alloc = update_state_after_alloc
    offload_host.LOADS.clear()
    everything = range(len(engine.groups))
    windows = {index for index in everything if not full(engine.groups[index])}
    bases = [prompt(40 + index, tokens) for index, tokens in enumerate((257, 320, 513, 640))]
    for base in bases:
        engine.serve(base[:130])
    differ = saved = 0
    for step in range(HISTORIES):
        if step % 4 != 3:
            gone = rng.choice((windows, {max(windows)}, set(everything)))
            engine.evict(gone, rng.choice((0, 128)))
        if step % 3 == 1:
            engine.evict(set(everything) - windows, 64 * rng.randrange(8))
        base = rng.choice(bases)
        count = 3 if step % 5 == 4 else 1
        texts = [base + prompt(step, rng.choice((0, 0, 31, 64, 100))) for _ in range(count)]
        served = engine.serve(*texts, load_tokens=rng.choice((None, None, 200, 0)))
        saved += sum(hit for _, hit in served)
        if step % 3 == 0:
            cold = engine.serve(*texts, cached=False)
            differ += sum(a[0] != b[0] for a, b in zip(served, cold, strict=True))
    found = [
        [[start, len(blocks)] for start, blocks in zip(load.starts, load.blocks, strict=True)]
        for load in offload_host.LOADS
    ]
    engine.connector.get_num_new_matched_tokens = matched
    engine.connector.update_state_after_alloc = allocated
    return {
        "loads": len(found),
        "wrong": sum(plan != load for plan, load in zip(plans, found, strict=True)),
        "full_blocks": sum(load[0][1] for load in found),
        "full_blocks_missing": sum(plan[0][1] for plan in plans),
        "tokens": differ,
        "hits": saved,
        "longer": longer,
        "adopted": adopted,
        "lost_blocks": engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks(),
    }


def main() -> None:
    """Serve all cases with one engine."""
    with tempfile.TemporaryDirectory() as folder:
        speculate = sys.argv[2:] == ["mtp"]
        engine = Engine(sys.argv[1], Path(folder), speculate)
        result: dict[str, Any] = {"eagle": [group.is_eagle_group for group in engine.groups]}
        result["renewed"], result["hit"] = file_cases(engine)
        if not speculate:
            result["order"] = host_order(engine)
            result["loads"] = windows_gone(engine)
        result["histories"] = histories(engine)
        result["busy"] = busy_files(engine)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
