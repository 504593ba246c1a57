# SPDX-License-Identifier: Apache-2.0
"""Requests of the Responses and the Messages API as chat completions, as vLLM 0.32 translates them.

Only plain text is translated here; a worker's render endpoint does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_plugin.router.prompt_messages import NotLocal

_BILLING_HEADER = "x-anthropic-billing-header"
_KEPT = ("chat_template_kwargs", "model")


def responses_as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """``/v1/responses``: text, or a list of messages with text.

    Raises:
        NotLocal: it is more than that.
    """
    for name in (
        "tools",
        "previous_response_id",
        "prompt",
        "conversation",
        "previous_input_messages",
    ):
        if body.get(name):
            raise NotLocal(f"Responses with {name!r}")
    if body.get("truncation", "disabled") not in (None, "disabled"):
        raise NotLocal("Responses with truncation")
    chat: dict[str, Any] = {name: body[name] for name in _KEPT if name in body}
    reasoning = body.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, Mapping):
            raise NotLocal("reasoning is no object")
        chat["reasoning_effort"] = reasoning.get("effort")
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions:
        if not isinstance(instructions, str):
            raise NotLocal("instructions are no text")
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        messages.extend(_item(item) for item in items or ())
    # Unlike chat completions, this API lets the tokenizer add its special tokens.
    return {**chat, "messages": messages, "add_special_tokens": True}


def _item(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        raise NotLocal("an input item that is no message")
    role, content = item.get("role"), item.get("content")
    if not item.keys() <= {"type", "role", "content"}:
        raise NotLocal("an input item with more than a role and a content")
    if role == "assistant" and isinstance(content, str):
        return {"role": role, "content": content}
    if role not in ("user", "system", "developer"):
        raise NotLocal(f"an input item of role {role!r}")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or part.keys() != {"type", "text"}:
                raise NotLocal("an input part that is no text")
            if part["type"] != "input_text":
                raise NotLocal(f"an input part of type {part['type']!r}")
            parts.append({"type": "text", "text": text})
        return {"role": role, "content": parts}
    if not isinstance(content, str):
        raise NotLocal("an input item without text")
    return {"role": role, "content": content}


def messages_as_chat(body: Mapping[str, Any], disabled_effort: str) -> dict[str, Any]:
    """``/v1/messages``: a system text, and turns with text.

    Args:
        body: of the request.
        disabled_effort: the ``reasoning_effort`` that stands for disabled thinking.

    Raises:
        NotLocal: it is more than that.
    """
    for name in ("tools", "tool_choice"):
        if body.get(name) is not None:
            raise NotLocal(f"Messages with {name!r}")
    chat: dict[str, Any] = {name: body[name] for name in _KEPT if name in body}
    output = body.get("output_config")
    if output is not None:
        if not isinstance(output, Mapping) or not output.keys() <= {"effort"}:
            raise NotLocal("Messages with more than an effort in output_config")
        chat["reasoning_effort"] = output.get("effort")
    if thinking_disabled(body):
        chat["reasoning_effort"] = disabled_effort
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        kept = [t for t in _blocks(system) if t and not t.startswith(_BILLING_HEADER)]
        kept = [system] if isinstance(system, str) else kept
        if kept:
            messages.append({"role": "system", "content": "".join(kept)})
    for message in body.get("messages") or ():
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise NotLocal("a message of another role")
        content = message.get("content")
        blocks = _blocks(content)
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif len(blocks) == 1 and blocks[0]:
            messages.append({"role": message["role"], "content": blocks[0]})
        elif len(blocks) > 1 and all(blocks):
            parts = [{"type": "text", "text": text} for text in blocks]
            messages.append({"role": message["role"], "content": parts})
        else:
            raise NotLocal("a message with an empty text")
    return {**chat, "messages": messages}


def thinking_disabled(body: Mapping[str, Any]) -> bool:
    """Whether a Messages request turns thinking off."""
    thinking = body.get("thinking")
    return isinstance(thinking, Mapping) and thinking.get("type") == "disabled"


def _blocks(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise NotLocal("content is neither text nor a list")
    texts = []
    for block in content:
        text = block.get("text") if isinstance(block, Mapping) else None
        if not isinstance(text, str) or block.get("type") != "text":
            raise NotLocal("a block that is no text")
        texts.append(text)
    return texts
