# SPDX-License-Identifier: Apache-2.0
"""Run a token-id workload in one in-process engine, then in the simulator; print both as JSON.

Usage: ``python kv_probe.py MODEL OPTIONS_JSON``; the last line is the result. The options are
``LLM``'s, but for ``probe``: ``simulate``, ``logprobs``, ``restart_at`` and ``batches`` say what to
do.

The simulator gets the engine's own KV cache groups, pool size, limits and settings, and the
tokens that the engine generated, so every difference in a hit is a difference in behaviour.
"""

import json
import os
import random
import sys
from collections import Counter

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MESSAGE_START = 1
MAX_BATCHED_TOKENS = 256
MAX_REQUESTS = 8
MAX_MODEL_LEN = 2048
LOGPROB_PROMPTS = 3


class EngineGeometry:
    """The groups of a running engine, in the form that the simulator takes."""

    def __init__(self, kv_cache_config, hash_block_tokens):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._groups = list(kv_cache_config.kv_cache_groups)
        sizes = [group.kv_cache_spec.block_size for group in self._groups]
        assert isinstance(self._groups[0].kv_cache_spec, FullAttentionSpec)
        self.hash_block_tokens = hash_block_tokens
        self.full_block_tokens = sizes[0]
        self.swa_block_tokens = min(sizes)
        self.alignment_tokens = max(sizes)

    def groups(self):
        return self._groups


class Chats:
    """Growing chats on two system prompts, with forks, edits and regenerations, in batches."""

    def __init__(self, seed, count=6, turns=5):
        self.rng = random.Random(seed)
        self.systems = [self.message(250), self.message(330)]
        self.histories = [list(self.systems[i % 2]) for i in range(count)]
        self.turns = turns

    def message(self, count):
        return [MESSAGE_START, *(self.rng.randrange(300, 1000) for _ in range(count - 1))]

    def batches(self):
        """Yield lists of ``(prompt, output tokens)``; is sent the outputs."""
        rng = self.rng
        for turn in range(self.turns + 1):
            if turn == self.turns:  # short prompts, long answers: running requests are preempted
                yield [(self.message(40 + at), 260) for at in range(MAX_REQUESTS)]
                return
            for size in ((1, 1, 4), (2, 3, 1), (6,), (3, 3))[turn % 4]:
                chosen = rng.sample(range(len(self.histories)), size)
                prompts = []
                for at in chosen:
                    history = self.histories[at]
                    kind = rng.random()
                    if kind < 0.2 and len(history) > 400:  # an edit, or a fork, far back
                        history = history[: rng.randrange(250, len(history))]
                    prompt = [*history, *self.message(rng.randrange(10, 90))]
                    if kind > 0.85:  # the same question again
                        prompt = list(self.histories[at])
                    prompts.append((prompt[: MAX_MODEL_LEN - 128], rng.randrange(4, 40)))
                outputs = yield prompts
                for at, (prompt, _), output in zip(chosen, prompts, outputs, strict=True):
                    self.histories[at] = [*prompt, *output]


