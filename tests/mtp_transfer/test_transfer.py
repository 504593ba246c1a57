# SPDX-License-Identifier: Apache-2.0
"""KV of MTP layers across vLLM's own connectors: their scheduler halves, without a model."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from benchmarks.sim import HASH, Geometry, model_dir, scheduler_arguments  # noqa: E402
from mimo_plugin.engines.vllm.mtp import transfer  # noqa: E402

WINDOW_TOKENS = 64
GEOMETRY = Geometry(
    swa_groups=2,
    full_block_tokens=32,
    swa_block_tokens=16,
    window_tokens=WINDOW_TOKENS,
    draft_group=True,
)
BASES = (Scheduler, AsyncScheduler)
MOONCAKE = {"do_remote_prefill": True, "transfer_id": "t", "remote_bootstrap_addr": "http://a:1"}
NIXL = {
    "do_remote_prefill": True,
    "remote_request_id": "p",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
    "remote_block_ids": [[1], [1], [1]],
}


@lru_cache(maxsize=8)
def engine_config(k: int) -> Any:
    """An engine with ``k`` MTP layers and no connector."""
    config = EngineArgs(
        model=model_dir(),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
    ).create_engine_config()
    draft = config.speculative_config.draft_model_config
    draft.hf_config.num_nextn_predict_layers = k
    return config


def with_connector(k: int, name: str, **extra: Any) -> Any:
    """The configuration of an engine that takes part in a transfer."""
    config = copy.copy(engine_config(k))
    config.additional_config = {}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=name,
        kv_role="kv_consumer" if name == "MooncakeConnector" else "kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )
    return config


def window_of(group: Any) -> int | None:
    """Sliding window of a KV cache group in tokens, None for full attention."""
    window: int | None = getattr(group.kv_cache_spec, "sliding_window", None)
    return window


class Receiver:
    """A scheduler that decodes what another engine prefilled."""

    def __init__(
        self, k: int, name: str, *, base: Any = Scheduler, guarded: bool = True, **extra: Any
    ) -> None:
        config = with_connector(k, name, **extra)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = 400
        arguments = scheduler_arguments(config, GEOMETRY, log_stats=False)
        for group in arguments["kv_cache_config"].kv_cache_groups:
            if window_of(group):
                group.kv_cache_spec = dataclasses.replace(
                    group.kv_cache_spec, extra_retained_tokens=k - 1
                )
        self.scheduler = base(**arguments)
        self.scheduler.use_v2_model_runner = True
        if guarded:
            transfer.guard(self.scheduler, k)
        self._hasher = get_request_block_hasher(GEOMETRY.hash_block_tokens, HASH)
        self.count = 0

    def add(self, prompt: Sequence[int], params: dict[str, Any]) -> str:
        """Submit a request; its id."""
        name = f"r{self.count}"
        self.count += 1
        sampling = SamplingParams(
            max_tokens=8, ignore_eos=True, extra_args={"kv_transfer_params": dict(params)}
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        request.kv_transfer_params = {"remote_engine_id": "sender", **params}
        self.scheduler.add_request(request)
        return name

    def step(self, **received: Any) -> Any:
        """Schedule once; the worker computes nothing and reports ``received``."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=[[5] if self._complete(name, output) else [] for name in ids],
                kv_connector_output=KVConnectorOutput(**received) if received else None,
            ),
        )
        return output

    def _complete(self, name: str, output: Any) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_prompt_tokens

    def first_step(self, prompt: Sequence[int], params: dict[str, Any]) -> tuple[str, Any]:
        """Id of a request and the step after its load has arrived."""
        name = self.add(prompt, params)
        waiting = self.step(finished_recving=None, finished_sending=None)
        assert not waiting.num_scheduled_tokens, "the request must wait for its KV"
        self.step(finished_recving={name})
        return name, self.step()


