# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with speculative decoding by MTP layers, without a model.

``Engine`` plays the worker: it drafts as many tokens as a step asks for, verifies what a step
schedules, and fails when a step verifies drafts that nobody made. Which drafts are right is the
test's choice. The clock is the test's; a step takes ``FIXED_S + PER_TOKEN_S * tokens``.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from benchmarks.sim import HASH, Geometry, model_dir, scheduler_arguments  # noqa: E402
from mimo_plugin.engines.vllm.mtp.lengths import MtpSettings, install  # noqa: E402
from mimo_plugin.engines.vllm.scheduler import build  # noqa: E402

BASES = (Scheduler, AsyncScheduler)
K = 3
FULL = Geometry(swa_groups=0, full_block_tokens=16)
HYBRID = Geometry(
    swa_groups=2, full_block_tokens=32, swa_block_tokens=16, window_tokens=64, draft_group=True
)
FIXED_S, PER_TOKEN_S = 10e-3, 0.1e-3

#: how many of ``drafts`` tokens of a request are right, its next output token being ``index``
Accepts = Callable[[str, int, int], int]


def all_right(request_id: str, drafts: int, index: int) -> int:
    """A draft that copies the target."""
    return drafts


def token(index: int) -> int:
    """The output token number ``index`` of any request."""
    return 3 + index % 500


@lru_cache(maxsize=8)
def _config(schedule: tuple[tuple[int, int, int], ...] | None, model_len: int) -> Any:
    config = EngineArgs(
        model=model_dir(),
        skip_tokenizer_init=True,
        max_model_len=model_len,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": K,
            **({"num_speculative_tokens_per_batch_size": schedule} if schedule else {}),
        },
    ).create_engine_config()
    # As many layers as are drafted with, so that the scheduler looks ahead for all of them.
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = K
    return config


