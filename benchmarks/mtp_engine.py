# SPDX-License-Identifier: Apache-2.0
"""One engine of the MTP benchmark, in a process of its own: ``python -m benchmarks.mtp_engine``.

Reads an :class:`Engine` as JSON from standard input and writes the results of its passes to the
file that it is given. The engine runs inside this process, so that every draft round can be seen
where vLLM counts it, with the plugin and without.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import tiny_trained

BLOCK_TOKENS = 64
MAX_REQUESTS = 16
#: room for the prompts and drafts of all running requests, so that no prompt is cut
WHOLE_TOKENS = 8192


@dataclass(frozen=True)
class Pass:
    """The same prompts served once.

    Attributes:
        name: of the result.
        outputs: tokens that each request gets.
        cold: forget all cached prefixes first.
    """

    name: str
    outputs: int
    cold: bool = True


@dataclass(frozen=True)
class Engine:
    """One engine and what it serves.

    Attributes:
        name: of the configuration.
        passes: in this order.
        prompts: how many held-out prompts.
        prompt_tokens: their length.
        features: of the plugin; empty for stock vLLM.
        settings: of the plugin's section ``mtp``.
        speculative: vLLM's speculative configuration; None for no speculation.
        change: a member of :data:`benchmarks.mtp_ablations.CHANGES`; None for none.
        arguments: of the engine, on top of :func:`arguments`.
    """

    name: str
    passes: tuple[Pass, ...]
    prompts: int
    prompt_tokens: int = tiny_trained.PROMPT_TOKENS
    features: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] | None = None
    change: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """What one pass gave.

    Attributes:
        outputs: tokens of each request.
        rounds: [request, outputs before the round, drafted tokens, accepted tokens] each.
        cached_tokens: of each prompt.
        cut_prompts: steps in which a prompt was computed in part.
        seconds: wall-clock time.
        cpu_s: CPU time of this process.
        start_s: time that the engine took to start.
    """

    outputs: list[list[int]]
    rounds: list[tuple[int, int, int, int]]
    cached_tokens: list[int]
    cut_prompts: int
    seconds: float
    cpu_s: float
    start_s: float


class Rounds:
    """Records what vLLM's scheduler counts; changes nothing."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.seen: list[tuple[str, int, int, int]] = []
        self.cut_prompts = 0
        count, advance, rounds = (
            Scheduler.make_spec_decoding_stats,
            Scheduler._update_after_schedule,
            self,
        )

        def make_spec_decoding_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs["num_draft_tokens"]:
                name = kwargs["request_id"]
                known = self.requests[name].num_output_tokens
                rounds.seen.append(
                    (name, known, kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
                )
            return count(self, *args, **kwargs)

        def _update_after_schedule(self: Any, output: Any) -> None:
            for name, tokens in output.num_scheduled_tokens.items():
                request = self.requests[name]
                end = request.num_computed_tokens + tokens
                rounds.cut_prompts += end < request.num_prompt_tokens
            advance(self, output)

        Scheduler.make_spec_decoding_stats = make_spec_decoding_stats
        Scheduler._update_after_schedule = _update_after_schedule

    def take(self, names: list[str]) -> tuple[list[tuple[int, int, int, int]], int]:
        """Rounds of the requests ``names`` since the last call, and prompts that were cut."""
        # The engine gives a request's id an ending of its own.
        place = {name: index for index, name in enumerate(names)}
        found = [(place[name.partition("-")[0]], *rest) for name, *rest in self.seen]
        cut, self.seen, self.cut_prompts = self.cut_prompts, [], 0
        return found, cut


def arguments(engine: Engine) -> dict[str, Any]:
    """Keyword arguments of ``LLM``."""
    config = {"mimo": {"features": list(engine.features), "mtp": engine.settings}}
    return {
        "model": str(tiny_trained.CHECKPOINT),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": MAX_REQUESTS,
        "max_num_batched_tokens": WHOLE_TOKENS,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        "speculative_config": engine.speculative,
        "additional_config": config if engine.features else {},
        **engine.arguments,
    }


def counted(llm: Any) -> tuple[int, int]:
    """Rounds and accepted tokens by vLLM's own metrics."""
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: metric for metric in llm.get_metrics()}
    rounds, accepted = (int(values[n].value) if n in values else 0 for n in names)
    return rounds, accepted


def serve(engine: Engine) -> dict[str, Result]:
    """Start the engine and run its passes."""
    from tools.model_runner_v2 import enable
    from tools.server import engine_environment

    enable()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}))
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    if engine.change is not None:
        from benchmarks.mtp_ablations import CHANGES

        CHANGES[engine.change]()
    rounds = Rounds()
    prompts = tiny_trained.held_out_prompts(engine.prompts, engine.prompt_tokens)
    llm = LLM(**arguments(engine))
    start_s = time.monotonic() - started
    results = {}
    for item in engine.passes:
        if item.cold and not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")
        sampling = SamplingParams(
            max_tokens=item.outputs, temperature=0.0, detokenize=False, ignore_eos=True
        )
        before = counted(llm)
        start, cpu = time.monotonic(), time.process_time()
        done = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        seconds, cpu_s = time.monotonic() - start, time.process_time() - cpu
        found, cut = rounds.take([output.request_id for output in done])
        seen = (len(found), sum(accepted for *_, accepted in found))
        told = tuple(new - old for new, old in zip(counted(llm), before, strict=True))
        if seen != told:
            raise RuntimeError(f"rounds and accepted tokens: saw {seen}, vLLM's metrics say {told}")
        results[item.name] = Result(
            outputs=[list(output.outputs[0].token_ids) for output in done],
            rounds=found,
            cached_tokens=[output.num_cached_tokens or 0 for output in done],
            cut_prompts=cut,
            seconds=seconds,
            cpu_s=cpu_s,
            start_s=start_s,
        )
    return results


def main() -> int:
    """Run the engine described on standard input, write its results to the path given."""
    given = json.load(sys.stdin)
    given["passes"] = tuple(Pass(**item) for item in given["passes"])
    given["features"] = tuple(given["features"])
    results = serve(Engine(**given))
    document = {name: dataclasses.asdict(result) for name, result in results.items()}
    Path(sys.argv[1]).write_text(json.dumps(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
