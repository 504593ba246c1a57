# SPDX-License-Identifier: Apache-2.0
"""A chat request's messages and tools as vLLM 0.32 hands them to the chat template.

vLLM validates messages with pydantic and flattens them (``entrypoints/openai/chat_completion/
protocol.py``, ``renderers/chat_utils.py``). Here is what comes of the usual shapes: any other shape
raises :class:`NotLocal`, and the caller asks a worker. What every worker refuses may come out as
anything. Order of keys counts: templates print calls and tools as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mimo_plugin.router.prompt_sessions import modality_of

#: Stands before a chat's first medium while the chat is rendered for what lies before it.
MARK = "\ue000mimo:medium\ue001"
_BILLING_HEADER = "x-anthropic-billing-header"
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


class NotLocal(Exception):
    """The request has a shape whose tokens only an engine's own renderer knows."""


def conversation_of(messages: Sequence[Any], content_format: str) -> tuple[list[Any], bool]:
    """Messages for the chat template, and whether a medium was cut at.

    Args:
        messages: of the request.
        content_format: ``string`` or ``openai``: what the template takes (vLLM's names).

    Raises:
        NotLocal: a shape that is not known here.
    """
    conversation: list[dict[str, Any]] = []
    cut = False
    for message in messages:
        if not isinstance(message, Mapping):
            raise NotLocal("a message is no object")
        parsed, marked = _message(message, content_format, cut)
        cut = cut or marked
        conversation.append(parsed)
    return conversation, cut


def _message(
    message: Mapping[str, Any], content_format: str, already_cut: bool
) -> tuple[dict[str, Any], bool]:
    role = message.get("role")
    if role not in _ROLES:
        raise NotLocal(f"role {role!r}")
    content = message.get("content")
    if content is None and "content" in message and role != "assistant":
        raise NotLocal("content is null")
    if "task" in message or message.get("tools") is not None:
        raise NotLocal("a message with 'task' or 'tools'")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise NotLocal("content is neither text nor a list")
    texts, marked = _parts(parts, role, isinstance(content, str), content_format, already_cut)
    result: dict[str, Any] = {"role": role}
    if content_format == "openai":
        plain = [part["text"] for part in texts if "text" in part]
        result["content"] = "\n".join(plain) if role == "tool" else texts
    else:  # empty texts are dropped in this format only
        result["content"] = "\n".join(part["text"] for part in texts if part.get("text"))
    if role == "assistant":
        _assistant(message, result)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = _text(message["tool_call_id"], "tool_call_id")
    if "name" in message:
        result["name"] = _text(message["name"], "name")
    if role == "developer":
        result["tools"] = None
    return result, marked


def _parts(
    parts: list[Any], role: str, plain: bool, content_format: str, already_cut: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Content parts as text parts; a mark stands where a request's first medium was."""
    found: list[dict[str, Any]] = []
    marked = False
    for part in parts:
        extra: dict[str, Any] = {}
        if plain:
            text = part
        elif modality := modality_of(part):
            if role == "tool":
                raise NotLocal("media in a tool's answer")
            if not (marked or already_cut):
                # Where placeholders go within plain text is the server's choice, so nothing of
                # this message is kept then.
                at = len(found) if content_format == "openai" else 0
                found.insert(at, {"type": "text", "text": MARK})
                marked = True
            if content_format == "openai":
                found.append({"type": modality})
            continue
        else:
            text, extra = _text_part(part, role)
        if role == "system" and text.startswith(_BILLING_HEADER):
            text = text.partition("\n")[2]
            if not text:
                continue
        found.append({"type": "text", "text": text, **extra})
    return found, marked


def _text_part(part: Any, role: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(part, Mapping):
        raise NotLocal("a content part is no object")
    kind = part.get("type")
    if kind == "text" and part.keys() <= {"type", "text", "cache_control"}:
        extra = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
        return _text(part.get("text"), "text"), extra
    if kind == "refusal" and role == "assistant" and part.keys() <= {"type", "refusal"}:
        return _text(part.get("refusal"), "refusal"), {}
    if kind == "thinking" and part.keys() <= {"type", "thinking"}:
        return _text(part.get("thinking"), "thinking"), {}
    raise NotLocal(f"content part {kind!r} with keys {sorted(map(str, part))}")


def _assistant(message: Mapping[str, Any], result: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NotLocal("tool_calls is no list")
        if calls:
            result["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = _text(reasoning, "reasoning")


def _call(call: Any) -> dict[str, Any]:
    """One tool call: known keys in the order of the engine's types, others behind as they came."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type") != "function":
        raise NotLocal("a tool call of another kind")
    name = _text(function.get("name"), "name")
    arguments = _text(function.get("arguments"), "arguments")
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError:
        parsed = {}
    except RecursionError as error:
        raise NotLocal("arguments nest too deeply") from error
    ordered: dict[str, Any] = {"arguments": parsed if isinstance(parsed, dict) else {}}
    ordered["name"] = name
    ordered.update((k, v) for k, v in function.items() if k not in ordered)
    result = {"id": _text(call.get("id"), "id"), "function": ordered, "type": "function"}
    result.update((k, v) for k, v in call.items() if k not in result)
    return result


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Tools for the chat template: what vLLM's models dump, in their order.

    Raises:
        NotLocal: a shape that is not known here.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise NotLocal("tools is no list, or empty")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise NotLocal("a tool of another kind")
    if "defer_loading" in tool or "defer_loading" in function:
        raise NotLocal("a tool with defer_loading")
    description, parameters = function.get("description"), function.get("parameters")
    strict = function.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise NotLocal("parameters is no object")
    if strict is not None and not isinstance(strict, bool):
        raise NotLocal("strict is neither true nor false")
    dumped: dict[str, Any] = {
        "name": _text(function.get("name"), "name"),
        "description": None if description is None else _text(description, "description"),
        "parameters": parameters,
    }
    if strict is not None:
        dumped["strict"] = strict
    return {"type": "function", "function": dumped}


def without_developer(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that does not know the role ``developer``: one system message in front."""
    if not any(m["role"] == "developer" for m in conversation):
        return conversation
    converted = []
    for message in conversation:
        if message["role"] == "developer":
            message = {k: v for k, v in message.items() if k != "tools"} | {"role": "system"}
        converted.append(message)
    systems = [i for i, m in enumerate(converted) if m["role"] == "system"]
    if systems == [0]:
        return converted
    texts = []
    for index in systems:
        content = converted[index]["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    others = [m for m in converted if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise NotLocal(f"{what} is no text")
    return value