def prompt_of(tokens: int, first: int = 3) -> list[int]:
    """A prompt of its own for each ``first``."""
    return [first + i % 500 for i in range(tokens)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    ("connector", "params", "sender_stops_early"),
    [("MooncakeConnector", MOONCAKE, False), ("NixlConnector", NIXL, True)],
)
@pytest.mark.parametrize("tokens", [40, 200, 210, 221])
def test_the_receiver_computes_what_the_sender_guessed(
    base, k, connector, params, sender_stops_early, tokens
):
    receiver = Receiver(k, connector, base=base)
    name, output = receiver.first_step(prompt_of(tokens), params)
    end = tokens - (k - 1 if sender_stops_early else 0)
    assert output.num_scheduled_tokens == {name: tokens - (end - k)}
    assert not output.scheduled_spec_decode_tokens
    (new,) = output.scheduled_new_reqs
    assert new.num_computed_tokens == end - k
    assert receiver.scheduler.handover_loads == 1
    assert receiver.scheduler.handover_incomplete == 0
    assert receiver.scheduler.handover_repeated_tokens == min(end, tokens - 1) - (end - k)


def test_stock_computes_one_token_and_pads_it_with_drafts_that_nobody_made():
    receiver = Receiver(3, "MooncakeConnector", guarded=False)
    name, output = receiver.first_step(prompt_of(200), MOONCAKE)
    assert output.num_scheduled_tokens == {name: 4}
    assert output.scheduled_spec_decode_tokens == {name: [-1, -1, -1]}


def test_a_window_whose_first_block_was_not_sent_is_respected():
    # 193 tokens are 13 blocks of 16; the sender's last 5 hold tokens 128 … 192, and the window of
    # token 190 begins at 127.
    receiver = Receiver(3, "MooncakeConnector")
    name, output = receiver.first_step(prompt_of(193), MOONCAKE)
    assert output.num_scheduled_tokens == {name: 2}
    assert receiver.scheduler.handover_incomplete == 1
    assert_windows_are_there(receiver, name, start=191, end=193)


@pytest.mark.parametrize("tokens", range(180, 230))
def test_no_recomputed_token_attends_to_a_missing_block(tokens):
    receiver = Receiver(3, "NixlConnector")
    name, output = receiver.first_step(prompt_of(tokens), NIXL)
    start = tokens - output.num_scheduled_tokens[name]
    assert tokens - 5 <= start <= tokens - 4
    assert_windows_are_there(receiver, name, start=start, end=tokens - 2)


