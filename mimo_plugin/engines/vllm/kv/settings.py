# SPDX-License-Identifier: Apache-2.0
"""The KV feature's settings, with what can be derived from the engine's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core import retention
from mimo_plugin.errors import setting_error

logger = logging.getLogger("vllm.mimo_plugin")

#: texts that only a chat template's message start produces, looked for in this order
_PROBE_TEXT = "mimoprobe"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """``KvConfig`` made concrete; see ``config.py`` for the meaning of each field."""

    swa_share: float = 0.5
    strict_split: bool = False
    classes: tuple[str, ...] = retention.CLASSES
    message_start_token_ids: frozenset[int] = frozenset()
    ladder_min_tokens: int | None = None
    ladder_growth: float = 0.25
    draft_share: float = 0.25
    memoise: bool = True


def resolve_settings(config: Any, vllm_config: Any) -> KvSettings:
    """Settings from a ``KvConfig``; message start ids come from the tokenizer if not given.

    Raises:
        ConfigError: ids given in the configuration are outside the vocabulary.
    """
    given = config.message_start_token_ids
    if given is None:
        ids = message_starts_of(vllm_config) if retention.BOUNDARY in config.classes else ()
    else:
        vocabulary = vllm_config.model_config.get_vocab_size()
        wrong = [i for i in given if not 0 <= i < vocabulary]
        if wrong:
            raise setting_error(
                "kv.message_start_token_ids",
                wrong,
                f"token ids from 0 to {vocabulary - 1}",
                "take the ids of the chat template's message start from the tokenizer",
            )
        ids = tuple(given)
    return KvSettings(
        swa_share=config.swa_share,
        strict_split=config.strict_split,
        classes=tuple(config.classes),
        message_start_token_ids=frozenset(ids),
        ladder_min_tokens=config.ladder_min_tokens,
        ladder_growth=config.ladder_growth,
        draft_share=config.draft_share,
        memoise=config.memoise,
    )


def message_starts_of(vllm_config: Any) -> tuple[int, ...]:
    """Ids of the special tokens that open a message in the model's chat template; () if unknown."""
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        return ()
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as error:  # a tokenizer that can't be read must not stop the engine
        logger.warning("mimo kv: no message boundaries, the tokenizer can't be read: %s", error)
        return ()
    return message_starts_from(tokenizer)


def message_starts_from(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that come between one message's text and the next one's.

    Renders a short chat and takes, before each message's text, the nearest special token that
    directly follows the end of the message before (or opens the chat).
    """
    messages = [
        {"role": role, "content": _PROBE_TEXT}
        for role in ("system", "user", "assistant", "user", "assistant", "user")
    ]
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        text_ids = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    except Exception as error:
        logger.info("mimo kv: no message boundaries, no usable chat template: %s", error)
        return ()
    special = set(getattr(tokenizer, "all_special_ids", ()) or ())
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    special |= {i for i, token in added.items() if getattr(token, "special", False)}
    ids = list(ids)
    starts: dict[int, int] = {}
    gap_start = 0
    for at in _occurrences(ids, list(text_ids)):
        gap = [i for i in ids[gap_start:at] if i in special]
        if gap:
            # The gap reads "<end of last message> … <start of this one> role": with two or more
            # special tokens the last is the start; with one it serves as both.
            starts[gap[-1]] = starts.get(gap[-1], 0) + 1
        gap_start = at + len(text_ids)
    return tuple(sorted(starts))


def _occurrences(ids: list[int], part: list[int]) -> list[int]:
    if not part:
        return []
    width = len(part)
    return [i for i in range(len(ids) - width + 1) if ids[i : i + width] == part]
