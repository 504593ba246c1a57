# SPDX-License-Identifier: Apache-2.0
"""Where the messages of a chat start, read off the tokenizer's chat template; for any engine."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

_LOGGER = logging.getLogger(__name__)

#: a message's text in the chats that are rendered to find where messages start
_PROBE_TEXT = "mimoprobe"


def message_starts_from(tokenizer: Any, logger: logging.Logger = _LOGGER) -> tuple[int, ...]:
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
    special = _special_ids(tokenizer)

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


def _special_ids(tokenizer: Any) -> set[int]:
    special = set(getattr(tokenizer, "all_special_ids", ()) or ())
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    return special | {i for i, token in added.items() if getattr(token, "special", False)}


def answer_opening_from(tokenizer: Any, logger: logging.Logger = _LOGGER) -> tuple[int, ...]:
    """Tokens that open the model's answer, in a chat's history as where it is asked to speak.

    The shortest run that opens no other message; it starts with a special token. () where the
    template has none.
    """
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        try:
            return _opening_of_chat(tokenizer, roles)
        except Exception as error:  # templates raise whatever they like, e.g. for a system message
            logger.debug("mimo: chat template refuses roles %s: %s", roles, error)
    return ()


def _opening_of_chat(tokenizer: Any, roles: tuple[str, ...]) -> tuple[int, ...]:
    starts = _starts_of_chat(tokenizer, roles)
    messages = [{"role": role, "content": _PROBE_TEXT} for role in roles]
    asked = roles.index("user")

    def render(count: int, ask: bool) -> list[int]:
        chat = messages[:count]
        more = {"add_generation_prompt": True} if ask else {}
        return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **more))

    text = list(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False))[1:]
    whole, asking = render(len(roles), False), render(asked + 1, True)
    found = _occurrences(whole, text)
    ends = [0, *(at + len(text) for at in found)]
    # what stands before the text of each message: the end of the one before it, and its opening
    gaps = [whole[end:at] for end, at in zip(ends[:-1], found, strict=True)]
    last = asking[_occurrences(asking, text)[-1] + len(text) :]
    others = [gap for gap, role in zip(gaps, roles, strict=True) if role != "assistant"]
    # from a message's start on; where answers have none, from the end of the question on
    for wanted in (starts, _special_ids(tokenizer)):
        opening = _common(_from_first(gaps[asked + 1], wanted), _from_first(last, wanted))
        for width in range(1, len(opening) + 1):
            if not any(_occurrences(gap, opening[:width]) for gap in others):
                return tuple(opening[:width])
    return ()


def _from_first(ids: list[int], wanted: Collection[int]) -> list[int]:
    """``ids`` from the first one that is ``wanted``; nothing where there is none."""
    at = next((i for i, token in enumerate(ids) if token in wanted), len(ids))
    return ids[at:]


def _common(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[:same]


def _occurrences(ids: list[int], part: list[int]) -> list[int]:
    """Where ``part`` stands in ``ids``, without overlaps."""
    found: list[int] = []
    width = len(part)
    for at in range(len(ids) - width + 1) if width else ():
        if ids[at : at + width] == part and (not found or at >= found[-1] + width):
            found.append(at)
    return found
