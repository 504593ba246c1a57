# SPDX-License-Identifier: Apache-2.0
"""Prompts made here: the model's tokenizer and chat template, as the engine uses them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from mimo_plugin.chat_template import message_starts_from
from mimo_plugin.errors import setting_error
from mimo_plugin.router.prompt_messages import NotLocal
from mimo_plugin.router.prompt_segments import SegmentEncoder
from mimo_plugin.router.prompt_template import ChatRenderer

logger = logging.getLogger(__name__)

#: Methods of transformers' fast tokenizers; a class that has its own may make other tokens than its
#: backend alone.
_ENCODING_METHODS = ("__call__", "encode", "_encode_plus", "tokenize", "_call_one")
_BACKEND_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
#: new text above this is encoded in a thread (about 4 ms of work)
THREAD_CHARS = 16_384


@dataclass(frozen=True)
class LocalTokens:
    """Tokens made here.

    Attributes:
        token_ids: of the whole prompt; with ``cut``, of its beginning.
        cut: whether a medium follows them.
        rest_chars: characters of the prompt behind the cut.
    """

    token_ids: list[int]
    cut: bool = False
    rest_chars: int = 0


class LocalTokenizer:
    """The model's tokenizer and chat template.

    Args:
        tokenizer: transformers' tokenizer; :meth:`load` makes it from a path.
        cache_bytes: bound of the cache of encoded pieces.
        message_start_token_ids: tokens that open a message; None reads them off the template.
        renderer_options: keywords of :class:`ChatRenderer`, the server's own settings.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        cache_bytes: int = 64 << 20,
        message_start_token_ids: Sequence[int] | None = None,
        **renderer_options: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()  # a call sets truncation on the shared backend
        self._pool: ThreadPoolExecutor | None = None
        self.chat = ChatRenderer(tokenizer, **renderer_options)
        self.whole_because: str | None = None
        self._encoder: SegmentEncoder | None = None
        try:
            self._encoder = self._segments(cache_bytes)
        except ValueError as error:
            self.whole_because = str(error)
            logger.warning(
                "mimo router: prompts are tokenised as a whole each time: %s", self.whole_because
            )
        if message_start_token_ids is None:
            message_start_token_ids = message_starts_from(tokenizer, logger)
        self.message_start_token_ids = frozenset(message_start_token_ids)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> LocalTokenizer:
        """The tokenizer of a model's directory or name, loaded as vLLM loads it.

        Raises:
            ConfigError: it can't be loaded, or is of a kind that only the engine has.
        """
        from transformers import AutoTokenizer

        folder = Path(model)
        if _is_mistral(folder):
            raise setting_error(
                "tokenizer", model, "a tokenizer that transformers loads", "use tokenizer=render"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model,
                revision=revision,
                trust_remote_code=trust_remote_code,
                truncation_side="left",
            )
        except Exception as error:  # transformers raises many kinds
            raise setting_error(
                "tokenizer", model, f"a model with a tokenizer ({error})", "use tokenizer=render"
            ) from error
        options.setdefault("no_tools_template", _processor_template(folder))
        return cls(tokenizer, **options)

    def _segments(self, cache_bytes: int) -> SegmentEncoder:
        for kind in type(self._tokenizer).__mro__:
            if kind.__name__ in _BACKEND_CLASSES:
                break
            changed = [name for name in _ENCODING_METHODS if name in vars(kind)]
            if changed:
                raise ValueError(f"{kind.__name__} has its own {', '.join(changed)}")
        else:
            raise ValueError("it is not one of the tokenizers library")
        if getattr(self._tokenizer, "split_special_tokens", False):
            raise ValueError("special tokens are encoded as text")
        return SegmentEncoder(self._tokenizer.backend_tokenizer, cache_bytes)

    @property
    def status(self) -> dict[str, Any]:
        """Figures for people and metrics."""
        counts = self._encoder.counts if self._encoder is not None else None
        return {
            "whole_because": self.whole_because,
            "piece_hits": counts.hits if counts else 0,
            "piece_misses": counts.misses if counts else 0,
            "cache_bytes": counts.bytes if counts else 0,
        }

    async def chat_tokens(self, body: Mapping[str, Any]) -> LocalTokens:
        """Tokens of a chat request.

        Raises:
            NotLocal: only the engine's own renderer knows them.
        """
        rendered = self.chat.render(body)
        if not rendered.cut:
            return LocalTokens(await self._tokens(rendered.text, body, False))
        if self._encoder is None or _asks_truncation(body):
            raise NotLocal("media, and no place at which its tokens can be cut")
        text = rendered.text[: self._encoder.stable_length(rendered.text, len(rendered.text))]
        add = _adds_special_tokens(body, False)
        ids = await self._encode(text, add) if text else []
        if add and text:
            raise NotLocal("media and add_special_tokens")
        rest = rendered.rest_chars + len(rendered.text) - len(text)
        return LocalTokens(ids, True, rest)

    async def text_tokens(self, text: str, body: Mapping[str, Any]) -> list[int]:
        """Tokens of a plain prompt.

        Raises:
            NotLocal: only the engine's own renderer knows them.
        """
        return await self._tokens(text, body, True)

    async def _tokens(self, text: str, body: Mapping[str, Any], default: bool) -> list[int]:
        add = _adds_special_tokens(body, default)
        if not _asks_truncation(body):
            return await self._encode(text, add)
        limit = body["truncate_prompt_tokens"]
        if body.get("truncation_side") is not None or type(limit) is not int or limit < 1:
            raise NotLocal("a truncation that depends on the server's limits")
        return await self._in_thread(text, self._whole, text, add, limit)

    async def _encode(self, text: str, add: bool) -> list[int]:
        encoder = self._encoder
        if encoder is None:
            return await self._in_thread(text, self._whole, text, add, None)
        try:
            if len(text) <= THREAD_CHARS or encoder.new_chars(text) <= THREAD_CHARS:
                return encoder.encode(text, add)
            return await self._in_thread(text, encoder.encode, text, add)
        except (UnicodeError, TypeError) as error:  # half a surrogate pair
            raise NotLocal(f"text that can't be encoded: {error}") from error

    async def _in_thread(self, text: str, call: Any, *arguments: Any) -> list[int]:
        if len(text) <= THREAD_CHARS:
            return list(call(*arguments))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="mimo-tokens")
        loop = asyncio.get_running_loop()
        return list(await loop.run_in_executor(self._pool, call, *arguments))

    def _whole(self, text: str, add: bool, limit: int | None) -> list[int]:
        """The whole text by transformers' own call."""
        try:
            with self._lock:
                encoded = self._tokenizer(
                    text, truncation=limit is not None, max_length=limit, add_special_tokens=add
                )
        except Exception as error:  # half a surrogate pair, a limit below the special tokens, …
            raise NotLocal(f"the tokenizer refuses it: {error}") from error
        return list(encoded["input_ids"])

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _asks_truncation(body: Mapping[str, Any]) -> bool:
    return body.get("truncate_prompt_tokens") is not None


def _adds_special_tokens(body: Mapping[str, Any], default: bool) -> bool:
    value = body.get("add_special_tokens", default)
    if not isinstance(value, bool):
        raise NotLocal("add_special_tokens is neither true nor false")
    return value


def _is_mistral(folder: Path) -> bool:
    """vLLM takes Mistral's own tokenizer where one of its files lies beside the model."""
    return folder.is_dir() and (
        (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*"))
    )


def _processor_template(folder: Path) -> str | None:
    """A processor's own template file; vLLM prefers it for chats without tools."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None
