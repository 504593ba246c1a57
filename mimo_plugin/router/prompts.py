# SPDX-License-Identifier: Apache-2.0
"""From a request to the prompt that the router decides with: the tokens that the engine will see.

Tokens come from the model's own tokenizer and chat template here (``local``), or from a worker
(``render``). What neither can tell is left out: a prompt's ``token_ids`` are right, or they are a
right beginning, or they are empty; ``prompt_tokens`` is an estimate then.

A request with several prompts is routed by its first one: ``token_ids`` are that one's, and
``prompt_tokens`` counts all, as all of them run on the worker that is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from mimo_plugin.core.retention import find_message_starts
from mimo_plugin.errors import MimoError, one_line, setting_error
from mimo_plugin.router import prompt_sessions as sessions
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.prompt_check import Checks, Sample
from mimo_plugin.router.prompt_convert import messages_as_chat, responses_as_chat, thinking_disabled
from mimo_plugin.router.prompt_found import (
    MEDIUM_TOKENS,
    Found,
    chat_bytes,
    estimate_tokens,
    kind_of,
    text_bytes,
)
from mimo_plugin.router.prompt_local import LocalTokenizer, LocalTokens
from mimo_plugin.router.prompt_messages import NotLocal
from mimo_plugin.router.prompt_render import RenderClient, spans_of

logger = logging.getLogger(__name__)

TOKENIZER_MODES = ("local", "render", "none")
MEDIA_MODES = ("render", "prefix")
_CHAT_PATHS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
_TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/pooling": "input"}


class PromptError(MimoError):
    """A request that every worker would refuse.

    Attributes:
        status: HTTP status of the answer.
        message: one line for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status
        self.message = one_line(message)


