# SPDX-License-Identifier: Apache-2.0
"""The KV feature's settings, with what can be derived from the engine's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core import retention
from mimo_plugin.errors import setting_error

logger = logging.getLogger("vllm.mimo_plugin")

#: a message's text in the chats that are rendered to find where messages start
_PROBE_TEXT = "mimoprobe"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """``KvConfig`` made concrete; see ``config.py`` for the meaning of each field."""

    swa_share: float = 0.6
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
    """Special tokens that open a message in the tokenizer's chat template; () if there are none.

    Renders short chats. What follows a message's text at the end of a chat ends that message; the
    next special token between it and the text of the next message opens the next one. The chat's
    own first message is left out: it starts at position 0, where no checkpoint is needed.
    """
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        try:
            return _starts_of_chat(tokenizer, roles)
        except Exception as error:  # templates raise whatever they like, e.g. for a system message
            logger.debug("mimo kv: chat template refuses roles %s: %s", roles, error)
    logger.info("mimo kv: no message boundaries, the tokenizer has no usable chat template")
    return ()


def _starts_of_chat(tokenizer: Any, roles: tuple[str, ...]) -> tuple[int, ...]:
    messages = [{"role": role, "content": _PROBE_TEXT} for role in roles]

    def render(count: int) -> list[int]:
        chat = messages[:count]
        return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))

    # Without its first token: that one may merge with a space before it.
    text = list(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False))[1:]
    special = set(getattr(tokenizer, "all_special_ids", ()) or ())
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    special |= {i for i, token in added.items() if getattr(token, "special", False)}

    whole = render(len(roles))
    found = _occurrences(whole, text)
    starts: set[int] = set()
    for index in range(1, min(len(found), len(roles))):
        before = render(index)
        last = _occurrences(before, text)[-1]
        ending = [i for i in before[last + len(text) :] if i in special]
        gap = [i for i in whole[found[index - 1] + len(text) : found[index]] if i in special]
        if len(gap) > 1 and gap == ending:
            gap = gap[-1:]  # the template opens an answer after every chat
        elif gap[: len(ending)] == ending:
            gap = gap[len(ending) :]
        starts.update(gap[:1])
    return tuple(sorted(starts))


def _occurrences(ids: list[int], part: list[int]) -> list[int]:
    """Where ``part`` stands in ``ids``, without overlaps."""
    found: list[int] = []
    width = len(part)
    for at in range(len(ids) - width + 1) if width else ():
        if ids[at : at + width] == part and (not found or at >= found[-1] + width):
            found.append(at)
    return found
