# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and KV cache manager without a model.

Requests, look-ups, allocation, eviction and preemption are the engine's real code; only the
model's forward pass is left out, and the output tokens are drawn from a seeded generator.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.workloads import FIRST_TOKEN, LAST_TOKEN, MESSAGE_START, Session
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.engines.vllm.scheduler import build

HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)

#: the plugin's settings in the benchmarks: defaults, and the workloads' message start
PLUGIN = KvSettings(message_start_token_ids=frozenset({MESSAGE_START}))


@dataclass(frozen=True)
class Geometry:
    """KV cache groups as vLLM builds them: MiMo-V2.5-Pro (10 full + 60 SWA layers) by default."""

    full_groups: int = 1
    swa_groups: int = 6
    layers_per_group: int = 10
    full_block_tokens: int = 32
    swa_block_tokens: int = 16
    window_tokens: int = 128
    full_kv_heads: int = 4
    swa_kv_heads: int = 8
    draft_group: bool = False

    @property
    def alignment_tokens(self) -> int:
        """Hits are multiples of this."""
        swa = self.swa_block_tokens if self.swa_groups else 1
        return max(self.full_block_tokens, swa)

    @property
    def hash_block_tokens(self) -> int:
        """Granularity of the block hashes."""
        if not self.swa_groups:
            return self.full_block_tokens
        return min(self.full_block_tokens, self.swa_block_tokens)

    def groups(self) -> list[Any]:
        """``KVCacheGroupSpec`` list; the last SWA group is the draft's when ``draft_group``."""
        dims = {"head_size": 192, "head_size_v": 128, "dtype": torch.bfloat16}
        full = FullAttentionSpec(
            block_size=self.full_block_tokens, num_kv_heads=self.full_kv_heads, **dims
        )
        swa = SlidingWindowSpec(
            block_size=self.swa_block_tokens,
            num_kv_heads=self.swa_kv_heads,
            sliding_window=self.window_tokens,
            **dims,
        )
        layers = range(self.layers_per_group)
        out = [
            KVCacheGroupSpec([f"full{g}.{i}" for i in layers], full)
            for g in range(self.full_groups)
        ]
        for g in range(self.swa_groups):
            draft = self.draft_group and g == self.swa_groups - 1
            names = [f"swa{g}.{i}" for i in layers]
            out.append(KVCacheGroupSpec(names, swa, is_eagle_group=draft))
        return out


@lru_cache(maxsize=1)
def model_dir() -> str:
    """A folder with the smallest config that vLLM accepts for MiMo-V2 (no weights are read)."""
    folder = Path(tempfile.mkdtemp(prefix="mimo-sim-"))
    layers = 4
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "v_head_dim": 64,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 64,
        "swa_v_head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2_097_152,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "partial_rotary_factor": 0.5,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": [0] * layers,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@lru_cache(maxsize=16)
def engine_config(max_batched_tokens: int, max_model_len: int, max_requests: int) -> Any:
    """A ``VllmConfig`` for the scheduler; its pool size and retention are set per simulation."""
    return EngineArgs(
        model=model_dir(),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_batched_tokens,
        max_num_seqs=max_requests,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
    ).create_engine_config()


def scheduler_arguments(vllm_config: Any, geometry: Geometry, *, log_stats: bool) -> dict[str, Any]:
    """Keywords of a ``Scheduler`` with the pool size and retention of ``vllm_config``."""
    cache_config = vllm_config.cache_config
    return {
        "vllm_config": vllm_config,
        "kv_cache_config": KVCacheConfig(
            num_blocks=cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=geometry.groups(),
            prefix_cache_retention_interval=cache_config.prefix_cache_retention_interval,
        ),
        "structured_output_manager": StructuredOutputManager(vllm_config),
        "block_size": geometry.alignment_tokens,
        "hash_block_size": geometry.hash_block_tokens,
        "log_stats": log_stats,
    }


@dataclass(slots=True)
class Record:
    """One request's first look-up, in tokens."""

    prompt_tokens: int
    hit_tokens: int
    full_hit_tokens: int


