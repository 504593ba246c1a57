# SPDX-License-Identifier: Apache-2.0
"""CPU time of the KV cache manager, plugin against stock, at long prompt lengths.

Times are process CPU seconds of vLLM's own ``KVCacheManager`` calls for one request's life (chunked
prefill, decode, free), for look-ups (whole hit, SWA miss, cold) and for a scheduler step while a
long request waits that does not fit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from benchmarks.sim import HASH, PLUGIN, Geometry, Simulator
from mimo_plugin.engines.vllm.kv.bind import kv_feature

CHUNK_TOKENS = 8192
DECODE_STEPS = 256
#: how far before the end the second prompt parts from the first (an SWA miss with full KV there)
PART_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one request's life in the KV cache manager."""

    prefill_s: float
    decode_s: float
    free_s: float
    hit_s: float
    miss_s: float
    cold_s: float
    adopt_s: float

    @property
    def total_s(self) -> float:
        """One life: cold look-up, prefill, decode, free; then a hit, a miss, adopting the hit."""
        return (
            self.prefill_s
            + self.decode_s
            + self.free_s
            + self.hit_s
            + self.miss_s
            + self.cold_s
            + self.adopt_s
        )


def make_manager(blocks: int, geometry: Geometry, *, plugin: bool) -> Any:
    """A KV cache manager over ``blocks`` blocks, stock or the plugin's."""
    arguments: dict[str, Any] = {
        "kv_cache_config": KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=geometry.groups(),
            prefix_cache_retention_interval=0,
        ),
        "max_model_len": 1 << 21,
        "scheduler_block_size": geometry.alignment_tokens,
        "hash_block_size": geometry.hash_block_tokens,
        "max_in_flight_tokens": CHUNK_TOKENS,
        "enable_caching": True,
    }
    if not plugin:
        return KVCacheManager(**arguments)
    with kv_feature(PLUGIN):
        return scheduler_module.KVCacheManager(**arguments)


def make_request(request_id: str, token_ids: list[int], hash_block_tokens: int) -> Any:
    """A request with its block hashes (hashing is the same for both and is not timed)."""
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=DECODE_STEPS + 8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_tokens, HASH),
    )


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def _prefill(manager: Any, request: Any) -> float:
    spent = 0.0
    length = request.num_tokens
    while request.num_computed_tokens < length:
        new = min(CHUNK_TOKENS, length - request.num_computed_tokens)
        seconds, blocks = _timed(lambda new=new: manager.allocate_slots(request, new))
        if blocks is None:
            raise RuntimeError(f"pool too small for a request of {length} tokens")
        spent += seconds
        request.num_computed_tokens += new
    return spent


def _decode(manager: Any, request: Any) -> float:
    spent = 0.0
    for step in range(DECODE_STEPS):
        request.append_output_token_ids(7 + step)
        seconds, _ = _timed(lambda: manager.allocate_slots(request, 1))
        spent += seconds
        request.num_computed_tokens += 1
    return spent


def measure(length_tokens: int, *, plugin: bool, geometry: Geometry | None = None) -> Cost:
    """One life of a request of ``length_tokens`` tokens, and look-ups of others on its prefix."""
    geometry = geometry or Geometry()
    hash_tokens = geometry.hash_block_tokens
    swa_per_chunk = geometry.swa_groups * CHUNK_TOKENS // geometry.swa_block_tokens
    blocks = 2 * length_tokens // geometry.full_block_tokens + 2 * swa_per_chunk + 20_000
    manager = make_manager(blocks, geometry, plugin=plugin)
    token_ids = [(i * 2_654_435_761) % 150_000 + 2 for i in range(length_tokens)]
    parted = token_ids[:-PART_TOKENS] + [3] * PART_TOKENS
    first = make_request("first", list(token_ids), hash_tokens)
    again = make_request("again", list(token_ids), hash_tokens)
    other = make_request("other", parted, hash_tokens)
    cold = make_request("cold", [5, *token_ids[:-1]], hash_tokens)
    gc.collect()
    gc.disable()
    try:
        cold_s, _ = _timed(lambda: manager.get_computed_blocks(cold))
        prefill_s = _prefill(manager, first)
        decode_s = _decode(manager, first)
        free_s, _ = _timed(lambda: manager.free(first))
        hit_s, (blocks_hit, hit, _) = _timed(lambda: manager.get_computed_blocks(again))
        miss_s, _ = _timed(lambda: manager.get_computed_blocks(other))
        adopt_s, adopted = _timed(
            lambda: manager.allocate_slots(again, length_tokens - hit, hit, blocks_hit)
        )
        if not hit or adopted is None:
            raise RuntimeError("the prefix that was just cached was not found again")
    finally:
        gc.enable()
    return Cost(prefill_s, decode_s, free_s, hit_s, miss_s, cold_s, adopt_s)


def best_of(length_tokens: int, repeats: int, *, plugin: bool) -> Cost:
    """Field by field the least of ``repeats`` runs: other load only ever adds time."""
    runs = [measure(length_tokens, plugin=plugin) for _ in range(repeats)]
    names = ("prefill_s", "decode_s", "free_s", "hit_s", "miss_s", "cold_s", "adopt_s")
    return Cost(**{name: min(getattr(run, name) for run in runs) for name in names})


def waiting_step_s(length_tokens: int, *, plugin: bool, steps: int = 20) -> tuple[float, float]:
    """CPU seconds of one scheduler step without, and with, a waiting request that doesn't fit.

    A running request holds most of the pool; the waiting one shares its prefix.
    """
    geometry = Geometry()
    margin = geometry.swa_groups * (2 * CHUNK_TOKENS // geometry.swa_block_tokens) + 2000
    simulator = Simulator(
        length_tokens // geometry.full_block_tokens + margin,
        plugin=PLUGIN if plugin else None,
        max_batched_tokens=CHUNK_TOKENS,
        max_model_len=1 << 21,
        max_requests=8,
    )
    token_ids = [(i * 2_654_435_761) % 150_000 + 2 for i in range(length_tokens)]
    simulator.generate(token_ids, 2)
    simulator.submit([*token_ids[:-PART_TOKENS], *[7] * PART_TOKENS], 4 * steps + 400)
    for _ in range(length_tokens // CHUNK_TOKENS + 6):
        simulator.step()
    extra = max(PART_TOKENS, (margin + 2000) * geometry.full_block_tokens)
    gc.collect()
    gc.disable()
    try:
        base_s = min(_timed(simulator.step)[0] for _ in range(steps))
        simulator.submit([*token_ids[:-PART_TOKENS], *[8] * extra], 4)
        simulator.step()
        waiting_s = min(_timed(simulator.step)[0] for _ in range(steps))
        if not simulator.scheduler.waiting:
            raise RuntimeError("the waiting request was admitted: nothing was measured")
    finally:
        gc.enable()
    return base_s, waiting_s
