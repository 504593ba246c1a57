# SPDX-License-Identifier: Apache-2.0
"""vLLM's internal balancer without engines: its class and its methods, counts by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from mimo_plugin.config_dp_affinity import DpAffinityConfig
from mimo_plugin.engines.vllm.dp_affinity import hook

OPENING = (1, 2)
"""Tokens that open an answer; a question opens with 1 and 3."""


def client(
    num_ranks: int,
    *,
    affinity: bool = True,
    client_count: int = 1,
    client_index: int = 0,
    first_rank: int = 0,
    clock: Any = None,
    **settings: Any,
) -> Any:
    """One API process' client of ``num_ranks`` engines, all idle."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    hook.install()
    made = object.__new__(DPLBAsyncMPClient)
    made.client_count, made.client_index = client_count, client_index
    made.engine_ranks_managed = list(range(first_rank, first_rank + num_ranks))
    made.core_engines = [rank.to_bytes(2, "little") for rank in made.engine_ranks_managed]
    made.reqs_in_flight, made.engine_inflight = {}, Counter()
    made.streaming_reqs = set()
    made.lb_engines = [[0, 0, 0.0] for _ in range(num_ranks)]
    made.eng_start_index = num_ranks * client_index // client_count
    if affinity:
        more = {} if clock is None else {"clock": clock}
        config = DpAffinityConfig(**settings)
        setattr(made, hook._BALANCER, hook.Balancer(config, OPENING, client_count == 1, **more))
    return made


def request(name: str, tokens: list[int] | None, **fields: Any) -> Any:
    """A request as the balancer sees it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    given = {
        "mm_features": None,
        "sampling_params": SamplingParams(),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        **fields,
    }
    return EngineCoreRequest(request_id=name, prompt_token_ids=tokens, **given)


def send(made: Any, sent: Any) -> int:
    """Rank that the request goes to."""
    engine = made.get_core_engine_for_request(sent)
    return int.from_bytes(engine, "little")


def finish(made: Any, name: str) -> None:
    """The request is over, as its engine says."""
    outputs = SimpleNamespace(finished_requests={name})
    asyncio.run(type(made).process_engine_outputs(made, outputs))


def system(tokens: int) -> list[int]:
    """A system prompt that chats share."""
    return [1, 4, *(10 + i % 97 for i in range(tokens))]


def question(chat: int, turn: int, tokens: int = 40) -> list[int]:
    """A question of a chat, and the mark behind which the model is to speak."""
    start = chat * 7919 + turn * 104_729
    return [1, 3, *(200 + (start + i * i) % 5003 for i in range(tokens)), 1, 2]


def answer(chat: int, turn: int, tokens: int = 30) -> list[int]:
    """What the model said."""
    return [(6000 + chat * 31 + turn * 17 + i) for i in range(tokens)]