@dataclass
class Totals:
    """Sums over a workload, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    full_hit_tokens: int = 0

    @property
    def hit_pct(self) -> float:
        """Share of prompt tokens that were reused, in percent."""
        return 100.0 * self.hit_tokens / max(1, self.prompt_tokens)


class Simulator:
    """One scheduler with its KV cache manager over a pool of ``blocks`` blocks.

    ``plugin=None`` is stock vLLM with ``retention_interval`` (0, N tokens, or None for dense).
    Without ``watch_lookups`` there are no :attr:`records`, and nothing between vLLM's own calls.
    """

    def __init__(
        self,
        blocks: int,
        *,
        plugin: KvSettings | None = None,
        retention_interval: int | None = 0,
        geometry: Geometry | None = None,
        max_batched_tokens: int = 2048,
        max_model_len: int = 131_072,
        max_requests: int = 16,
        events: bool = False,
        watch_lookups: bool = True,
    ) -> None:
        self.geometry = geometry or Geometry()
        vllm_config = engine_config(max_batched_tokens, max_model_len, max_requests)
        vllm_config.cache_config.num_gpu_blocks = blocks
        vllm_config.cache_config.prefix_cache_retention_interval = retention_interval
        arguments = scheduler_arguments(vllm_config, self.geometry, log_stats=False)
        self.scheduler = (
            Scheduler(**arguments) if plugin is None else build(Scheduler, plugin, **arguments)
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self._hasher = get_request_block_hasher(self.geometry.hash_block_tokens, HASH)
        self._outputs: dict[str, list[int]] = {}
        self._count = 0
        self.records: dict[str, Record] = {}
        if watch_lookups:
            self._watch_lookups()

    def _watch_lookups(self) -> None:
        original = self.manager.get_computed_blocks

        def get_computed_blocks(request: Any, *args: Any) -> Any:
            result = original(request, *args)
            if request.request_id not in self.records:
                self.records[request.request_id] = Record(
                    request.num_prompt_tokens, result[1], self.full_hit_tokens(request)
                )
            return result

        self.manager.get_computed_blocks = get_computed_blocks

    def full_hit_tokens(self, request: Any) -> int:
        """Longest aligned prefix with resident full-attention KV, short of the last token."""
        block = self.geometry.full_block_tokens
        scale = block // self.pool.hash_block_size
        get_block = self.pool.cached_block_hash_to_block.get_one_block
        count = 0
        for index in range((request.num_tokens - 1) // block):
            key = make_block_hash_with_group_id(request.block_hashes[(index + 1) * scale - 1], 0)
            if get_block(key) is None:
                break
            count += 1
        return count * block // self.geometry.alignment_tokens * self.geometry.alignment_tokens

    def submit(
        self,
        prompt: Sequence[int],
        num_output_tokens: int,
        output: list[int] | None = None,
        block_hasher: Callable[[Any], list[Any]] | None = None,
    ) -> str:
        """Queue a request; returns its id. ``block_hasher`` replaces vLLM's hashing."""
        request_id = str(self._count)
        self._count += 1
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=num_output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=block_hasher or self._hasher,
        )
        rng = random.Random(10_000 + self._count)
        self._outputs[request_id] = output or [
            rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_output_tokens)
        ]
        self.scheduler.add_request(request)
        return request_id

    def output_of(self, request_id: str) -> list[int]:
        """The output tokens that the request was given."""
        return list(self._outputs[request_id])

    def step(self) -> set[str]:
        """One engine step; returns the ids of the requests that finished in it."""
        return self.update(self.scheduler.schedule())

    def update(self, scheduled: Any) -> set[str]:
        """The rest of a step: "run" what was scheduled; returns the ids that finished."""
        ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._outputs[request_id][request.num_output_tokens]] if done else [])
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(scheduled, output)
        return before - set(self.scheduler.requests)

    def generate(self, prompt: Sequence[int], num_output_tokens: int) -> tuple[Record, list[int]]:
        """Run one request to its end, alone or beside what is queued."""
        request_id = self.submit(prompt, num_output_tokens)
        while request_id not in self.step():
            pass
        return self.records[request_id], self.output_of(request_id)

    def drive(self, sessions: Iterable[Session], *, concurrency: int = 4, seed: int = 0) -> Totals:
        """Run sessions to their end; when a slot is free a random idle session goes on."""
        rng = random.Random(seed + 77)
        idle = [(session, next(session)) for session in sessions]
        rng.shuffle(idle)
        active: dict[str, Session] = {}
        while idle or active:
            while idle and len(active) < concurrency:
                session, (prompt, num_output) = idle.pop(rng.randrange(len(idle)))
                active[self.submit(prompt, num_output)] = session
            for request_id in sorted(self.step(), key=int):
                session = active.pop(request_id)
                try:
                    idle.append((session, session.send(self.output_of(request_id))))
                except StopIteration:
                    continue
        return self.totals()

    def totals(self) -> Totals:
        """Sums over all requests seen so far."""
        out = Totals()
        for record in self.records.values():
            out.requests += 1
            out.prompt_tokens += record.prompt_tokens
            out.hit_tokens += record.hit_tokens
            out.full_hit_tokens += record.full_hit_tokens
        return out
