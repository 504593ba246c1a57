# SPDX-License-Identifier: Apache-2.0
"""Prefill on one worker, decode on another, as vLLM does it.

The prefill worker gets the request with one token to make and ``do_remote_decode``; its answer
names the blocks in ``kv_transfer_params``, which go into the request to the decode worker. A
prefill answer without them left nothing to fetch: the decode worker computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_DECODES_ONLY = ("stream_options", "min_tokens")
PATHS = ("/v1/completions", "/v1/chat/completions")
"""Where vLLM answers with ``kv_transfer_params``."""


def prefill_body(parsed: Mapping[str, Any]) -> bytes:
    """The request for the prefill worker."""
    body = {key: value for key, value in parsed.items() if key not in _DECODES_ONLY}
    body["stream"] = False
    body["max_tokens"] = 1
    for key in _LIMITS:
        if key in body:
            body[key] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return msgspec.json.encode(body)


def transfer_of(answer: bytes) -> dict[str, Any] | None:
    """``kv_transfer_params`` of the prefill worker's answer; None: it has none.

    Raises:
        ValueError: it is no JSON object.
    """
    value = msgspec.json.decode(answer)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    transfer = value.get("kv_transfer_params")
    return transfer if isinstance(transfer, dict) and transfer else None


def decode_body(parsed: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> bytes:
    """The request for the decode worker."""
    body = dict(parsed)
    if transfer is not None:
        body["kv_transfer_params"] = dict(transfer)
    return msgspec.json.encode(body)
