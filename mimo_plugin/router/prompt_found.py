# SPDX-License-Identifier: Apache-2.0
"""What was found of one request's prompt, and estimates for what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimo_plugin.router.prompt import MediaSpan

#: what a medium is taken for where its tokens are not known
MEDIUM_TOKENS = 1024


class Found:
    """Tokens of one request, and where they came from."""

    __slots__ = ("media", "prompt_tokens", "source", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        prompt_tokens: int = 0,
        media: Sequence[MediaSpan] = (),
        source: str = "unknown",
    ) -> None:
        self.token_ids = token_ids
        self.prompt_tokens = prompt_tokens
        self.media = media
        self.source = source


def kind_of(value: object) -> str:
    """JSON's name of what a value is."""
    names = {type(None): "null", bool: "a boolean", str: "text", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def estimate_tokens(size_bytes: int, media: int = 0) -> int:
    """Tokens of so much text and media: about four bytes a token."""
    return -(-size_bytes // 4) + MEDIUM_TOKENS * media


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def chat_bytes(body: Mapping[str, Any]) -> int:
    """Bytes of the texts of a chat: contents only."""
    total = 0
    for name in ("system", "instructions", "messages", "input"):
        value = body.get(name)
        for message in value if isinstance(value, list) else [value]:
            content = message.get("content") if isinstance(message, Mapping) else message
            for part in content if isinstance(content, list) else [content]:
                text = part.get("text") if isinstance(part, Mapping) else part
                total += text_bytes(text) if isinstance(text, str) else 0
    return total
