# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two engines, with three MTP layers, over vLLM's NIXL connector.

One ``vllm serve`` computes the prompts, another one gets their KV and decodes. NIXL runs on the CPU
with its ordinary wheel. The checkpoint's MTP layers copy the target, so every draft is accepted
unless a row of their KV is wrong; a sliding window of 16 tokens makes each row weigh much.
"""

from __future__ import annotations

import random
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from integration_tests.copy_draft import make_copy_draft
from integration_tests.side_by_side import start_all
from tools import model_runner_v2
from tools.server import ServerError, VllmServer, free_port

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        find_spec("nixl") is None and find_spec("nixl_cu12") is None,
        reason="needs NIXL: pip install --no-deps nixl nixl-cu12",
    ),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
]

K = 3
OUTPUTS = 12
HANDSHAKE_TRIES = 6
#: block edges of 16 and 32 tokens before, at and after the end, and chunks of 64 tokens
LENGTHS_TOKENS = (40, 64, 65, 66, 67, 130)
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


def prompts() -> list[list[int]]:
    """Random tokens: no continuation of a sender's is ever the right guess."""
    draw = random.Random(7)
    return [[draw.randrange(300, 900) for _ in range(n)] for n in LENGTHS_TOKENS]


def arguments(k: int) -> list[str]:
    """Options of an engine with ``k`` draft tokens."""
    return [
        "--max-model-len=512",
        "--max-num-batched-tokens=64",
        "--max-num-seqs=4",
        "--speculative-config",
        f'{{"method":"mtp","num_speculative_tokens":{k}}}',
    ]


def start(serve: Any, model: Path, k: int = K, *more: str, plugin: str = "mimo:mtp") -> VllmServer:
    """A server under Model Runner V2; with ``more`` it takes part in a transfer."""
    environment = {**model_runner_v2.environment(), "VLLM_HOST_IP": "127.0.0.1"}
    environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # to empty a cache
    return serve(model, *arguments(k), *more, plugin=plugin, environment=environment)


def complete(server: VllmServer, prompt: list[int], outputs: int, **body: Any) -> dict[str, Any]:
    """The answer to a greedy request, with token ids."""
    request = {"prompt": prompt, "max_tokens": outputs, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = server.post(
        "/v1/completions", {**request, "return_token_ids": True, **body}
    )
    return answer


def accepted(server: VllmServer) -> list[float]:
    """Drafts so far, then accepted tokens per draft position."""
    found = server.metrics()
    positions = {
        int(labels["position"]): value
        for labels, value in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    }
    (_, drafts), *_ = found["vllm:spec_decode_num_drafts_total"]
    return [drafts, *(positions[i] for i in sorted(positions))]


def prefill(server: VllmServer, prompt: list[int]) -> dict[str, Any]:
    """What the decoding side needs to know of a prompt that ``server`` has computed."""
    answer = complete(server, prompt, 1, kv_transfer_params={"do_remote_decode": True})
    params: dict[str, Any] = answer["kv_transfer_params"]
    assert params["remote_block_ids"], params
    return params


def hand_over(sender: VllmServer, receiver: VllmServer, prompt: list[int], done: str = "") -> bool:
    """Whether one request passed from ``sender`` to ``receiver``.

    NIXL gives a first handshake 5 s, which a busy machine can miss; so there are several tries. It
    ends early once the receiver's log holds ``done``.
    """
    for _ in range(HANDSHAKE_TRIES):
        try:
            complete(receiver, prompt, 2, kv_transfer_params=prefill(sender, prompt))
        except ServerError:
            if done and done in receiver.log_text():
                return False
        else:
            return True
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft layers that copy the target."""
    return make_copy_draft(tmp_path_factory.mktemp("copy-draft"))


@pytest.fixture(scope="module")
def engines(serve_module: Any, model: Path) -> dict[str, VllmServer]:
    """The two engines of one split, and one that drafts less."""

    def engine(k: int) -> partial[VllmServer]:
        return partial(start, serve_module, model, k, "--kv-transfer-config", NIXL)

    return start_all({"sender": engine(K), "receiver": engine(K), "other": engine(K - 1)})


def watched(server: VllmServer, prompt: list[int], **body: Any) -> tuple[list[int], list[float]]:
    """Tokens of an answer; drafts and tokens accepted at each position meanwhile."""
    before = accepted(server)
    tokens = complete(server, prompt, OUTPUTS, **body)["choices"][0]["token_ids"]
    return tokens, [new - old for old, new in zip(before, accepted(server), strict=True)]


def test_a_split_engine_drafts_as_one_engine(engines: dict[str, VllmServer]) -> None:
    sender, receiver = engines["sender"], engines["receiver"]
    assert hand_over(sender, receiver, list(range(300, 350)))
    already = receiver.metric("vllm:external_prefix_cache_hits_total") or 0
    split = [
        watched(receiver, prompt, kv_transfer_params=prefill(sender, prompt))
        for prompt in prompts()
    ]
    loaded = receiver.metric("vllm:external_prefix_cache_hits_total")
    assert loaded is not None
    assert loaded - already == sum(n - (K - 1) for n in LENGTHS_TOKENS)
    # the one engine is the sender, with nothing left of the prompts that it has sent
    assert sender.post("/reset_prefix_cache", {}) == {"success": True}
    for prompt, found in zip(prompts(), split, strict=True):
        assert found == watched(sender, prompt), f"prompt of {len(prompt)} tokens"
    assert sum(acceptance[1] for _, acceptance in split) > 0


def test_another_number_of_layers_is_refused(engines: dict[str, VllmServer]) -> None:
    receiver = engines["other"]
    mismatch = "compatibility hash mismatch"
    assert not hand_over(engines["sender"], receiver, prompts()[1], mismatch)
    log = receiver.log_text()
    assert mismatch in log
    assert f"every NIXL peer must run {K - 1} MTP layers" in log