class PromptReader:
    """Reads prompts. One for all requests of a router; its state is caches and counters.

    Args:
        local: the model's tokenizer, or None.
        render: asks workers, or None.
        mode: ``local`` (a worker is asked for what can't be done here), ``render`` (a worker is
            asked always) or ``none`` (no tokens at all, except those that requests bring).
        media: ``render`` asks a worker for the tokens of chats with media, which lets it fetch and
            process them; ``prefix`` is content with what lies before the first medium.
        base_models: names under which workers serve the model itself; another name in a request is
            a LoRA adapter's. Empty: no name is taken for one.
        max_prompt_tokens: longer lists of token ids are refused.
        max_text_chars: longer prompts are not tokenised.

    Raises:
        ConfigError: a mode without what it needs.
    """

    def __init__(
        self,
        local: LocalTokenizer | None = None,
        render: RenderClient | None = None,
        *,
        mode: str = "local",
        media: str = "render",
        base_models: Iterable[str] = (),
        max_prompt_tokens: int = 4_000_000,
        max_text_chars: int = 32_000_000,
    ) -> None:
        if mode not in TOKENIZER_MODES:
            raise setting_error("tokenizer", mode, " | ".join(TOKENIZER_MODES), "choose one")
        if media not in MEDIA_MODES:
            raise setting_error("media", media, " | ".join(MEDIA_MODES), "choose one")
        if mode == "local" and local is None:
            raise setting_error("tokenizer", mode, "local with a model", "name the model")
        if mode == "render" and render is None:
            raise setting_error("tokenizer", mode, "render with a worker", "name a worker")
        self.local = local if mode == "local" else None
        self.render = render if mode != "none" else None
        self.mode = mode
        self.media = media
        self.base_models = frozenset(base_models)
        self.checks = Checks()
        self._starts = local.message_start_token_ids if local is not None else frozenset()
        self._max_prompt_tokens = max_prompt_tokens
        self._max_text_chars = max_text_chars
        self._counts = {
            "local": 0,
            "render": 0,
            "given": 0,
            "beginning": 0,
            "unknown": 0,
            "errors": 0,
        }
        self.last_not_local: str | None = None

    @property
    def status(self) -> dict[str, Any]:
        """Figures for people and metrics; ``prompts`` counts by where tokens came from."""
        return {
            "mode": self.mode,
            "prompts": dict(self._counts),
            "check": self.checks.state,
            "difference": self.checks.difference,
            "last_not_local": self.last_not_local,
            "local": self.local.status if self.local is not None else None,
            "render": self.render.status if self.render is not None else None,
        }

    async def check(self, worker: str, headers: Mapping[str, str] | None = None) -> str:
        """Compare the local tokens of some chats with a worker's.

        Where they differ the worker is asked from then on, with an error in the log.

        Returns:
            ``same``, ``different``, or ``unchecked`` (the worker can't say, or nothing is local).
        """
        if self.local is None or self.render is None:
            return self.checks.state
        model = next(iter(sorted(self.base_models)), None)
        return await self.checks.run(
            worker, self.render, self._sample_tokens, model, dict(headers or {})
        )

    async def _sample_tokens(self, sample: Sample) -> list[int] | None:
        assert self.local is not None
        try:
            if sample.kind == "text":
                return await self.local.text_tokens(sample.body["prompt"], sample.body)
            return (await self.local.chat_tokens(sample.body)).token_ids
        except NotLocal:
            return None

    async def read(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Prompt:
        """The prompt of one request.

        Args:
            path: of the request, e.g. ``/v1/chat/completions``; others than those known give a
                prompt without tokens.
            body: its JSON, left as it is.
            headers: its headers; names in any case.

        Raises:
            PromptError: every worker would refuse the request.
        """
        if not isinstance(body, Mapping):
            raise PromptError(400, "the body must be a JSON object")
        path = "/" + path.partition("?")[0].strip("/")
        lowered = {str(k).lower(): v for k, v in headers.items() if isinstance(v, str)}
        try:
            found = await self._tokens(path, body, lowered)
            return self._prompt(found, body, lowered)
        except PromptError:
            raise
        except Exception:
            # A body of any shape may come: the worker answers it, and no request is lost for it.
            self._counts["errors"] += 1
            logger.exception("mimo router: a request to %s could not be read", path)
            return Prompt(token_ids=[], prompt_tokens=0)

    def _prompt(self, found: Found, body: Mapping[str, Any], headers: Mapping[str, str]) -> Prompt:
        self._counts[found.source] += 1
        model, salt = body.get("model"), body.get("cache_salt")
        lora = body.get("lora_path")
        if not (isinstance(lora, str) and lora):
            known = not self.base_models or not isinstance(model, str) or not model
            lora = None if known or model in self.base_models else model
        ids = found.token_ids
        starts: list[int] = []
        if ids and self._starts:
            starts = find_message_starts(ids, self._starts, 0, len(ids))
        return Prompt(
            token_ids=ids,
            prompt_tokens=max(found.prompt_tokens, len(ids)),
            media=tuple(s for s in found.media if s.start_tokens + s.length_tokens <= len(ids)),
            lora=lora,
            salt=salt if isinstance(salt, str) and salt else None,
            session=sessions.session_of(body, headers) or sessions.derived_session(body),
            media_keys=sessions.media_of(body),
            kept_tokens=tuple(starts),
        )

    async def _tokens(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Found:
        if path == "/tokenize" or path in _TEXT_FIELDS:
            if path in _TEXT_FIELDS and "messages" not in body:
                return await self._texts(path, body, body.get(_TEXT_FIELDS[path]), headers)
            if "messages" not in body:
                return await self._texts(path, body, body.get("prompt"), headers)
            return await self._chat(path, body, body, headers)
        if path in _CHAT_PATHS:
            return await self._chat(path, body, self._as_chat(path, body), headers)
        if path == "/inference/v1/generate":
            return self._token_in(body)
        if path == "/generate":
            return await self._generate(body, headers)
        return Found()

    def _as_chat(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The request as a chat completion; None if only an engine can translate it."""
        field = "input" if path == "/v1/responses" else "messages"
        value = body.get(field)
        if not isinstance(value, list) and not (field == "input" and isinstance(value, str)):
            raise PromptError(400, f"{field}: found {kind_of(value)}; a list is needed")
        try:
            if path == "/v1/responses":
                return responses_as_chat(body)
            if path == "/v1/messages" and self.local is not None:
                return messages_as_chat(body, self.local.chat.disabled_thinking_effort)
            return body if path == "/v1/chat/completions" else None
        except NotLocal as error:
            self.last_not_local = one_line(error)
            return None

    async def _chat(
        self,
        path: str,
        body: Mapping[str, Any],
        chat: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> Found:
        messages = body.get("messages", body.get("input"))
        if not isinstance(messages, (list, str)):
            raise PromptError(400, f"messages: found {kind_of(messages)}; a list is needed")
        transfer = body.get("kv_transfer_params")
        given = transfer.get("prompt_token_ids") if isinstance(transfer, Mapping) else None
        media = len(sessions.media_of(body))
        if given is not None and not media and not body.get("echo"):
            return self._given(given)
        chars = chat_bytes(body)
        if chars > self._max_text_chars:
            return Found(prompt_tokens=estimate_tokens(chars, media))
        kind = "tools" if body.get("tools") is not None else "chat"
        begun: LocalTokens | None = None
        if chat is not None and self._locally(kind):
            begun = await self._local_chat(chat)
            if begun is not None and not begun.cut:
                return Found(begun.token_ids, len(begun.token_ids), source="local")
        asks = self.render is not None and not (begun is not None and self.media == "prefix")
        if path == "/v1/messages" and thinking_disabled(body):
            # The render endpoint always takes "none" for it, the Messages API not always.
            effort = self.local.chat.disabled_thinking_effort if self.local else None
            asks = asks and effort == "none"
        if asks and self.render is not None:
            rendered = await self.render.render(path, body, headers)
            if rendered is not None:
                return Found(rendered.token_ids, rendered.prompts_tokens, rendered.media, "render")
        if begun is not None and begun.token_ids:
            total = len(begun.token_ids) + estimate_tokens(begun.rest_chars, media)
            return Found(begun.token_ids, total, source="beginning")
        return Found(prompt_tokens=estimate_tokens(chars, media))

    def _locally(self, kind: str) -> bool:
        return self.local is not None and not self.checks.differs(kind)

    async def _local_chat(self, chat: Mapping[str, Any]) -> LocalTokens | None:
        assert self.local is not None
        try:
            return await self.local.chat_tokens(chat)
        except NotLocal as error:
            self.last_not_local = one_line(error)
            return None

    async def _texts(
        self, path: str, body: Mapping[str, Any], prompt: Any, headers: Mapping[str, str]
    ) -> Found:
        """A plain prompt: text or token ids, or a list of those."""
        if body.get("prompt_embeds") is not None:
            return Found()
        if not isinstance(prompt, (str, list)):
            if prompt is None:
                return Found()
            raise PromptError(400, f"the prompt is {kind_of(prompt)}; text or a list is needed")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not prompts:
            return Found()
        first = prompts[0]
        if not isinstance(first, (str, list)):
            return self._given(prompts)
        if isinstance(first, list):
            found = self._given(first)
            others = sum(len(p) for p in prompts[1:] if isinstance(p, list))
            return Found(found.token_ids, found.prompt_tokens + others, source="given")
        rest = sum(text_bytes(p) for p in prompts[1:] if isinstance(p, str))
        if len(first) > self._max_text_chars:
            return Found(prompt_tokens=estimate_tokens(text_bytes(first) + rest))
        if self._locally("text") and body.get("suffix") is None:
            assert self.local is not None
            try:
                ids = await self.local.text_tokens(first, body)
                return Found(ids, len(ids) + estimate_tokens(rest), source="local")
            except NotLocal as error:
                self.last_not_local = one_line(error)
        if self.render is not None:
            rendered = await self.render.render(path, body, headers)
            if rendered is not None:
                return Found(rendered.token_ids, rendered.prompts_tokens, rendered.media, "render")
        return Found(prompt_tokens=estimate_tokens(text_bytes(first) + rest))

    def _given(self, ids: Any) -> Found:
        """Token ids that the request brings.

        Raises:
            PromptError: they are none, or too many.
        """
        if not isinstance(ids, list):
            raise PromptError(400, f"token ids: found {kind_of(ids)}; a list of integers is needed")
        if len(ids) > self._max_prompt_tokens:
            raise PromptError(
                413, f"token ids: found {len(ids)}; at most {self._max_prompt_tokens} are taken"
            )
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
            raise PromptError(400, "token ids: only integers from 0 on are allowed")
        return Found(ids, len(ids), source="given")

    def _token_in(self, body: Mapping[str, Any]) -> Found:
        """vLLM's ``/inference/v1/generate``: placeholders are in place unless media are raw."""
        found = self._given(body.get("token_ids"))
        if body.get("content_parts"):  # the engine will put placeholders in
            media = len(sessions.media_of(body))
            return Found(prompt_tokens=found.prompt_tokens + MEDIUM_TOKENS * media)
        features = body.get("features")
        if features is None:
            return found
        spans = spans_of(features)
        if spans is None:
            return Found(prompt_tokens=found.prompt_tokens)
        return Found(found.token_ids, found.prompt_tokens, spans, "given")

    async def _generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Found:
        """SGLang's ``/generate``."""
        if body.get("input_embeds") is not None:
            return Found()
        media = len(sessions.media_of(body))
        ids = body.get("input_ids")
        if ids is None:
            text = body.get("text")
            if text is None:
                return Found()
            if media:  # the engine puts placeholders in
                return Found(prompt_tokens=estimate_tokens(text_bytes(str(text)), media))
            return await self._texts("/generate", {"text": text}, text, headers)
        if not isinstance(ids, list):
            raise PromptError(400, f"input_ids: found {kind_of(ids)}; a list is needed")
        first = ids[0] if ids and isinstance(ids[0], list) else ids
        found = self._given(first)
        others = 0 if first is ids else sum(len(p) for p in ids[1:] if isinstance(p, list))
        total = found.prompt_tokens + others
        return Found(prompt_tokens=total) if media else Found(first, total, source="given")
