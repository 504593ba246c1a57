# SPDX-License-Identifier: Apache-2.0
"""Which chat a request is a turn of, and what its images, videos and sounds are called.

A session is, first found wins:

1. ``session_id`` of the body (vLLM and SGLang know it), SGLang's ``session_params.id``.
2. A header of :data:`SESSION_HEADERS`: vLLM's ``X-Session-ID`` first.
3. ``vllm_xargs.session_id``, ``metadata.session_id``, the session in the ``metadata.user_id`` that
   Claude Code sends, ``prompt_cache_key``, the ``conversation`` of a Responses request.
4. A digest of what a chat keeps from turn to turn: model, salt, system text, first user message.

``user`` is not one: it names a person, and a person's chats share nothing. Forks of a chat share
the derived session, and so do two chats that begin alike: they also share their first tokens. A
plain completion without a name has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

#: Headers that name a session: vLLM's, SGLang's router's, then those of clients and other routers.
SESSION_HEADERS = (
    "x-session-id",
    "x-smg-routing-key",
    "x-override-conversation-id",
    "x-conversation-id",
    "session-id",
    "session_id",
    "conversation_id",
)
_MAX_NAME_CHARS = 512
_CLAUDE_CODE_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")
#: keys of a content part that carry media, and the modality
MEDIA_KEYS = {
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
_MEDIA_TYPES = {**MEDIA_KEYS, "input_image": "image", "image": "image", "video": "video"}


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session that a request names (rules 1 to 3), or None."""
    params = body.get("session_params")
    metadata = body.get("metadata")
    xargs = body.get("vllm_xargs")
    conversation = body.get("conversation")
    candidates: list[object] = [body.get("session_id")]
    candidates += [params.get("id")] if isinstance(params, Mapping) else []
    candidates += [headers.get(name) for name in SESSION_HEADERS]
    candidates += [xargs.get("session_id")] if isinstance(xargs, Mapping) else []
    if isinstance(metadata, Mapping):
        candidates += [metadata.get("session_id"), _claude_code_session(metadata.get("user_id"))]
    candidates.append(body.get("prompt_cache_key"))
    candidates.append(conversation.get("id") if isinstance(conversation, Mapping) else conversation)
    for found in candidates:
        if isinstance(found, str) and found:
            return found if len(found) <= _MAX_NAME_CHARS else _digest(found)
    return None


def _claude_code_session(user_id: object) -> str | None:
    """Its ``user_<hash>_account_<id>_session_<id>``, or a JSON object with ``session_id``."""
    if not isinstance(user_id, str):
        return None
    if found := _CLAUDE_CODE_SESSION.search(user_id):
        return found.group(1)
    if user_id.startswith("{"):
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        name = value.get("session_id") if isinstance(value, dict) else None
        return name if isinstance(name, str) else None
    return None


def derived_session(body: Mapping[str, Any]) -> str | None:
    """Digest of what all turns of a chat begin with; None if there is no user message."""
    parts: list[str] = [str(body.get("model") or ""), str(body.get("cache_salt") or "")]
    for name in ("system", "instructions"):
        parts.extend(_texts(body.get(name)))
    messages = body.get("messages")
    if messages is None:
        messages = body.get("input")
        if isinstance(messages, str) and "instructions" not in body:
            return None  # one text, no chat
    if isinstance(messages, str):
        return "chat:" + _digest(*parts, messages)
    for message in messages if isinstance(messages, Sequence) else ():
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        if role in ("system", "developer"):
            parts.extend(_texts(message.get("content")))
        elif role == "user":
            parts.append("\0user")
            parts.extend(_texts(message.get("content")))
            parts.extend(media_keys(message.get("content")))
            return "chat:" + _digest(*parts)
    return None


def media_keys(content: object) -> list[str]:
    """Keys of the media in one message's content, in order."""
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return []
    return [key for part in content if (key := media_key(part)) is not None]


def modality_of(part: object) -> str | None:
    """``image``, ``audio`` or ``video`` if a content part carries media, else None."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA_TYPES:
        return _MEDIA_TYPES[kind]
    return next((modality for key, modality in MEDIA_KEYS.items() if key in part), None)


def media_key(part: object) -> str | None:
    """What names the medium of a content part on the hash ring; None without media.

    The ``uuid`` that vLLM takes for its content, else a digest of the base64 text of what is sent
    within the request, else the URL.
    """
    if modality_of(part) is None or not isinstance(part, Mapping):
        return None
    uuid = part.get("uuid")
    if isinstance(uuid, (str, int)) and not isinstance(uuid, bool) and uuid != "":
        return f"uuid:{uuid}"
    for name in ("image_url", "video_url", "audio_url", "input_audio", "source", *MEDIA_KEYS):
        value = part.get(name)
        if isinstance(value, Mapping):
            value = value.get("url") or value.get("data") or value.get("file_id")
        if isinstance(value, str) and value:
            if value.startswith("data:"):
                return "b2:" + _digest(value.partition(",")[2])
            return value if "://" in value[:16] else "b2:" + _digest(value)
    return None


def media_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of all media of a request, in order, each once."""
    keys: dict[str, None] = {}
    messages = body.get("messages")
    if messages is None:
        messages = body.get("input")
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                keys.update(dict.fromkeys(media_keys(content)))
    keys.update(dict.fromkeys(media_keys(body.get("content_parts"))))
    for name in ("image_data", "video_data", "audio_data"):  # SGLang's /generate
        for item in _items(body.get(name)):
            if isinstance(item, Mapping):
                item = item.get("url") or item.get("data")
            if isinstance(item, str) and item:
                key = media_key({"image_url": item})
                keys.update({key: None} if key else {})
    return tuple(keys)


def _items(value: object) -> Iterator[object]:
    """Members of a list of lists of media, or the one that is no list."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, tuple)):
            stack.extend(reversed(one))
        elif one is not None:
            yield one


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for part in content:
            if isinstance(part, str):
                yield part
                continue
            text = part.get("text") if isinstance(part, Mapping) else None
            # Claude Code's header has another digest in each request.
            if isinstance(text, str) and not text.startswith("x-anthropic-billing-header"):
                yield text


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
