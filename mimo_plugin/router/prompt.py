# SPDX-License-Identifier: Apache-2.0
"""What a request's prompt is to the router: tokens as the engine will see them, and what else
tells two prompts with the same tokens apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One image, video or audio clip in a prompt.

    Attributes:
        start_tokens: position of its first placeholder token.
        length_tokens: placeholder tokens that it takes.
        identifier: the engine's key of its content.
    """

    start_tokens: int
    length_tokens: int
    identifier: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: as the engine will see them; where only a beginning is known, that beginning.
        prompt_tokens: length of the whole prompt (an estimate where it is not known).
        media: spans of media within ``token_ids``, in order.
        lora: name of the adapter, or None.
        salt: ``cache_salt`` of the request, or None.
        session: what names the chat that it is a turn of, or None.
        media_keys: keys of its images and videos for the hash ring.
        kept_tokens: starts of its messages: where workers with the feature ``kv`` keep windows.
    """

    token_ids: Sequence[int]
    prompt_tokens: int
    media: tuple[MediaSpan, ...] = ()
    lora: str | None = None
    salt: str | None = None
    session: str | None = None
    media_keys: tuple[str, ...] = ()
    kept_tokens: tuple[int, ...] = ()