def assert_windows_are_there(receiver: Receiver, name: str, *, start: int, end: int) -> None:
    """What the token at ``start`` attends to has a block, and one that a sender's list can hold."""
    rows = receiver.scheduler.kv_cache_manager.get_blocks(name).blocks
    for group, row in zip(GEOMETRY.groups(), rows, strict=True):
        size, window = group.kv_cache_spec.block_size, window_of(group)
        if window is None:
            assert not any(block.is_null for block in row)
            continue
        first = max(0, start - window + 1) // size
        assert first >= -(-end // size) - (-(-window // size) + 1)
        assert not any(block.is_null for block in row[first:])


def test_a_load_behind_a_prefix_of_ones_own():
    receiver = Receiver(3, "MooncakeConnector")
    scheduler = receiver.scheduler
    first = receiver.add(prompt_of(272), {})
    while scheduler.requests[first].num_output_tokens == 0:
        receiver.step()
    scheduler.finish_requests([first], RequestStatus.FINISHED_ABORTED)
    receiver.step()
    name = receiver.add(prompt_of(242), MOONCAKE)
    receiver.step(finished_recving=None)
    full, *_ = scheduler.kv_cache_manager.get_blocks(name).blocks
    assert [block.block_hash is not None for block in full] == [True] * 7 + [False]
    receiver.step(finished_recving={name})
    assert receiver.step().num_scheduled_tokens == {name: 3}
    assert (scheduler.handover_loads, scheduler.handover_incomplete) == (1, 0)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_block_whose_rows_are_final_is_offloaded(guarded, nested):
    name, extra = "OffloadingConnector", {"cpu_bytes_to_use": 1 << 26}
    if nested:
        child = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        name, extra = "MultiConnector", {"connectors": [child]}
    receiver = Receiver(3, name, guarded=guarded, **extra)
    if guarded:
        transfer.guard(receiver.scheduler, 3)  # a second time changes nothing
    receiver.add(prompt_of(66), {})
    metadata = receiver.step().kv_connector_metadata
    (job,) = (metadata.metadata[0] if nested else metadata).store_jobs.values()
    sizes = [group.kv_cache_spec.block_size for group in GEOMETRY.groups()]
    blocks = zip(job.src_spec.block_indices, job.src_spec.group_sizes, sizes, strict=True)
    ends = [(first + number) * size for first, number, size in blocks]
    # Of 66 tokens the rows from 64 on rest on guesses in the last layer, those before do not.
    assert max(ends) == 64


@pytest.mark.parametrize("guarded", [False, True])
def test_a_block_whose_last_rows_are_guessed_is_not_offloaded(guarded):
    receiver = Receiver(3, "OffloadingConnector", guarded=guarded, cpu_bytes_to_use=1 << 26)
    receiver.add(prompt_of(65), {})
    (job,) = receiver.step().kv_connector_metadata.store_jobs.values()
    sizes = [group.kv_cache_spec.block_size for group in GEOMETRY.groups()]
    blocks = zip(job.src_spec.block_indices, job.src_spec.group_sizes, sizes, strict=True)
    assert max((first + number) * size for first, number, size in blocks) == (48 if guarded else 64)


def test_a_failed_load_is_upstreams_business():
    receiver = Receiver(3, "MooncakeConnector")
    name = receiver.add(prompt_of(200), MOONCAKE)
    receiver.scheduler.recompute_kv_load_failures = True
    receiver.step(finished_recving=None)
    receiver.step(finished_recving={name}, failed_recving={name})
    output = receiver.step()
    assert output.num_scheduled_tokens == {name: 200}
    assert receiver.scheduler.handover_loads == 0


def test_a_request_without_a_transfer_is_left_alone():
    receiver = Receiver(3, "MooncakeConnector")
    name = receiver.add(prompt_of(200), {})
    assert receiver.step().num_scheduled_tokens == {name: 200}
    assert receiver.scheduler.handover_loads == 0


def test_guard_needs_a_connector_and_several_layers():
    receiver = Receiver(3, "MooncakeConnector", guarded=False)
    transfer.guard(receiver.scheduler, 1)
    assert type(receiver.scheduler) is Scheduler
    transfer.guard(receiver.scheduler, 3)
    assert isinstance(receiver.scheduler, Scheduler)
    assert receiver.scheduler.handover_layers == 3
    assert transfer.extended(type(receiver.scheduler)) is type(receiver.scheduler)
    receiver.scheduler.connector = None
    transfer.guard(receiver.scheduler, 2)
    assert receiver.scheduler.handover_layers == 3


@pytest.mark.parametrize(
    "name",
    [
        "NixlConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "DecodeBenchConnector",
    ],
)
def test_known_connectors_pass(name):
    assert transfer.why_transfer_unsafe(with_connector(3, name)) is None


@pytest.mark.parametrize(
    "name",
    ["LMCacheConnectorV1", "ExampleConnector", "MoRIIOConnector", "MooncakeStoreConnector"],
)
def test_an_unknown_connector_is_refused_in_one_line(name):
    line = transfer.why_transfer_unsafe(with_connector(3, name))
    assert line is not None
    assert name in line
    assert "NixlConnector" in line
    assert "\n" not in line
    assert transfer.why_transfer_unsafe(with_connector(1, name)) is None


def test_connectors_inside_a_multi_connector_are_looked_at():
    inside = [{"kv_connector": name} for name in ("NixlConnector", "LMCacheConnectorV1")]
    config = with_connector(3, "MultiConnector", connectors=inside)
    assert "LMCacheConnectorV1" in str(transfer.why_transfer_unsafe(config))
    config = with_connector(3, "MultiConnector", connectors=inside[:1])
    assert transfer.why_transfer_unsafe(config) is None
    assert transfer.why_transfer_unsafe(engine_config(3)) is None


def test_nixl_peers_must_have_as_many_layers(monkeypatch):
    stock = metadata._get_speculative_compatibility_factors
    monkeypatch.setattr(metadata, "_get_speculative_compatibility_factors", stock)

    def digest(k: int, section: dict[str, Any] | None) -> str:
        config = with_connector(k, "NixlConnector")
        config.additional_config = {} if section is None else {"mimo": section}
        return metadata.compute_nixl_compatibility_hash(config, "CPU_ATTN")

    plain = digest(2, None)
    assert plain == digest(3, None), "vLLM leaves the number of layers out"
    transfer.prepare_worker(with_connector(3, "NixlConnector"))
    transfer.prepare_worker(with_connector(3, "NixlConnector"))
    on = {"features": ["mtp"]}
    assert digest(2, None) == plain, "an engine without the feature is as before"
    assert digest(3, {"features": ["kv"]}) == plain
    assert len({plain, digest(2, on), digest(3, on)}) == 3
    assert digest(3, on) == digest(3, on)
