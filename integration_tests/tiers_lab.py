# SPDX-License-Identifier: Apache-2.0
"""An engine in this process with the feature ``tiers``, or without, of which all tiers can be seen.

Everything runs through ``LLM.generate``; what is reached for inside the engine only looks, or takes
away what a tier holds, as eviction would.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MAX_MODEL_LEN = 4096
MAX_BATCHED_TOKENS = 512
OUTPUT_TOKENS = 16
PATIENCE_S = 60.0
WAIT_S = 0.02
TOLD = ("direction", "kind", "what", "reason")
"""Labels by which counters are kept apart."""

DEVICE_TO_HOST, HOST_TO_DEVICE = "vllm:kv_offload_store_bytes", "vllm:kv_offload_load_bytes"
TO_STORE, FROM_STORE = "vllm:kv_offload_tiering_write_bytes", "vllm:kv_offload_tiering_read_bytes"


def tokens(seed: int, count: int) -> list[int]:
    """The same random ids for the same seed; none opens a message."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(count)]


HOT = tokens(0, 1500)
PROMPTS = {
    "full": HOT,
    "div1024": HOT[:1024] + tokens(7, 150),
    "div500": HOT[:500] + tokens(7, 150),
    "ext": HOT + tokens(7, 150),
}
"""A prompt, two that part from it, and one that goes on behind it."""
SHORT = [tokens(50 + at, 420) for at in range(4)]