def live_blocks(pool):
    """Cached blocks now, by KV cache group."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    return Counter(
        get_group_id(block.block_hash) for block in pool.blocks if block.block_hash is not None
    )


def warm_and_cold(llm, sampling):
    """Largest difference in the logprobs of a run with a hit and one without, and their tokens."""
    worst, same, hits = 0.0, True, []
    rng = random.Random(99)
    shared = [MESSAGE_START, *(rng.randrange(300, 1000) for _ in range(500))]
    for at in range(LOGPROB_PROMPTS):
        tail = [MESSAGE_START, *(rng.randrange(300, 1000) for _ in range(70 + 31 * at))]
        pairs = []
        for warm in (False, True):
            assert llm.reset_prefix_cache()
            if warm:
                llm.generate([{"prompt_token_ids": shared + tail[:20]}], sampling, use_tqdm=False)
            (answer,) = llm.generate(
                [{"prompt_token_ids": shared + tail}], sampling, use_tqdm=False
            )
            tokens = list(answer.outputs[0].token_ids)
            pairs.append(
                (
                    tokens,
                    [
                        each[token].logprob
                        for each, token in zip(answer.outputs[0].logprobs, tokens, strict=True)
                    ],
                    answer.num_cached_tokens,
                )
            )
        (cold, cold_logprobs, nothing), (warm, warm_logprobs, hit) = pairs
        assert nothing == 0
        same = same and cold == warm
        hits.append(hit)
        worst = max(worst, *(abs(a - b) for a, b in zip(cold_logprobs, warm_logprobs, strict=True)))
    return {"worst_logprob_gap": worst, "same_tokens": same, "hits": hits}


def run_chats(llm, restart_at=None, batches=None):
    """Drive the workload: (batch, outputs, hits) each.

    ``restart_at``: drop the cache before that batch; ``batches``: stop after so many.
    """
    from vllm import SamplingParams

    log = []
    plan = Chats(7).batches()
    batch = next(plan)
    while True:
        if len(log) == restart_at:
            assert llm.reset_prefix_cache()
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in batch],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in batch],
            use_tqdm=False,
        )
        outputs = [list(answer.outputs[0].token_ids) for answer in answers]
        log.append((batch, outputs, [answer.num_cached_tokens for answer in answers]))
        if len(log) == batches:
            return log
        try:
            batch = plan.send(outputs)
        except StopIteration:
            return log


def simulate(log, scheduler, settings):
    """The same requests in the simulator: hits, live blocks and preemptions."""
    from benchmarks.sim import Simulator

    pool = scheduler.kv_cache_manager.block_pool
    simulator = Simulator(
        pool.num_gpu_blocks,
        plugin=settings,
        geometry=EngineGeometry(scheduler.kv_cache_config, pool.hash_block_size),
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_requests=MAX_REQUESTS,
    )
    hits, preemptions = [], 0
    for batch, outputs, _ in log:
        ids = [
            simulator.submit(prompt, n, output)
            for (prompt, n), output in zip(batch, outputs, strict=True)
        ]
        requests = [simulator.scheduler.requests[each] for each in ids]
        stats = [request.prefill_stats for request in requests]
        waiting = set(ids)
        while waiting:
            waiting -= simulator.step()
        hits.append([each.num_local_cached_tokens for each in stats])
        preemptions += sum(request.num_preemptions for request in requests)
    return {
        "simulator_hits": hits,
        "simulator_live": sorted(live_blocks(simulator.pool).items()),
        "simulator_preemptions": preemptions,
    }


def metrics():
    """Everything in the registry of this process, labels summed over."""
    from prometheus_client import REGISTRY

    values = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith(("mimo:", "vllm:spec_decode", "vllm:external_prefix")):
                values[sample.name] += sample.value
    return dict(values)


def main():
    model, options = sys.argv[1], json.loads(sys.argv[2])
    probe = options.pop("probe")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=MAX_REQUESTS,
        disable_log_stats=False,
        **options,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    settings = getattr(manager.coordinator, "settings", None)
    preemptions = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kwargs: (
        preemptions.append(request.request_id),
        preempt(request, *args, **kwargs),
    )[1]
    log = run_chats(llm, probe.get("restart_at"), probe.get("batches"))
    result = {
        "prompts": [[len(prompt) for prompt, _ in batch] for batch, _, _ in log],
        "outputs": [outputs for _, outputs, _ in log],
        "engine_hits": [hits for _, _, hits in log],
        "engine_live": sorted(live_blocks(manager.block_pool).items()),
        "engine_preemptions": len(preemptions),
        "kv_module": type(manager.coordinator).__module__,
        "message_starts": sorted(settings.message_start_token_ids) if settings else None,
        "block_sizes": [
            group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups
        ],
        "metrics": metrics(),
    }
    if probe.get("simulate"):
        result.update(simulate(log, scheduler, settings))
    if probe.get("logprobs"):
        sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)
        result["logprobs"] = warm_and_cold(llm, sampling)
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
