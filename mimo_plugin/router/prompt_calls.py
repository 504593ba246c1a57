# SPDX-License-Identifier: Apache-2.0
"""Which calls to a worker say the tokens of a request: endpoint and body, the best first.

vLLM has its render endpoints (``entrypoints/scale_out/render``) with ``--enable-scale-out`` only.
Without them its ``/tokenize`` is asked, for what it does as well: chats and prompts of text without
truncation. SGLang has ``/tokenize`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_plugin.router.prompt_sessions import media_of

#: endpoint of a request -> vLLM's endpoint that renders it
RENDER_PATHS = {
    "/v1/chat/completions": "/v1/chat/completions/render",
    "/v1/completions": "/v1/completions/render",
    "/v1/responses": "/v1/responses/render",
    "/v1/messages": "/v1/messages/render",
}
#: fields of a request that never change its prompt
_NOT_PROMPT = frozenset(
    {
        "stream",
        "stream_options",
        "request_id",
        "rid",
        "session_id",
        "prompt_cache_key",
        "user",
        "priority",
        "seed",
        "use_beam_search",
        "return_token_offsets",
        "kv_transfer_params",
        "store",
        "background",
    }
)
#: fields of SGLang's ``/tokenize``
_SGLANG_FIELDS = (
    "model",
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
)
_CHAT_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)


def calls_for(kind: str, path: str, body: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Endpoints and bodies that give the tokens of the request; none if no endpoint does.

    Args:
        kind: ``vllm`` or ``sglang``.
        path: endpoint of the request.
        body: of the request, left as it is.
    """
    if kind == "sglang":
        return _sglang(path, body)
    if path == "/tokenize":
        return [(path, dict(body))]
    where = RENDER_PATHS.get(path)
    if where is None or body.get("kv_transfer_params"):
        return []
    sent = {name: value for name, value in body.items() if name not in _NOT_PROMPT}
    calls = [(where, {**sent, "mm_payload": "none"})]
    tokenized = _as_tokenize(path, body)
    return calls if tokenized is None else [*calls, ("/tokenize", tokenized)]


def _sglang(path: str, body: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sent = {name: body[name] for name in _SGLANG_FIELDS if name in body}
    if "messages" in sent and path in ("/v1/chat/completions", "/tokenize"):
        return [("/tokenize", sent)]
    text = sent.get("prompt", body.get("text"))
    if path in ("/v1/completions", "/generate", "/tokenize") and isinstance(text, str):
        sent.pop("messages", None)
        return [("/tokenize", {**sent, "prompt": text})]
    return []


def _as_tokenize(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request for vLLM's ``/tokenize``; None if that would not give the same tokens.

    It knows neither truncation nor suffix, and of media it does not say which they are. What it has
    no field for goes to the template by ``chat_template_kwargs``.
    """
    if any(body.get(n) is not None for n in ("truncate_prompt_tokens", "suffix", "prompt_embeds")):
        return None
    sent = {n: body[n] for n in ("model", "add_special_tokens") if n in body}
    if path == "/v1/completions":
        prompt = body.get("prompt")
        return {**sent, "prompt": prompt} if isinstance(prompt, str) else None
    if path != "/v1/chat/completions" or media_of(body):
        return None
    sent.update((n, body[n]) for n in _CHAT_FIELDS if n in body)
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return None
    merged = dict(kwargs or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        merged.setdefault("enable_thinking", effort != "none")
        merged["reasoning_effort"] = effort
    if body.get("documents") is not None:
        merged["documents"] = body["documents"]
    return {**sent, "chat_template_kwargs": merged} if merged else sent