class Engine:
    """One scheduler with drafts; ``settings=None`` is stock vLLM."""

    def __init__(
        self,
        settings: MtpSettings | None = None,
        *,
        base: type[Any] = Scheduler,
        accepts: Accepts = all_right,
        blocks: int = 400,
        geometry: Geometry = FULL,
        kv: Any = None,
        schedule: tuple[tuple[int, int, int], ...] | None = None,
        max_model_len: int = 8192,
        max_batched_tokens: int = 256,
        max_requests: int = 16,
        depth: int = 1,
        step_s: Callable[[int, int | None], float] | None = None,
    ) -> None:
        config = copy.copy(_config(schedule, max_model_len))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_batched_tokens = max_batched_tokens
        config.scheduler_config.max_num_seqs = max_requests
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        self.config = config
        arguments = scheduler_arguments(config, geometry, log_stats=True)
        plain = settings is None and kv is None
        self.scheduler = base(**arguments) if plain else build(base, kv, **arguments)
        self.scheduler.use_v2_model_runner = True
        self.now_s = self._end_s = 0.0
        if settings is not None:
            install(self.scheduler, settings, clock_s=lambda: self.now_s)
        self.accepts = accepts
        self._hands_out = base is AsyncScheduler
        assert depth == 1 or self._hands_out, "only async scheduling has steps ahead"
        self._depth = depth
        self._step_s = step_s or (lambda tokens, shape: FIXED_S + PER_TOKEN_S * tokens)
        self._hasher = get_request_block_hasher(geometry.hash_block_tokens, HASH)
        self._flying: deque[tuple[Any, dict[str, bool], dict[str, int], float]] = deque()
        #: request id -> valid drafts that the worker holds for it
        self._held: dict[str, int] = {}
        self.known: dict[str, Request] = {}
        self.steps = 0
        #: drafts that requests were given, and of these, those that steps were to verify
        self.proposed = self.scheduled = 0
        #: lengths per step: of the drafts a step verifies, padding left out
        self.verified_lengths: list[dict[str, int]] = []
        #: what vLLM counted
        self.stock_accepted = 0
        self._inc: Counter[tuple[str, ...]] = Counter()

    def submit(self, prompt: Sequence[int], output_tokens: int, **kwargs: Any) -> str:
        """Make and add a request; its id."""
        name = f"r{len(self.known)}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=kwargs.pop("sampling_params", None)
            or SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=float(len(self.known)),
            block_hasher=self._hasher,
            **kwargs,
        )
        self.known[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> None:
        """Every running request loses its KV."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def schedule(self) -> Any:
        """The first half of a step, and what the worker does in it."""
        output = self.scheduler.schedule()
        self.steps += 1
        cached = output.scheduled_cached_reqs
        for name in (*(r.req_id for r in output.scheduled_new_reqs), *cached.resumed_req_ids):
            self._held[name] = 0
        samples, valid, shapes = {}, {}, set()
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            held = self._held[name]
            if held or not drafts:
                assert drafts <= held, f"{name}: {drafts} drafts verified, {held} made"
                valid[name] = drafts
                self.scheduled += drafts
            assert count > drafts, "no row for the token before the drafts"
            samples[name] = not self.scheduler.requests[name].is_prefill_chunk
            shapes.add(count - 1)
            # Drafts of a prefill chunk are never used.
            self._held[name] = output.num_spec_tokens_to_schedule if samples[name] else 0
            if self._hands_out and samples[name]:
                self._gives(name, output)
        self.verified_lengths.append(valid)
        tokens = output.total_num_scheduled_tokens
        seconds = self._step_s(tokens, shapes.pop() if len(shapes) == 1 else None)
        self._end_s = max(self._end_s, self.now_s) + seconds
        self._flying.append((output, samples, valid, self._end_s))
        return output

    def _gives(self, name: str, output: Any) -> None:
        given = len(self.scheduler.requests[name].spec_token_ids)
        assert given <= output.num_spec_tokens_to_schedule
        self.proposed += given

    def update(self) -> None:
        """The second half of the oldest step that is under way."""
        output, samples, valid, end_s = self._flying.popleft()
        self.now_s = max(self.now_s, end_s)
        ids = list(samples)
        if self._hands_out and output.has_structured_output_requests:
            # The drafts come back before the step, so that grammars can refuse some.
            drafts = [[7] * K for _ in ids]
            self.scheduler.update_draft_token_ids_in_output(DraftTokenIds(ids, drafts), output)
        sampled: list[list[int]] = []
        for name in ids:
            index = self.known[name].num_output_tokens
            accepted = self.accepts(name, valid.get(name, 0), index) if samples[name] else -1
            sampled.append([token(index + i) for i in range(accepted + 1)])
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        for out in self.scheduler.update_from_output(output, result).values():
            self._take_stats(out.scheduler_stats)
        if not self._hands_out:
            drafts = [[7] * output.num_spec_tokens_to_schedule for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
            for name in ids:
                if samples[name] and name in self.scheduler.requests:
                    self._gives(name, output)

    def _take_stats(self, stats: Any) -> None:
        if stats is None:
            return
        if stats.spec_decoding_stats is not None:
            self.stock_accepted += stats.spec_decoding_stats.num_accepted_tokens
        payload = (stats.kv_connector_stats or {}).get("mimo")
        for name, labels, value in payload["inc"] if payload else ():
            self._inc[(name, *labels)] += value

    def step(self) -> Any:
        """One engine step; returns what was scheduled."""
        output = self.schedule()
        while len(self._flying) >= self._depth:
            self.update()
        return output

    def run(self, most_steps: int = 3000) -> int:
        """Steps until nothing is left, and their number. Fails when it takes more than that."""
        for count in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                while self._flying:
                    self.update()
                return count
            self.step()
        raise AssertionError(f"still {self.scheduler.get_request_counts()} after {most_steps}")

    def check_outputs(self, but: Sequence[str] = ()) -> None:
        """Every request but the aborted ones got all its tokens, in order."""
        for name, request in self.known.items():
            if name not in but:
                expected = [token(i) for i in range(request.max_tokens)]
                assert list(request.output_token_ids) == expected, name

    def counters(self, metric: str) -> Counter[tuple[str, ...]]:
        """A counter's values so far by its labels."""
        payload = self.scheduler.draft_control.report.drain()
        for name, labels, value in payload["inc"] if payload else ():
            self._inc[(name, *labels)] += value
        return Counter({key[1:]: n for key, n in self._inc.items() if key[0] == metric})

    def total(self, metric: str) -> float:
        """The sum of a counter's values."""
        return sum(self.counters(metric).values())