class Engine:
    """See the module.

    Args:
        model: folder of the checkpoint.
        features: of ours; none: stock vLLM.
        tiers: the section ``tiers``.
        options: of ``LLM``.
    """

    def __init__(
        self,
        model: str,
        features: Sequence[str] = (),
        tiers: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        if features:
            section = {"features": list(features), "tiers": {"host_gib": 0.2, **(tiers or {})}}
            options["additional_config"] = {"mimo": section}
        self.llm = LLM(
            model,
            enforce_eager=True,
            **{
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": MAX_BATCHED_TOKENS,
                "disable_log_stats": False,
                **options,
            },
        )
        core: Any = self.llm.llm_engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        connector = self.scheduler.connector
        self.tiered = connector.connector_scheduler if connector is not None else None
        self._keys: list[list[bytes]] = []
        if self.tiered is not None:
            self._spy()

    # -- requests ------------------------------------------------------------------------------

    def ask_all(
        self, prompts: Sequence[Sequence[int]], count: int = OUTPUT_TOKENS
    ) -> list[dict[str, Any]]:
        """Greedy answers of requests that are served together."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=1)
        answers = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        found = []
        for answer in answers:
            ids, logprobs = list(answer.outputs[0].token_ids), answer.outputs[0].logprobs
            found.append(
                {
                    "cached": answer.num_cached_tokens,
                    "tokens": ids,
                    "logprobs": [
                        each[token].logprob for each, token in zip(logprobs, ids, strict=True)
                    ],
                }
            )
        return found

    def ask(self, prompt: Sequence[int], count: int = OUTPUT_TOKENS) -> dict[str, Any]:
        """Greedy answer of one request."""
        return self.ask_all([prompt], count)[0]

    def measured(self, prompt: Sequence[int], count: int = OUTPUT_TOKENS) -> dict[str, Any]:
        """As :meth:`ask`, with what moved between the tiers until nothing moved any more."""
        before = self.counters()
        answer = self.ask(prompt, count)
        self.settle()
        answer["moved"] = {
            name: value - before[name]
            for name, value in self.counters().items()
            if value != before[name]
        }
        return answer

    # -- states --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Steps until no tier has anything to do; stores nothing, prompts are below a block."""
        assert self.tiered is not None
        end_s, quiet = time.monotonic() + PATIENCE_S, 0
        while quiet < 3:
            assert time.monotonic() < end_s, "the tiers never came to rest"
            self.ask([300] * 20, 1)
            busy = self.tiered._jobs or self.tiered.manager.has_pending_work()
            quiet = 0 if busy else quiet + 1
            time.sleep(WAIT_S)
        # The stores' own counts are asked for at most once a second.
        self.manager.accounting._due_s = 0.0
        self.ask([300] * 20, 1)

    def forget_device(self) -> None:
        """The device loses all it has cached."""
        assert self.llm.reset_prefix_cache()

    def forget_host(self) -> None:
        """The device and host memory lose all they have."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def lose_host(self, lost: Callable[[bytes], bool]) -> int:
        """Host memory loses the chunks with these keys; how many."""
        assert self.tiered is not None
        host = self.tiered.manager.primary_tier
        gone = [key for key in list(host._policy.chunks) if lost(key)]
        for key in gone:
            chunk = host._policy.get(key)
            assert chunk.ref_cnt == 0, "in use"
            host._policy.remove(key)
            host._free_chunk(chunk)
            host._num_evictable_cache_chunks -= 1
        return len(gone)

    def lose_device(self, group: int, blocks: Sequence[int]) -> int:
        """The device loses blocks of a group of the prompt asked last; how many it had."""
        found = [self.device_block(group, index) for index in blocks]
        gone = {block.block_id for block in found if block is not None}
        self.pool.evict_blocks(gone)
        return len(gone)

    def device_block(self, group: int, index: int) -> Any | None:
        """The device's cached block of the prompt asked last, None if there is none."""
        assert self.tiered is not None and self.tiered.device_blocks is not None
        return self.tiered.device_blocks.find(group, self._keys[group][index])

    # -- what is there -------------------------------------------------------------------------

    @property
    def manager(self) -> Any:
        """Ours, of the tiers."""
        assert self.tiered is not None
        return self.tiered.manager

    @property
    def store_tier(self) -> Any:
        """The one below host memory."""
        (tier,) = self.manager.secondary_tiers
        return tier

    @property
    def groups(self) -> int:
        """Number of KV cache groups; the first is full attention."""
        assert self.tiered is not None
        return len(self.tiered.geometry)

    def keys(self, group: int) -> list[bytes]:
        """Offload keys of the prompt asked last, block by block."""
        return self._keys[group]

    def host_chunks(self) -> dict[int, int]:
        """Chunks in host memory by group."""
        from vllm.v1.kv_offload.base import get_offload_group_idx

        return dict(
            Counter(get_offload_group_idx(key) for key in self.manager.primary_tier._policy.chunks)
        )

    def host_bytes_used(self) -> int:
        """Bytes of the rows that hold something."""
        host = self.manager.primary_tier
        rows = len(host._policy.chunks)
        return rows * int(host.get_kv_memoryview().strides[0])

    def block_bytes(self) -> list[int]:
        """Bytes of a block of each group, as the engine holds it."""
        config = self.scheduler.kv_cache_config
        return [
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            for group in config.kv_cache_groups
        ]

    def leftovers(self) -> list[int]:
        """What is kept of requests; of one that has ended, nothing after the next step."""
        assert self.tiered is not None and self.tiered.device_blocks is not None
        device = self.tiered.device_blocks
        kept = (self.tiered._requests, self.tiered._req_status, device._plans, device._fresh)
        return [len(each) for each in kept]

    def counters(self) -> Counter[str]:
        """Counters of vLLM's offloading and of the feature, with the labels that matter."""
        from prometheus_client import REGISTRY

        values: Counter[str] = Counter()
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                name = sample.name.removesuffix("_total")
                if metric.type != "counter" or sample.name.endswith("_created"):
                    continue
                if name.startswith(("mimo:tier", "mimo:degraded")):
                    labels = sample.labels
                    told = ",".join(labels[key] for key in sorted(labels) if key in TOLD)
                    values[f"{name}[{told}]" if told else name] += sample.value
                elif name.startswith(("vllm:kv_offload", "vllm:num_preemptions")):
                    values[name] += sample.value
        return values

    def close(self) -> None:
        """End the engine, as a restart would."""
        self.llm.llm_engine.engine_core.shutdown()

    def _spy(self) -> None:
        """Remember the keys of whatever prompt of more than a block is given blocks."""
        tiered = self.tiered
        assert tiered is not None
        allocated = tiered.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, external: int) -> Any:
            if request.num_prompt_tokens > 128:
                states = tiered._req_status[request.request_id].group_states
                self._keys = [list(state.offload_keys) for state in states]
            return allocated(request, blocks, external)

        tiered.update_state_after_alloc = update_state_after_alloc


def after_reset(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """What :meth:`Engine.measured` says with nothing on the device."""
    engine.forget_device()
    return engine.measured(prompt)
