# SPDX-License-Identifier: Apache-2.0
"""A client's request: may it go on, and what of it.

Only paths that engines answer users at are forwarded. What an engine does for whoever runs it
(sleep, weights, caches, adapters) is not, and no ``..`` leads there. Left out of what is forwarded:
headers that are of one connection only, the choice of a data-parallel rank, and what makes a vLLM
worker report blocks twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from mimo_plugin.router.problems import Problem

FORWARDED = re.compile(
    r"/(v[12]/.+|inference/.+|tokenize|detokenize|rerank|score|classify|pooling|embed|generate"
    r"|generative_scoring|tokenizer_info|get_model_info|model_info)"
)
_OPERATORS = re.compile(r"/v1/(un)?load_lora_adapter")
NO_PREFILL = re.compile(r"/(v1/)?(tokenize|detokenize)|.*/(render|count_tokens|cancel)")
"""Nothing is computed for these."""
RANK_HEADER = "X-data-parallel-rank"
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT = _HOP_BY_HOP | {
    "host",
    "content-length",
    "expect",
    "content-encoding",
    RANK_HEADER.lower(),
}
#: a body that says which rank computes, to either engine
_RANKS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")
_REPORT = "kv_cache_report_mode"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,300})\r\n')


def check_path(request: web.BaseRequest) -> str:
    """The path to forward, with its query, as the client wrote it.

    Raises:
        Problem: nothing that a router forwards.
    """
    raw = request.raw_path
    path, _, query = raw.partition("?")
    if not raw.startswith("/"):  # http://…, as for a proxy
        raise Problem(404, "only paths are served here; found an address")
    if request.headers.get("Upgrade", "").lower() == "websocket":
        raise Problem(501, "web sockets are not forwarded: connect to a worker")
    decoded = unquote(unquote(path))
    if "\\" in decoded or any(ord(char) <= 32 or ord(char) == 127 for char in decoded):
        raise Problem(400, "the path holds characters that no path has")
    if "//" in decoded or any(part in (".", "..") for part in decoded.split("/")):
        raise Problem(400, "the path holds empty or dotted parts")
    if _OPERATORS.fullmatch(decoded):
        raise Problem(
            403, f"{decoded} is not forwarded: load adapters at each worker; the router sees them"
        )
    if not FORWARDED.fullmatch(decoded):
        raise Problem(404, f"no such path: {decoded}")
    return f"{path}?{query}" if query else path


class Budget:
    """Bytes of bodies that are held at once, by all requests.

    Args:
        most_bytes: limit.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used_bytes = most_bytes, 0


class Held:
    """What one request holds of a budget."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget, self._bytes = budget, 0

    def add(self, size_bytes: int) -> None:
        """Hold more.

        Raises:
            Problem: all requests together hold too much.
        """
        self._bytes += size_bytes
        self._budget.used_bytes += size_bytes
        if self._budget.used_bytes > self._budget.most_bytes:
            self.release()
            text = "the bodies of all requests take too much memory (--max-buffered-mib)"
            raise Problem(503, text, "overloaded", headers={"Retry-After": "1"}, close=True)

    def release(self) -> None:
        """Hold nothing more; harmless when called again."""
        self._budget.used_bytes -= self._bytes
        self._bytes = 0


async def read_body(
    request: web.BaseRequest, most_bytes: int, timeout_s: float, held: Held
) -> bytes:
    """The whole body, which ``held`` has to account for.

    Raises:
        Problem: it is too large (nothing more of it is read), or does not come in time.
    """
    if request.content_length is not None and request.content_length > most_bytes:
        raise _too_large(most_bytes)
    if not request.can_read_body:
        return b""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.writer is not None:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts: list[bytes] = []
    size = 0
    deadline = asyncio.get_running_loop().call_later(
        timeout_s, request.content.set_exception, asyncio.TimeoutError()
    )
    try:
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if size > most_bytes:
                raise _too_large(most_bytes)
            held.add(len(chunk))
            parts.append(chunk)
    except asyncio.TimeoutError:
        raise Problem(
            408, f"the body did not come within {timeout_s:g} s", "timeout", close=True
        ) from None
    except web.RequestPayloadError as error:
        raise Problem(400, f"the body can't be read: {error}", close=True) from None
    finally:
        deadline.cancel()
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most_bytes: int) -> Problem:
    return Problem(
        413, f"the body is larger than {most_bytes / 2**20:g} MiB (--max-body-mib)", close=True
    )


def parse(request: web.BaseRequest, body: bytes) -> dict[str, Any] | None:
    """The body's JSON object; None where it is something else by its type.

    Raises:
        Problem: it is meant to be JSON and is not.
    """
    if request.method not in ("POST", "PUT") or not body:
        return None
    kind = request.content_type
    if kind.startswith(("multipart/", "audio/", "image/")) or kind.endswith("form-urlencoded"):
        return None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem(400, "the body is no JSON object")
    return value


def model_of(body: bytes, parsed: Mapping[str, Any] | None) -> str | None:
    """The model that is asked for; None: any."""
    if parsed is not None:
        model = parsed.get("model")
        if model is not None and not isinstance(model, str):
            raise Problem(400, f"model: found {type(model).__name__}; allowed: a name")
        return model or None
    found = _FORM_MODEL.search(body[:65536]) or _FORM_MODEL.search(body[-65536:])
    return found[1].decode("utf-8", "replace") if found else None


def clean(parsed: dict[str, Any]) -> bool:
    """Take out what is not for clients to say; True when something was.

    Raises:
        Problem: it names KV on other machines, which a client has no business with.
    """
    changed = False
    for key in (*_RANKS, _REPORT):
        if key in parsed:
            del parsed[key]
            changed = True
    extra = parsed.get("vllm_xargs")
    if isinstance(extra, dict) and _REPORT in extra:
        del extra[_REPORT]
        changed = True
    transfer = parsed.get("kv_transfer_params")
    if isinstance(transfer, dict):
        for key in transfer:
            if str(key).startswith(("remote_", "do_remote_")):
                raise Problem(
                    400, f"kv_transfer_params.{key} is not for clients: the router sets it"
                )
    return changed


def request_id(request: web.BaseRequest, fresh: str) -> str:
    """The client's id of the request, or a fresh one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else fresh


def forwarded_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers, as a worker gets them."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",") if name}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        low = name.lower()
        if low not in _NOT_SENT and low not in named:
            kept.add(name, value)
    return kept


def answered_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A worker's headers, as the client gets them."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",") if name}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        low = name.lower()
        if low not in _HOP_BY_HOP and low not in named and low != "x-request-id":
            kept.add(name, value)
    return kept
